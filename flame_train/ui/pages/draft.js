"use strict";
// The draft stays in this browser: a closed page or a reload loses nothing, and the server keeps none.

/** @typedef {{toml: string, template: string, family: string, dir: string, sources: Object<string, string>, preset: Object<string, any>,
 *   confirmed: string[], purpose: string, card: string, path: string}} Draft */

const NAME = "flame-train draft";

/** Keeps a draft, or forgets one without a text. Returns whether this browser keeps anything. @param {Draft} draft */
export function keep(draft) {
  try {
    if (draft.toml) localStorage.setItem(NAME, JSON.stringify(draft));
    else localStorage.removeItem(NAME);
    return true;
  } catch { return false; }
}

/** Returns the draft that was kept. @returns {Draft | null} */
export function kept() {
  try { return JSON.parse(localStorage.getItem(NAME) ?? "null"); } catch { return null; }
}
