"""How hookscope's cost grows with layers, batch, picture size and number of pictures."""

import json
import statistics
import sys
from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.findings import Fit, Measurement, Section
from benchmarks.networks import seeded
from benchmarks.processes import run
from benchmarks.timing import fitted, interleaved, spread
from hookscope.inputs import Batch
from hookscope.inspection.forward import inspect
from hookscope.results.inputs import InputRecord

_LAYERED = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_BATCHES = (1, 2, 4, 8, 16, 32)
_SIDES = (112, 224, 448, 896)
_IMAGES = (1, 20, 100, 500)
_SIDE_OF_MANY = 112  # pixels, so that 500 pictures finish
# Peak memory may grow by so much from 1 picture to 500; the design's allowance beside the largest activation.
_FLAT_MEGABYTES = 30.0

_NOTE = """\
hookscope's cost is its time less the plain forward's, medians of turns; lines are by least squares. Layers: module
calls of resnet18 to resnet152. Batch, picture size and number of pictures: resnet18, the last in batches of one at
112 × 112, with the peak memory of a separate process for each count."""


def measure() -> Section:
    """Measure each kind of growth."""
    found: list[Measurement] = []
    fits: list[Fit] = []
    by_calls: dict[float, float] = {}
    for name in _LAYERED:
        model, batch = seeded(name)
        calls = float(len(inspect(model, batch, ["*"]).rows))
        by_calls[calls] = _pair(found, f"{name}, {calls:.0f} module calls", model, batch, 15)
    fits.append(fitted("resnet18 to resnet152, cost", "module call", "ms", by_calls))
    by_batch = {
        float(count): _pair(
            found, f"resnet18, batch of {count}", *seeded("resnet18", count=count), 7 if count < 16 else 4
        )
        for count in _BATCHES
    }
    fits.append(fitted("resnet18, cost", "picture of the batch", "ms", by_batch))
    by_size = {
        side * side / 1e6: _pair(found, f"resnet18, {side} × {side}", *seeded("resnet18", side=side), 9)
        for side in _SIDES
    }
    fits.append(fitted("resnet18, cost", "megapixel", "ms", by_size))
    return Section("Growth", _NOTE, (*found, *_many(fits)), tuple(fits))


def _pair(found: list[Measurement], subject: str, model: nn.Module, batch: torch.Tensor, rounds: int) -> float:
    """Time hookscope beside the plain forward; note both, return the difference in ms."""

    def plain() -> None:
        with torch.no_grad():
            model(batch)

    ways = {"plain forward": plain, "hookscope": lambda: inspect(model, batch, ["*"])}
    spreads = {name: spread(times, "ms", 1e3) for name, times in interleaved(ways, rounds, settle=plain).items()}
    base = spreads["plain forward"].median
    found += [Measurement(subject, name, each.median / base, "×", each) for name, each in spreads.items()]
    return spreads["hookscope"].median - base


def noise(count: int, side: int) -> Iterator[Batch]:
    """Give seeded pictures in batches of one."""
    generator = torch.Generator().manual_seed(0)
    for index in range(count):
        picture = torch.randn(1, 3, side, side, generator=generator)
        yield Batch((picture,), (index,), (InputRecord(f"noise {index}", None, None, (3, side, side), ()),))


def _many(fits: list[Fit]) -> list[Measurement]:
    """Run over more and more pictures, each count in processes of its own: seconds and peak memory."""
    found: list[Measurement] = []
    by_count: dict[float, float] = {}
    peaks: dict[float, float] = {}
    for count in _IMAGES:
        command = [sys.executable, "-m", "benchmarks.children.many", str(count), str(_SIDE_OF_MANY)]
        printed = [json.loads(run(command)) for _ in range(3 if count == 1 else 1)]
        seconds = spread([each["seconds"] for each in printed])
        by_count[float(count)] = seconds.median
        peaks[float(count)] = statistics.median(each["peak_bytes"] for each in printed) / 1e6
        found.append(Measurement(f"resnet18, pictures: {count}", "hookscope", seconds.median, "s", seconds))
    fits.append(fitted("resnet18, time", "picture", "s", by_count))
    fits.append(fitted("resnet18, peak memory", "picture", "MB", peaks))
    first, last = _IMAGES[0], _IMAGES[-1]
    what = f"resnet18, peak memory of {last} pictures over that of {first}"
    more = peaks[last] - peaks[first]
    return [*found, Measurement(what, "hookscope", more, "MB", at_most=_FLAT_MEGABYTES)]
