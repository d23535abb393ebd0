"use strict";
// Where a plot is wider than its frame, as on a phone, the part around its first mark is shown.

for (const plot of document.querySelectorAll("figure.depth svg.plot")) {
  const mark = plot.querySelector("path.mark");
  if (!mark) continue;
  const frame = plot.parentElement;
  const at = Number.parseFloat(mark.getAttribute("d").slice(1)) / plot.viewBox.baseVal.width;
  frame.scrollLeft = at * frame.scrollWidth - frame.clientWidth / 2;
}
