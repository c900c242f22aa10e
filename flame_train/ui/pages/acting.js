"use strict";
// On every page: whether this window acts. On the page of a run: what can be done with it, and what it says.
import { ask } from "./ask.js";

const EVERY_MS = 2000, WHEN_DONE_MS = 8000;

// ---- one window acts

const takeOver = make("button", { type: "button" }, "act in this one");
const banner = make("p", { id: "lease", class: "card warned", role: "status" }, "Another window acts; this one looks. ", takeOver);
banner.hidden = true;
document.getElementById("main")?.prepend(banner);
takeOver.addEventListener("click", () => ask("take", {}));
document.addEventListener("acts", (event) => {
  const acts = Boolean(/** @type {CustomEvent} */ (event).detail);
  banner.hidden = acts;
  document.body.dataset.acts = acts ? "yes" : "no";
});

/** Does something again and again; it says after how many milliseconds. @param {() => Promise<number>} action */
export async function again(action) {
  let wait = WHEN_DONE_MS;
  try { wait = await action(); } catch { /* the server does not answer just now */ }
  window.setTimeout(() => again(action), wait);
}

/** A button that acts: it waits for the answer, and says what is refused in `told`.
 * @param {string} text @param {HTMLElement} told @param {() => Promise<string | void>} action @param {string} [kind] */
export function acting(text, told, action, kind = "") {
  const made = /** @type {HTMLButtonElement} */ (make("button", { type: "button", class: kind }, text));
  made.addEventListener("click", async () => {
    made.disabled = true;
    told.classList.remove("bad");
    try { told.textContent = (await action()) ?? ""; }
    catch (error) { told.textContent = error instanceof Error ? error.message : String(error); told.classList.add("bad"); }
    made.disabled = false;
  });
  return made;
}

/** Has a run do something; a second stop, which loses work, is asked about. Returns what was done.
 * @param {HTMLElement} place @param {{what: string, name?: string, entry?: string}} question @returns {Promise<string>} */
export async function act(place, question) {
  const stops = question.what === "stop";
  if (stops && place.dataset.stopping && !confirm("It stops already. Stop at once, and lose the steps since the last checkpoint?")) return "";
  const { done } = await ask("act", question);
  if (stops) place.dataset.stopping = "yes";
  return done;
}

/** The buttons of a run that goes on. @param {HTMLElement} place @param {HTMLElement} told @param {{name?: string, entry?: string}} run */
export function whileItGoesOn(place, told, run) {
  return ["sample", "save", "stop"].map((what) => acting(what === "stop" ? what : `${what} now`, told, () => act(place, { ...run, what })));
}

// ---- a run

/** @param {string} name */
function runBar(name) {
  const told = make("p", { role: "status", class: "note" }), now = make("p", { class: "mono now" }), buttons = make("div", { class: "tools" });
  const loras = make("p", {}), log = make("pre", { class: "mono log", tabindex: "0" });
  const bar = make("section", { id: "acts", class: "card", "aria-label": "the run" }, now, buttons, loras, told, make("details", {}, make("summary", {}, "Log"), log));
  document.getElementById("live")?.prepend(bar);
  let shown = "";
  const form = (/** @type {string} */ how, /** @type {string} */ text) => make("a", { class: "button", href: `/new?${new URLSearchParams({ run: name, how })}` }, text);
  again(async () => {
    const run = await ask("run", { name });
    now.textContent = run.now;
    if (log.textContent !== run.lines.join("\n")) {
      const below = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      log.textContent = run.lines.join("\n");
      if (below) log.scrollTop = log.scrollHeight;
    }
    const how = JSON.stringify([run.goes_on, run.state, run.device, run.loras]);
    if (how !== shown) {
      shown = how;
      delete bar.dataset.stopping;
      const goOn = async () => { await ask("again", { name, device: run.device }); location.href = "/queue"; };
      buttons.replaceChildren(...(run.goes_on
        ? whileItGoesOn(bar, told, { name })
        : run.state === "done" ? [] : [acting(`continue on ${run.device}`, told, goOn, "primary")]),
      form("continue", "continue from it with changes"), form("clone", "clone"));
      loras.replaceChildren(...run.loras.flatMap((/** @type {any} */ each) => [make("a", { class: "button", download: "", href: `/file?${new URLSearchParams({ name, path: each.path })}` }, `download ${each.path}`), make("small", {}, ` ${each.about} `)]));
    }
    return run.goes_on ? EVERY_MS : WHEN_DONE_MS;
  });
}

const live = document.getElementById("live");
if (live?.dataset.source === "/run.json" && live.dataset.name0) runBar(live.dataset.name0);
again(async () => { await ask("lease", {}); return EVERY_MS; });
