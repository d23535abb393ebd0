"use strict";
// The state of a page is its fragment: #layer=…&q=…

function stateInFragment() {
  const given = {};
  for (const part of location.hash.slice(1).split("&")) {
    const at = part.indexOf("=");
    if (at < 1) continue;
    try {
      given[part.slice(0, at)] = decodeURIComponent(part.slice(at + 1));
    } catch {
      given[part.slice(0, at)] = part.slice(at + 1);
    }
  }
  return given;
}

let waiting = 0;

// Writes the state into the fragment a moment later, unless a link has changed it by then.
function keepInFragment(state) {
  clearTimeout(waiting);
  const before = location.hash;
  waiting = setTimeout(() => {
    if (location.hash === before) history.replaceState(null, "", state());
  }, 200);
}
