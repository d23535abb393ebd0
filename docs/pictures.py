"""Make the pictures and pages of the documentation again: `python -m docs.pictures`, in the root of the repository.

The pictures of pages need Chromium and Playwright, which the extra "test" installs.
"""

import io
import os
import re
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
_LAYER = "_blocks.0._bn1"
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
    _keep("conv", "overview.jpg")
    size = ("--resize", "224x448", "--crop", "224x448")
    _hookscope("attribute", "demo", str(_IMAGES / "cat-and-coffee.jpg"), "--top", "2", *size, "--out", "attribute")
    _keep("attribute", "where-it-looks.jpg")


def _write_pages() -> None:
    layers = ("--layer", "_blocks.0._*", "--layer", "!padding")
    _hookscope("activations", "demo", _CAT, *layers, "--out", "run", "--report", str(_PAGES / "activations.html"))
    _photograph(_PAGES / "activations.html", f"#layer={_LAYER}", "#panel figure.maps .chosen", "report.png")
    Path("deep.py").write_text(_DEEP, encoding="utf-8")
    shape = ("--input-shape", "4,3,8,8")
    _hookscope("grads", "deep.py:build", *shape, "--out", "deep", "--report", str(_PAGES / "grads.html"))
    _keep("deep", "vanishing.png")
    _hookscope("attribute", "demo", _CAT, "--top", "2", "--out", "looks", "--report", str(_PAGES / "attribute.html"))
    _compare()
    _check()


def _compare() -> None:
    """Change one BatchNorm of a network, and find it."""
    import torch  # noqa: PLC0415 - after what needs no more than the command line

    import hookscope  # noqa: PLC0415

    weights = hookscope.load_model("demo").module.state_dict()
    torch.save(weights, "old.pt")
    weights["_blocks.5._bn1.running_var"] *= 1.5
    torch.save(weights, "new.pt")
    _hookscope("diff", "old.pt", "new.pt", _CAT, "--out", "difference")
    _keep("difference", "difference.jpg")
    layers = ("--layer", "_blocks.5._bn[12]", "--layer", "_blocks.1[05]._bn2", "--layer", "_fc")  # a page of 1.5 MB
    _hookscope("diff", "old.pt", "new.pt", _CAT, *layers, "--out", "page", "--report", str(_PAGES / "diff.html"))


def _check() -> None:
    """Check a broken checkpoint, and a sound one on pictures that are upside down."""
    import torch  # noqa: PLC0415
    from torchvision.models import mobilenet_v3_small  # noqa: PLC0415

    torch.manual_seed(0)
    weights = mobilenet_v3_small(num_classes=10).state_dict()
    weights["features.4.block.0.0.weight"][3, 1] = float("nan")
    torch.save(weights, "broken.pt")
    _hookscope("check", "broken.pt", "--evidence", "evidence", "--report", str(_PAGES / "check.html"), code=1)
    _keep("evidence/broken.pt", "failing.png")
    page = (_ROOT / "docs" / "questions" / "data.md").read_text(encoding="utf-8")
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], {})  # noqa: S102 - makes the pictures of the page
    settings = ("--data", "data", "--limit", "accuracy.min-fraction=0.95", "--select", "accuracy")
    _hookscope("check", "demo", *settings, "--evidence", "wrong", code=1)
    _keep("wrong/demo", "labelled.jpg")


def _keep(run: str, name: str) -> None:
    """Keep the overview of a run."""
    _save(Path(run, "overview.png").read_bytes(), name)


def _save(png: bytes, name: str) -> None:
    """Keep a picture: with a photograph in it as JPEG, else as PNG of few colours."""
    with Image.open(io.BytesIO(png)) as picture:
        kept = picture.convert("RGB")
        if name.endswith(".jpg"):
            kept.save(_IMAGES / name, quality=88, optimize=True)
        else:
            kept.quantize(256).save(_IMAGES / name, optimize=True)


def _hookscope(*command: str, code: int = 0) -> None:
    quiet = () if command[0] == "check" else ("--quiet",)
    shown = [word.removeprefix(f"{_PAGES}{os.sep}") for word in command]
    sys.argv[:] = ["hookscope", *shown]  # what a page says that it was made by
    if run([*command, *quiet]) != code:
        raise SystemExit(f"hookscope {' '.join(shown)} has not ended with {code}")


def _photograph(page: Path, fragment: str, shown: str, name: str) -> None:
    """Open a page, wait for what is meant to be `shown`, and keep what the window shows."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - for few of the pictures

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="dark")
        opened.goto(f"{page.as_uri()}{fragment}")
        opened.wait_for_selector(shown)
        _save(opened.screenshot(), name)
        browser.close()


if __name__ == "__main__":
    main()
