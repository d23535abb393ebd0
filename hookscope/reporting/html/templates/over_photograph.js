// Each input shows one of its maps over the photograph; its slider sets the opacity. A click, or the arrow keys, picks a
// patch of the photograph and shows its map: a window on the picture of all of them.

for (const look of document.querySelectorAll(".look:has(.opacity)")) {
  const [svg, ground, slider, told, list] =
    ["svg.photograph", ".ground", ".opacity", ".told-patch", "fieldset"].map((name) => look.querySelector(name));
  const [layers, abouts, radios] =
    [".layer", ".about-map", 'input[type="radio"]'].map((name) => [...look.querySelectorAll(name)]);
  const ofPatches = (layer) => layer.localName === "svg";
  let place = null;

  function show() {
    const chosen = radios.findIndex((radio) => radio.checked);
    for (const several of [layers, abouts]) several.forEach((one, number) => one.toggleAttribute("hidden", number !== chosen));
    // The photograph has all its colours where no map lies over it.
    ground.classList.toggle("coloured", slider.value === "0");
    slider.setAttribute("aria-valuetext", `${slider.value}%`);
    for (const map of svg.querySelectorAll("image:not(.ground)")) map.setAttribute("opacity", slider.value / 100);
    told?.toggleAttribute("hidden", !ofPatches(layers[chosen]));
    if (ofPatches(layers[chosen])) showPatch(layers[chosen]);
  }

  function showPatch(layer) {
    const [view, frame] = layer.children;
    const { block, tops } = layer.dataset;
    const [rows, columns, height, width] = ["rows", "columns", "height", "width"].map((name) => Number(layer.dataset[name]));
    place ??= [Math.floor(rows / 2), Math.floor(columns / 2)];
    const [row, column] = place = [clamped(place[0], rows - 1), clamped(place[1], columns - 1)];
    view.setAttribute("viewBox", `${column * (width + 2) + 1} ${row * (height + 2) + 1} ${width} ${height}`);
    frame.setAttribute("transform", `translate(${column} ${row})`);
    told.textContent = `row ${row}, column ${column} in ${block}: colours from 0 to ${tops.split(" ")[row * columns + column]}`;
  }

  // Show the patches of a block, and then the one at the place that `where` finds in it.
  function pick(where) {
    const blocks = radios.filter((_, number) => ofPatches(layers[number]));
    const radio = blocks.find((block) => block.checked) ?? blocks[0];
    radio.checked = true;
    list.scrollTop = radio.closest("label").offsetTop - list.offsetTop;
    show();
    place = where(layers[radios.indexOf(radio)]);
    show();
  }

  look.addEventListener("input", show);
  show();
  if (!told) continue;
  svg.addEventListener("click", (event) => pick((layer) => {
    const { x, y } = pointIn(layer, event);
    return [Math.floor(y), Math.floor(x)];
  }));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    pick(() => [place[0] + step[0], place[1] + step[1]]);
  });
}
