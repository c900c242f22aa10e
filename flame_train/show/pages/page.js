"use strict";
// What both pages do: the slider over steps, the zoom, finding an image. All text is set as text, never as markup.

function make(tag, attributes, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...inside);
  return made;
}

const sampleImages = () => [...document.querySelectorAll("#samples img[data-step]")];

function stepsAndPrompts() {
  const found = { byPlace: new Map(), steps: new Set(), prompts: new Map() };
  for (const image of sampleImages()) {
    found.byPlace.set(image.dataset.step + "/" + image.dataset.prompt, image);
    found.steps.add(Number(image.dataset.step));
    const head = image.closest("table").tHead.rows[0].cells[Number(image.dataset.prompt) + 1];
    found.prompts.set(image.dataset.prompt, head ? head.textContent : image.alt);
  }
  found.steps = [...found.steps].sort((a, b) => a - b);
  return found;
}

// ---- before and after, with a slider over the steps

const chosen = { prompt: "0", step: null };

function fillViewer() {
  const viewer = document.querySelector("#samples .viewer");
  const { byPlace, steps, prompts } = stepsAndPrompts();
  if (!viewer || steps.length < 2) return;
  if (!prompts.has(chosen.prompt)) chosen.prompt = [...prompts.keys()][0];
  const select = make("select", { id: "which" });
  for (const [number, text] of prompts) select.append(make("option", { value: number }, text));
  select.value = chosen.prompt;
  const slider = make("input", { type: "range", min: 0, max: steps.length - 1, step: 1, id: "when" });
  const last = steps.length - 1;
  slider.value = chosen.step === null ? last : Math.max(steps.indexOf(chosen.step), 0);
  const sides = ["before", "after"].map(() => {
    const caption = make("figcaption"), image = make("img");
    return { caption, image, figure: make("figure", {}, image, caption) };
  });
  const put = (side, step, word) => {
    const found = byPlace.get(step + "/" + chosen.prompt);
    side.image.hidden = !found;
    if (found) { side.image.src = found.dataset.large || found.src; side.image.alt = found.alt; }
    side.caption.textContent = word + "step " + step + (found ? "" : ": no such image");
  };
  const show = () => {
    const step = steps[Number(slider.value)];
    chosen.prompt = select.value;
    chosen.step = Number(slider.value) === last ? null : step;
    slider.setAttribute("aria-valuetext", "step " + step);
    put(sides[0], steps[0], steps[0] === 0 ? "before, " : "first, ");
    put(sides[1], step, "");
  };
  select.addEventListener("change", show);
  slider.addEventListener("input", show);
  viewer.replaceChildren(
    make("label", {}, "prompt ", select),
    make("div", { class: "pair" }, sides[0].figure, sides[1].figure),
    make("label", { for: "when" }, "step"), slider);
  viewer.hidden = false;
  show();
}

// ---- zoom: Enter or a click opens, Escape closes, arrows go to other rows (steps, or runs) and prompts

const zoomed = { step: 0, prompt: "0" };
let dialog = null;

function openDialog() {
  if (dialog) return dialog;
  dialog = make("dialog", { "aria-label": "sample image" }, make("img", { alt: "" }), make("p"), make("div", { class: "buttons" }));
  const moves = [["row above", "ArrowUp"], ["row below", "ArrowDown"], ["previous prompt", "ArrowLeft"], ["next prompt", "ArrowRight"]];
  for (const [name, key] of moves) {
    const button = make("button", { type: "button" }, name);
    button.addEventListener("click", () => moveZoom(key));
    dialog.querySelector(".buttons").append(button);
  }
  const close = make("button", { type: "button" }, "close");
  close.addEventListener("click", () => dialog.close());
  dialog.querySelector(".buttons").append(close);
  dialog.addEventListener("keydown", (event) => { if (moveZoom(event.key)) event.preventDefault(); });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("close", () => {
    const from = document.querySelector(`#samples table img[data-step="${Number(zoomed.step)}"][data-prompt="${Number(zoomed.prompt)}"]`);
    if (from) from.closest("button").focus();
  });
  document.body.append(dialog);
  return dialog;
}

function moveZoom(key) {
  const { byPlace, steps, prompts } = stepsAndPrompts(), names = [...prompts.keys()];
  const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[key];
  if (!by) return false;
  const step = steps[steps.indexOf(Number(zoomed.step)) + by[0]];
  const prompt = names[names.indexOf(zoomed.prompt) + by[1]];
  const image = byPlace.get(step + "/" + prompt);
  if (image) zoom(image);
  return true;
}

function zoom(image) {
  const shown = openDialog();
  zoomed.step = Number(image.dataset.step);
  zoomed.prompt = image.dataset.prompt;
  shown.querySelector("img").src = image.dataset.large || image.src;
  shown.querySelector("img").alt = image.alt;
  shown.querySelector("p").textContent = image.alt;
  if (!shown.open) shown.showModal();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest && event.target.closest("button.zoom");
  if (button) zoom(button.querySelector("img"));
});

// ---- finding an image of the dataset

function fillFinder() {
  const finder = document.querySelector("#dataset .finder"), body = document.querySelector("#dataset tbody");
  if (!finder || !body || finder.dataset.live) return;
  const search = make("input", { type: "search", placeholder: "file or caption", "aria-label": "find images by file or caption" });
  const sort = make("select", { "aria-label": "order" });
  for (const name of ["highest loss first", "lowest loss first", "by file"]) sort.append(make("option", {}, name));
  const rows = [...body.rows];
  const arrange = () => {
    const wanted = search.value.toLowerCase(), how = sort.selectedIndex, ordered = [...rows];
    if (how === 1) ordered.reverse();
    if (how === 2) ordered.sort((a, b) => a.cells[1].textContent.localeCompare(b.cells[1].textContent));
    for (const row of ordered) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    body.replaceChildren(...ordered);
  };
  search.addEventListener("input", arrange);
  sort.addEventListener("change", arrange);
  finder.replaceChildren(search, sort);
  finder.hidden = false;
}

fillViewer();
fillFinder();
