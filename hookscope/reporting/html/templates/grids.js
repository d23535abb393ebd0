// Grids in the page of a row: each channel is a window on one picture, and one of them is large, over its input.

function drawGrid(figure) {
  const [number, columns, count, height, width, frames] =
    ["number", "columns", "count", "height", "width", "frames"].map((name) => Number(figure.dataset[name]));
  const [tiles, map, pick, previous, next, under, opacity] =
    ["tiles", "map", "pick", "previous", "next", "under", "opacity"].map((name) => figure.querySelector(`.${name}`));
  const scale = Math.max(1, Math.floor((pick ? 44 : 9) / Math.max(height, width / frames)));
  const view = (channel) => `${(channel % columns) * width} ${Math.floor(channel / columns) * height} ${width} ${height}`;
  const tile = (_, channel) => `<svg viewBox="${view(channel)}" width="${width * scale}"><use href="#p${number}"/></svg>`;
  tiles.innerHTML = Array.from({ length: count }, tile).join(""); // numbers alone
  if (width * scale > tiles.clientWidth) tiles.style.imageRendering = "auto"; // smaller than it is
  if (!pick) return;
  const input = under && document.querySelector(`img[data-file="${CSS.escape(figure.dataset.input)}"]`);
  if (input) under.src = input.src;
  const select = (wanted) => {
    const channel = clamped(Math.round(wanted) || 0, count - 1);
    pick.value = channel;
    map.setAttribute("viewBox", view(channel));
    map.setAttribute("aria-label", `Channel ${channel} of ${count}`);
    tiles.querySelector(".chosen")?.classList.remove("chosen");
    tiles.children[channel].classList.add("chosen");
    previous.disabled = channel === 0;
    next.disabled = channel === count - 1;
  };
  pick.addEventListener("input", () => pick.value !== "" && select(Number(pick.value)));
  previous.addEventListener("click", () => select(Number(pick.value) - 1));
  next.addEventListener("click", () => select(Number(pick.value) + 1));
  tiles.addEventListener("click", ({ target }) => {
    if (target !== tiles) select([...tiles.children].indexOf(target.closest("svg")));
  });
  opacity?.addEventListener("input", () => { map.style.opacity = opacity.value / 100; });
  select(0);
}

onOpen.push(() => $("body").querySelectorAll("figure.maps").forEach(drawGrid));
