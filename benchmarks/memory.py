"""Peak memory of each way to see every module call, in a process of its own."""

import json
import subprocess
import sys

import torch
from torchvision.models import get_model

import hookscope
from benchmarks.capture_ways import WAYS
from benchmarks.findings import Measurement, Section, Work
from benchmarks.processes import run
from benchmarks.same_work import failed
from benchmarks.timing import spread

_NETWORKS = ("vgg16", "resnet152")
_PLAIN = "plain forward"
_ROUNDS = {_PLAIN: 3, "hookscope": 3}
_ALLOWED_MEGABYTES = 30  # beyond the largest activation; the design's

_NOTE = """\
Megabytes by which resident memory grows at the peak of one run, in a process that has run the network before, less the
plain forward's. hookscope may take what the largest activation takes and 30 MB."""


def measure() -> Section:
    """Measure each network and way."""
    found = [each for network in _NETWORKS for each in _measure_network(network)]
    return Section("Peak memory with statistics on every module call", _NOTE, tuple(found))


def _measure_network(network: str) -> list[Measurement]:
    peaks: dict[str, list[float]] = {}
    works: dict[str, Work | None] = {}
    for turn in range(max(_ROUNDS.values())):
        for name in (_PLAIN, *WAYS):
            if turn >= _ROUNDS.get(name, 1):
                continue
            try:
                printed = json.loads(run([sys.executable, "-m", "benchmarks.children.memory", network, name]))
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
        at_most = _ALLOWED_MEGABYTES + _largest_activation_bytes(network) / 1e6 if name == "hookscope" else None
        found.append(Measurement(network, name, more, "MB", peak, work, at_most))
    return found


def _largest_activation_bytes(network: str) -> int:
    with torch.device("meta"):
        model = get_model(network)
    rows, _ = hookscope.list_modules(model, (torch.zeros(1, 3, 224, 224, device="meta"),))
    return max(4 * torch.Size(shape).numel() for row in rows for shape in row.output_shapes)
