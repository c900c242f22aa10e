"use strict";
// The queue: what waits, what goes on and what came of it. All of it stands in the queue's file.
import { acting, again, whileItGoesOn } from "./acting.js";
import { ask, by } from "./ask.js";

/** @typedef {{id: string, config: string, folder: string, device: string, state: string, on: string, said: string, name: string, now: string, lines: string[]}} Entry */

const list = by("queue", HTMLElement), told = by("told", HTMLElement), after = by("after", HTMLSelectElement);
/** @type {Map<string, {made: HTMLElement, shown: string}>} */
const cards = new Map();
let paused = "";

/** @param {string} text */
const say = (text) => { told.classList.remove("bad"); told.textContent = text; };

/** @param {Entry} run @param {boolean} first */
function card(run, first) {
  const name = run.folder.split("/").at(-1) ?? run.folder;
  const made = make("li", { class: "card", id: "run-" + run.id });
  const title = run.name ? make("a", { href: `/run?${new URLSearchParams({ name: run.name })}` }, name) : make("strong", {}, name);
  title.title = run.folder;
  const kind = { started: "running", stopped: "interrupted" }[run.state] ?? run.state;
  const move = (/** @type {string} */ what) => async () => show(await ask("move", { entry: run.id, what }));
  const buttons = run.state === "started" ? whileItGoesOn(made, told, { entry: run.id })
    : [...(run.state === "waiting" ? first ? [] : [acting("up", told, move("up"))] : [acting(run.state === "done" ? "start again" : "continue", told, move("again"))]), acting("remove", told, move("remove"))];
  made.append(make("div", { class: "tools" }, title, make("span", { class: `state ${kind}` }, kind), make("small", {}, run.on || `for ${run.device}`), ...buttons));
  if (run.said) made.append(make("p", { class: run.state === "failed" ? "bad" : "note" }, run.said));
  made.append(make("p", { class: "mono now" }), make("details", {}, make("summary", {}, "Log"), make("pre", { class: "mono log", tabindex: "0" })));
  return made;
}

/** @param {any} queue */
function show(queue) {
  by("trouble", HTMLElement).textContent = queue.trouble;
  if (document.activeElement !== after) after.value = queue.after_failure;
  by("devices", HTMLElement).textContent = `one run each on ${queue.devices.join(", ")}`;
  by("state", HTMLElement).textContent = queue.paused ? `paused: ${queue.paused}` : queue.runs.length ? "" : "Nothing is queued.";
  if (paused !== queue.paused || !by("turn", HTMLElement).firstChild) {
    paused = queue.paused;
    const turn = async () => show(await ask("settle", { paused: !paused }));
    by("turn", HTMLElement).replaceChildren(acting(paused ? "go on" : "pause", told, turn));
  }
  const waiting = queue.runs.filter((/** @type {Entry} */ run) => run.state === "waiting");
  const items = queue.runs.map((/** @type {Entry} */ run) => {
    const first = run === waiting[0], { now, lines, ...rest } = run, shown = JSON.stringify([rest, first]);
    let kept = cards.get(run.id);
    if (!kept || kept.shown !== shown) cards.set(run.id, kept = { made: card(run, first), shown });
    /** @type {[string, string][]} */
    const texts = [[".now", now], [".log", lines.join("\n")]];
    for (const [place, text] of texts) {
      const found = kept.made.querySelector(place);
      if (found && found.textContent !== text) found.textContent = text;
    }
    kept.made.querySelector("details")?.toggleAttribute("hidden", !lines.length);
    return kept.made;
  });
  if (items.length !== list.children.length || items.some((/** @type {HTMLElement} */ item, /** @type {number} */ at) => list.children[at] !== item)) list.replaceChildren(...items);
}

after.addEventListener("change", async () => {
  try { show(await ask("settle", { after_failure: after.value })); say(""); }
  catch (error) { told.classList.add("bad"); told.textContent = error instanceof Error ? error.message : String(error); }
});
again(async () => { show(await ask("queue", {})); document.body.dataset.ready = "yes"; return 1500; });
