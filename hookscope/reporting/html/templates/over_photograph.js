"use strict";
// Each input shows one of its maps over the photograph; its slider sets the opacity.

for (const look of document.querySelectorAll(".look:has(.opacity)")) {
  const maps = [...look.querySelectorAll("svg image.layer")];
  const abouts = [...look.querySelectorAll(".about-map")];
  const ground = look.querySelector(".ground");
  const slider = look.querySelector(".opacity");
  const radios = [...look.querySelectorAll('input[type="radio"]')];

  function show() {
    const chosen = radios.findIndex((radio) => radio.checked);
    maps.forEach((map, number) => {
      map.classList.toggle("off", number !== chosen);
      map.setAttribute("opacity", slider.value / 100);
    });
    abouts.forEach((about, number) => { about.hidden = number !== chosen; });
    // The photograph has all its colours where no map lies over it.
    ground.classList.toggle("coloured", slider.value === "0");
    slider.setAttribute("aria-valuetext", `${slider.value}%`);
  }

  look.addEventListener("input", show);
  look.addEventListener("change", show);
  show();
}
