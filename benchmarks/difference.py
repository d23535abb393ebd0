"""Two networks in lockstep over two plain passes, beside pytest-torch, and which of planted faults are named."""

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import hookscope
from benchmarks.comparing import Ready, over_first, ready, timeable
from benchmarks.findings import Measurement, Section, Work
from benchmarks.networks import seeded
from benchmarks.processes import run as run_process
from benchmarks.same_work import failed
from benchmarks.timing import CLOCKS, Run, interleaved, spread
from hookscope.inspection.forward import list_modules

First = Callable[[], str | None]
"""Runs a comparison; returns the first layer that differs, None if none does."""

_NETWORK = "resnet34"
_BUDGET = 1.5
_ROUNDS = 20
_MEMORY_ROUNDS = 3
# Beside both networks: so many of the largest activation, and so many megabytes.
_ACTIVATIONS, _ALLOWED_MEGABYTES = 3, 30
_FAULT = "layer2.1.conv2"

_NOTE = """\
One picture through two copies of {network}; in the second, one weight of {fault} is scaled, or not. A tool does the
work if it names that layer as the first to differ, and none where nothing is scaled; also for {count} further layers,
one at a time. Memory is the peak growth of a process that holds both networks and has run them before."""


def measure() -> Section:
    """Time both on the CPU, weigh them, and count faults that are named."""
    places = _places(seeded(_NETWORK)[0])
    note = _NOTE.format(network=_NETWORK, fault=_FAULT, count=len(places))
    found = [*_timed(differ=True), *_timed(differ=False), *_weighed()]
    return Section("Two networks side by side", note, (*found, *(_counted(way, places) for way in WAYS)))


def pair(*, differ: bool, fault: str = _FAULT) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return two networks and a picture; a fault scales one filter of a layer, in the second network."""
    model, picture = seeded(_NETWORK)
    other = deepcopy(model)
    if differ:
        weight = other.get_submodule(fault).weight
        with torch.no_grad():
            weight[0].mul_(1.5)  # type: ignore[index]
    return model, other, picture


def _timed(*, differ: bool) -> list[Measurement]:
    model, other, picture = pair(differ=differ)

    def passes() -> None:
        with torch.no_grad():
            model(picture)
            other(picture)

    def prepare(way: str) -> tuple[Run, Work]:
        compare = WAYS[way](*pair(differ=differ))
        wrong = compare() != (_FAULT if differ else None)
        return compare, Work("differs" if wrong else "same", 1, int(wrong))

    ways = {"two plain passes": Ready(None, passes, _ROUNDS)}
    ways |= {way: ready(_ROUNDS, partial(prepare, way)) for way in WAYS}
    seconds = interleaved(*timeable(ways), CLOCKS["cpu"], passes, warm=True)
    subject = f"{_NETWORK}, {'one layer differs' if differ else 'equal'}"
    return over_first(subject, ways, seconds, {"hookscope": (_BUDGET, None)})


def _weighed() -> list[Measurement]:
    model, picture = seeded(_NETWORK)
    rows, _ = list_modules(model, (picture,))
    largest = max(4 * torch.Size(shape).numel() for row in rows for shape in row.output_shapes) / 1e6
    found = []
    for way in ("two plain passes", *WAYS):
        growths = []
        reason = ""
        for _ in range(_MEMORY_ROUNDS):
            try:
                printed = run_process([sys.executable, "-m", "benchmarks.children.two_networks", way])
            except Exception as error:  # noqa: BLE001 - a peer may raise anything
                reason = str(error)
                break
            growths.append(json.loads(printed)["growth_bytes"])
        peak = spread(growths, "MB", 1e-6) if growths else None
        at_most = _ACTIVATIONS * largest + _ALLOWED_MEGABYTES if way == "hookscope" else None
        work = failed(RuntimeError(reason)) if reason else None
        found.append(Measurement("peak memory", way, peak.median if peak else None, "MB", peak, work, at_most))
    return found


def _counted(way: str, places: list[str]) -> Measurement:
    """Count the faults whose layer is named first."""
    wrong = missing = 0
    for place in places:
        try:
            wrong += WAYS[way](*pair(differ=True, fault=place))() != place
        except Exception:  # noqa: BLE001 - a peer may raise anything
            missing += 1
    work = Work("differs" if wrong or missing else "same", len(places), wrong, missing)
    return Measurement(f"{len(places)} faults", way, None, "×", None, work)


def _places(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]


def _hookscope(model: nn.Module, other: nn.Module, picture: Tensor) -> First:
    def compare() -> str | None:
        found = hookscope.diff(model, other, picture).first_differences
        return found[0].layer if found else None

    return compare


def _pytest_torch(model: nn.Module, other: nn.Module, picture: Tensor) -> First:
    localize: Any = import_module("pytest_torch.divergence").localize_divergence

    def compare() -> str | None:
        with torch.no_grad():
            first = localize(model, other, picture).first
        return None if first is None else str(first.name)

    return compare


WAYS: dict[str, Callable[[nn.Module, nn.Module, Tensor], First]] = {
    "hookscope": _hookscope,
    "pytest-torch": _pytest_torch,
}
