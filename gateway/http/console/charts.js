// Two figures over the last five minutes that this page has seen.
import { count, ms } from "./text.js";

const KEPT = 300;
const HEIGHT = 230;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const seen = [];
const plots = [];

const line = (label, color, scale, value, dash) => ({
  label, scale, stroke: css(color), width: 2, dash, value: (_, v) => value(v), points: { show: false },
});

const axis = (scale, side, value, color) => ({
  scale, side, size: 64, font: "12px system-ui, sans-serif", stroke: css(color),
  grid: { show: side === 3, stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1 },
  values: (_, ticks) => ticks.map((tick) => value(tick)),
});

const time = () => ({
  font: "12px system-ui, sans-serif", stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 },
  ticks: { stroke: css("--grid"), width: 1 }, size: 32,
});

const fromZero = { range: (_, __, max) => [0, max > 0 ? max * 1.1 : 1] };

const figures = {
  paces: {
    series: () => [
      line("first token p50", "--blue", "ttft", ms), line("first token p90", "--blue", "ttft", ms, [6, 4]),
      line("per token p50", "--orange", "pace", ms), line("per token p90", "--orange", "pace", ms, [6, 4]),
    ],
    axes: () => [time(), axis("ttft", 3, ms, "--blue"), axis("pace", 1, ms, "--orange")],
    scales: { ttft: fromZero, pace: fromZero },
    row: ({ paces }) => {
      const { ttft, pace } = paces[document.getElementById("class").value] ?? {};
      return [ttft?.p50_ms, ttft?.p90_ms, pace?.p50_ms, pace?.p90_ms];
    },
  },
  ends: {
    series: () => [
      line("whole", "--blue", "y", count), line("on time", "--green", "y", count, [6, 4]),
      line("no whole answer", "--red", "y", count),
    ],
    axes: () => [time(), axis("y", 3, count, "--soft")],
    scales: { y: fromZero },
    row: ({ rates }) => [rates.ok, rates.good, rates.ended == null ? null : rates.ended - rates.ok],
  },
};

function data(figure) {
  const columns = [seen.map((one) => one.at)];
  seen.forEach((one, nth) => figure.row(one).forEach((value, at) => ((columns[at + 1] ??= [])[nth] = value ?? null)));
  return columns;
}

/** Draw anew: the colours, the width or the class have changed. */
export function redraw() {
  for (const { plot } of plots.splice(0)) plot.destroy();
  if (!seen.length) return;
  for (const [id, figure] of Object.entries(figures)) {
    const place = document.getElementById(id);
    const options = {
      width: place.clientWidth, height: HEIGHT, scales: { x: { time: true }, ...figure.scales }, axes: figure.axes(),
      series: [{ label: "at", value: (_, v) => (v == null ? "" : new Date(v * 1000).toLocaleTimeString()) }, ...figure.series()],
      cursor: { drag: { x: false, y: false } },
    };
    plots.push({ plot: new uPlot(options, data(figure), place), figure, place });
  }
}

/** Add what a snapshot says. A long gap is a gap in the lines. */
export function draw({ at, rates, paces }) {
  const before = seen.at(-1);
  if (before && at - before.at > 5) seen.push({ at: before.at + 1, rates: {}, paces: {} });
  seen.push({ at, rates, paces });
  seen.splice(0, seen.length - KEPT);
  if (!plots.length) redraw();
  else for (const { plot, figure } of plots) plot.setData(data(figure));
}

/** Forget everything: the next one who signs in has seen nothing. */
export function clear() {
  seen.length = 0;
  redraw();
}

const resized = () => plots.forEach(({ plot, place }) => plot.setSize({ width: place.clientWidth, height: HEIGHT }));
addEventListener("resize", resized);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
document.getElementById("class").addEventListener("change", redraw);
