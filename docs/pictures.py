"""Make the pictures in this folder again: `python -m docs.pictures`, in the root of the repository.

The picture of the report needs Chromium and Playwright, which the extra "test" installs.
"""

import io
import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image

from hookscope.cli.app import run

_ROOT = Path(__file__).parents[1]
_DOCS = _ROOT / "docs"
_CAT = "sample_images/cat.jpg"  # relative, so that no picture shows where the repository lies
_LAYER = "_blocks.0._depthwise_conv"


def main() -> None:
    """Run the commands that the README shows, and keep a picture of each."""
    os.chdir(_ROOT)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _hookscope("activations", "demo", _CAT, "--layer", "conv", "--out", str(folder / "activations"))
        [grid] = (folder / "activations" / "grids").glob("*-_conv_stem.png")
        shutil.copyfile(grid, _DOCS / "first-convolution.png")
        _hookscope("grads", "demo", _CAT, "--loss", "ce", "--target", "tabby", "--out", str(folder / "grads"))
        shutil.copyfile(folder / "grads" / "plots" / "gradient-flow.png", _DOCS / "gradient-flow.png")
        _hookscope("attribute", "demo", _CAT, "--top", "3", "--out", str(folder / "attribute"))
        with Image.open(folder / "attribute" / "overview.png") as picture:
            picture.save(_DOCS / "where-it-looks.jpg", quality=88, optimize=True)
        _hookscope("report", str(folder / "activations"), "--out", str(folder / "report.html"))
        _photograph(folder / "report.html", _DOCS / "report.png")


def _hookscope(*command: str) -> None:
    if code := run([*command, "--quiet"]):
        raise SystemExit(code)


def _photograph(page: Path, target: Path) -> None:
    """Open a report on one layer, and keep what the window shows."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - for one picture of three

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        opened.goto(f"{page.as_uri()}#layer={_LAYER}")
        opened.wait_for_selector("#panel figure.ready")
        with Image.open(io.BytesIO(opened.screenshot())) as picture:
            picture.convert("RGB").quantize(256).save(target, optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
