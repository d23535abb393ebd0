"use strict";
// A click, or the arrow keys, picks a patch of the photograph and shows its map.

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

for (const look of document.querySelectorAll(".look:has(.patch-frame)")) {
  const palette = bytes(look.closest("[data-palette]").dataset.palette); // 256 colours with opacity
  const slider = look.querySelector(".opacity");
  const radios = [...look.querySelectorAll('input[type="radio"]')];
  const svg = look.querySelector("svg.photograph");
  const picked = look.querySelector("image.picked");
  const frame = look.querySelector(".patch-frame");
  const told = look.querySelector(".told-patch");
  let place = null;

  function show() {
    const chosen = radios.find((radio) => radio.checked && "weights" in radio.dataset);
    picked.classList.toggle("off", !chosen);
    frame.classList.toggle("off", !chosen);
    told.hidden = !chosen;
    svg.classList.toggle("picks", Boolean(chosen));
    if (chosen) draw(chosen.dataset);
  }

  function draw(chosen) {
    const [rows, columns, height, width] = ["rows", "columns", "height", "width"].map((name) => Number(chosen[name]));
    const [x, y, across, down] = ["x", "y", "across", "down"].map((name) => Number(chosen[name]));
    place ??= { row: Math.floor(rows / 2), column: Math.floor(columns / 2) };
    place.row = Math.max(0, Math.min(rows - 1, place.row));
    place.column = Math.max(0, Math.min(columns - 1, place.column));
    const index = place.row * columns + place.column;
    const levels = bytes(chosen.weights).subarray(index * height * width, (index + 1) * height * width);
    const canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = height;
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(width, height);
    levels.forEach((level, cell) => pixels.data.set(palette.subarray(level * 4, level * 4 + 4), cell * 4));
    context.putImageData(pixels, 0, 0);
    for (const [name, value] of Object.entries({ x, y, width: across, height: down, href: canvas.toDataURL() })) {
      picked.setAttribute(name, value);
    }
    picked.setAttribute("opacity", slider.value / 100);
    frame.setAttribute("x", x + (across / columns) * place.column);
    frame.setAttribute("y", y + (down / rows) * place.row);
    frame.setAttribute("width", across / columns);
    frame.setAttribute("height", down / rows);
    const top = chosen.tops.split(" ")[index];
    told.textContent = `row ${place.row}, column ${place.column} in ${chosen.block}: colours from 0 to ${top}`;
  }

  function pick(radio) {
    const chosen = radios.find((each) => each.checked && "weights" in each.dataset);
    (chosen ?? radio).checked = true;
    const list = look.querySelector(".maps-of");
    list.scrollTop = (chosen ?? radio).closest("label").offsetTop - list.offsetTop;
    look.dispatchEvent(new Event("change"));
  }

  svg.addEventListener("click", (event) => {
    const radio = radios.find((each) => "weights" in each.dataset);
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const x = at.x - Number(radio.dataset.x);
    const y = at.y - Number(radio.dataset.y);
    place = {
      row: Math.floor((y / Number(radio.dataset.down)) * Number(radio.dataset.rows)),
      column: Math.floor((x / Number(radio.dataset.across)) * Number(radio.dataset.columns)),
    };
    pick(radio);
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    if (place) place = { row: place.row + step[0], column: place.column + step[1] };
    pick(radios.find((each) => "weights" in each.dataset));
  });
  look.addEventListener("input", show);
  look.addEventListener("change", show);
  show();
}
