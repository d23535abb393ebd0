// Grids in the page of a row: channels side by side, and one of them large, over its input.

async function load(figure) {
  const picture = new Image();
  picture.src = `data:image/png;base64,${$(`p${figure.dataset.picture}`).textContent}`;
  await picture.decode();
  if (figure.isConnected) draw(figure, picture);
}

function draw(figure, picture) {
  const [columns, count, height, width, frames] =
    ["columns", "count", "height", "width", "frames"].map((name) => Number(figure.dataset[name]));
  const canvas = figure.querySelector(".tiles");
  const room = Math.max(200, figure.querySelector(".mosaic").clientWidth);
  const gap = height * width === 1 ? 1 : 2;
  let scale = Math.max(1, Math.floor((height * width === 1 ? 9 : 44) / Math.max(height, width / frames)));
  scale = Math.min(scale, Math.max(room / width, 0.1));
  let across;
  for (;; scale *= 0.8) { // until no browser's limit is met
    across = Math.max(1, Math.min(count, Math.floor((room + gap) / (width * scale + gap))));
    if (Math.ceil(count / across) * (height * scale + gap) < 16000) break;
  }
  const [pitchX, pitchY] = [width * scale + gap, height * scale + gap];
  const sharp = scale < 1 ? 1 : Math.min(2, Math.ceil(devicePixelRatio || 1));
  canvas.width = Math.ceil(across * pitchX - gap) * sharp;
  canvas.height = Math.ceil(Math.ceil(count / across) * pitchY - gap) * sharp;
  canvas.style.width = `${canvas.width / sharp}px`;
  const pen = canvas.getContext("2d");
  pen.scale(sharp, sharp);
  pen.imageSmoothingEnabled = scale < 1;
  const from = (channel) => [(channel % columns) * width, Math.floor(channel / columns) * height];
  for (let channel = 0; channel < count; channel++) {
    const [x, y] = [(channel % across) * pitchX, Math.floor(channel / across) * pitchY];
    pen.drawImage(picture, ...from(channel), width, height, x, y, width * scale, height * scale);
  }
  figure.classList.add("ready");
  const pick = figure.querySelector(".pick");
  if (!pick) return;
  const input = [...document.querySelectorAll("img[data-file]")].find((each) => each.dataset.file === figure.dataset.input);
  const under = figure.querySelector(".under");
  if (under && input) under.src = input.src;
  const map = figure.querySelector(".map");
  [map.width, map.height] = [width, height];
  figure.querySelector(".stage").style.aspectRatio = `${width} / ${height}`;
  const chosen = figure.querySelector(".chosen");
  const select = (wanted) => {
    const channel = Math.max(0, Math.min(count - 1, Math.round(wanted) || 0));
    pick.value = channel;
    const inner = map.getContext("2d");
    inner.clearRect(0, 0, width, height);
    inner.drawImage(picture, ...from(channel), width, height, 0, 0, width, height);
    map.setAttribute("aria-label", `Channel ${channel} of ${count}`);
    chosen.hidden = false;
    const box = [(channel % across) * pitchX, Math.floor(channel / across) * pitchY, width * scale, height * scale];
    ["left", "top", "width", "height"].forEach((side, at) => { chosen.style[side] = `${box[at]}px`; });
    figure.querySelector(".previous").disabled = channel === 0;
    figure.querySelector(".next").disabled = channel === count - 1;
  };
  pick.addEventListener("input", () => pick.value !== "" && select(Number(pick.value)));
  figure.querySelector(".previous").addEventListener("click", () => select(Number(pick.value) - 1));
  figure.querySelector(".next").addEventListener("click", () => select(Number(pick.value) + 1));
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / pitchX, (event.clientY - box.top) / pitchY];
    const channel = Math.floor(y) * across + Math.floor(x);
    if (channel < count) select(channel);
  });
  const opacity = figure.querySelector(".opacity");
  if (opacity) opacity.addEventListener("input", () => { map.style.opacity = opacity.value / 100; });
  select(0);
}

onOpen.push(() => $("body").querySelectorAll("figure.maps").forEach(load));
