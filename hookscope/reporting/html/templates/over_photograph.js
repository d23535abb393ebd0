// Each input shows one of its maps over the photograph; its slider sets the opacity. A click, or the arrow keys, picks a
// patch of the photograph and shows its map.

for (const look of document.querySelectorAll(".look:has(.opacity)")) {
  const [svg, ground, slider, picked, frame, told, list] =
    ["svg.photograph", ".ground", ".opacity", ".picked", ".patch-frame", ".told-patch", ".maps-of"].map((name) => look.querySelector(name));
  const [maps, abouts, radios] =
    ["image.layer", ".about-map", 'input[type="radio"]'].map((name) => [...look.querySelectorAll(name)]);
  const blocks = radios.slice(maps.length); // whose patches can be picked
  let place = null;

  function show() {
    const chosen = radios.findIndex((radio) => radio.checked);
    const block = blocks[chosen - maps.length];
    for (const several of [maps, abouts]) several.forEach((one, number) => one.toggleAttribute("hidden", number !== chosen));
    for (const one of blocks.length ? [picked, frame, told] : []) one.toggleAttribute("hidden", !block);
    // The photograph has all its colours where no map lies over it.
    ground.classList.toggle("coloured", slider.value === "0");
    slider.setAttribute("aria-valuetext", `${slider.value}%`);
    for (const map of svg.querySelectorAll("image:not(.ground)")) map.setAttribute("opacity", slider.value / 100);
    if (block) draw(block.dataset);
  }

  function draw({ block, weights, tops, x, y, across, down, ...sizes }) {
    const [rows, columns, height, width] = ["rows", "columns", "height", "width"].map((name) => Number(sizes[name]));
    place ??= [Math.floor(rows / 2), Math.floor(columns / 2)];
    const [row, column] = place = [clamped(place[0], rows - 1), clamped(place[1], columns - 1)];
    const index = row * columns + column;
    const levels = bytes(weights).subarray(index * height * width, (index + 1) * height * width);
    const palette = bytes(look.closest("[data-palette]").dataset.palette); // 256 colours with opacity
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [width, height];
    const colours = new Uint8ClampedArray([...levels].flatMap((level) => [...palette.subarray(level * 4, level * 4 + 4)]));
    canvas.getContext("2d").putImageData(new ImageData(colours, width), 0, 0);
    const [wide, tall] = [across / columns, down / rows];
    const set = (element, attributes) => Object.entries(attributes).forEach((entry) => element.setAttribute(...entry));
    set(picked, { x, y, width: across, height: down, href: canvas.toDataURL() });
    set(frame, { x: Number(x) + wide * column, y: Number(y) + tall * row, width: wide, height: tall });
    told.textContent = `row ${row}, column ${column} in ${block}: colours from 0 to ${tops.split(" ")[index]}`;
  }

  function pick(wanted) {
    place = wanted;
    const radio = blocks.find((block) => block.checked) ?? blocks[0];
    radio.checked = true;
    list.scrollTop = radio.closest("label").offsetTop - list.offsetTop;
    show();
  }

  look.addEventListener("input", show);
  show();
  if (!blocks.length) continue;
  svg.addEventListener("click", (event) => {
    const at = pointIn(svg, event);
    const { x, y, across, down, rows, columns } = blocks[0].dataset;
    pick([Math.floor(((at.y - y) / down) * rows), Math.floor(((at.x - x) / across) * columns)]);
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    pick(place && [place[0] + step[0], place[1] + step[1]]);
  });
}
