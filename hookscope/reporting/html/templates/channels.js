// The table of channels: found by words, sorted, a part of it at a time. The state of the page is its fragment.

{
const { columns, channels, orders, strips } = JSON.parse(document.getElementById("data").textContent);
const STRIP = columns.length;
const place = Object.fromEntries(columns.map(({ key }, at) => [key, at]));
const value = (each, key) => each[place[key]];
const AT_ONCE = 100;
const [query, order, pictured] = ["q", "order", "pictured"].map((id) => document.getElementById(id));
const body = document.querySelector("#found tbody");
let found = channels;
let shown = 0;

function matches(each, words) {
  const name = value(each, "layer").toLowerCase();
  const best = (value(each, "best_class") ?? "").toLowerCase();
  return words.every((word) =>
    /^\d+$/.test(word) ? value(each, "channel") === word || name.includes(word) : name.includes(word) || best.includes(word));
}

function search() {
  const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
  const ordered = orders[order.value]?.map((at) => channels[at]) ?? channels;
  found = ordered.filter((each) => (!pictured.checked || each[STRIP] >= 0) && matches(each, words));
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
    columns.forEach(({ words }, at) => cell(row, each[at], !words));
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
  if (state.get("order") in orders) order.value = state.get("order");
  pictured.checked = Boolean(state.get("pictured"));
}
for (const each of [query, order, pictured]) each.addEventListener("input", search);
document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
document.getElementById("more").addEventListener("click", extend);
search();
}
