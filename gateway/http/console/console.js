// Signs in, keeps the stream of snapshots up, and hands them to the page.
import { clear, draw } from "./charts.js";
import { Refused, snapshots } from "./feed.js";
import { set } from "./rows.js";
import { show } from "./views.js";

const KEPT = "signalbox.admin-key";
const SILENT_MS = 8_000;
const PAUSES_MS = [500, 1_000, 2_000, 5_000];

const by = (id) => document.getElementById(id);
let key = sessionStorage.getItem(KEPT) ?? "";
let stop = null;

/** `time` changes with each snapshot, so it is not read out. */
function status(kind, text, time = "") {
  by("status").className = kind;
  set(by("status").firstElementChild, text);
  set(by("time"), time);
}

/** Ask for the key. */
function door(trouble = "") {
  key = "";
  sessionStorage.removeItem(KEPT);
  by("board").hidden = by("controls").hidden = true;
  by("pause").ariaPressed = "false";
  by("door").hidden = false;
  by("trouble").textContent = trouble;
  status("", "Not signed in.");
  clear();
  by("key").focus();
}

function shown(snapshot) {
  by("door").hidden = true;
  by("board").hidden = by("controls").hidden = false;
  by("key").value = "";
  if (by("keep").checked) sessionStorage.setItem(KEPT, key);
  const time = `As of ${new Date(snapshot.at * 1000).toLocaleTimeString()}.`;
  const count = (number, word, ending) => `${number} ${word}${number === 1 ? "" : ending}`;
  const queue = snapshot.gateways == null ? "" : `, ${count(snapshot.gateways, "process", "es")} on this queue`;
  if (snapshot.store_up) status("live", `${snapshot.version}, ${count(snapshot.workers, "worker", "s")}${queue}.`, time);
  else status("bad", "The store cannot be reached: what it knows is missing.", time);
  show(snapshot);
  draw(snapshot);
  document.body.dataset.at = snapshot.at;
}

const pause = (ms, signal) =>
  new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });

/** Read one stream to its end; a silent one is given up. */
async function read(signal) {
  const silent = new AbortController();
  let timer = setTimeout(() => silent.abort(), SILENT_MS);
  try {
    for await (const snapshot of snapshots(key, AbortSignal.any([signal, silent.signal]))) {
      if (signal.aborted) return;
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENT_MS);
      shown(snapshot);
    }
  } finally {
    clearTimeout(timer);
  }
}

/** Watch until told otherwise, again and again where the stream breaks. */
async function watch() {
  stop?.abort();
  const { signal } = (stop = new AbortController());
  for (let nth = 0; !signal.aborted; nth += 1) {
    const before = document.body.dataset.at;
    let trouble = "The gateway ended the stream.";
    try {
      await read(signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused && [401, 403, 404].includes(error.status)) return door(error.message);
      trouble = error instanceof Refused ? `The gateway says: ${error.message}.` : "The gateway cannot be reached.";
    }
    if (signal.aborted) return;
    if (document.body.dataset.at !== before) nth = 0;
    status("bad", `${trouble} Trying again.`);
    await pause(PAUSES_MS[Math.min(nth, PAUSES_MS.length - 1)], signal);
  }
}

function halt(text) {
  stop?.abort();
  status("", text);
}

by("door").addEventListener("submit", (event) => {
  event.preventDefault();
  key = by("key").value.trim();
  by("trouble").textContent = "";
  status("", "Signing in.");
  watch();
});
by("leave").addEventListener("click", () => (halt(""), door()));
by("pause").addEventListener("click", () => {
  const paused = by("pause").ariaPressed !== "true";
  by("pause").ariaPressed = String(paused);
  if (paused) halt("Paused.");
  else watch();
});
document.addEventListener("visibilitychange", () => {
  if (!key || by("pause").ariaPressed === "true") return;
  if (document.hidden) halt("Not watching while this tab is hidden.");
  else watch();
});

if (key) {
  status("", "Signing in.");
  by("keep").checked = true;
  watch();
} else {
  door();
}
