// The state of the page is its fragment: #layer=…&q=…&type=…&flagged=1&sort=-mean&columns=kind,shape
// Text of the run is only ever read from and written to the document as text.

const $ = (id) => document.getElementById(id);
const table = $("table");
const panel = $("panel");
const ROW_HEIGHT = 27; // px, as in the style
const rows = [...table.tBodies[0].rows].map((tr, number) => {
  const label = tr.cells[1].textContent;
  return { tr, number, label, kind: tr.dataset.kind, text: `${label} ${tr.dataset.kind} ${tr.dataset.also ?? ""}`.toLowerCase(),
    flagged: tr.classList.contains("flagged") };
});
const places = new Map();
for (const row of rows) {
  if (!places.has(row.label)) places.set(row.label, row);
}
const boxes = [...document.querySelectorAll('input[name="column"]')];
const usual = boxes.filter((box) => box.checked).map((box) => box.value).join(",");
const sections = new Set([...document.querySelectorAll("main > section")].map((section) => section.id));
let order = rows;
let shown = null;
let sorted = "index";
let later = [];

// --- the fragment

function address(layer) {
  const columns = boxes.filter((box) => box.checked).map((box) => box.value).join(",");
  const state = { layer, q: $("q").value, type: $("type").value, flagged: $("flagged").checked ? "1" : "",
    sort: sorted === "index" ? "" : sorted, columns: columns === usual ? null : columns };
  const kept = Object.entries(state).filter(([name, value]) => value || (name === "columns" && value !== null));
  return `#${kept.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&")}`;
}

function remember() {
  keepInFragment(() => address(shown ? shown.label : ""));
}

function follow() {
  clearTimeout(waiting);
  if (sections.has(location.hash.slice(1))) return;
  const given = stateInFragment();
  $("q").value = given.q || "";
  $("type").value = given.type || "";
  if ($("type").selectedIndex < 0) $("type").value = "";
  $("flagged").checked = Boolean(given.flagged);
  const columns = (given.columns === undefined ? usual : given.columns).split(",");
  for (const box of boxes) box.checked = columns.includes(box.value);
  chooseColumns();
  sort(given.sort || "index");
  filter();
  const row = given.layer === undefined ? undefined : places.get(given.layer);
  if (row) open(row);
  else if (panel.open) panel.close();
}

// --- the table

function filter() {
  const words = $("q").value.toLowerCase().split(/\s+/).filter(Boolean);
  const kind = $("type").value;
  const flagged = $("flagged").checked;
  const fit = Math.ceil(innerHeight / ROW_HEIGHT);
  const region = table.parentElement;
  const scrolled = region.scrollTop;
  const top = scrolled ? order.filter((row) => !row.tr.hidden)[Math.floor(scrolled / ROW_HEIGHT)] : undefined;
  bringLater();
  const appearing = [];
  let above = 0;
  let count = 0;
  for (const row of order) {
    const matches = (!kind || row.kind === kind) && (!flagged || row.flagged) && words.every((word) => row.text.includes(word));
    if (row === top) above = count;
    if (matches && row.tr.hidden) appearing.push([count, row.tr]);
    if (row.tr.hidden === matches) row.tr.hidden = !matches;
    count += matches;
  }
  // The row at the top stays there. The next frame draws the rows in sight; the others come after it.
  const first = Math.min(above - 1, count - fit);
  later = appearing.filter(([place]) => place < first || place > above + fit).map(([, tr]) => tr);
  for (const tr of later) tr.classList.add("later");
  if (top) region.scrollTop = above * ROW_HEIGHT + (scrolled % ROW_HEIGHT);
  if (later.length) requestAnimationFrame(() => setTimeout(bringLater));
  const all = `${rows.length} ${rows.length === 1 ? "row" : "rows"}`;
  $("matched").value = count === rows.length ? all : `${count} of ${all}`;
  $("none").hidden = count > 0;
}

function bringLater() {
  for (const tr of later) tr.classList.remove("later");
  later = [];
}

function chooseColumns() {
  for (const box of boxes) table.classList.toggle(`no-${box.value}`, !box.checked);
}

function sort(wanted) {
  const key = wanted.replace(/^-/, "");
  const button = [...table.querySelectorAll("th button")].find((each) => each.dataset.key === key);
  if (!button || wanted === sorted) return;
  sorted = wanted;
  const head = button.parentElement;
  const way = wanted.startsWith("-") ? -1 : 1;
  const numeric = head.classList.contains("number") || key === "shape";
  const value = ({ tr, label }) => {
    const held = key === "name" ? label : tr.cells[head.cellIndex].dataset.v;
    return held === undefined || !numeric ? held : Number(held);
  };
  const compare = numeric ? (a, b) => a - b : new Intl.Collator("en", { numeric: true }).compare;
  const keyed = rows.map((row) => [value(row), row]);
  keyed.sort(([a, first], [b, second]) => {
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined) || first.number - second.number;
    return way * compare(a, b) || first.number - second.number;
  });
  order = keyed.map(([, row]) => row);
  table.tBodies[0].append(...order.map((row) => row.tr));
  for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
}

// --- the page of a layer

function open(row) {
  if (shown === row && panel.open) return;
  shown = row;
  $("panel-title").textContent = row.label;
  $("body").replaceChildren($(`layer-${row.number}`).content.cloneNode(true));
  $("body").scrollTop = 0;
  const visible = order.filter((each) => !each.tr.hidden);
  const at = visible.indexOf(row);
  $("back").disabled = at < 1;
  $("next").disabled = at < 0 || at + 1 >= visible.length;
  if (!panel.open) panel.showModal();
  $("panel-title").focus();
  for (const figure of $("body").querySelectorAll("figure.maps")) load(figure);
}

function go(row) {
  clearTimeout(waiting); // what it would remember has no layer
  location.hash = address(row.label);
}

function turn(step) {
  const visible = order.filter((each) => !each.tr.hidden);
  const next = visible[visible.indexOf(shown) + step];
  if (next && shown) go(next);
}

async function load(figure) {
  const held = $(`p${figure.dataset.picture}`);
  if (!held) { // still on its way
    document.addEventListener("DOMContentLoaded", () => figure.isConnected && load(figure), { once: true });
    return;
  }
  const picture = new Image();
  picture.src = `data:image/png;base64,${held.textContent}`;
  await picture.decode();
  if (figure.isConnected) draw(figure, picture);
}

function draw(figure, picture) {
  const [columns, count, height, width, frames] =
    ["columns", "count", "height", "width", "frames"].map((name) => Number(figure.dataset[name]));
  const canvas = figure.querySelector(".tiles");
  const room = Math.max(200, figure.querySelector(".mosaic").clientWidth);
  const gap = height * width === 1 ? 1 : 2;
  let scale = Math.max(1, Math.floor((height * width === 1 ? 9 : 44) / Math.max(height, width / frames)));
  scale = Math.min(scale, Math.max(room / width, 0.1));
  let across;
  for (;; scale *= 0.8) { // until no browser's limit is met
    across = Math.max(1, Math.min(count, Math.floor((room + gap) / (width * scale + gap))));
    if (Math.ceil(count / across) * (height * scale + gap) < 16000) break;
  }
  const [pitchX, pitchY] = [width * scale + gap, height * scale + gap];
  const sharp = scale < 1 ? 1 : Math.min(2, Math.ceil(devicePixelRatio || 1));
  canvas.width = Math.ceil(across * pitchX - gap) * sharp;
  canvas.height = Math.ceil(Math.ceil(count / across) * pitchY - gap) * sharp;
  canvas.style.width = `${canvas.width / sharp}px`;
  const pen = canvas.getContext("2d");
  pen.scale(sharp, sharp);
  pen.imageSmoothingEnabled = scale < 1;
  const from = (channel) => [(channel % columns) * width, Math.floor(channel / columns) * height];
  for (let channel = 0; channel < count; channel++) {
    const [x, y] = [(channel % across) * pitchX, Math.floor(channel / across) * pitchY];
    pen.drawImage(picture, ...from(channel), width, height, x, y, width * scale, height * scale);
  }
  figure.classList.add("ready");
  const pick = figure.querySelector(".pick");
  if (!pick) return;
  const input = $(`input-${figure.dataset.input}`);
  const under = figure.querySelector(".under");
  if (under && input) under.src = input.src;
  const map = figure.querySelector(".map");
  [map.width, map.height] = [width, height];
  figure.querySelector(".stage").style.aspectRatio = `${width} / ${height}`;
  const chosen = figure.querySelector(".chosen");
  const select = (wanted) => {
    const channel = Math.max(0, Math.min(count - 1, Math.round(wanted) || 0));
    pick.value = channel;
    const inner = map.getContext("2d");
    inner.clearRect(0, 0, width, height);
    inner.drawImage(picture, ...from(channel), width, height, 0, 0, width, height);
    map.setAttribute("aria-label", `Channel ${channel} of ${count}`);
    chosen.hidden = false;
    chosen.style.left = `${(channel % across) * pitchX}px`;
    chosen.style.top = `${Math.floor(channel / across) * pitchY}px`;
    chosen.style.width = `${width * scale}px`;
    chosen.style.height = `${height * scale}px`;
    figure.querySelector(".previous").disabled = channel === 0;
    figure.querySelector(".next").disabled = channel === count - 1;
  };
  pick.addEventListener("input", () => pick.value !== "" && select(Number(pick.value)));
  figure.querySelector(".previous").addEventListener("click", () => select(Number(pick.value) - 1));
  figure.querySelector(".next").addEventListener("click", () => select(Number(pick.value) + 1));
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / pitchX, (event.clientY - box.top) / pitchY];
    const channel = Math.floor(y) * across + Math.floor(x);
    if (channel < count) select(channel);
  });
  const opacity = figure.querySelector(".opacity");
  if (opacity) opacity.addEventListener("input", () => { map.style.opacity = opacity.value / 100; });
  select(0);
}

// --- plots over depth: a click leads to the layer

for (const figure of document.querySelectorAll("figure.depth")) {
  followPointer(figure, (label) => {
    const row = places.get(label);
    if (row) go(row);
  });
}

// --- what people do

$("q").addEventListener("input", () => { filter(); remember(); });
for (const id of ["type", "flagged"]) $(id).addEventListener("change", () => { filter(); remember(); });
for (const box of boxes) box.addEventListener("change", () => { chooseColumns(); remember(); });
document.querySelector("form.filters").addEventListener("submit", (event) => event.preventDefault());
table.tHead.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  sort(sorted === button.dataset.key ? `-${sorted}` : button.dataset.key);
  remember();
});
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#layer="]');
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const row = places.get(decodeURIComponent(link.getAttribute("href").slice(7)));
  if (!row) return;
  event.preventDefault();
  go(row);
});
$("close").addEventListener("click", () => panel.close());
$("back").addEventListener("click", () => turn(-1));
$("next").addEventListener("click", () => turn(1));
panel.addEventListener("click", (event) => { if (event.target === panel) panel.close(); });
panel.addEventListener("keydown", (event) => {
  if (event.target.closest("input")) return;
  if (event.key === "ArrowLeft" || event.key === "ArrowRight") turn(event.key === "ArrowLeft" ? -1 : 1);
});
panel.addEventListener("close", () => {
  const last = shown;
  shown = null;
  $("body").replaceChildren();
  if (stateInFragment().layer !== undefined) history.pushState(null, "", address(""));
  const link = last && !last.tr.hidden && last.tr.querySelector("a");
  if (link) link.focus({ preventScroll: true });
});
addEventListener("hashchange", follow);
follow();
document.documentElement.classList.add("ready");
