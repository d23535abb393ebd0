"use strict";
// Rows that are filtered, sorted and opened, and plots that lead to them. Text of the run is only ever read from and
// written to the document as text. The state of the page is its fragment: #layer=…&q=…&sort=rows:-mean

const $ = (id) => document.getElementById(id);
const [LEFT, RIGHT, HEIGHT, TOP, FOOT] = [66, 992, 220, 10, 26]; // of a plot's lines, as in figures.py
const panel = $("panel");
const parts = [...document.querySelectorAll("template.part")].map((template) => {
  const { name, otherNames = "", kind, flagged } = template.dataset;
  return { template, name, kind, flagged: flagged !== undefined, text: `${name} ${otherNames}`.toLowerCase(), matches: true };
});
const places = new Map([...parts].reverse().map((part) => [part.name, part])); // the first of a name
const tables = [...document.querySelectorAll("table[data-key]")].map((table) => {
  const rows = [...table.tBodies[0].rows].map((tr, number) => ({ tr, number, part: parts[tr.dataset.part] }));
  return { table, key: table.dataset.key, rows, order: rows, sorted: "order", isLong: table.id === "table" };
});
const filters = [...document.querySelectorAll(".filters :is(input, select)[id]")];
const boxes = [...document.querySelectorAll('input[name="column"]')];
const chosen = () => boxes.filter((box) => box.checked).map((box) => box.value).join(",");
const usual = chosen();
const onFilter = tables.length ? [filterRows] : []; // what the filters change
const onOpen = []; // what else happens with the part of a row that is shown
let shown = null;

const filter = () => onFilter.forEach((then) => then());
const clamped = (value, last) => Math.max(0, Math.min(last, value));
const searched = () => $("q").value.toLowerCase().split(/\s+/).filter(Boolean);

function tell(count, words) { // how many the filters find
  $("matched").value = words;
  $("none").hidden = count > 0;
}

// --- the fragment

function address(layer) {
  const values = filters.map((one) => [one.id, one.type === "checkbox" ? (one.checked ? "1" : "") : one.value]);
  const sort = tables.filter((each) => each.sorted !== "order").map((each) => `${each.key}:${each.sorted}`).join(",");
  const state = [["layer", layer], ...values, ["sort", sort]].filter(([, value]) => value);
  if (chosen() !== usual) state.push(["columns", chosen()]);
  return `#${state.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&")}`;
}

const remember = () => history.replaceState(null, "", address(shown ? shown.name : ""));
const go = (part) => { location.hash = address(part.name); };

function follow() {
  if (location.hash.length > 1 && !location.hash.includes("=")) return; // a section
  const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  for (const one of filters) {
    if (one.type === "checkbox") one.checked = Boolean(state[one.id]);
    else one.value = state[one.id] ?? "";
    if (one.selectedIndex < 0) one.selectedIndex = 0;
  }
  const columns = (state.columns ?? usual).split(",");
  for (const box of boxes) box.checked = columns.includes(box.value);
  chooseColumns();
  const orders = new Map((state.sort ?? "").split(",").map((each) => each.split(":")));
  for (const each of tables) sort(each, orders.get(each.key) || "order");
  filter();
  const part = state.layer === undefined ? undefined : find(state.layer);
  if (part) open(part);
  else if (panel.open) panel.close();
}

// A parameter leads to its layer, and a layer that has no row to its first parameter.
function find(name) {
  return places.get(name) ?? places.get(name.slice(0, Math.max(0, name.lastIndexOf(".")))) ??
    parts.find((part) => part.name.startsWith(`${name}.`));
}

// --- the tables

function filterRows() {
  const words = searched();
  const kind = $("type")?.value;
  for (const part of parts) {
    part.matches = (!kind || part.kind === kind) && (!$("flagged")?.checked || part.flagged) && words.every((word) => part.text.includes(word));
  }
  for (const { tr, part } of tables.flatMap((each) => each.rows)) {
    if (tr.hidden === part.matches) tr.hidden = !part.matches; // elsewhere the row at the top stays there by itself
  }
  const count = parts.filter((part) => part.matches).length;
  const [found, total] = [count, parts.length].map((number) => number.toLocaleString("en"));
  const all = `${total} ${parts.length === 1 ? "row" : "rows"}`;
  tell(count, count === parts.length ? all : `${found} of ${all}`);
}

function chooseColumns() {
  for (const box of boxes) $("table").classList.toggle(`no-${box.value}`, !box.checked);
}

function sort(each, wanted) {
  const key = wanted.replace(/^-/, "");
  const button = each.table.querySelector(`th button[data-sort="${CSS.escape(key)}"]`);
  if (!button || wanted === each.sorted) return;
  each.sorted = wanted;
  const head = button.parentElement;
  const way = wanted.startsWith("-") ? -1 : 1;
  const numeric = key === "order" || head.classList.contains("number");
  const cell = ({ tr }) => tr.cells[head.cellIndex];
  const value = (row) => (key === "order" ? row.number : numeric ? cell(row).dataset.v ?? "" : cell(row).textContent);
  const compare = numeric ? (a, b) => a - b : new Intl.Collator("en", { numeric: true }).compare;
  const keyed = each.rows.map((row) => [value(row), row]);
  keyed.sort(([a, first], [b, second]) => {
    if (a === "" || b === "") return (a === "") - (b === "") || first.number - second.number;
    return way * compare(a, b) || first.number - second.number;
  });
  each.order = keyed.map(([, row]) => row);
  each.table.tBodies[0].append(...each.order.map((row) => row.tr));
  for (const other of each.table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
}

// --- the page of a row

function visible() {
  return (tables[0]?.isLong ? tables[0].order.map((row) => row.part) : parts).filter((part) => part.matches);
}

function open(part) {
  if (shown === part && panel.open) return;
  shown = part;
  $("panel-title").textContent = part.name;
  $("body").replaceChildren(part.template.content.cloneNode(true));
  $("body").scrollTop = 0;
  const all = visible();
  const at = all.indexOf(part);
  $("back").disabled = at < 1;
  $("next").disabled = at < 0 || at + 1 >= all.length;
  if (!panel.open) panel.showModal();
  $("panel-title").focus();
  for (const then of onOpen) then(part);
}

function turn(by) {
  const all = visible();
  const next = all[all.indexOf(shown) + by];
  if (next && shown) go(next);
}

// --- what is under the pointer

// Where the pointer is, in the units of a drawing.
function pointIn(drawing, { clientX, clientY }) {
  return new DOMPoint(clientX, clientY).matrixTransform(drawing.getScreenCTM().inverse());
}

// `look` returns what is under the pointer in words, and the name or the row that a click there leads to.
function pointAt(area, output, look) {
  area.addEventListener("pointermove", (event) => { output.value = look(event)?.words ?? ""; });
  area.addEventListener("pointerleave", () => { output.value = ""; });
  area.addEventListener("click", (event) => {
    const part = look(event)?.part;
    if (part) go(part);
  });
}

function followPointer(figure) {
  const plot = figure.querySelector("svg.plot");
  const drawn = plot.querySelector(".drawn");
  const labels = JSON.parse(figure.dataset.labels);
  pointAt(plot, figure.querySelector(".place"), (event) => {
    const step = (RIGHT - LEFT) / Math.max(1, labels.length - 1);
    const at = clamped(Math.round((pointIn(drawn, event).x - LEFT) / step), labels.length - 1);
    plot.querySelector(".cursor").setAttribute("d", `M${LEFT + at * step} 0V${HEIGHT - 20}`);
    return { words: labels[at], part: find(labels[at]) };
  });
}

// --- what people do

document.querySelectorAll("figure.depth").forEach(followPointer);
for (const one of filters) one.addEventListener("input", () => { filter(); remember(); });
for (const box of boxes) box.addEventListener("change", () => { chooseColumns(); remember(); });
document.querySelector("form.filters")?.addEventListener("submit", (event) => event.preventDefault());
for (const each of tables) {
  each.table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const key = button.dataset.sort;
    const isNumber = key !== "order" && button.parentElement.classList.contains("number");
    const [first, second] = isNumber ? [`-${key}`, key] : [key, `-${key}`]; // the largest first
    sort(each, each.sorted === first ? second : first);
    remember();
  });
}
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#layer="]');
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const part = find(decodeURIComponent(link.getAttribute("href").slice(7)));
  if (!part) return;
  event.preventDefault();
  go(part);
});
$("back").addEventListener("click", () => turn(-1));
$("next").addEventListener("click", () => turn(1));
panel.addEventListener("keydown", (event) => {
  if (event.target.closest("input")) return;
  if (event.key === "ArrowLeft" || event.key === "ArrowRight") turn(event.key === "ArrowLeft" ? -1 : 1);
});
panel.addEventListener("close", () => {
  const last = shown;
  shown = null;
  $("body").replaceChildren();
  if (/[#&]layer=/.test(location.hash)) history.pushState(null, "", address(""));
  const row = last && tables.map((each) => each.rows.find(({ part }) => part === last)).find(Boolean);
  if (row && !row.tr.hidden) row.tr.querySelector("a").focus({ preventScroll: true });
});
addEventListener("hashchange", follow);
document.addEventListener("DOMContentLoaded", () => {
  follow(); // the scripts of the parts have run
  document.documentElement.classList.add("ready");
});
