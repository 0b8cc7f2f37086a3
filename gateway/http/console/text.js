// How numbers are written. What is not known is a dash.

const NONE = "–";

/** Three significant figures; whole numbers below 10,000 as they are. */
export function count(value) {
  if (value == null) return NONE;
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return Number.isInteger(value) ? String(value) : String(+value.toPrecision(3));
}

/** Milliseconds, in a unit that suits them. */
export function ms(value) {
  if (value == null) return NONE;
  if (value >= 60_000) return `${+(value / 60_000).toPrecision(3)} min`;
  if (value >= 1_000) return `${+(value / 1_000).toPrecision(3)} s`;
  return `${+value.toPrecision(3)} ms`;
}

export const percent = (value) => (value == null ? NONE : `${+(value * 100).toPrecision(3)} %`);
export const per = (value) => (value == null ? NONE : `${count(value)}/s`);
export const both = (of) => (of == null ? NONE : `${ms(of.p50_ms)} · ${ms(of.p90_ms)}`);
