// The table of channels: found by words, sorted, a part of it at a time. The state of the page is its fragment.

{
const { columns, channels, strips } = JSON.parse(document.getElementById("data").textContent);
const STRIP = columns.length;
const place = Object.fromEntries(columns.map(({ key }, at) => [key, at]));
const value = (each, key) => each[place[key]];
const AT_ONCE = 100;
const [query, order, pictured] = ["q", "order", "pictured"].map((id) => document.getElementById(id));
const body = document.querySelector("#found tbody");
let found = channels;
let shown = 0;

const largest = (each) => Math.max(Math.abs(value(each, "min") ?? 0), Math.abs(value(each, "max") ?? 0));
const keys = {
  place: null,
  dead: (each) => (value(each, "firing_inputs") ?? 1) + value(each, "firing_positions"),
  selective: (each) => -(value(each, "selectivity") ?? -1),
  range: (each) => -largest(each),
};
const percent = (share) =>
  share === null ? "-" : share === 0 || share === 1 ? `${share * 100}%` : share < 0.001 ? "<0.1%" : share > 0.999 ? ">99.9%" : `${(share * 100).toFixed(1)}%`;
const number = (figure) => (figure === null ? "-" : String(Number(figure.toPrecision(4))));
const formats = { percent, number };

function matches(each, words) {
  const name = value(each, "layer").toLowerCase();
  const best = (value(each, "best_class") ?? "").toLowerCase();
  return words.every((word) =>
    /^\d+$/.test(word) ? String(value(each, "channel")) === word || name.includes(word) : name.includes(word) || best.includes(word));
}

function search() {
  const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
  found = channels.filter((each) => (!pictured.checked || each[STRIP] >= 0) && matches(each, words));
  const key = keys[order.value];
  if (key) found = found.map((each) => [key(each), each]).sort((a, b) => a[0] - b[0]).map(([, each]) => each);
  body.replaceChildren();
  shown = 0;
  extend();
  document.getElementById("matched").value = `${found.length.toLocaleString("en")} channel${found.length === 1 ? "" : "s"}`;
  document.getElementById("none").hidden = found.length > 0;
  const state = new URLSearchParams({ q: query.value, order: order.value, pictured: pictured.checked ? "1" : "" });
  history.replaceState(null, "", `#${state}`);
}

function cell(row, text, isNumber) {
  const made = row.insertCell();
  made.className = isNumber ? "number" : "name";
  made.textContent = text;
}

function extend() {
  for (const each of found.slice(shown, shown + AT_ONCE)) {
    const row = body.insertRow();
    columns.forEach(({ words, format }, at) => cell(row, (formats[format] ?? String)(each[at]), !words));
    if (each[STRIP] >= 0) {
      const picture = document.createElement("img");
      picture.src = strips[each[STRIP]];
      picture.alt = `crops of the inputs that excite channel ${value(each, "channel")} of ${value(each, "layer")} most`;
      picture.className = "crops";
      const below = body.insertRow().insertCell();
      below.colSpan = row.cells.length;
      below.append(picture);
    }
  }
  shown = Math.min(found.length, shown + AT_ONCE);
  document.getElementById("more").hidden = shown === found.length;
}

const state = new URLSearchParams(location.hash.slice(1));
if (state.has("order")) {
  query.value = state.get("q") ?? "";
  if (state.get("order") in keys) order.value = state.get("order");
  pictured.checked = Boolean(state.get("pictured"));
}
for (const each of [query, order, pictured]) each.addEventListener("input", search);
document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
document.getElementById("more").addEventListener("click", extend);
search();
}
