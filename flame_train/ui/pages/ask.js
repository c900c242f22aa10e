"use strict";
// What all parts of the window need: a question to the server, a question that waits, and the choice of a folder.

/** An answer that is an error: `message` for the reader, `now` what a caption has become. */
export class Refused extends Error {
  /** @param {string} message @param {string} [now] */
  constructor(message, now) { super(message); this.now = now; }
}

// What this window is called: the server lets one act, and the others look.
const WINDOW = sessionStorage.getItem("window") ?? crypto.randomUUID();
sessionStorage.setItem("window", WINDOW);

/** Asks the server. Throws Refused with its words. @param {string} what @param {Object<string, any>} question @returns {Promise<any>} */
export async function ask(what, question) {
  let answer;
  try {
    answer = await fetch("/ask/" + what, { method: "POST", headers: { "Content-Type": "application/json", "X-Flame-Window": WINDOW }, body: JSON.stringify(question) });
  } catch { throw new Refused("the server does not answer; is flame-train ui still running?"); }
  const text = await answer.text();
  document.dispatchEvent(new CustomEvent("acts", { detail: answer.headers.get("X-Flame-Acts") !== "no" }));
  if (answer.ok) return JSON.parse(text);
  try {
    const told = JSON.parse(text);
    throw new Refused(told.error, told.now);
  } catch (error) { throw error instanceof Refused ? error : new Refused(text.trim() || "the server failed"); }
}

/** Returns a function that runs `action` once nobody has called it for a while. @param {() => void} action @param {number} ms */
export function later(action, ms) {
  /** @type {number | undefined} */
  let timer;
  return () => { clearTimeout(timer); timer = window.setTimeout(action, ms); };
}

/** Returns the element of an id. @template {HTMLElement} T @param {string} id @param {new () => T} kind @returns {T} */
export function by(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error("no " + id);
  return found;
}

/** Shows what lies below the roots, to choose a folder, or with `files` a file. @param {string} title @param {string} start @param {(path: string) => void} taken @param {boolean} [files] */
export async function choosePlace(title, start, taken, files) {
  const list = make("ul", { class: "folders" }), at = make("p", { class: "mono" });
  const take = make("button", { type: "button", class: "primary" }, "take this folder");
  const close = make("button", { type: "button" }, "cancel");
  const dialog = /** @type {HTMLDialogElement} */ (make("dialog", { "aria-label": title }, make("h2", {}, title), at, list, make("div", { class: "buttons" }, take, close)));
  let here = "";
  /** @param {string} path */
  const go = async (path) => {
    let found;
    take.toggleAttribute("disabled", true);  // it would take the folder before
    try { found = await ask("folders", { path }); } catch { found = await ask("folders", { path: "" }); }
    here = found.path;
    at.textContent = (here || "folders that this window may use") + (found.images ? `: ${found.images} images` : "");
    take.toggleAttribute("disabled", !here);
    const rows = found.folders.map((/** @type {any} */ each) => row(each.name + (each.images ? ` (${each.images} images)` : ""), each.path));
    if (files) rows.push(...found.files.map((/** @type {any} */ each) => row(each.name, each.path, true)));
    if (found.above !== null) rows.unshift(row("..", found.above));
    list.replaceChildren(...rows);
    list.querySelector("button")?.focus();
  };
  /** @param {string} name @param {string} path @param {boolean} [file] */
  const row = (name, path, file) => {
    const button = make("button", { type: "button", class: "quiet" }, name);
    button.addEventListener("click", () => { if (file) { dialog.close(); taken(path); } else go(path); });
    return make("li", {}, button);
  };
  take.addEventListener("click", () => { dialog.close(); taken(here); });
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  await go(start);
}
