"use strict";
// The live page: asks the server for what is new, puts it in, and keeps what the reader does.

const live = /** @type {HTMLElement} */ (document.getElementById("live"));
const names = Object.entries(live.dataset).filter(([key]) => /^name\d+$/.test(key)).map(([, value]) => value || "");
const state = { digest: "", dataset: "", asked: 0, timer: 0 };
const EVERY_MS = 2000, WHEN_DONE_MS = 10000;

/** @param {Record<string, string | number>} more */
function query(more) {
  const found = new URLSearchParams();
  for (const name of names) found.append("name", name);
  for (const [key, value] of Object.entries(more)) found.append(key, String(value));
  return `?${found}`;
}

/** The server's HTML, in which all text is escaped. @param {string} markup */
function parsed(markup) {
  const made = document.createElement("template");
  made.innerHTML = markup;
  return made.content;
}

// ---- sections, put in only where they are new

/** @type {Map<string, string>} */
const shownMarkup = new Map();

/** @param {string} name @param {string} markup */
function putSection(name, markup) {
  const old = document.getElementById(name);
  if (!old || shownMarkup.get(name) === markup) return;
  shownMarkup.set(name, markup);
  const opened = all(HTMLDetailsElement, "details", old).map((each) => each.open), held = { ...reading };
  const scrolled = all(HTMLElement, ".scroll, .grid", old).map((each) => [each.scrollLeft, each.scrollTop]);
  const active = document.activeElement, focused = active && old.contains(active) ? selectorOf(active) : null;
  old.replaceWith(parsed(markup));
  const fresh = /** @type {HTMLElement} */ (document.getElementById(name));
  all(HTMLDetailsElement, "details", fresh).forEach((each, i) => { each.open = Boolean(opened[i]); });
  all(HTMLElement, ".scroll, .grid", fresh).forEach((each, i) => {
    if (scrolled[i]) each.scrollTo(scrolled[i][0], scrolled[i][1]);
  });
  if (name === "samples") fillGallery();
  if (name === "plots") Object.assign(reading, held), fillCharts();
  if (focused) first(HTMLElement, focused, fresh)?.focus() ?? first(SVGElement, focused, fresh)?.focus();
}

/** A selector of an element, in the section that is put in instead. @param {Element} active */
function selectorOf(active) {
  if (active.id) return `#${CSS.escape(active.id)}`;
  if (active.matches(".zoom")) return ".zoom[tabindex='0']";
  if (active.matches("svg.chart")) return `#${CSS.escape(active.closest("figure")?.id || "")} svg`;
  const href = active.getAttribute("href");
  return href ? `a[href="${CSS.escape(href)}"]` : active.tagName;
}

// ---- the dataset, page by page

imagesOf = async (asked) => {
  const answer = await fetch("/dataset" + query(asked));
  const found = answer.ok ? await answer.json() : { html: "", found: 0, page: 0, pages: 1 };
  const made = parsed(found.html);
  if (!document.querySelector("#dataset tbody") && made.querySelector("tbody")) {
    document.getElementById("dataset")?.replaceWith(made.cloneNode(true));
    fillFinder();
  }
  return { ...found, rows: all(HTMLTableRowElement, "tbody tr", made) };
};

// ---- asking

/** @param {string} id */
const field = (id) => /** @type {HTMLInputElement} */ (document.getElementById(id));

async function ask() {
  const told = /** @type {HTMLElement} */ (document.getElementById("told")), number = ++state.asked;
  let wait = WHEN_DONE_MS;
  try {
    const how = { smoothing: field("smoothing").value, axis: field("axis").value, first: field("first").value || 0 };
    const answer = await fetch(live.dataset.source + query({ have: state.digest, ...how }));
    if (!answer.ok) throw new Error("the run is not there any more");
    const found = await answer.json();
    if (number !== state.asked) return;
    if (found.running) wait = EVERY_MS;
    told.className = "";
    told.textContent = "";
    if (!found.same) {
      state.digest = found.digest;
      for (const [name, markup] of Object.entries(found.sections)) putSection(name, markup);
      if (found.dataset && found.dataset !== state.dataset) { state.dataset = found.dataset; await showImages({}); }
    }
  } catch (error) {
    told.className = "lost";
    const why = error instanceof Error ? error.message : error;
    told.textContent = `the server does not answer: ${why}; what is shown may be old`;
  }
  clearTimeout(state.timer);
  state.timer = window.setTimeout(ask, wait);
}

document.documentElement.style.setProperty("--sheet", `url("/sheet${query({})}")`);
for (const id of ["smoothing", "axis", "first"]) field(id).addEventListener("change", ask);
ask();
