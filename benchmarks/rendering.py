"""Draw feature maps of all convolutions as pictures: `run.save(folder)` beside torchvision and matplotlib."""

import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torchvision.utils import make_grid, save_image

import hookscope
from benchmarks.findings import Measurement, Section, Work
from benchmarks.networks import seeded
from benchmarks.timing import interleaved, spread
from hookscope.results.activations import Activations

_FEW = 16  # channels per layer, so that matplotlib finishes
_ROUNDS = {"hookscope": 9, "torchvision make_grid": 3, "matplotlib subplots": 1}

_NOTE = """\
From the result of `hookscope.activations` to files. `run.save(folder)` writes a PNG per layer, each map with its range,
colours and a scale, and the rest of the run. torchvision's `make_grid` tiles grey maps; matplotlib makes one subplot a
channel, for 16 channels of each layer."""


def _by_hookscope(run: Activations, folder: Path) -> None:
    run.save(folder / "run")


def _by_torchvision(run: Activations, folder: Path) -> None:
    """Tile with `make_grid`, each map scaled to its own range."""
    for maps in run.feature_maps:
        columns = math.ceil(math.sqrt(len(maps.values)))
        grid = make_grid(torch.from_numpy(maps.values)[:, None], nrow=columns, normalize=True, scale_each=True)
        save_image(grid, folder / f"{maps.label}.png")


def _by_matplotlib(run: Activations, folder: Path) -> None:
    """Make a figure of subplots per layer."""
    for maps in run.feature_maps:
        side = math.ceil(math.sqrt(len(maps.values)))
        figure = Figure(figsize=(side, side))
        for index, values in enumerate(maps.values):
            axes = figure.add_subplot(side, side, index + 1)
            axes.imshow(values, cmap="viridis")
            axes.axis("off")
        figure.savefig(folder / f"{maps.label}.png")


_WAYS: dict[str, Callable[[Activations, Path], None]] = {
    "hookscope": _by_hookscope,
    "torchvision make_grid": _by_torchvision,
    "matplotlib subplots": _by_matplotlib,
}


def measure() -> Section:
    """Draw all channels, then the few that matplotlib can be waited for."""
    actual: list[Measurement] = []
    for channels in (None, _FEW):
        run = hookscope.activations(*seeded("resnet34"), layer="type:conv2d", grids_for=1, max_channels=channels)
        names = [name for name in _WAYS if channels or name != "matplotlib subplots"]
        works = {name: _judged(name, run) for name in names}
        seconds = interleaved({name: partial(_drawn, name, run) for name in names}, _ROUNDS, warm=True)
        subject = f"{channels or 'all'} channels of resnet34's {len(run)} convolutions"
        for name, times in seconds.items():
            spreads = spread(times)
            actual.append(Measurement(subject, name, spreads.median, "s", spreads, works[name]))
    return Section("Feature maps as PNG files", _NOTE, tuple(actual))


def _drawn(name: str, run: Activations) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _WAYS[name](run, Path(folder))


def _judged(name: str, run: Activations) -> Work:
    """Count the layers that have a picture that opens and is not of one colour."""
    with tempfile.TemporaryDirectory() as folder:
        _WAYS[name](run, Path(folder))
        readable = sum(_is_picture(path) for path in Path(folder).rglob("*.png") if path.name != "overview.png")
    missing = len(run) - readable
    return Work("differs" if missing else "same", len(run), 0, missing)


def _is_picture(path: Path) -> bool:
    with Image.open(path) as picture:
        return bool(np.ptp(np.asarray(picture.convert("L"))))
