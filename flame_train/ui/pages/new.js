"use strict";
// A run is set up. The TOML text is all that there is; fields, images and plan follow from it.
import { ask, by, choosePlace, later } from "./ask.js";
import { keep, kept } from "./draft.js";
import { Form } from "./form.js";
import { Sheet } from "./images.js";
import { planned, refused } from "./plan.js";

/** @typedef {import("./form.js").Problem} Problem */

const run = {
  toml: "", template: "", family: "", told: "", dir: "",
  /** names of the hub that were chosen, and not only typed */
  confirmed: /** @type {Set<string>} */ (new Set()),
  /** @type {Object<string, string>} */ sources: {},
  /** @type {Object<string, any>} */ preset: {},
  /** @type {Object<string, any> | null} */ values: null,
  /** @type {string[]} */ written: [],
  /** @type {Problem[]} */ problems: [],
  /** @type {Problem[]} */ deeper: [],
};
const page = crypto.randomUUID();
const schema = await (await fetch("/form.json")).json();
const input = (/** @type {string} */ id) => by(id, HTMLInputElement);
const select = (/** @type {string} */ id) => by(id, HTMLSelectElement);
const toml = by("toml", HTMLTextAreaElement), told = by("told", HTMLElement), planBox = by("plan", HTMLElement);
const form = new Form(by("fields", HTMLElement), schema, change);
const sheet = new Sheet(by("sheet", HTMLElement), () => run.toml, () => planSoon());
let imagesOf = "", pathTouched = false;
/** @type {{toml: string, path: string, done: boolean} | null} what was written, or refused */
let wrote = null;

// ---- one thing after another: an answer to an older question never replaces a newer one

/** @type {Promise<void>} */
let queue = Promise.resolve();
let waiting = 0;
/** @param {() => Promise<void>} action */
function inOrder(action) {
  waiting += 1;
  queue = queue.then(action).catch((error) => say(error instanceof Error ? error.message : String(error), true)).finally(() => { waiting -= 1; });
  return queue;
}

/** @param {string} text @param {boolean} [bad] @param {...(Node | string)} more */
function say(text, bad, ...more) { told.replaceChildren(text, ...more); told.classList.toggle("bad", Boolean(bad)); }

/** @param {string} text @param {() => void} action */
function button(text, action) {
  const made = /** @type {HTMLButtonElement} */ (make("button", { type: "button" }, text));
  made.addEventListener("click", action);
  return made;
}

/** Takes a state of the text. @param {any} state */
function take(state) {
  if (told.classList.contains("bad")) say("");
  Object.assign(run, { toml: state.toml, problems: state.problems, deeper: [] });
  if (state.values) Object.assign(run, { values: state.values, written: state.written });
  if (toml.value !== run.toml) toml.value = run.toml;
  follow();
}

/** Has everything on the page follow the text. */
function follow() {
  const values = run.values ?? {};
  show();
  for (const [id, key] of [["base", "model.checkpoint"], ["folder", "data.path"], ["name", "output.name"]])
    if (document.activeElement !== input(id) && waiting < 2) input(id).value = values[key] ?? "";
  input("folder").placeholder = run.written.includes("data.sets") ? "the sets below, of data.sets" : "";
  if (!pathTouched) input("path").value = `${rootOf(values["data.path"])}/${values["output.name"] || "new"}.toml`;
  const now = JSON.stringify(Object.entries(values).filter(([key]) => /^(data|captions)[.]/.test(key)));
  if (now !== imagesOf) {
    imagesOf = now;
    sheet.page = sheet.set = 0;
    if (values["data.path"] || run.written.includes("data.sets")) sheet.read();
    else sheet.clear();
  }
  by("settings", HTMLElement).hidden = !run.toml;
  changedSince();
  keepDraft();
  by("sources", HTMLElement).replaceChildren(...[...new Set(Object.values(run.sources))].map((source) => make("li", {}, source)));
  if (run.toml) planSoon();
}

/** Shows problems at their fields and the rest above the plan. */
function show() {
  const problems = [...run.problems, ...run.deeper];
  form.show({ ...run, problems, lacks: schema.families[run.family]?.lacks ?? [] });
  refilter();
  const general = problems.filter((each) => !form.fields.has(each.key));
  by("toml-error", HTMLElement).textContent = general.map((each) => (each.line ? `line ${each.line}: ` : "") + (each.key ? each.key + ": " : "") + each.message).join("\n");
  toml.setAttribute("aria-invalid", String(general.length > 0));
}

/** Asks about the text, and again where it was typed in meanwhile. @param {(toml: string) => Promise<any>} question @returns {Promise<any>} */
async function settled(question) {
  for (;;) {
    const text = run.toml, answer = await question(text);
    if (text === run.toml) return answer;
  }
}

function retake() { return inOrder(async () => take(await settled((text) => ask("state", { toml: text })))); }

/** @param {string} path @param {any} value @param {boolean} [chosen] */
function change(path, value, chosen) {
  if (chosen) for (const name of [value].flat()) run.confirmed.add(name);
  planIsOld();
  return inOrder(async () => take(await settled((text) => ask("change", { toml: text, key: path, value }))));
}

function refilter() {
  const text = input("find").value, count = form.filter(text, input("every").checked);
  by("matches", HTMLElement).textContent = text ? `${count} settings` : "";
}

/** @param {string | undefined} path */
function rootOf(path) { return schema.roots.find((/** @type {string} */ root) => path === root || path?.startsWith(root + "/")) ?? schema.roots[0]; }

function cardOf() { return Number(input("card").value) || null; }

// ---- the choices that a config begins with

async function begin() {
  const base = input("base").value.trim(), folder = input("folder").value.trim(), name = input("name").value.trim() || "my-lora";
  const root = rootOf(folder), purpose = select("purpose").value || null, card = cardOf();
  planIsOld();
  await inOrder(async () => {
    if (!run.family) return base ? undefined : say("choose a base model first", true);
    const has = run.toml && run.values, dir = `${root}/runs/${name}`;
    const wanted = [["model.checkpoint", base], ["data.path", folder], ["output.name", name], ["output.dir", !has || has["output.dir"] === run.dir ? dir : ""]];
    const given = Object.fromEntries(wanted.filter(([key, value]) => value && !(has && has[key ?? ""] === value)));
    const { begun, state } = await settled(async (before) => {
      const begun = await ask("begin", { family: run.family, purpose, card, given, before, template: run.template });
      return { begun, state: await ask("state", { toml: begun.toml }) };
    });
    const plain = await ask("state", { toml: begun.template });
    Object.assign(run, { template: begun.template, sources: begun.sources, preset: plain.values ?? {} });
    if ("output.dir" in given) run.dir = dir;
    take(state);
  });
}

/** Asks which family a base is of, by its file. @param {string} base @param {boolean} confirmed */
async function tellFamily(base, confirmed) {
  const line = by("base-family", HTMLElement);
  run.told = base;
  if (!base) { line.textContent = ""; return; }
  line.textContent = "looking at it";
  try {
    const { family } = await ask("family", { path: base, confirmed });
    if (run.told !== base) return;
    setFamily(family);
    line.className = "help";
    line.textContent = `${schema.families[family].title}, told by its file`;
  } catch (error) {
    line.className = "error";
    line.textContent = error instanceof Error ? error.message : String(error);
    line.append(familyChoice((family) => { setFamily(family); begin(); }));
    if (!confirmed && base.startsWith("hf:")) {
      line.append(" ", button("ask the hub", () => { input("base").value = base; baseChosen(); }));
    }
    run.family = "";
  }
}

/** Makes a choice of the family, for a file that does not tell it. @param {(family: string) => void} taken */
function familyChoice(taken) {
  const names = Object.entries(schema.families).map(([name, { title }]) => make("option", { value: name }, title));
  const choice = /** @type {HTMLSelectElement} */ (make("select", { "aria-label": "family of the base model" }, make("option", { value: "" }, "choose the family"), ...names));
  choice.addEventListener("change", () => taken(choice.value));
  return choice;
}

/** @param {string} family */
function setFamily(family) {
  if (run.family === family) return;
  run.family = family;
  const purpose = select("purpose"), before = purpose.value, { presets } = schema.families[family];
  purpose.replaceChildren(...presets.map((/** @type {string} */ name) => make("option", { value: name }, name)), make("option", { value: "" }, "none"));
  purpose.value = presets.includes(before) || (run.toml && !before) ? before : presets.includes("style") ? "style" : presets[0] ?? "";
}

async function baseChosen() {
  const base = input("base").value.trim();
  run.confirmed.add(base);
  await tellFamily(base, true);
  if (run.family) await begin();
}

async function findModels() {
  const { models, note } = await ask("models", {});
  const hub = Object.values(schema.families).flatMap((family) => family.published);
  by("bases", HTMLElement).replaceChildren(...[...models.map((/** @type {any} */ each) => each.path), ...hub].map((value) => make("option", { value })));
  by("found", HTMLElement).replaceChildren(...models.slice(0, 12).map((/** @type {any} */ each) => {
    const model = button(each.name, () => { input("base").value = each.path; baseChosen(); });
    model.append(make("small", {}, " " + each.title));
    model.title = each.path;
    return model;
  }), note && make("p", { class: "note" }, note));
}

// ---- another config: dropped, opened, or the example's

/** @param {File} file @param {boolean} [partial] @param {string} [family] */
async function open(file, partial = false, family = run.family) {
  await inOrder(async () => {
    if (file.size > 1 << 20) return say("expected a config of at most 1 MiB", true);
    let made;
    try { made = await ask("import", { name: file.name, text: await file.text(), family, partial }); }
    catch (error) {
      const message = error instanceof Error ? error.message : String(error);
      if (message.includes("can be taken")) return say(message, true, " ", button("take the rest", () => open(file, true, family)));
      return say(message, true, message.includes("choose it") ? familyChoice((name) => open(file, partial, name)) : "");
    }
    const before = draft();
    await opened(made.toml);
    const needless = Object.entries(made.needless ?? {}).map(([name, why]) => `${name}: ${why}`);
    const lists = [["without a counterpart", made.listed], ["still to be set", made.missing], ["need no key here", needless]].filter(([, lines]) => lines?.length);
    const counts = made.carried === undefined ? "" : ` ${made.carried} keys were carried over` + lists.map(([what, lines]) => `, ${lines.length} ${what}`).join("");
    const details = lists.map(([what, lines]) => make("details", lines === needless ? {} : { open: "" }, make("summary", {}, what), make("ul", {}, ...lines.map((/** @type {string} */ line) => make("li", {}, line)))));
    say(`${file.name}: a config of ${made.from}.${counts}. `, false, ...wayBack(before), ...details);
  });
}

/** @param {string} text */
async function opened(text) {
  Object.assign(run, { toml: text, template: "", dir: "", sources: {}, preset: {} });
  toml.value = text;
  select("purpose").value = input("card").value = "";
  const state = await settled((text) => ask("state", { toml: text }));
  take(state);
  if (state.values?.["model.checkpoint"]) { await tellFamily(state.values["model.checkpoint"], false); show(); }
}

async function example() {
  await inOrder(async () => {
    say("making images and a small base");
    const made = await ask("example", { path: schema.roots[0] }), before = draft();
    await opened(made.toml);
    pathTouched = false;
    say(`an example lies in ${made.folder} `, false, ...wayBack(before));
    findModels();
  });
}

// ---- the draft, which outlives the page

/** @returns {import("./draft.js").Draft} */
function draft() {
  const { toml, template, family, dir, sources, preset } = run, path = pathTouched ? input("path").value : "";
  return { toml, template, family, dir, sources, preset, confirmed: [...run.confirmed], purpose: select("purpose").value, card: input("card").value, path };
}

function keepDraft() {
  if (!keep(draft()) && run.toml) say("this browser keeps no draft: write the config before you leave the page");
}

/** @param {import("./draft.js").Draft} before */
async function restore({ confirmed, purpose, card, path, family, ...rest }) {
  run.family = "";
  Object.assign(run, rest, { confirmed: new Set(confirmed), values: null, written: [], problems: [], deeper: [] });
  if (schema.families[family]) setFamily(family);
  select("purpose").value = purpose;
  input("card").value = card;
  pathTouched = Boolean(path);
  if (path) input("path").value = path;
  toml.value = run.toml;
  if (!run.toml) planBox.replaceChildren(make("p", { class: "note" }, "It follows once a base and a folder are chosen."));
  take(run.toml ? await settled((text) => ask("state", { toml: text })) : { toml: "", values: {}, written: [], problems: [] });
  const base = run.values?.["model.checkpoint"] ?? "";
  await tellFamily(base, run.confirmed.has(base));
}

/** A button that takes back what replaced a draft. @param {import("./draft.js").Draft} before @returns {Node[]} */
function wayBack(before) {
  return before.toml ? [button("back to the draft before", () => inOrder(async () => { await restore(before); say(""); }))] : [];
}

async function beginAnew() {
  const before = draft();
  await restore({ toml: "", template: "", family: "", dir: "", sources: {}, preset: {}, confirmed: [], purpose: "", card: "", path: "" });
  say("", false, ...wayBack(before));
}

// ---- the plan

const planLater = later(plan, 600);

function planIsOld() { if (planBox.querySelector(".facts")) planBox.setAttribute("aria-busy", "true"); }

function planSoon() {
  planBox.setAttribute("aria-busy", "true");
  planBox.dataset.busy = run.values?.["memory.budget"] ? "choosing settings that fit: half a minute" : "planning anew";
  planLater();
}

async function plan() {
  if (!run.toml) return;
  const text = run.toml;
  planBox.setAttribute("aria-busy", "true");
  let found, failed = "";
  try { found = await ask("plan", { toml: text, device: select("device").value, card: cardOf(), page, confirmed: [...run.confirmed] }); }
  catch (error) { failed = error instanceof Error ? error.message : String(error); }
  if (text !== run.toml || found?.superseded) return;
  planBox.setAttribute("aria-busy", "false");
  if (!found) { planBox.replaceChildren(make("p", { class: "bad" }, failed)); return; }
  run.deeper = found.plan ? [] : found.problems.filter((/** @type {Problem} */ each) => !run.problems.some((other) => other.key === each.key && other.message === each.message));
  show();
  planBox.replaceChildren(...(found.plan ? planned(found, cardOf(), Boolean(run.values?.["sample.first"])) : refused([...run.problems, ...run.deeper], (key) => form.fields.has(key))));
}

/** Takes back what was said of another text or file. */
function changedSince() {
  if (!wrote || (wrote.toml === run.toml && wrote.path === input("path").value)) return;
  by("written", HTMLElement).replaceChildren(wrote.done ? make("p", { class: "note" }, `Changed since ${wrote.path} was written.`) : "");
  wrote = null;
}

/** Writes the config, or starts it too. @param {string} what @param {any} [refused] the question that was refused */
async function write(what, refused) {
  if (!run.toml) return say("choose a base model first", true);
  await inOrder(async () => {
    const place = by("written", HTMLElement);
    const question = refused ? { ...refused, force: true } : { toml: run.toml, path: input("path").value, device: select("device").value, force: false };
    try {
      const made = await ask(what, question);
      if (what === "start") { location.href = "/queue"; return; }
      const command = make("code", {}, made.command), copy = button("copy", async () => {
        try { await navigator.clipboard.writeText(made.command); copy.textContent = "copied"; }
        catch { getSelection()?.selectAllChildren(command); copy.textContent = "selected: copy it by the keyboard"; }
      });
      wrote = { toml: question.toml, path: question.path, done: true };
      place.replaceChildren(make("p", {}, "Written. This trains it:"), make("p", { class: "command" }, command, " ", copy));
    } catch (error) {
      const message = error instanceof Error ? error.message : String(error);
      wrote = { toml: question.toml, path: question.path, done: false };
      place.replaceChildren(make("p", { class: "bad", role: "alert" }, message));
      if (message.includes("exists already")) place.append(button("replace it", () => write(what, question)));
    }
  });
}

// ---- what is clicked, typed and dropped

input("base").addEventListener("change", baseChosen);
input("folder").addEventListener("change", () => (run.toml ? change("data.path", input("folder").value.trim()) : begin()));
by("choose", HTMLElement).addEventListener("click", () => choosePlace("Folder of images", input("folder").value, (path) => { input("folder").value = path; input("folder").dispatchEvent(new Event("change")); }));
for (const id of ["purpose", "card"]) by(id, HTMLElement).addEventListener("change", begin);
input("name").addEventListener("change", () => (run.toml && !run.family ? change("output.name", input("name").value.trim()) : begin()));
input("path").addEventListener("input", () => { pathTouched = true; changedSince(); keepDraft(); });
select("device").addEventListener("change", plan);
for (const id of ["find", "every"]) by(id, HTMLElement).addEventListener("input", refilter);
toml.addEventListener("input", () => { run.toml = toml.value; planIsOld(); changedSince(); keepDraft(); });
toml.addEventListener("input", later(retake, 400));
for (const what of ["write", "start"]) by(what, HTMLElement).addEventListener("click", () => write(what));
by("example", HTMLElement).addEventListener("click", example);
input("opened").addEventListener("change", () => { const file = input("opened").files?.[0]; if (file) open(file); input("opened").value = ""; });
for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault());
document.addEventListener("drop", (event) => { const file = event instanceof DragEvent && event.dataTransfer?.files[0]; if (file) open(file); });

/** Begins with a run's config. @param {string} name @param {string} how @param {import("./draft.js").Draft | null} before */
async function copyOf(name, how, before) {
  await inOrder(async () => {
    const made = await ask("copy", { name, how });
    input("path").value = `${made.folder}.toml`;
    pathTouched = true;
    await opened(made.toml);
    say(`${how === "continue" ? "It begins with the last state of" : "A copy of"} ${name}, in ${made.folder}. `, false, ...(before ? wayBack(before) : []));
  });
}

select("device").value = schema.device;
const asked = new URLSearchParams(location.search), left = kept();
if (asked.has("run")) await copyOf(asked.get("run") ?? "", asked.get("how") ?? "", left);
else if (left?.toml) await inOrder(async () => {
  await restore(left);
  say("This is your draft, as you left it. ", false, button("begin anew", () => inOrder(beginAnew)));
});
await findModels();
document.body.dataset.ready = "yes";
