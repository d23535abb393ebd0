"""Draw feature maps of all convolutions as pictures."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torchvision.utils import make_grid, save_image

from benchmarks.findings import Measurement, Section, Work
from benchmarks.networks import seeded
from benchmarks.timing import interleaved, spread
from hookscope.inspection.forward import inspect
from hookscope.render.grids import draw_grid, encode_png
from hookscope.results.activations import FeatureMaps

Drawn = Mapping[str, tuple[bytes, int]]
"""By label: the PNG, and how many channels are on it."""

_FEW = 16  # channels per layer, so that matplotlib finishes
_AT_MOST_SECONDS = 0.25

_NOTE = """\
From the captured maps to PNG in memory. hookscope draws each map with its range, colours and a scale; torchvision's
`make_grid` tiles grey maps; matplotlib makes one subplot a channel, for 16 channels of each layer. Checked beforehand:
each way gives one readable PNG per layer with every channel on it; the pictures differ by design."""


def by_hookscope(maps: Sequence[FeatureMaps]) -> Drawn:
    """Draw as `hookscope activations` does."""
    with ThreadPoolExecutor() as pool:
        pictures = pool.map(lambda each: encode_png(draw_grid(each)), maps)
        return {each.label: (picture, len(each.values)) for each, picture in zip(maps, pictures, strict=True)}


def by_torchvision(maps: Sequence[FeatureMaps]) -> Drawn:
    """Tile with `make_grid`, each map scaled to its own range."""
    drawn = {}
    for each in maps:
        buffer = io.BytesIO()
        columns = math.ceil(math.sqrt(len(each.values)))
        grid = make_grid(torch.from_numpy(each.values)[:, None], nrow=columns, normalize=True, scale_each=True)
        save_image(grid, buffer, format="png")
        drawn[each.label] = (buffer.getvalue(), len(each.values))
    return drawn


def by_matplotlib(maps: Sequence[FeatureMaps]) -> Drawn:
    """Make a figure of subplots per layer."""
    drawn = {}
    for each in maps:
        side = math.ceil(math.sqrt(len(each.values)))
        figure = Figure(figsize=(side, side))
        for index, values in enumerate(each.values):
            axes = figure.add_subplot(side, side, index + 1)
            axes.imshow(values, cmap="viridis")
            axes.axis("off")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        drawn[each.label] = (buffer.getvalue(), len(figure.axes))
    return drawn


def judge_drawn(drawn: Drawn, maps: Sequence[FeatureMaps]) -> Work:
    """Check that each layer has a picture that opens, is not of one colour, and holds every channel."""
    found = {label: each for label, each in drawn.items() if _is_picture(each[0])}
    missing = sum(each.label not in found for each in maps)
    wrong = sum(found[each.label][1] != len(each.values) for each in maps if each.label in found)
    return Work("differs" if missing or wrong else "same", len(maps), wrong, missing)


def _is_picture(content: bytes) -> bool:
    with Image.open(io.BytesIO(content)) as picture:
        return bool(np.ptp(np.asarray(picture.convert("L"))))


def measure() -> Section:
    """Draw all channels, then the few that matplotlib can be waited for."""
    model, batch = seeded("resnet34")
    found: list[Measurement] = []
    for channels, most in ((None, _AT_MOST_SECONDS), (_FEW, None)):
        maps = inspect(model, batch, ["type:conv2d"], grids_for=1, max_channels=channels).feature_maps
        ways: dict[str, Callable[[Sequence[FeatureMaps]], Drawn]] = {"hookscope": by_hookscope}
        ways["torchvision make_grid"] = by_torchvision
        if channels is not None:
            ways["matplotlib subplots"] = by_matplotlib
        rounds = {"hookscope": 9, "torchvision make_grid": 3, "matplotlib subplots": 1}
        works = {name: judge_drawn(draw(maps), maps) for name, draw in ways.items()}
        seconds = interleaved({name: partial(draw, maps) for name, draw in ways.items()}, rounds, warm=True)
        what = f"{'all' if channels is None else channels} channels of resnet34's {len(maps)} convolutions"
        for name, times in seconds.items():
            spreads = spread(times)
            at_most = most if name == "hookscope" else None
            found.append(Measurement(what, name, spreads.median, "s", spreads, works[name], at_most))
    return Section("Feature maps as PNG pictures", _NOTE, tuple(found))
