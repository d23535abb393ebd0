"""Make the pictures and pages of the documentation again: `python -m docs.pictures`, in the root of the repository.

The picture of the report needs Chromium and Playwright, which the extra "test" installs.
"""

import io
import os
import shutil
import sys
import tempfile
from contextlib import chdir
from pathlib import Path

from PIL import Image

from hookscope.cli.app import run

_ROOT = Path(__file__).parents[1]
_IMAGES = _ROOT / "docs" / "images"
_PAGES = _ROOT / "docs" / "pages"
_CAT = "sample_images/cat.jpg"  # relative, so that no picture shows where the repository lies
_LAYER = "_blocks.0._depthwise_conv"
_DEEP = """from torch import nn


def build(depth=12):
    layers = [nn.Flatten(), nn.Linear(3 * 8 * 8, 32)]
    for _ in range(depth):
        layers += [nn.Sigmoid(), nn.Linear(32, 32)]
    return nn.Sequential(*layers, nn.Linear(32, 10))
"""


def main() -> None:
    """Run the commands that the documentation shows, and keep a picture or a page of each."""
    _IMAGES.mkdir(exist_ok=True)
    _PAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, chdir(temporary):
        Path("sample_images").symlink_to(_ROOT / "sample_images")
        _draw()
        _write_pages()


def _draw() -> None:
    _hookscope("activations", "demo", _CAT, "--layer", "conv", "--out", "conv")
    [grid] = Path("conv", "grids").glob("*-_conv_stem.png")
    shutil.copyfile(grid, _IMAGES / "first-convolution.png")
    with Image.open(Path("conv", "overview.png")) as picture:
        picture.convert("RGB").save(_IMAGES / "overview.jpg", quality=88, optimize=True)
    _hookscope("grads", "demo", _CAT, "--loss", "ce", "--target", "tabby", "--out", "grads")
    shutil.copyfile(Path("grads", "plots", "gradient-flow.png"), _IMAGES / "gradient-flow.png")
    _hookscope("attribute", "demo", _CAT, "--top", "3", "--out", "attribute")
    with Image.open(Path("attribute", "overview.png")) as picture:
        picture.save(_IMAGES / "where-it-looks.jpg", quality=88, optimize=True)
    _hookscope("report", "conv", "--out", "report.html")
    _photograph(Path("report.html").resolve(), _IMAGES / "report.png")


def _write_pages() -> None:
    import torch  # noqa: PLC0415 - after what needs no more than the command line
    from torchvision.models import mobilenet_v3_small  # noqa: PLC0415

    layers = ("--layer", "_blocks.0._*", "--layer", "!padding")
    _hookscope("activations", "demo", _CAT, *layers, "--out", "run", "--report", str(_PAGES / "activations.html"))
    Path("deep.py").write_text(_DEEP, encoding="utf-8")
    _hookscope("grads", "deep.py:build", "--input-shape", "4,3,8,8", "--report", str(_PAGES / "grads.html"))
    _hookscope("attribute", "demo", _CAT, "--top", "2", "--out", "looks", "--report", str(_PAGES / "attribute.html"))
    torch.manual_seed(0)
    weights = mobilenet_v3_small(num_classes=10).state_dict()
    weights["features.4.block.0.0.weight"][3, 1] = float("nan")
    torch.save(weights, "broken.pt")
    _hookscope("check", "broken.pt", "--evidence", "evidence", "--report", str(_PAGES / "check.html"), code=1)


def _hookscope(*command: str, code: int = 0) -> None:
    quiet = () if command[0] == "check" else ("--quiet",)
    shown = [word.removeprefix(f"{_PAGES}{os.sep}") for word in command]
    sys.argv[:] = ["hookscope", *shown]  # what a page says that it was made by
    if run([*command, *quiet]) != code:
        raise SystemExit(f"hookscope {' '.join(shown)} has not ended with {code}")


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
