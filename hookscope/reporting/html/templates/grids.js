// Grids in the page of a row: channels side by side, and one of them large, over its input.

async function draw(figure) {
  const picture = new Image();
  picture.src = `data:image/png;base64,${$(`p${figure.dataset.picture}`).textContent}`;
  await picture.decode();
  if (!figure.isConnected) return;
  const [columns, count, height, width, frames] =
    ["columns", "count", "height", "width", "frames"].map((name) => Number(figure.dataset[name]));
  const [mosaic, canvas, chosen, map, pick, previous, next, under, opacity] =
    ["mosaic", "tiles", "chosen", "map", "pick", "previous", "next", "under", "opacity"].map((name) => figure.querySelector(`.${name}`));
  const room = Math.max(200, mosaic.clientWidth);
  const isCell = height * width === 1;
  const gap = isCell ? 1 : 2;
  let scale = Math.max(1, Math.floor((isCell ? 9 : 44) / Math.max(height, width / frames)));
  scale = Math.min(scale, Math.max(room / width, 0.1));
  let across;
  for (;; scale *= 0.8) { // until no browser's limit is met
    across = clamped(Math.floor((room + gap) / (width * scale + gap)), count) || 1;
    if (Math.ceil(count / across) * (height * scale + gap) < 16000) break;
  }
  const [pitchX, pitchY] = [width * scale + gap, height * scale + gap];
  const box = (channel) => [(channel % across) * pitchX, Math.floor(channel / across) * pitchY, width * scale, height * scale];
  const copy = (pen, channel, ...to) =>
    pen.drawImage(picture, (channel % columns) * width, Math.floor(channel / columns) * height, width, height, ...to);
  const sharp = scale < 1 ? 1 : Math.min(2, Math.ceil(devicePixelRatio || 1));
  canvas.width = Math.ceil(across * pitchX - gap) * sharp;
  canvas.height = Math.ceil(Math.ceil(count / across) * pitchY - gap) * sharp;
  canvas.style.width = `${canvas.width / sharp}px`;
  const pen = canvas.getContext("2d");
  pen.scale(sharp, sharp);
  pen.imageSmoothingEnabled = scale < 1;
  for (let channel = 0; channel < count; channel++) copy(pen, channel, ...box(channel));
  figure.classList.add("ready");
  if (!pick) return;
  const input = [...document.querySelectorAll("img[data-file]")].find((each) => each.dataset.file === figure.dataset.input);
  if (under && input) under.src = input.src;
  [map.width, map.height] = [width, height];
  map.parentElement.style.aspectRatio = `${width} / ${height}`;
  const select = (wanted) => {
    const channel = clamped(Math.round(wanted) || 0, count - 1);
    pick.value = channel;
    map.width = width; // clears it
    copy(map.getContext("2d"), channel, 0, 0, width, height);
    map.setAttribute("aria-label", `Channel ${channel} of ${count}`);
    chosen.hidden = false;
    ["left", "top", "width", "height"].forEach((side, at) => { chosen.style[side] = `${box(channel)[at]}px`; });
    previous.disabled = channel === 0;
    next.disabled = channel === count - 1;
  };
  pick.addEventListener("input", () => pick.value !== "" && select(Number(pick.value)));
  previous.addEventListener("click", () => select(Number(pick.value) - 1));
  next.addEventListener("click", () => select(Number(pick.value) + 1));
  canvas.addEventListener("click", ({ offsetX, offsetY }) => {
    const channel = Math.floor(offsetY / pitchY) * across + Math.floor(offsetX / pitchX);
    if (channel < count) select(channel);
  });
  opacity?.addEventListener("input", () => { map.style.opacity = opacity.value / 100; });
  select(0);
}

onOpen.push(() => $("body").querySelectorAll("figure.maps").forEach(draw));
