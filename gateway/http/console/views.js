// A snapshot as the page shows it.
import { bar, column, follow, make, set, table } from "./rows.js";
import { both, count, ms, per, percent } from "./text.js";

const FEW = 16;
const by = (id) => document.getElementById(id);
let last = null;

const budget = (label, what) => ({
  label, kind: "budget",
  fill: (cell, item) => {
    const of = item[what];
    const share = of && of.limit > 0 ? of.used / of.limit : 0;
    const parts = [{ name: share >= 0.95 ? "full" : "used", share }];
    bar(cell, of ? `${count(of.used)} / ${count(of.limit)}` : "–", parts);
  },
});

function state(cell, one) {
  const words = !one.up ? "down" : one.breaker !== "closed" ? `breaker ${one.breaker}` : one.open === false ? "shut" : "up";
  set(cell, words);
  cell.className = words === "up" ? "text good" : "text bad";
}

const engine = (one) =>
  one.engine_running == null ? "–"
    : `${count(one.engine_running)} + ${count(one.engine_waiting ?? 0)} waiting` +
      (one.engine_kv == null ? "" : `, KV ${percent(one.engine_kv)}`);

const BACKENDS = [
  column("Backend", (one) => one.name),
  { label: "State", kind: "text", fill: state },
  budget("Leases", "leases"),
  budget("Prefill tokens", "prefill"),
  budget("KV tokens", "kv"),
  column("Streams here", (one) => count(one.streams)),
  column("Engine runs", engine),
];

const CLASSES = [
  column("Class", (one) => one.name),
  column("Waiting", (one) => count(one.waiting)),
  column("Prompt tokens", (one) => count(one.tokens)),
  column("Oldest", (one) => (one.oldest_s ? ms(one.oldest_s * 1000) : "–")),
  column("Turned away", (one) => percent(one.shed)),
  column("First token p50 · p90", (one) => both(one.ttft)),
  column("Per token p50 · p90", (one) => both(one.pace)),
];

function empty(caption) {
  const node = make("table");
  node.append(make("caption", "", caption), make("thead"), make("tbody"));
  return node;
}

function pools(snapshot) {
  const create = () => {
    const section = make("section");
    section.append(make("h2"), empty("Budgets of the shared queue, for all gateways on it."), empty("What waits in it."));
    return section;
  };
  follow(by("pools"), snapshot.pools, (pool) => pool.model, create, (section, pool) => {
    const [title, backends, classes] = section.children;
    set(title, pool.model);
    table(backends, BACKENDS, pool.backends, (one) => one.name, "no backend");
    table(classes, CLASSES, pool.services, (one) => one.name, "no class");
  });
}

function tiles({ live, rates, paces }) {
  const running = (live.granted ?? 0) + (live.streaming ?? 0);
  const items = [
    ["Waiting", count(live.queued ?? 0)],
    ["Running", count(running)],
    ["Whole answers", per(rates.ok)],
    ["Of them on time", rates.ok ? percent(rates.good / rates.ok) : "–"],
    ["Prompt tokens", per(rates.prompt_tokens)],
    ["Output tokens", per(rates.output_tokens)],
    ["First token", ms(paces[""].ttft?.p50_ms), `p90 ${ms(paces[""].ttft?.p90_ms)}`],
    ["Per token", ms(paces[""].pace?.p50_ms), `p90 ${ms(paces[""].pace?.p90_ms)}`],
  ];
  const create = ([name]) => {
    const tile = make("div");
    tile.append(make("dt", "", name), make("dd"), make("dd"));
    return tile;
  };
  follow(by("tiles"), items, ([name]) => name, create, (tile, [, text, more = ""]) => {
    set(tile.children[1], text);
    set(tile.children[2], more);
  });
}

function tenants(snapshot) {
  const classes = Object.keys(snapshot.paces).filter((name) => name);
  const columns = [
    column("Tenant", (one) => one.name),
    ...classes.map((name) => column(name, (one) => count(one.waiting[name] ?? 0))),
    column("Requests", (one) => per(one.requests_per_s)),
    column("Tokens", (one) => per(one.tokens_per_s)),
    column("Requests in all", (one) => count(one.requests)),
    column("Tokens in all", (one) => count(one.tokens)),
  ];
  table(by("tenants"), columns, snapshot.tenants, (one) => one.name, "nobody has asked for anything yet");
}

const REASONS = [
  column("Reason", (one) => one.reason),
  column("Now", (one) => per(one.per_s)),
  column("In all", (one) => count(one.total)),
];

function reasons(snapshot) {
  const none = snapshot.ends.filter((end) => end.reason !== "ok");
  table(by("reasons"), REASONS, none, (one) => one.reason, "every request had a whole answer");
}

const where = (one) => (one.backend ? `${one.model} on ${one.backend}` : one.model || "–");
const tokens = (one) => `${count(one.prompt_tokens)} → ${count(one.output_tokens)}`;

/** Only the first few are shown until all are asked for. */
function cut(requests) {
  const button = by("more");
  const whole = button.ariaExpanded === "true";
  button.hidden = requests.length <= FEW;
  set(button, whole ? `Show ${FEW}` : `Show ${requests.length}`);
  return whole ? requests : requests.slice(0, FEW);
}

function requests(snapshot) {
  const shown = cut(snapshot.requests);
  const live = Object.values(snapshot.live).reduce((sum, each) => sum + each, 0);
  const longest = Math.max(1, ...shown.map((one) => one.total_ms));
  const phases = (cell, one) => {
    const [name, last] = one.phases.at(-1);
    const again = one.retries ? `, attempt ${one.retries + 1}` : "";
    const parts = one.phases.map(([phase, took]) => ({ name: phase, share: took / longest, title: `${phase} ${ms(took)}` }));
    bar(cell, `${name} ${ms(last)}${again}`, parts);
  };
  const columns = [
    column("Request", (one) => (one.id.length > 13 ? `${one.id.slice(0, 12)}…` : one.id || "unread")),
    column("Tenant", (one) => one.tenant || "–", "text"),
    column("Class", (one) => one.service || "–", "text"),
    column("Where", where, "text"),
    { label: "Phase", kind: "text phases", fill: phases },
    column("Tokens", tokens),
    column("So far", (one) => ms(one.total_ms)),
  ];
  set(by("shown"), live > shown.length ? `The oldest ${shown.length} of ${count(live)}, in all workers.` : "In all workers.");
  table(by("requests"), columns, shown, (one) => one.id, "none");
}

function classes(snapshot) {
  const items = Object.keys(snapshot.paces);
  const create = (name) => Object.assign(make("option", "", name || "all"), { value: name });
  follow(by("class"), items, (name) => name, create, () => {});
}

/** Show all of it. */
export function show(snapshot) {
  last = snapshot;
  classes(snapshot);
  tiles(snapshot);
  pools(snapshot);
  tenants(snapshot);
  reasons(snapshot);
  requests(snapshot);
}

by("more").addEventListener("click", () => {
  by("more").ariaExpanded = String(by("more").ariaExpanded !== "true");
  if (last) requests(last);
});
