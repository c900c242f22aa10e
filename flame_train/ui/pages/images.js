"use strict";
// The images of the folder: each with the part that is trained, its bucket, and its caption, which is saved as a file.
import { ask, Refused } from "./ask.js";

/** @typedef {{path: string, seen: string}} Seen
 * @typedef {{bucket?: string, shares?: number[], kept?: number, original?: string, span?: {count: number}, problem?: string}} Placed
 * @typedef {{file: string, image: Seen, caption: string, written_in: string, editable: boolean, placements: Placed[],
 *   mask: Seen | null, controls: Seen[]}} Row */

const FEW = 8;  // images: ui.css knows it too

export class Sheet {
  /** @param {HTMLElement} place @param {() => string} toml @param {() => void} saved */
  constructor(place, toml, saved) {
    this.place = place;
    this.toml = toml;
    this.saved = saved;
    this.page = 0;
    this.set = 0;
    this.lacking = false;
    this.few = true;
    this.asked = 0;
    this.found = /** @type {any} */ (null);
  }

  clear() { this.asked += 1; this.place.replaceChildren(); }

  /** Reads the folder anew, and shows a page of it. */
  async read() {
    const asked = ++this.asked, of = { toml: this.toml(), set: this.set };
    let found;
    try {
      found = await ask("images", { ...of, page: this.page, lacking: this.lacking });
    } catch (error) {
      if (asked === this.asked) this.place.replaceChildren(make("p", { class: "bad", role: "alert" }, String(error instanceof Error ? error.message : error)));
      return;
    }
    if (asked !== this.asked) return;
    this.page = found.page;
    this.found = found;
    this.place.replaceChildren(this.sets(found), this.counts(found), ...this.notes(found), ...this.cards(found.images, of), this.pager(found));
  }

  /** The images, the first two rows of them until all are asked for. @param {Row[]} rows @param {{toml: string, set: number}} of */
  cards(rows, of) {
    const list = make("ul", { class: "sheet" }, ...rows.map((row) => this.card(row, of)));
    if (rows.length <= FEW || !this.few) return [list];
    const all = make("button", { type: "button" }, `show all ${rows.length}`);
    list.classList.add("few");
    all.addEventListener("click", () => {
      this.few = false;
      list.classList.remove("few");
      all.remove();
      list.querySelectorAll("textarea")[FEW]?.focus();
    });
    return [list, all];
  }

  /** A choice of the set, where there are several. @param {any} found */
  sets(found) {
    if (found.sets.length < 2) return "";
    const choice = /** @type {HTMLSelectElement} */ (make("select", { "aria-label": "set of images" }));
    found.sets.forEach((/** @type {string} */ path, /** @type {number} */ i) => choice.append(make("option", { value: String(i) }, path)));
    choice.value = String(this.set);
    choice.addEventListener("change", () => { this.set = Number(choice.value); this.page = 0; this.clear(); this.read(); });
    return choice;
  }

  /** @param {any} found */
  counts(found) {
    const box = /** @type {HTMLInputElement} */ (make("input", { type: "checkbox" }));
    box.checked = this.lacking;
    box.addEventListener("change", () => { this.lacking = box.checked; this.page = 0; this.read(); });
    const told = make("span", { id: "counts", role: "status" }, countsOf(found));
    told.classList.toggle("warned", found.without_caption > 0);
    return make("div", { class: "tools" }, told, make("label", {}, box, "only those without a caption"));
  }

  /** @param {any} found */
  notes(found) {
    const orphans = found.captions_without_image.slice(0, 20).map((/** @type {string} */ name) => `${name}: no image of this name`);
    const lines = [...found.notices, ...orphans];
    if (!lines.length) return [];
    return [make("details", {}, make("summary", {}, `${lines.length} notes`), make("ul", {}, ...lines.map((line) => make("li", {}, line))))];
  }

  /** @param {Row} row @param {{toml: string, set: number}} of what the row was read from */
  card(row, of) {
    const caption = /** @type {HTMLTextAreaElement} */ (make("textarea", { rows: "3", "aria-label": `caption of ${row.file}` }));
    caption.value = row.caption;
    caption.readOnly = !row.editable;
    const told = make("p", { class: "help", role: "status" }, where(row));
    const card = make("li", { class: row.written_in ? "" : "lacks" }, this.picture(row), make("p", { class: "mono" }, row.file), ...row.placements.map(placed), caption, told);
    let before = row.caption;
    caption.addEventListener("change", async () => {
      told.className = "help";
      told.textContent = "saving";
      try {
        const saved = await ask("caption", { ...of, file: row.file, before, caption: caption.value });
        before = saved.caption;
        if (card.classList.contains("lacks")) { this.found.without_caption -= 1; this.place.querySelector("#counts")?.replaceChildren(countsOf(this.found)); }
        card.classList.remove("lacks");
        told.textContent = `saved in ${saved.written_in}`;
        this.saved();
      } catch (error) {
        told.className = "error";
        told.textContent = error instanceof Error ? error.message : String(error);
        if (error instanceof Refused && error.now !== undefined) { before = error.now; told.textContent += `: "${error.now}"`; }
      }
    });
    return card;
  }

  /** @param {Row} row */
  picture(row) {
    const whole = make("div", { class: "crop" }, thumb(row.image, row.file));
    const shares = row.placements[0]?.shares;
    if (shares) {
      const kept = make("span", { class: "kept" });
      ["left", "top", "width", "height"].forEach((side, i) => kept.style.setProperty(side, `${100 * (shares[i] ?? 0)}%`));
      whole.append(kept);
    }
    const beside = row.controls.map((control, i) => thumb(control, `control image ${i + 1} of ${row.file}`));
    if (row.mask) beside.push(thumb(row.mask, `mask of ${row.file}`, true));
    return make("div", { class: "pictures" }, whole, ...(beside.length ? [make("div", { class: "beside-it" }, ...beside)] : []));
  }

  /** @param {any} found */
  pager(found) {
    if (found.pages < 2) return "";
    /** @param {string} text @param {number} by */
    const turn = (text, by) => {
      const button = /** @type {HTMLButtonElement} */ (make("button", { type: "button" }, text));
      button.disabled = this.page + by < 0 || this.page + by >= found.pages;
      button.addEventListener("click", () => { this.page += by; this.read(); });
      return button;
    };
    return make("div", { class: "tools" }, turn("back", -1), `page ${found.page + 1} of ${found.pages}`, turn("on", 1));
  }
}

/** @param {any} found */
function countsOf(found) {
  const orphans = found.captions_without_image.length;
  return `${found.count} image${found.count === 1 ? "" : "s"}, ${found.without_caption} without a caption, ${orphans} caption${orphans === 1 ? "" : "s"} without an image`;
}

/** @param {Row} row */
function where(row) {
  if (!row.written_in) return "no caption yet";
  return row.editable ? "" : `stands in ${row.written_in}; change it there`;
}

/** @param {Placed} each */
function placed(each) {
  if (each.problem) return make("p", { class: "bucket bad" }, each.problem);
  const cut = Math.round(100 * (1 - (each.kept ?? 1)));
  return make("p", { class: "bucket" }, `${each.original} → ${each.bucket}` + (each.span ? `, ${each.span.count} frames` : "") + (cut ? `, ${cut}% cropped away` : ""));
}

/** @param {Seen} file @param {string} alt @param {boolean} [mask] */
function thumb(file, alt, mask) {
  const query = new URLSearchParams({ ...file, side: "320", ...(mask ? { mask: "yes" } : {}) });
  return make("img", { src: "/picture?" + query, alt, loading: "lazy" });
}
