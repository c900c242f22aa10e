"use strict";
// What a plan tells: whether it fits, its figures, and what is to mend first.

/** @typedef {import("./form.js").Problem} Problem */

/** @param {Problem[]} problems @param {(key: string) => boolean} isField */
export function refused(problems, isField) {
  const rows = problems.map((each) => {
    const link = make("a", { href: isField(each.key) ? "#key-" + each.key.replace(".", "-") : "#toml" }, each.key || "the text");
    return make("li", {}, link, ": " + each.message);
  });
  return [make("p", { class: "bad" }, `${rows.length} to mend`), make("ul", { class: "problems" }, ...rows)];
}

/** @param {any} found @param {number | null} card its GB @param {boolean} drawsFirst whether samples are drawn before the first step */
export function planned(found, card, drawsFirst) {
  const p = found.plan, ms = p.predicted_step_ms;
  const memory = p.predicted_memory_gib + p.cuda_context_gib, disk = p.cache_gib + p.checkpoints_gib;
  const fits = p.fits !== false && (card ? memory * 2 ** 30 <= card * 1e9 : p.smallest_card_gb !== null);
  const first = [`${p.cached_views} images are encoded`, ...(p.prompts && drawsFirst ? [`${p.prompts} samples drawn`] : [])].join(" and ");
  const notes = [...found.notes, ms === null ? `Before the first step ${first}: on a CPU that takes minutes.` : p.gpu ? "" : `Times are those of an ${p.step_time_of}; other cards take longer.`];
  /** @type {[string, string][]} */
  const facts = [
    ["memory", `${memory.toFixed(2)} GiB`], ["a step", ms === null ? "not predicted for the CPU" : `${ms} ms on ${p.step_time_of}`],
    ["all steps there", ms === null ? "" : duration((ms * p.steps) / 1000)], ["steps", `${p.steps}, ${p.epochs < 10 ? p.epochs : Math.round(p.epochs)} epochs`],
    ["images", `${p.images}` + (p.validation_images ? ` and ${p.validation_images} held out` : "")],
    ["disk", `${disk.toFixed(2)} GiB, ${found.free_disk_gib} are free`], ["trained values", p.trainable_parameters.toLocaleString("en")],
  ];
  return [
    make("p", { class: !fits ? "bad" : p.device === "cpu" ? "" : "fits" }, found.verdict),
    make("dl", { class: "facts" }, ...facts.filter(([, value]) => value).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))),
    make("ul", { class: "notes" }, ...notes.filter(Boolean).map((/** @type {string} */ note) => make("li", {}, note))),
    make("details", {}, make("summary", {}, "the whole plan"), make("pre", { class: "mono", tabindex: "0" }, found.text)),
  ];
}

/** @param {number} seconds */
function duration(seconds) {
  const minutes = Math.round(seconds / 60);
  return minutes < 1 ? `${Math.round(seconds)} s` : minutes < 90 ? `${minutes} min` : `${(minutes / 60).toFixed(1)} h`;
}
