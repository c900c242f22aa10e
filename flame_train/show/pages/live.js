"use strict";
// The live page: asks the server for what is new, draws the charts with Plotly, keeps what the reader does.

const live = document.getElementById("live");
const names = Object.entries(live.dataset).filter(([key]) => /^name\d*$/.test(key)).map(([, value]) => value);
const state = { digest: "", dataset: null, charts: [], find: "", order: "highest", page: 0, asked: 0 };
const plots = document.querySelector("#curves .plots");
const EVERY_MS = 2000, WHEN_DONE_MS = 10000;

function query(more) {
  const found = new URLSearchParams();
  for (const name of names) found.append("name", name);
  for (const [key, value] of Object.entries(more)) found.append(key, value);
  return "?" + found;
}

// ---- charts

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function layoutOf(chart) {
  const rule = colour("rule"), ink = colour("soft");
  const loss = ["loss", "bands", "levels", "validation"].includes(chart.name);
  const logarithmic = loss && document.getElementById("logarithmic").checked;
  const legend = chart.lines.length > 1 ? 24 * Math.ceil(chart.lines.length / 3) : 0;
  return {
    margin: { l: 58, r: 12, t: 8, b: 40 + legend }, height: 270 + legend, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: 12 }, showlegend: chart.lines.length > 1, uirevision: chart.name,
    legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom" }, hovermode: "x", hoverlabel: { namelength: 40 },
    xaxis: { title: { text: chart.x_title, standoff: 6 }, gridcolor: rule, zerolinecolor: rule, linecolor: rule },
    yaxis: { type: logarithmic ? "log" : "linear", rangemode: logarithmic ? "normal" : "tozero", gridcolor: rule,
      zerolinecolor: rule, exponentformat: "e" },
  };
}

function tracesOf(chart) {
  const shift = chart.lines.length && chart.lines[0].faint ? 1 : 0;
  return chart.lines.map((line, i) => ({
    x: line.x, y: line.y, name: escaped(line.label), mode: line.marks ? "lines+markers" : "lines", type: "scatter",
    opacity: line.faint ? 0.45 : 1,
    line: { color: colour("c" + (Math.max(i - shift, 0) % 8)), width: line.faint ? 1 : 2 }, marker: { size: 5 },
  }));
}

// Plotly reads some tags in texts, such as <b> and links: a run's name is to be text.
const escaped = (text) => text.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);

function drawCharts() {
  const wanted = new Set(state.charts.map((chart) => "chart-" + chart.name));
  for (const figure of [...plots.children]) if (!wanted.has(figure.id)) figure.remove();
  for (const chart of state.charts) {
    let figure = document.getElementById("chart-" + chart.name);
    if (!figure) {
      const caption = make("figcaption", {}, chart.title, chart.note ? make("small", {}, " " + chart.note) : "");
      figure = make("figure", { class: "plot", id: "chart-" + chart.name }, caption, make("div", { class: "plotly-chart" }));
      plots.append(figure);
    }
    const ends = chart.lines.filter((line) => line.y.length).map((line) => line.label + " " + line.y.at(-1).toPrecision(4));
    const drawn = figure.querySelector(".plotly-chart");
    drawn.setAttribute("role", "img");
    drawn.setAttribute("aria-label", chart.title + "; last: " + ends.join(", "));
    Plotly.react(drawn, tracesOf(chart), layoutOf(chart), { responsive: true, displayModeBar: false });
  }
}

// ---- sections: the server's HTML, in which all text is escaped; put in only where it is new

const sections = new Map();

function putSection(name, markup) {
  if (sections.get(name) === markup) return false;
  sections.set(name, markup);
  const old = document.getElementById(name);
  if (!old) return false;
  const opened = [...old.querySelectorAll("details")].map((each) => each.open);
  const scrolled = old.querySelector(".scroll"), at = scrolled ? [scrolled.scrollLeft, scrolled.scrollTop] : null;
  const focused = old.contains(document.activeElement) ? placeOf(document.activeElement) : null;
  const made = document.createElement("template");
  made.innerHTML = markup;
  old.replaceWith(made.content);
  const fresh = document.getElementById(name);
  fresh.querySelectorAll("details").forEach((each, i) => { each.open = Boolean(opened[i]); });
  if (at && fresh.querySelector(".scroll")) fresh.querySelector(".scroll").scrollTo(...at);
  if (name === "samples") fillViewer();
  if (focused && fresh.querySelector(focused)) fresh.querySelector(focused).focus();
  return true;
}

function placeOf(active) {
  if (active.id) return "#" + CSS.escape(active.id);
  if (active.hasAttribute("href")) return `a[href="${CSS.escape(active.getAttribute("href"))}"]`;
  if (active.classList.contains("scroll")) return ".scroll";
  const image = active.querySelector("img[data-step]");
  return image ? `button:has(> img[data-step="${Number(image.dataset.step)}"][data-prompt="${Number(image.dataset.prompt)}"])` : null;
}

// ---- the dataset, page by page

async function fetchDataset() {
  const answer = await fetch("/dataset" + query({ find: state.find, order: state.order, page: state.page }));
  if (!answer.ok) return;
  const found = await answer.json(), before = document.getElementById("dataset");
  state.page = found.page;
  const kept = before.querySelector(".finder input");
  const typing = kept && document.activeElement === kept;
  const made = document.createElement("template");
  made.innerHTML = found.html;
  const section = made.content.firstElementChild, finder = section.querySelector(".finder");
  before.replaceWith(section);
  if (!finder) return;
  const search = kept || make("input", { type: "search", placeholder: "file or caption", "aria-label": "find images by file or caption" });
  if (!kept) search.addEventListener("input", () => { state.find = search.value; state.page = 0; fetchDataset(); });
  const order = make("select", { "aria-label": "order" });
  for (const [value, text] of [["highest", "highest loss first"], ["lowest", "lowest loss first"], ["file", "by file"]])
    order.append(make("option", { value }, text));
  order.value = state.order;
  order.addEventListener("change", () => { state.order = order.value; state.page = 0; fetchDataset(); });
  const turn = (text, by) => {
    const button = make("button", { type: "button" }, text);
    button.disabled = state.page + by < 0 || state.page + by >= found.pages;
    button.addEventListener("click", () => { state.page += by; fetchDataset(); });
    return button;
  };
  finder.dataset.live = "yes";
  finder.replaceChildren(search, order);
  if (found.pages > 1)
    finder.append(make("span", { class: "pager" }, turn("back", -1), `page ${found.page + 1} of ${found.pages}, ${found.found} images`, turn("on", 1)));
  finder.hidden = false;
  for (const thumb of section.querySelectorAll(".thumb")) thumb.style.backgroundImage = `url("/sheet${query({})}")`;
  if (typing) search.focus();
}

// ---- asking

async function ask() {
  const told = document.getElementById("told");
  let wait = WHEN_DONE_MS;
  try {
    const number = ++state.asked;
    const answer = await fetch(live.dataset.source + query({ have: state.digest, smoothing: document.getElementById("smoothing").value }));
    if (!answer.ok) throw new Error("the run is not there any more");
    const found = await answer.json();
    if (number !== state.asked) return;
    if (found.running) wait = EVERY_MS;
    told.className = "";
    told.textContent = found.running ? "updated as the run goes on" : "";
    if (!found.same) {
      state.digest = found.digest;
      state.charts = found.charts;
      drawCharts();
      for (const [name, markup] of Object.entries(found.sections)) putSection(name, markup);
      if (found.dataset && found.dataset !== state.dataset) { state.dataset = found.dataset; await fetchDataset(); }
    }
  } catch (error) {
    told.className = "lost";
    told.textContent = "the server does not answer: " + error.message + "; what is shown may be old";
  }
  clearTimeout(state.timer);
  state.timer = setTimeout(ask, wait);
}

document.getElementById("smoothing").addEventListener("change", ask);
document.getElementById("logarithmic").addEventListener("change", drawCharts);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
ask();
