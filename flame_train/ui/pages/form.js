"use strict";
// The schema as a form. Each field is made of what the server says of its key; no key is named here.
import { choosePlace, later } from "./ask.js";

/** @typedef {{path: string, section: string, name: string, title: string, doc: string, unit: string, expected: string, kind: string, choices: string[],
 *   default: string, defaults: Object<string, string>, chosen_by: string, only: Object<string, string[]>, aka: string[], place: boolean, free: boolean}} Key
 * @typedef {{key: string, line: number, message: string}} Problem
 * @typedef {{key: Key, box: HTMLElement, control: any, error: HTMLElement, from: HTMLElement, reset: HTMLElement}} Field
 * @typedef {{values: Object<string, any> | null, written: string[], problems: Problem[], sources: Object<string, string>, preset: Object<string, any>, lacks: string[]}} Shown */

export class Form {
  /** @param {HTMLElement} place @param {{keys: Key[], common: string[], sections: Object<string, string>}} schema
   * @param {(path: string, value: any, chosen?: boolean) => void} changed */
  constructor(place, schema, changed) {
    this.common = new Set(schema.common);
    this.changed = changed;
    /** @type {Map<string, Field>} */
    this.fields = new Map();
    /** @type {Shown | null} */
    this.shown = null;
    /** @type {{name: string, head: HTMLElement}[]} */
    this.heads = [];
    this.sorted = false;
    for (const [name, doc] of Object.entries(schema.sections)) {
      const head = make("h3", {}, name, make("small", {}, " " + doc));
      this.heads.push({ name, head });
      place.append(head);
      for (const key of schema.keys) if (key.section === name) place.append(this.add(key).box);
    }
    this.inOrder = [...place.children];
  }

  /** @param {Key} key @returns {Field} */
  add(key) {
    const id = "key-" + key.path.replace(".", "-");
    const control = controlOf(key, id), error = make("p", { class: "error", id: id + "-error" });
    control.setAttribute("aria-describedby", `${id}-help ${id}-error`);
    const from = make("span"), reset = make("button", { type: "button", class: "quiet", "aria-label": `default of ${key.path}`, title: "default" }, "\u21ba");
    reset.addEventListener("click", () => this.changed(key.path, null));
    control.addEventListener("change", () => this.changed(key.path, valueOf(key, control), true));
    if (key.kind !== "switch" && key.kind !== "choice") {
      const soon = later(() => { if (document.activeElement === control) this.changed(key.path, valueOf(key, control)); }, 700);
      control.addEventListener("input", soon);
    }
    const others = key.aka.length ? ` Elsewhere: ${key.aka.join(", ")}.` : "";
    const help = make("p", { class: "help", id: id + "-help" }, key.doc && key.doc + ". ", from, others);
    const path = key.path.split(/(?<=[._])/).flatMap((part) => [part, make("wbr")]);  // a line breaks between words alone
    const label = make("label", { for: id }, key.title, make("small", {}, key.unit && ` in ${key.unit}`, make("span", { class: "mono" }, ...path)));
    const choose = make("button", { type: "button", "aria-label": `choose a place for ${key.path}` }, "choose");
    choose.addEventListener("click", () => choosePlace(key.title, String(valueOf(key, control)), (path) => this.changed(key.path, key.kind === "lines" ? [...valueOf(key, control), path] : path), true));
    const entry = key.place ? make("div", { class: "beside" }, control, choose) : control;
    const box = make("div", { class: "field", "data-kind": key.kind }, make("div", { class: "named" }, label, reset), entry, help, error);
    const field = { key, box, control, error, from, reset };
    this.fields.set(key.path, field);
    return field;
  }

  /** Puts the values, the problems and where values come from into the fields. @param {Shown} shown */
  show(shown) {
    this.shown = shown;
    for (const field of this.fields.values()) {
      const { key, control } = field, problem = shown.problems.filter((each) => each.key === key.path);
      if (shown.values) {
        if (document.activeElement !== control) setValue(key, control, shown.values[key.path], this.defaultOf(key));
        const value = shown.values[key.path];
        const ofPreset = key.path in shown.sources && JSON.stringify(shown.preset[key.path]) === JSON.stringify(value);
        field.from.textContent = (ofPreset ? `From ${(shown.sources[key.path] ?? "").split(":")[0]}. ` : this.isChanged(key) ? "Yours. " : "") + `Default: ${this.defaultOf(key)}.`;
        field.reset.hidden = !this.isChanged(key);
      }
      control.setAttribute("aria-invalid", String(problem.length > 0));
      field.error.textContent = problem.map((each) => each.message).join("\n");
    }
  }

  /** @param {Key} key */
  defaultOf(key) {
    const chosen = this.shown && this.shown.values ? this.shown.values[key.chosen_by] : "";
    return key.defaults[chosen] ?? key.default;
  }

  /** Tells whether a key is written, at another value than its default. @param {Key} key */
  isChanged(key) {
    const value = this.shown?.values?.[key.path], text = typeof value === "string" ? value : JSON.stringify(value);
    return Boolean(this.shown?.written.includes(key.path)) && text?.replace(/[\s"]/g, "") !== this.defaultOf(key).replace(/[\s"]/g, "");
  }

  /** Hides all but the common fields, those with an error, and those that are looked for. Returns how many are left.
   * @param {string} text @param {boolean} every @returns {number} */
  filter(text, every) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    /** @type {Set<string>} */
    const sections = new Set();
    /** @type {[number, HTMLElement][]} */
    const ranks = [];
    let count = 0;
    for (const { key, box, error } of this.fields.values()) {
      const where = [key.path, key.title, key.doc, ...key.aka, ...key.choices, ...Object.values(key.only).flat()].join(" ").toLowerCase();
      const found = words.length > 0 && words.every((word) => where.includes(word));
      const applies = !this.shown || !this.shown.values || (key.path in this.shown.values && !this.shown.lacks.includes(key.path));
      const wanted = words.length ? found : applies && (every || this.common.has(key.path) || this.isChanged(key));
      box.hidden = !(wanted || error.textContent);
      box.classList.toggle("idle", !applies);
      box.querySelector(".named small.only")?.remove();
      if (!applies) box.querySelector("label")?.append(make("small", { class: "only" }, onlyWith(key)));
      if (!box.hidden) { count += 1; sections.add(key.section); }
      const named = [key.path, key.name, ...key.aka].some((name) => name.toLowerCase() === words.join(" "));
      ranks.push([words.length ? Number(!named) * 2 + Number(!this.common.has(key.path)) : 0, box]);
    }
    for (const { name, head } of this.heads) head.hidden = words.length > 0 || !sections.has(name);
    this.sort(words.length ? ranks : []);
    return count;
  }

  /** Puts the fields in the order of their ranks, or without any in that of the file. @param {[number, HTMLElement][]} ranks */
  sort(ranks) {
    if (!ranks.length && !this.sorted) return;
    this.sorted = ranks.length > 0;
    const place = this.heads[0]?.head.parentElement, focused = document.activeElement;
    const order = ranks.length ? [...ranks].sort(([a], [b]) => a - b).map(([, box]) => box) : this.inOrder;
    place?.append(...order);
    if (focused instanceof HTMLElement && focused !== document.activeElement) focused.focus();
  }
}

/** @param {Key} key */
function onlyWith(key) {
  const rules = Object.entries(key.only).map(([path, names]) => `${path} = ${names.join(" or ")}`);
  return rules.length ? " with " + rules.join(", ") : " not of this family";
}

/** @param {Key} key @param {string} id @returns {any} */
function controlOf(key, id) {
  if (key.kind === "switch") return make("input", { type: "checkbox", id });
  if (key.kind === "choice") {
    const select = make("select", { id });
    for (const choice of key.choices) select.append(make("option", { value: choice }, choice));
    return select;
  }
  if (key.kind === "lines") return make("textarea", { id, rows: "3", spellcheck: "false" });
  const typed = make("input", { type: "text", id, autocomplete: "off", spellcheck: "false" });
  if (key.kind === "number") typed.setAttribute("inputmode", "decimal");
  return typed;
}

/** @param {Key} key @param {any} control @returns {any} */
function valueOf(key, control) {
  if (key.kind === "switch") return control.checked;
  if (key.kind !== "lines" || control.dataset.toml) return control.value;
  return control.value.split("\n").filter((/** @type {string} */ line) => line.trim());
}

/** @param {Key} key @param {any} control @param {any} value @param {string} usual */
function setValue(key, control, value, usual) {
  if (key.kind === "switch") { control.checked = value === true || (value === undefined && usual === "true"); return; }
  if (key.kind === "choice") {
    const unknown = value !== undefined && !key.choices.includes(value);
    control.querySelector("option.wrong")?.remove();
    if (unknown) control.append(make("option", { value, class: "wrong" }, value));
    control.value = value ?? usual.replaceAll('"', "");
    return;
  }
  if (key.kind === "lines") {
    const lines = Array.isArray(value);
    control.dataset.toml = lines || value === undefined ? "" : "yes";
    control.value = lines ? value.join("\n") : value ?? "";
    control.rows = Math.min(Math.max(control.value.split("\n").length, 2), 8);
    return;
  }
  control.value = value ?? "";
  control.placeholder = value === undefined ? usual : "";
}
