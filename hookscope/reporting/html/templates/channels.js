// The table of channels: found by words, in one of several orders, a part of it at a time.

{
const { columns, channels, orders, strips } = JSON.parse($("data").textContent);
const STRIP = columns.length;
const AT_ONCE = 100;
const place = Object.fromEntries(columns.map(({ key }, at) => [key, at]));
const body = document.querySelector("#found tbody");
let found = channels;
let shown = 0;

function matches(channel, words) {
  const [name, best] = ["layer", "best_class"].map((key) => (channel[place[key]] ?? "").toLowerCase());
  return words.every((word) =>
    name.includes(word) || (/^\d+$/.test(word) ? channel[place.channel] === word : best.includes(word)));
}

function search() {
  const words = $("q").value.toLowerCase().split(/\s+/).filter(Boolean);
  const ordered = orders[$("order").value]?.map((at) => channels[at]) ?? channels;
  found = ordered.filter((channel) => (!$("pictured").checked || channel[STRIP] >= 0) && matches(channel, words));
  body.replaceChildren();
  shown = 0;
  extend();
  $("matched").value = `${found.length.toLocaleString("en")} channel${found.length === 1 ? "" : "s"}`;
  $("none").hidden = found.length > 0;
}

function extend() {
  for (const channel of found.slice(shown, shown + AT_ONCE)) {
    const row = body.insertRow();
    columns.forEach(({ words }, at) => {
      const cell = row.insertCell();
      cell.className = words ? "name" : "number";
      cell.textContent = channel[at];
    });
    if (channel[STRIP] >= 0) {
      const picture = new Image();
      picture.src = strips[channel[STRIP]];
      picture.alt = `crops of the inputs that excite channel ${channel[place.channel]} of ${channel[place.layer]} most`;
      picture.className = "crops";
      const below = body.insertRow().insertCell();
      below.colSpan = row.cells.length;
      below.append(picture);
    }
  }
  shown = Math.min(found.length, shown + AT_ONCE);
  $("more").hidden = shown === found.length;
}

$("more").addEventListener("click", extend);
onFilter.push(search);
search();
}
