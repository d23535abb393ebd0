// Each input shows one of its maps over the photograph; its slider sets the opacity. A click, or the arrow keys, picks a
// patch of the photograph and shows its map.

for (const look of document.querySelectorAll(".look:has(.opacity)")) {
  const palette = bytes(look.closest("[data-palette]").dataset.palette); // 256 colours with opacity
  const [svg, ground, slider, picked, frame, told] =
    ["svg.photograph", ".ground", ".opacity", ".picked", ".patch-frame", ".told-patch"].map((name) => look.querySelector(name));
  const maps = [...look.querySelectorAll("svg image.layer")];
  const abouts = [...look.querySelectorAll(".about-map")];
  const radios = [...look.querySelectorAll('input[type="radio"]')];
  const blocks = radios.filter((radio) => "weights" in radio.dataset); // whose patches can be picked
  let place = null;

  function show() {
    const chosen = radios.find((radio) => radio.checked);
    maps.forEach((map, number) => map.classList.toggle("off", number !== radios.indexOf(chosen)));
    abouts.forEach((about, number) => { about.hidden = number !== radios.indexOf(chosen); });
    // The photograph has all its colours where no map lies over it.
    ground.classList.toggle("coloured", slider.value === "0");
    slider.setAttribute("aria-valuetext", `${slider.value}%`);
    for (const map of [...maps, ...(picked ? [picked] : [])]) map.setAttribute("opacity", slider.value / 100);
    if (!blocks.length) return;
    const isBlock = blocks.includes(chosen);
    picked.classList.toggle("off", !isBlock);
    frame.classList.toggle("off", !isBlock);
    told.hidden = !isBlock;
    if (isBlock) draw(chosen.dataset);
  }

  function draw({ block, weights, tops, ...numbers }) {
    const [rows, columns, height, width, x, y, across, down] =
      ["rows", "columns", "height", "width", "x", "y", "across", "down"].map((name) => Number(numbers[name]));
    place ??= { row: Math.floor(rows / 2), column: Math.floor(columns / 2) };
    place.row = Math.max(0, Math.min(rows - 1, place.row));
    place.column = Math.max(0, Math.min(columns - 1, place.column));
    const index = place.row * columns + place.column;
    const levels = bytes(weights).subarray(index * height * width, (index + 1) * height * width);
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [width, height];
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(width, height);
    levels.forEach((level, cell) => pixels.data.set(palette.subarray(level * 4, level * 4 + 4), cell * 4));
    context.putImageData(pixels, 0, 0);
    const [wide, tall] = [across / columns, down / rows];
    const set = (element, attributes) => Object.entries(attributes).forEach((entry) => element.setAttribute(...entry));
    set(picked, { x, y, width: across, height: down, href: canvas.toDataURL() });
    set(frame, { x: x + wide * place.column, y: y + tall * place.row, width: wide, height: tall });
    told.textContent = `row ${place.row}, column ${place.column} in ${block}: colours from 0 to ${tops.split(" ")[index]}`;
  }

  function pick() {
    const radio = blocks.find((block) => block.checked) ?? blocks[0];
    radio.checked = true;
    const list = look.querySelector(".maps-of");
    list.scrollTop = radio.closest("label").offsetTop - list.offsetTop;
    show();
  }

  if (blocks.length) {
    svg.addEventListener("click", (event) => {
      const { x, y, across, down, rows, columns } = blocks[0].dataset;
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      place = { row: Math.floor(((at.y - y) / down) * rows), column: Math.floor(((at.x - x) / across) * columns) };
      pick();
    });
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      if (place) place = { row: place.row + step[0], column: place.column + step[1] };
      pick();
    });
  }
  look.addEventListener("input", show);
  show();
}
