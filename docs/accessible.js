// What the theme leaves out: wide tables can be scrolled with the keyboard, a copy button is no landmark, and two lists
// of pages have two names.
document$.subscribe(() =>
  requestAnimationFrame(() => {
    for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
    for (const buttons of document.querySelectorAll("nav.md-code__nav")) buttons.setAttribute("role", "none");
    const counts = new Map();
    for (const list of document.querySelectorAll("nav.md-nav")) {
      const heading = document.getElementById(list.getAttribute("aria-labelledby"));
      const name = list.getAttribute("aria-label") || heading?.textContent.trim() || "Pages";
      counts.set(name, (counts.get(name) ?? 0) + 1);
      list.removeAttribute("aria-labelledby");
      list.setAttribute("aria-label", counts.get(name) > 1 ? `${name} ${counts.get(name)}` : name);
    }
  }),
);
