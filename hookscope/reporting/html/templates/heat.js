const heats = tables.filter((each) => each.table.classList.contains("strips"));
for (const each of heats) {
  const { title, scale, names, steps } = each.table.dataset;
  Object.assign(each, { title, share: scale === "share", values: null, names: JSON.parse(names), // of files; none of steps
    steps: steps.split(" ").map((range) => range.split("-").map(Number)) });
}

// --- numbers behind the colours

function valuesOf(each, row) {
  const bytes = () => Uint8Array.from(atob($(`values-${each.key}`).textContent), (letter) => letter.charCodeAt(0));
  each.values ??= new Float32Array(bytes().buffer);
  return each.values.subarray(row * each.steps.length, (row + 1) * each.steps.length);
}

function words(each, value) {
  if (Number.isNaN(value)) return "-";
  if (!Number.isFinite(value)) return "NaN or Inf";
  if (!each.share) return value === 0 || (value >= 1e-3 && value < 1e5) ? String(Number(value.toPrecision(4))) : value.toExponential(3);
  if (value % 1 === 0) return `${100 * value}%`; // 0% and 100% only where that is exact
  return value < 0.001 ? "<0.1%" : value > 0.999 ? ">99.9%" : `${(100 * value).toFixed(1)}%`;
}

function columnWords(each, column) {
  if (each.names.length) return each.names[column];
  const [first, last] = each.steps[column];
  const [from, to] = [first, last].map((step) => step.toLocaleString("en"));
  return first === last ? `step ${from}` : `steps ${from} to ${to}`;
}

for (const each of heats) {
  pointAt(each.table, each.table.closest(".heat").querySelector(".place"), (event) => {
    const strip = event.target.closest("svg.cells");
    if (!strip) return undefined;
    const { cells, dataset } = strip.closest("tr");
    const column = clamped(Math.floor(pointIn(strip, event).x), each.steps.length - 1);
    const value = valuesOf(each, Number(dataset.row))[column];
    return { words: `${cells[0].textContent}, ${columnWords(each, column)}: ${words(each, value)}`, part: parts[dataset.part] };
  });
}

// --- charts in the page of a row

function chart(each, row) {
  const values = [...valuesOf(each, row.number)];
  const fits = (value) => Number.isFinite(value) && (each.share || value > 0);
  const [least, most] = [Math.min, Math.max].map((extreme) => extreme(...values.filter(fits)));
  const isEmpty = least > most;
  const ends = isEmpty ? [] : each.share ? [0, 1] : [...new Set([least, most])];
  const scaled = each.share ? Number : Math.log10;
  const [low, high] = [ends[0], ends.at(-1)].map(scaled);
  const x = (column) => LEFT + ((RIGHT - LEFT) * column) / Math.max(1, values.length - 1);
  const y = (value) => TOP + 6 + (high > low ? (high - scaled(value)) / (high - low) : 0.5) * (HEIGHT - FOOT - TOP - 18);
  let [line, marks, pen] = ["", "", "M"];
  values.forEach((value, column) => {
    if (fits(value)) {
      line += `${pen}${x(column)} ${y(value)}h.1`;
      pen = "L";
    } else if (!Number.isNaN(value)) {
      marks += `M${x(column)} ${HEIGHT - FOOT - 8}v8`;
      pen = "M";
    }
  });
  const rules = ends.map((value) => `M${LEFT - 4} ${y(value)}H1000`).join("");
  const figure = $("chart").content.firstElementChild.cloneNode(true);
  const plot = figure.querySelector("svg.plot");
  figure.querySelector("h3").textContent = each.title;
  figure.querySelector(".keys").textContent = marks && `at the foot: NaN${each.share ? " or Inf" : ", Inf or 0"}`;
  const paths = { rule: rules, line, mark: marks }; // of numbers alone
  for (const [style, path] of Object.entries(paths)) {
    plot.querySelector(".cursor").insertAdjacentHTML("beforebegin", `<path class="${style}" d="${path}"/>`);
  }
  const letters = innerWidth < 700 ? 20 : 50;
  const short = (name) => (name.length > letters ? `…${name.slice(1 - letters)}` : name);
  const write = (left, top, anchor, text) => {
    plot.insertAdjacentHTML("afterbegin", `<text x="${left}" y="${top}" text-anchor="${anchor}"></text>`);
    plot.firstElementChild.textContent = text;
  };
  for (const value of ends) write(-6, y(value) + 4, "end", words(each, value));
  write(0, HEIGHT - 8, "start", short(columnWords(each, 0)));
  write("100%", HEIGHT - 8, "end", short(columnWords(each, values.length - 1)));
  const range = isEmpty ? ": no number above 0" : `, from ${words(each, least)} to ${words(each, most)}`;
  plot.setAttribute("aria-label", `${each.title} of ${row.part.name}${range}`);
  const named = (value, column) => `${columnWords(each, column)}: ${words(each, value)}`;
  figure.dataset.labels = JSON.stringify(values.map(named));
  followPointer(figure);
  return figure;
}

onOpen.push((part) => {
  const charts = heats.flatMap((each) => each.rows.filter((row) => row.part === part).map((row) => chart(each, row)));
  $("body").querySelector(".charts").replaceChildren(...charts);
});
