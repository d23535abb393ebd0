const [TOP, FOOT] = [10, 26]; // px of a plot, as in figures.py
const heats = tables.filter((each) => each.table.classList.contains("strips"));
for (const each of heats) {
  const { title, scale, names, steps } = each.table.dataset;
  Object.assign(each, { title, share: scale === "share", values: null, names: JSON.parse(names), // of files; none of steps
    steps: steps.split(" ").map((range) => range.split("-").map(Number)) });
}

// --- numbers behind the colours

function valuesOf(each, row) {
  each.values ??= new Float32Array(bytes($(`values-${each.key}`).textContent).buffer);
  return each.values.subarray(row * each.steps.length, (row + 1) * each.steps.length);
}

function words(each, value) {
  if (Number.isNaN(value)) return "-";
  if (!Number.isFinite(value)) return "NaN or Inf";
  if (each.share) return percent(value);
  return value === 0 || (value >= 1e-3 && value < 1e5) ? String(Number(value.toPrecision(4))) : value.toExponential(3);
}

function percent(share) { // 0% and 100% only where that is exact
  if (share === 0 || share === 1) return `${100 * share}%`;
  return share < 0.001 ? "<0.1%" : share > 0.999 ? ">99.9%" : `${(100 * share).toFixed(1)}%`;
}

function columnWords(each, column) {
  if (each.names.length) return each.names[column];
  const [first, last] = each.steps[column];
  const [from, to] = [first, last].map((step) => step.toLocaleString("en"));
  return first === last ? `step ${from}` : `steps ${from} to ${to}`;
}

for (const each of heats) {
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
    if (strip) go(parts[strip.closest("tr").dataset.part]);
  });
}

// --- charts in the page of a row

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
  const ends = known.length ? [...new Set([low, high])] : [];
  [low, high] = [scaled(low), scaled(high)];
  if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
  const x = (column) => left + ((right - left) * column) / Math.max(1, values.length - 1);
  const y = (value) => TOP + 6 + (1 - (scaled(value) - low) / (high - low)) * (height - FOOT - TOP - 18);
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
  const rules = ends.map((value) => `<path class="rule" d="M${left - 4} ${y(value).toFixed(1)}H${width}"/>`).join("");
  const lines = `${rules}<path class="line" d="${path}"/><path class="mark" d="${marks}"/>`; // of numbers alone
  plot.querySelector(".drawn").insertAdjacentHTML("afterbegin", lines);
  const first = each.names.length ? each.names[0] : `step ${each.steps[0][0].toLocaleString("en")}`;
  const last = each.names.length ? each.names.at(-1) : each.steps.at(-1)[1].toLocaleString("en");
  const most = innerWidth < 700 ? 20 : 50; // characters of a name
  const end = (name) => (name.length > most ? `…${name.slice(1 - most)}` : name);
  const texts = ends.map((value) => [-6, y(value) + 4, "end", words(each, value)]);
  for (const [left, top, anchor, text] of [...texts, [0, height - 8, "start", end(first)], ["100%", height - 8, "end", end(last)]]) {
    plot.insertAdjacentHTML("afterbegin", `<text x="${left}" y="${top}" text-anchor="${anchor}"></text>`);
    plot.firstElementChild.textContent = text;
  }
  const range = known.length ? `, from ${words(each, Math.min(...known))} to ${words(each, Math.max(...known))}` : ": no number above 0";
  plot.setAttribute("aria-label", `${each.title} of ${row.part.name}${range}`);
  const labels = each.steps.map((_, column) => {
    const item = document.createElement("i");
    item.textContent = `${columnWords(each, column)}: ${words(each, values[column])}`;
    return item;
  });
  figure.querySelector(".labels").content.replaceChildren(...labels);
  followPointer(figure);
  return figure;
}

onOpen.push((part) => {
  const drawnRows = heats.map((each) => [each, each.rows.find((row) => row.part === part)]).filter(([, row]) => row);
  $("body").querySelector(".charts").replaceChildren(...drawnRows.map(([each, row]) => chart(each, row)));
});
