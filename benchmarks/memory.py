"""Peak memory of public calls over the plain passes, beside other tools, each in a process of its own."""

import json
import subprocess
import sys

from benchmarks.activations import ACTIVATIONS
from benchmarks.difference import WAYS as COMPARING
from benchmarks.findings import Measurement, Section, Work
from benchmarks.gradients import GRADIENTS
from benchmarks.networks import largest_activation_bytes
from benchmarks.processes import run
from benchmarks.same_work import failed
from benchmarks.timing import spread

# By public function: networks, and all ways.
_CASES = {
    "activations": (("vgg16", "resnet152"), tuple(ACTIVATIONS.ways)),
    "grads": (("vgg16", "resnet152"), tuple(GRADIENTS.ways)),
    "diff": (("resnet34",), tuple(COMPARING)),
}
_ROUNDS = {"plain": 3, "hookscope": 3}
_FEW, _MANY = 8, 500
_ALLOWED_MEGABYTES = 30  # beyond the largest activation

_NOTE = f"""\
Megabytes by which resident memory grows at the peak of one run, in a process that has done the same before, minus the
growth in the plain passes. Freed blocks of 64 KiB or more go back to the system at once; otherwise fragmentation
differs more between processes than between tools. hookscope runs with its defaults. Its limit is the largest
activation plus {_ALLOWED_MEGABYTES} MB, and {_ALLOWED_MEGABYTES} MB from {_FEW} to {_MANY} pictures."""


def measure() -> Section:
    """Measure `activations`, `grads` and `diff`, and a run over many pictures."""
    actual = []
    for function, (networks, ways) in _CASES.items():
        for network in networks:
            actual += _measured(function, network, ["plain", *(way for way in ways if "hookscope," not in way)])
    few, many = (json.loads(_child("pictures", "resnet18", str(count)))["growth_bytes"] for count in (_FEW, _MANY))
    subject = f"activations, resnet18, {_MANY} pictures over {_FEW}"
    actual.append(Measurement(subject, "hookscope", (many - few) / 1e6, "MB", at_most=_ALLOWED_MEGABYTES))
    return Section("Peak memory over the plain passes", _NOTE, tuple(actual))


def _child(*words: str) -> str:
    return run([sys.executable, "-m", "benchmarks.children.memory", *words])


def _measured(function: str, network: str, ways: list[str]) -> list[Measurement]:
    actual: list[Measurement] = []
    base = 0.0
    for way in ways:
        work: Work | None = None
        growths = []
        try:
            for _ in range(_ROUNDS.get(way, 1)):
                printed = json.loads(_child(function, network, way))
                work = Work(**printed["work"]) if printed["work"] else None
                growths.append(printed["growth_bytes"])
        except subprocess.CalledProcessError as error:
            work = failed(RuntimeError(error.stderr.strip().splitlines()[-1]))
        peak = spread(growths, "MB", 1e-6) if growths else None
        if way == "plain" and peak:
            base = peak.median
        more = peak.median - base if peak else None
        at_most = _ALLOWED_MEGABYTES + largest_activation_bytes(network) / 1e6 if way == "hookscope" else None
        actual.append(Measurement(f"{function}, {network}", way, more, "MB", peak, work, at_most))
    return actual
