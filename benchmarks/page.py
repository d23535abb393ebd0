"""The report in a browser: how soon a large one is there, and how soon its filter answers."""

import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import ViewportSize, sync_playwright

from benchmarks.findings import Measurement, Section
from benchmarks.processes import PICTURE, run
from benchmarks.timing import spread

# Leaves and stages of resnet152: 468 rows, 155 of them convolutions with grids.
_LAYERS = ("*", "!type:Bottleneck", "!*downsample", "!type:ResNet")
_WINDOW: ViewportSize = {"width": 1280, "height": 900}
_WORDS = ["c", "conv", "", "layer3", "layer3 conv2", ""]
_INTERACTIVE_SECONDS, _FILTER_SECONDS, _MEGABYTES = 2.0, 0.05, 6.0
_ROUNDS = 9

# Types each word into the filter; gives the seconds of the slowest, from the key to the painted frame.
_TYPE = """words => new Promise(done => {
  const field = document.getElementById("q"), spent = [];
  const next = () => {
    if (!words.length) return done(Math.max(...spent) / 1000);
    field.value = words.shift();
    const began = performance.now();
    field.dispatchEvent(new Event("input"));
    requestAnimationFrame(() => {  // a message sent from a frame arrives when it is painted
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = () => { spent.push(performance.now() - began); next(); };
      port2.postMessage(0);
    });
  };
  requestAnimationFrame(next);
})"""


def measure() -> Section:
    """Open the report of resnet152 in headless Chromium, and filter its table."""
    subject = "resnet152, 468 rows"
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        report = Path(name, "report.html")
        layers = [text for pattern in _LAYERS for text in ("--layer", pattern)]
        command = [sys.executable, "-m", "hookscope", "activations", "resnet152", str(PICTURE), "--weights", "none"]
        run([*command, *layers, "--out", f"{name}/run", "--report", str(report), "--quiet"])
        megabytes = report.stat().st_size / 1e6
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        ready, filtered = [], []
        for _ in range(_ROUNDS):
            page = browser.new_page(viewport=_WINDOW)
            began = time.perf_counter()
            page.goto(report.as_uri(), wait_until="commit")
            page.wait_for_selector("html.ready", state="attached")
            page.fill("#q", "layer3.35")
            page.wait_for_selector("#table tbody tr[hidden]", state="attached")
            ready.append(time.perf_counter() - began)
            page.goto(f"{report.as_uri()}#layers")
            page.evaluate("document.getElementById('layers').scrollIntoView()")
            page.wait_for_load_state("networkidle")
            filtered.append(float(page.evaluate(_TYPE, _WORDS)))
            page.close()
        browser.close()
    opening, filtering = spread(ready), spread(filtered)
    note = (
        "A report with all layers, stages and grids, in headless Chromium: until a word typed into the filter has "
        "hidden rows, and the slowest of six words, from the key to the painted frame."
    )
    return Section(
        "The report in a browser",
        note,
        (
            Measurement(subject, "interactive", opening.median, "s", opening, None, _INTERACTIVE_SECONDS),
            Measurement(subject, "filtering", filtering.median, "s", filtering, None, _FILTER_SECONDS),
            Measurement(subject, "file", megabytes, "MB", None, None, _MEGABYTES),
        ),
    )
