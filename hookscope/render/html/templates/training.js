// The state of the page is its fragment: #layer=…&q=…&sort=gradient-norm:-largest
// Text of the run is only ever read from and written to the document as text.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const [TOP, FOOT] = [10, 26]; // px of a plot, as in figures.py
const panel = $("panel");
const tables = [...document.querySelectorAll("table.strips")].map((table) => ({
  table, key: table.dataset.key, title: table.dataset.title, share: table.dataset.scale === "share", sorted: "order",
  names: JSON.parse(table.dataset.names), // of files; none where the columns are steps
  steps: table.dataset.steps.split(" ").map((each) => each.split("-").map(Number)), values: null,
  rows: [...table.tBodies[0].rows].map((tr, number) => ({ tr, number, name: tr.cells[0].textContent })),
}));
const parts = [...document.querySelectorAll("template.part")].map((template) => ({ template, name: template.dataset.name }));
const places = new Map();
for (const part of parts) if (!places.has(part.name)) places.set(part.name, part);
for (const each of tables) each.of = new Map(each.rows.map((row) => [row.name, row]));
let shown = null;

// --- the fragment

function address(layer) {
  const sort = tables.filter((each) => each.sorted !== "order").map((each) => `${each.key}:${each.sorted}`).join(",");
  const state = { layer, q: tables.length ? $("q").value : "", sort };
  const kept = Object.entries(state).filter(([, value]) => value);
  return `#${kept.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&")}`;
}

function remember() {
  keepInFragment(() => address(shown ? shown.name : ""));
}

function go(name) {
  clearTimeout(waiting); // what it would remember has no layer
  location.hash = address(name);
}

function follow() {
  clearTimeout(waiting);
  if (location.hash.length > 1 && !location.hash.includes("=")) return; // a section
  const given = stateInFragment();
  if (tables.length) {
    $("q").value = given.q || "";
    const orders = new Map((given.sort || "").split(",").map((each) => each.split(":")));
    for (const each of tables) sort(each, orders.get(each.key) || "order");
    filter();
  }
  const part = given.layer === undefined ? undefined : find(given.layer);
  if (part) open(part);
  else if (panel.open) panel.close();
}

// A layer whose output was not watched leads to its first parameter.
function find(name) {
  return places.get(name) ?? parts.find((part) => part.name.startsWith(`${name}.`));
}

// --- the tables

function filter() {
  const words = $("q").value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (name) => words.every((word) => name.toLowerCase().includes(word));
  for (const { rows } of tables) for (const { tr, name } of rows) tr.hidden = !matches(name);
  const count = parts.filter((part) => matches(part.name)).length;
  const all = `${parts.length} ${parts.length === 1 ? "row" : "rows"}`;
  $("matched").value = count === parts.length ? all : `${count} of ${all}`;
  $("none").hidden = count > 0;
}

function sort(each, wanted) {
  const key = wanted.replace(/^-/, "");
  const button = each.table.querySelector(`th button[data-sort="${CSS.escape(key)}"]`);
  if (!button || wanted === each.sorted) return;
  each.sorted = wanted;
  const way = wanted.startsWith("-") ? -1 : 1;
  const head = button.parentElement;
  const value = ({ tr, number }) => (key === "order" ? number : tr.cells[head.cellIndex].dataset.v);
  const keyed = each.rows.map((row) => [value(row), row]);
  keyed.sort(([a, first], [b, second]) => {
    if (a === "" || b === "") return (a === "") - (b === "") || first.number - second.number;
    return way * (a - b) || first.number - second.number;
  });
  each.table.tBodies[0].append(...keyed.map(([, row]) => row.tr));
  for (const cell of each.table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
}

// --- numbers behind the colours

function valuesOf(each, row) {
  if (!each.values) {
    const bytes = Uint8Array.from(atob($(`values-${each.key}`).textContent), (letter) => letter.charCodeAt(0));
    each.values = new Float32Array(bytes.buffer);
  }
  return each.values.subarray(row * each.steps.length, (row + 1) * each.steps.length);
}

function words(each, value) {
  if (Number.isNaN(value)) return "-";
  if (!Number.isFinite(value)) return "NaN or Inf";
  if (each.share) return `${Number((100 * value).toPrecision(3))}%`;
  return value === 0 || (value >= 1e-3 && value < 1e5) ? String(Number(value.toPrecision(4))) : value.toExponential(3);
}

function columnWords(each, column) {
  if (each.names.length) return each.names[column];
  const [first, last] = each.steps[column];
  const [from, to] = [first, last].map((step) => step.toLocaleString("en"));
  return first === last ? `step ${from}` : `steps ${from} to ${to}`;
}

for (const each of tables) {
  const place = each.table.closest(".heat").querySelector(".place");
  each.table.addEventListener("pointermove", (event) => {
    const strip = event.target.closest("svg.cells");
    if (!strip) return;
    const tr = strip.closest("tr");
    const box = strip.getBoundingClientRect();
    const column = Math.max(0, Math.min(each.steps.length - 1, Math.floor(((event.clientX - box.left) / box.width) * each.steps.length)));
    place.value = `${tr.cells[0].textContent}, ${columnWords(each, column)}: ${words(each, valuesOf(each, Number(tr.dataset.row))[column])}`;
  });
  each.table.addEventListener("pointerleave", () => { place.value = ""; });
  each.table.addEventListener("click", (event) => {
    const strip = event.target.closest("svg.cells");
    if (strip) go(strip.closest("tr").cells[0].textContent);
  });
}

// --- the page of a row

function drawn(kind, attributes, text = "") {
  const element = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

function chart(each, row) {
  const values = valuesOf(each, row.number);
  const fits = (value) => Number.isFinite(value) && (each.share || value > 0);
  const known = [...values].filter(fits);
  const figure = $("chart").content.firstElementChild.cloneNode(true);
  const plot = figure.querySelector("svg.plot");
  figure.querySelector("h3").textContent = each.title;
  const height = plot.height.baseVal.value;
  const [left, right, width] = [plot.dataset.left, plot.dataset.right, plot.dataset.width].map(Number);
  const scaled = each.share ? (value) => value : Math.log10;
  let [low, high] = each.share ? [0, 1] : [Math.min(...known), Math.max(...known)];
  const ends = known.length ? [low, high] : [];
  [low, high] = [scaled(low), scaled(high)];
  if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
  const x = (column) => left + ((right - left) * column) / Math.max(1, values.length - 1);
  const y = (value) => TOP + 6 + (1 - (scaled(value) - low) / (high - low)) * (height - FOOT - TOP - 18);
  const back = [];
  const texts = [];
  for (const value of new Set(ends)) {
    back.push(drawn("path", { class: "rule", d: `M${left - 4} ${y(value).toFixed(1)}H${width}` }));
    texts.push(drawn("text", { x: -6, y: (y(value) + 4).toFixed(1), "text-anchor": "end" }, words(each, value)));
  }
  let path = "";
  let joined = false;
  let marks = "";
  values.forEach((value, column) => {
    const at = `${x(column).toFixed(1)} `;
    if (fits(value)) {
      path += `${joined ? "L" : "M"}${at}${y(value).toFixed(1)}${joined ? "" : "h.1"}`;
      joined = true;
    } else if (!Number.isNaN(value)) {
      marks += `M${at}${height - FOOT - 8}v8`;
      joined = false;
    }
  });
  back.push(drawn("path", { class: "line", d: path }), drawn("path", { class: "mark", d: marks }));
  const first = each.names.length ? each.names[0] : `step ${each.steps[0][0].toLocaleString("en")}`;
  const last = each.names.length ? each.names.at(-1) : each.steps.at(-1)[1].toLocaleString("en");
  const most = innerWidth < 700 ? 20 : 50; // characters of a name
  const end = (name) => (name.length > most ? `…${name.slice(1 - most)}` : name);
  texts.push(drawn("text", { x: 0, y: height - 8 }, end(first)));
  texts.push(drawn("text", { x: "100%", y: height - 8, "text-anchor": "end" }, end(last)));
  plot.prepend(...texts);
  plot.querySelector(".drawn").prepend(...back);
  plot.setAttribute("aria-label", known.length ? `${each.title} of ${row.name}, from ${words(each, Math.min(...known))} to ${words(each, Math.max(...known))}` : `${each.title} of ${row.name}: no number above 0`);
  const labels = each.steps.map((_, column) => {
    const item = document.createElement("i");
    item.textContent = `${columnWords(each, column)}: ${words(each, values[column])}`;
    return item;
  });
  figure.querySelector(".labels").content.replaceChildren(...labels);
  followPointer(figure, () => {});
  return figure;
}

function visible() {
  const words = tables.length ? $("q").value.toLowerCase().split(/\s+/).filter(Boolean) : [];
  return parts.filter((part) => words.every((word) => part.name.toLowerCase().includes(word)));
}

function open(part) {
  if (shown === part && panel.open) return;
  shown = part;
  $("panel-title").textContent = part.name;
  $("body").replaceChildren(part.template.content.cloneNode(true));
  $("body").scrollTop = 0;
  const charts = tables.filter((each) => each.of.has(part.name)).map((each) => chart(each, each.of.get(part.name)));
  $("body").querySelector(".charts").replaceChildren(...charts);
  const all = visible();
  const at = all.indexOf(part);
  $("back").disabled = at < 1;
  $("next").disabled = at < 0 || at + 1 >= all.length;
  if (!panel.open) panel.showModal();
  $("panel-title").focus();
}

function turn(by) {
  const all = visible();
  const next = all[all.indexOf(shown) + by];
  if (next && shown) go(next.name);
}

// --- what people do

for (const figure of document.querySelectorAll("figure.depth")) followPointer(figure, () => {});
if (tables.length) {
  $("q").addEventListener("input", () => { filter(); remember(); });
  document.querySelector("form.filters").addEventListener("submit", (event) => event.preventDefault());
}
for (const each of tables) {
  each.table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const key = button.dataset.sort;
    const first = key === "order" ? key : `-${key}`; // the largest first
    sort(each, each.sorted === first ? (key === "order" ? "-order" : key) : first);
    remember();
  });
}
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#layer="]');
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go(decodeURIComponent(link.getAttribute("href").slice(7)));
});
$("close").addEventListener("click", () => panel.close());
$("back").addEventListener("click", () => turn(-1));
$("next").addEventListener("click", () => turn(1));
panel.addEventListener("click", (event) => { if (event.target === panel) panel.close(); });
panel.addEventListener("keydown", (event) => {
  if (event.key === "ArrowLeft" || event.key === "ArrowRight") turn(event.key === "ArrowLeft" ? -1 : 1);
});
panel.addEventListener("close", () => {
  const last = shown;
  shown = null;
  $("body").replaceChildren();
  if (stateInFragment().layer !== undefined) history.pushState(null, "", address(""));
  const row = last && tables.map((each) => each.of.get(last.name)).find(Boolean);
  if (row && !row.tr.hidden) row.tr.querySelector("a").focus({ preventScroll: true });
});
addEventListener("hashchange", follow);
document.addEventListener("DOMContentLoaded", () => {
  follow(); // the numbers come after this script
  document.documentElement.classList.add("ready");
});
