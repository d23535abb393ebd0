"""Peak memory of each way to see every module call or every gradient, in a separate process."""

import json
import subprocess
import sys
from collections.abc import Collection
from typing import Literal

import torch
from torchvision.models import get_model

from benchmarks import capture_ways, gradients
from benchmarks.findings import Measurement, Section, Work
from benchmarks.processes import run
from benchmarks.same_work import failed
from benchmarks.timing import spread
from hookscope.inspection.forward import list_modules

_PLAIN = "plain"
_OURS = ("hookscope", capture_ways.WITH_DISTRIBUTIONS)
_ROUNDS = dict.fromkeys((_PLAIN, *_OURS), 3)
_ALLOWED_MEGABYTES = 30  # beyond the largest activation; the design's

_NOTE = """\
Megabytes by which resident memory grows at the peak of one run, in a process that has run the network before, minus the
growth in the plain {}. Freed blocks of 64 KiB or more go back to the system at once; otherwise fragmentation differs
more between processes than between tools. hookscope may take the size of the largest activation plus 30 MB."""


def measure() -> Section:
    """Measure what it takes to see what modules return."""
    found = [each for network in ("vgg16", "resnet152") for each in _measured("forward", network, capture_ways.WAYS)]
    return Section("Peak memory with statistics on every module call", _NOTE.format("forward pass"), tuple(found))


def measure_gradients() -> Section:
    """Measure what it takes to see gradients."""
    networks = ("vgg16", "resnet152", "vit_b_16")
    found = [each for network in networks for each in _measured("backward", network, gradients.WAYS)]
    note = _NOTE.format("forward and backward passes")
    return Section("Peak memory with gradients of every module call", note, tuple(found))


def _measured(which: Literal["forward", "backward"], network: str, ways: Collection[str]) -> list[Measurement]:
    peaks: dict[str, list[float]] = {}
    works: dict[str, Work | None] = {}
    for turn in range(max(_ROUNDS.values())):
        for name in (_PLAIN, *ways):
            if turn >= _ROUNDS.get(name, 1):
                continue
            try:
                printed = json.loads(run([sys.executable, "-m", "benchmarks.children.memory", which, network, name]))
            except subprocess.CalledProcessError as error:
                works[name] = failed(RuntimeError(error.stderr.strip().splitlines()[-1]))
                continue
            works[name] = Work(**printed["work"]) if printed["work"] else None
            peaks.setdefault(name, []).append(printed["growth_bytes"])
    spreads = {name: spread(values, "MB", 1e-6) for name, values in peaks.items()}
    found = []
    for name, work in works.items():
        peak = spreads.get(name)
        more = peak.median - spreads[_PLAIN].median if peak else None
        at_most = _ALLOWED_MEGABYTES + _largest_activation_bytes(network) / 1e6 if name in _OURS else None
        found.append(Measurement(network, name, more, "MB", peak, work, at_most))
    return found


def _largest_activation_bytes(network: str) -> int:
    with torch.device("meta"):
        model = get_model(network)
    rows, _ = list_modules(model, (torch.zeros(1, 3, 224, 224, device="meta"),))
    return max(4 * torch.Size(shape).numel() for row in rows for shape in row.output_shapes)
