"use strict";
// The table of channels: found by words, sorted, a part of it at a time. The state of the page is its fragment.

const { channels, strips } = JSON.parse(document.getElementById("data").textContent);
const withClasses = Boolean(document.getElementById("data").dataset.classes);
const [LAYER, CHANNEL, INPUTS, POSITIONS, MEAN, STD, MIN, MAX, SELECTIVITY, CLASS, FOLLOWS, TOP, STRIP] = Array(13).keys();
const AT_ONCE = 100;
const [query, order, pictured] = ["q", "order", "pictured"].map((id) => document.getElementById(id));
const body = document.querySelector("#found tbody");
let found = channels;
let shown = 0;

const largest = (each) => Math.max(Math.abs(each[MIN] ?? 0), Math.abs(each[MAX] ?? 0));
const keys = {
  place: null,
  dead: (each) => (each[INPUTS] ?? 1) + each[POSITIONS],
  selective: (each) => -(each[SELECTIVITY] ?? -1),
  range: (each) => -largest(each),
};
const percent = (share) =>
  share === null ? "-" : share === 0 || share === 1 ? `${share * 100}%` : share < 0.001 ? "<0.1%" : share > 0.999 ? ">99.9%" : `${(share * 100).toFixed(1)}%`;
const number = (value) => (value === null ? "-" : String(Number(value.toPrecision(4))));

function matches(each, words) {
  const name = each[LAYER].toLowerCase();
  return words.every((word) =>
    /^\d+$/.test(word) ? String(each[CHANNEL]) === word || name.includes(word) : name.includes(word) || each[CLASS].toLowerCase().includes(word));
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
    cell(row, each[LAYER], false);
    cell(row, each[CHANNEL], true);
    cell(row, percent(each[INPUTS]), true);
    cell(row, percent(each[POSITIONS]), true);
    for (const at of [MEAN, STD, MIN, MAX]) cell(row, number(each[at]), true);
    if (withClasses) {
      cell(row, number(each[SELECTIVITY]), true);
      cell(row, each[CLASS], false);
    }
    cell(row, each[FOLLOWS], false);
    cell(row, each[TOP], false);
    if (each[STRIP] >= 0) {
      const picture = document.createElement("img");
      picture.src = strips[each[STRIP]];
      picture.alt = `crops of the inputs that excite channel ${each[CHANNEL]} of ${each[LAYER]} most`;
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
