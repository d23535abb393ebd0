"use strict";
// Plots: what is under the pointer in words, with a line through it, and what a click there leads to.

function followPointer(figure, choose) {
  const plot = figure.querySelector("svg.plot");
  const labels = [...figure.querySelector(".labels").content.children].map((each) => each.textContent);
  const [frame, left, right, width] = ["frame", "left", "right", "width"].map((each) => Number(plot.dataset[each]));
  const place = (event) => {
    const box = plot.getBoundingClientRect();
    const x = frame + ((event.clientX - box.left) / box.width) * (width - frame);
    const share = (x - left) / (right - left);
    return Math.max(0, Math.min(labels.length - 1, Math.round(share * (labels.length - 1))));
  };
  plot.addEventListener("pointermove", (event) => {
    const at = place(event);
    const x = left + (at / Math.max(1, labels.length - 1)) * (right - left);
    plot.querySelector(".cursor").setAttribute("d", `M${x.toFixed(1)} 0V${plot.height.baseVal.value - 20}`);
    figure.querySelector(".place").value = labels[at];
  });
  plot.addEventListener("pointerleave", () => {
    plot.querySelector(".cursor").setAttribute("d", "");
    figure.querySelector(".place").value = "";
  });
  plot.addEventListener("click", (event) => choose(labels[place(event)]));
}

