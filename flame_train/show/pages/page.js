"use strict";
// What the live page and the report do: walk and enlarge samples, read charts, find images, sort a table.
// All text is set as text, never as markup. `tsc` checks the types (jsconfig.json).

/**
 * @param {string} tag
 * @param {Record<string, string | number>} [attributes]
 * @param {...(Node | string)} inside
 */
function make(tag, attributes, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, String(value));
  made.append(...inside);
  return made;
}

/** @param {string} text @param {() => void} act */
function button(text, act) {
  const made = /** @type {HTMLButtonElement} */ (make("button", { type: "button" }, text));
  made.addEventListener("click", act);
  return made;
}

/**
 * All elements of a kind.
 * @template {Element} T
 * @param {new () => T} kind
 * @param {string} selector
 * @param {ParentNode} [inside]
 * @returns {T[]}
 */
function all(kind, selector, inside = document) {
  return /** @type {T[]} */ ([...inside.querySelectorAll(selector)].filter((each) => each instanceof kind));
}

/**
 * The first element of a kind.
 * @template {Element} T
 * @param {new () => T} kind
 * @param {string} selector
 * @param {ParentNode} [inside]
 * @returns {T | undefined}
 */
function first(kind, selector, inside = document) {
  return all(kind, selector, inside)[0];
}

/** What an event happened in. @param {Event} event @param {string} selector */
const around = (event, selector) => (event.target instanceof Element ? event.target.closest(selector) : null);

// ---- the gallery: arrow keys walk its images, the stage shows one beside what it was before

/** The row's name and the column of the image on the stage; no name: the newest row. */
const chosen = { row: "", column: 0 };

/** @param {HTMLTableRowElement} row @param {number} column */
const imageAt = (row, column) => row.cells[column + 1] && first(HTMLImageElement, ".zoom img", row.cells[column + 1]);
const galleryRows = () => all(HTMLTableRowElement, "#samples tbody tr").filter((row) => row.querySelector(".zoom"));
/** @param {HTMLTableRowElement} row */
const nameOf = (row) => row.cells[0].textContent || "";

/** The row and the column of an image. @param {HTMLImageElement} image */
function placeOf(image) {
  const cell = image.closest("td"), rows = galleryRows();
  return { row: rows.findIndex((row) => row.contains(image)), column: cell ? cell.cellIndex - 1 : 0 };
}

/**
 * The image that a key leads to from another, over places without one; null for other keys.
 * @param {HTMLImageElement} from
 * @param {string} key
 */
function neighbour(from, key) {
  const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[key];
  if (!by) return null;
  const rows = galleryRows();
  let { row, column } = placeOf(from);
  do { row += by[0]; column += by[1]; } while (rows[row] && rows[row].cells[column + 1] && !imageAt(rows[row], column));
  return rows[row] && column >= 0 ? imageAt(rows[row], column) : undefined;
}

/** Puts an image on the stage. @param {HTMLImageElement} image @param {boolean} [focus] */
function choose(image, focus) {
  const rows = galleryRows(), { row, column } = placeOf(image);
  chosen.row = rows[row] === newest(rows) ? "" : nameOf(rows[row]);
  chosen.column = column;
  for (const zoom of all(HTMLButtonElement, "#samples .zoom")) {
    const is = zoom.contains(image);
    zoom.tabIndex = is ? 0 : -1;
    zoom.toggleAttribute("aria-current", is);
    if (is && focus) zoom.focus();
  }
  fillStage(image);
  if (dialog && dialog.open) fillDialog(image);
}

/** The first row that is compared with another. @param {HTMLTableRowElement[]} rows */
const newest = (rows) => rows.find((row) => row.dataset.before === undefined) || rows[0];

/** The image on the stage, after a new table came too. */
function chosenImage() {
  const rows = galleryRows(), row = rows.find((each) => nameOf(each) === chosen.row) || newest(rows);
  return row && (imageAt(row, chosen.column) || first(HTMLImageElement, ".zoom img", row));
}

/** @param {HTMLImageElement} image @param {string} caption */
const picture = (image, caption) => {
  const large = make("img", { src: image.dataset.large || image.src, alt: image.alt });
  return make("figure", {}, large, make("figcaption", {}, caption));
};

/** @param {HTMLImageElement} image */
function fillStage(image) {
  const stage = first(HTMLElement, "#samples .stage"), column = chosen.column;
  if (!stage) return;
  const focused = stage.contains(document.activeElement) ? document.activeElement?.id : "";
  const rows = galleryRows().filter((each) => imageAt(each, column)).reverse();
  const row = rows.find((each) => each.contains(image));
  const head = first(HTMLTableCellElement, `thead tr > :nth-child(${column + 2})`, first(HTMLElement, "#samples table"));
  const before = rows.find((each) => each.dataset.before !== undefined), pair = make("div", { class: "pair" });
  const old = before && imageAt(before, column);
  if (old && before !== row) pair.append(picture(old, nameOf(before)));
  if (row) pair.append(picture(image, nameOf(row)));
  stage.replaceChildren(make("p", {}, head ? head.textContent || "" : ""), pair);
  stage.hidden = false;
  if (rows.length < 2 || !row) return;
  const range = make("input", { type: "range", min: 0, max: rows.length - 1, id: "when" });
  const slider = /** @type {HTMLInputElement} */ (range);
  slider.value = String(rows.indexOf(row));
  slider.setAttribute("aria-valuetext", nameOf(row));
  slider.addEventListener("input", () => {
    const next = imageAt(rows[Number(slider.value)], column);
    if (next) choose(next);
  });
  const earlier = button("\u2190", () => walk("ArrowDown")), later = button("\u2192", () => walk("ArrowUp"));
  earlier.setAttribute("aria-label", "row below"), later.setAttribute("aria-label", "row above");
  earlier.id = "earlier", later.id = "later";
  stage.append(make("div", { class: "walk" }, earlier, make("label", {}, make("span", {}, "row"), slider), later));
  if (focused) document.getElementById(focused)?.focus();
}

/** Goes on from the image on the stage. @param {string} key */
function walk(key) {
  const from = chosenImage(), to = from && neighbour(from, key);
  if (to) choose(to);
}

function fillGallery() {
  const image = chosenImage();
  if (image) choose(image);
}

// ---- an image alone: Enter or a click opens it, Escape closes it

/** @type {HTMLDialogElement | null} */
let dialog = null;

/** @param {HTMLImageElement} image */
function fillDialog(image) {
  if (!dialog) {
    const keys = {
      ArrowUp: "\u2191 row above", ArrowDown: "\u2193 row below",
      ArrowLeft: "\u2190 previous prompt", ArrowRight: "\u2192 next prompt",
    };
    const moves = Object.entries(keys).map(([key, name]) => button(name, () => walk(key)));
    const tools = make("div", { class: "tools" }, ...moves, button("close", () => dialog?.close()));
    const made = make("dialog", { "aria-label": "sample" }, make("img", { alt: "" }), make("p"), tools);
    dialog = /** @type {HTMLDialogElement} */ (made);
    dialog.addEventListener("keydown", (event) => {
      if (!event.key.startsWith("Arrow")) return;
      event.preventDefault();
      walk(event.key);
    });
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog?.close(); });
    dialog.addEventListener("close", () => { const from = chosenImage(); if (from) choose(from, true); });
    document.body.append(dialog);
  }
  const shown = first(HTMLImageElement, "img", dialog), told = first(HTMLElement, "p", dialog);
  if (shown) shown.src = image.dataset.large || image.src, shown.alt = image.alt;
  if (told) told.textContent = image.alt;
}

document.addEventListener("click", (event) => {
  const zoom = around(event, "#samples .zoom"), image = zoom && first(HTMLImageElement, "img", zoom);
  if (!image) return;
  choose(image);
  fillDialog(image);
  dialog?.showModal();
});

document.addEventListener("keydown", (event) => {
  const zoom = around(event, "#samples .zoom"), image = zoom && first(HTMLImageElement, "img", zoom);
  const to = image && neighbour(image, event.key);
  if (to === null) return;
  event.preventDefault();
  if (to) choose(to, true);
});

// ---- charts: the pointer or arrow keys read them, a click or Enter leads to the samples and the file of a step

/** The chart that is read, at which place of its axis, and whether a click or Enter holds it. */
const reading = { chart: "", x: 0, held: false };

/** @param {SVGElement} svg */
function scaleOf(svg) {
  const { box, x, y } = svg.dataset, log = svg.dataset.log !== undefined;
  const [left, right, top, bottom, x0, x1, y0, y1] = `${box} ${x} ${y}`.split(" ").map(Number);
  const digits = (/** @type {number} */ value) => Math.floor(Math.log10(Math.abs(value) || 1));
  return {
    top, bottom,
    /** @param {number} x */
    x: (x) => x0 + ((x - left) / (right - left)) * (x1 - x0),
    /** @param {number} y */
    y: (y) => {
      const share = (bottom - y) / (bottom - top);
      return log ? y0 * (y1 / y0) ** share : y0 + share * (y1 - y0);
    },
    /** As many digits as the place tells. @param {number} value */
    text: (value) => value.toPrecision(log ? 3 : Math.max(1, Math.min(12, 4 + digits(value) - digits(y1 - y0)))),
  };
}

/** @type {WeakMap<Element, number[][]>} */
const pointsKept = new WeakMap();

/** @param {SVGPolylineElement} line */
function pointsOf(line) {
  const written = (line.getAttribute("points") || "").split(" ").filter(Boolean);
  const points = pointsKept.get(line) || written.map((each) => each.split(",").map(Number));
  pointsKept.set(line, points);
  return points;
}

/** @param {number[][]} points @param {number} x */
const nearest = (points, x) =>
  points.reduce((best, each) => (Math.abs(each[0] - x) < Math.abs(best[0] - x) ? each : best), points[0]);

/** Reads a chart at a place of its drawing. @param {SVGElement} svg @param {number} x @param {boolean} hold */
function read(svg, x, hold) {
  const figure = svg.closest("figure"), scale = scaleOf(svg);
  const lines = all(SVGPolylineElement, "polyline", svg).filter((line) => pointsOf(line).length);
  if (!figure || !lines.length) return;
  const at = nearest(lines.map((line) => nearest(pointsOf(line), x)), x);
  leave();
  Object.assign(reading, { chart: figure.id, x: at[0], held: hold });
  const place = figure.dataset.xTitle === "step" ? Math.round(scale.x(at[0])) : Number(scale.x(at[0]).toPrecision(3));
  const cursor = document.createElementNS(svg.namespaceURI, "path");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("d", `M${at[0]} ${scale.top}V${scale.bottom}`);
  svg.append(cursor);
  const values = lines.map((line) => ({ name: line.dataset.label || "", point: nearest(pointsOf(line), at[0]) }))
    .filter(({ point }) => Math.abs(point[0] - at[0]) < 2)
    .map(({ name, point }) => `${name} ${scale.text(scale.y(point[1]))}`);
  const told = make("p", { class: hold ? "at held" : "at" }, `${figure.dataset.xTitle} ${place}: ${values.join(", ")}`);
  if (hold && figure.dataset.xTitle === "step") told.append(...leadsOf(place));
  figure.append(told);
  svg.setAttribute("aria-valuenow", String(place));
  svg.setAttribute("aria-valuetext", told.textContent || "");
}

/** Links to the samples and the file that are next to a step. @param {number} step @returns {HTMLElement[]} */
function leadsOf(step) {
  /** At the same distance what can be saved comes first. @param {HTMLElement} each */
  const distance = (each) => Math.abs(Number(each.dataset.step) - step) + (each.matches("li:not(:has(a))") ? 0.5 : 0);
  /** @template {HTMLElement} T @param {T[]} some */
  const closest = (some) => some.sort((a, b) => distance(a) - distance(b))[0];
  const leads = [], row = closest(galleryRows().filter((each) => each.dataset.step !== undefined));
  const image = row && (imageAt(row, chosen.column) || imageAt(row, 0));
  if (image) {
    const link = make("a", { href: "#samples" }, `samples of ${nameOf(row)}`);
    link.addEventListener("click", (event) => {
      event.preventDefault();
      document.getElementById("samples")?.scrollIntoView();
      choose(image, true);
    });
    leads.push(link);
  }
  const file = closest(all(HTMLElement, "#files [data-step]")), saved = file && first(HTMLAnchorElement, "a", file);
  const name = (file?.firstChild?.textContent || "").replace(/^checkpoints\//, "");
  if (file) leads.push(make("a", { href: saved?.getAttribute("href") || "#files" }, name));
  return leads;
}

function leave() {
  document.querySelectorAll("#plots .cursor, #plots .at").forEach((each) => each.remove());
  Object.assign(reading, { chart: "", held: false });
}

/** The charts can be reached by keys; the one that was read before a new drawing is read again. */
function fillCharts() {
  for (const svg of all(SVGElement, "#plots svg.chart")) {
    const [low, high] = (svg.dataset.x || "").split(" ");
    const slider = { tabindex: "0", role: "slider", "aria-valuemin": low, "aria-valuemax": high, "aria-valuenow": high };
    for (const [name, value] of Object.entries(slider)) svg.setAttribute(name, value);
  }
  const svg = reading.held && first(SVGElement, `#${CSS.escape(reading.chart)} svg`);
  if (svg) read(svg, reading.x, true);
}

/** @param {MouseEvent} event */
function readAtPointer(event) {
  const svg = around(event, "#plots svg.chart");
  if (!(svg instanceof SVGElement)) return;
  const hold = event.type === "click", box = svg.getBoundingClientRect();
  if (hold || !reading.held) read(svg, ((event.clientX - box.left) / box.width) * 420, hold);
}
document.addEventListener("pointermove", readAtPointer);
document.addEventListener("click", readAtPointer);
document.addEventListener("pointerout", (event) => { if (around(event, "#plots svg.chart") && !reading.held) leave(); });
document.addEventListener("keydown", (event) => {
  const svg = around(event, "#plots svg.chart");
  if (!(svg instanceof SVGElement)) return;
  if (event.key === "Escape") leave();
  const lines = all(SVGPolylineElement, "polyline", svg);
  const xs = lines.flatMap((line) => pointsOf(line).map(([x]) => x)).sort((a, b) => a - b);
  const here = reading.chart === svg.closest("figure")?.id ? reading.x : xs[xs.length - 1];
  const to = {
    ArrowLeft: xs.filter((x) => x < here - 0.005).pop(), ArrowRight: xs.find((x) => x > here + 0.005),
    Home: xs[0], End: xs[xs.length - 1], Enter: here,
  }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  read(svg, to, true);
});

// ---- finding an image of the dataset

/** @typedef {{ find: string, order: string, page: number }} Wanted */
/** @typedef {{ rows: HTMLTableRowElement[], found: number, page: number, pages: number }} Found */
const PAGE = 20, wanted = { find: "", order: "highest", page: 0 };

/** @type {HTMLTableRowElement[]} */
let rowsHere = [];

/** The images of the page itself; the live page asks the server. @param {Wanted} asked @returns {Promise<Found>} */
let imagesOf = async ({ find, order, page }) => {
  const rows = rowsHere.filter((row) => (row.textContent || "").toLowerCase().includes(find.toLowerCase()));
  if (order === "lowest") rows.reverse();
  if (order === "file") rows.sort((a, b) => (a.cells[1].textContent || "").localeCompare(b.cells[1].textContent || ""));
  const pages = Math.max(Math.ceil(rows.length / PAGE), 1);
  return { rows: rows.slice(page * PAGE, (page + 1) * PAGE), found: rows.length, page, pages };
};

/** @param {Partial<Wanted>} change */
async function showImages(change) {
  Object.assign(wanted, change);
  const found = await imagesOf(wanted), body = first(HTMLElement, "#dataset tbody");
  const pager = first(HTMLElement, "#dataset .pager");
  if (!body || !pager) return;
  wanted.page = found.page;
  body.replaceChildren(...found.rows);
  const [back, told, on] = pager.children;
  back.toggleAttribute("disabled", found.page === 0);
  on.toggleAttribute("disabled", found.page >= found.pages - 1);
  told.textContent = `page ${found.page + 1} of ${found.pages}: ${found.found} images`;
}

function fillFinder() {
  const finder = first(HTMLElement, "#dataset .finder");
  if (!finder || !finder.hidden) return;
  rowsHere = all(HTMLTableRowElement, "#dataset tbody tr");
  const about = { placeholder: "file or caption", "aria-label": "find images by file or caption" };
  const search = /** @type {HTMLInputElement} */ (make("input", { type: "search", ...about }));
  search.addEventListener("input", () => showImages({ find: search.value, page: 0 }));
  const order = /** @type {HTMLSelectElement} */ (make("select", { "aria-label": "order" }));
  const orders = { highest: "highest loss first", lowest: "lowest loss first", file: "by file" };
  order.append(...Object.entries(orders).map(([value, text]) => make("option", { value }, text)));
  order.addEventListener("change", () => showImages({ order: order.value, page: 0 }));
  const turn = (/** @type {number} */ by) => () => showImages({ page: wanted.page + by });
  const pager = make("span", { class: "pager" }, button("previous", turn(-1)), make("span"), button("next", turn(1)));
  finder.replaceChildren(search, order, pager);
  finder.hidden = false;
  if (rowsHere.length) showImages({});
}

// ---- a table whose heads sort it

function fillSort() {
  for (const head of all(HTMLTableCellElement, "table.runs thead th")) {
    const text = head.textContent || "";
    head.replaceChildren(button(text, () => {
      const rising = head.getAttribute("aria-sort") !== "ascending", body = head.closest("table")?.tBodies[0];
      all(HTMLElement, "table.runs th[aria-sort]").forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      /** @param {HTMLTableRowElement} row */
      const value = (row) => row.cells[head.cellIndex].dataset.sort ?? row.cells[head.cellIndex].textContent ?? "";
      const rows = [...(body?.rows || [])].sort((a, b) => {
        const by = Number.parseFloat(value(a)) - Number.parseFloat(value(b));
        return (by || value(a).localeCompare(value(b), undefined, { numeric: true })) * (rising ? 1 : -1);
      });
      body?.replaceChildren(...rows);
    }));
  }
}

fillGallery();
fillCharts();
fillFinder();
if (document.querySelector("form table.runs")) fillSort();
