// The table of channels: found by words, in one of several orders, a part of it at a time.

{
const { columns, channels, orders, strips } = JSON.parse($("data").textContent);
const STRIP = columns.length;
const AT_ONCE = 100;
const place = Object.fromEntries(columns.map(({ key }, at) => [key, at]));
const body = document.querySelector("#found tbody");
let waiting = []; // channels that were found and are not yet in the table

function matches(channel, words) {
  const [name, best] = ["layer", "best_class"].map((key) => (channel[place[key]] ?? "").toLowerCase());
  return words.every((word) =>
    name.includes(word) || (/^\d+$/.test(word) ? channel[place.channel] === word : best.includes(word)));
}

function search() {
  const words = searched();
  const ordered = orders[$("order").value]?.map((at) => channels[at]) ?? channels;
  waiting = ordered.filter((channel) => (!$("pictured").checked || channel[STRIP] >= 0) && matches(channel, words));
  tell(waiting.length, `${waiting.length.toLocaleString("en")} channel${waiting.length === 1 ? "" : "s"}`);
  body.replaceChildren();
  extend();
}

function extend() {
  for (const channel of waiting.splice(0, AT_ONCE)) {
    const row = body.insertRow();
    columns.forEach(({ words }, at) => {
      const cell = row.insertCell();
      cell.className = words ? "name" : "number";
      cell.textContent = channel[at];
    });
    if (channel[STRIP] < 0) continue;
    const picture = new Image();
    picture.src = strips[channel[STRIP]];
    picture.alt = `crops of the inputs that excite channel ${channel[place.channel]} of ${channel[place.layer]} most`;
    const below = body.insertRow().insertCell();
    below.colSpan = columns.length;
    below.append(picture);
  }
  $("more").hidden = !waiting.length;
}

$("more").addEventListener("click", extend);
onFilter.push(search);
search();
}
