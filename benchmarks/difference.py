"""`hookscope.diff` over two plain passes, beside pytest-torch, and which of planted faults are named."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import hookscope
from benchmarks.comparing import over_first, ready, timeable
from benchmarks.findings import Measurement, Section, Work
from benchmarks.networks import seeded
from benchmarks.timing import CLOCKS, Run, interleaved

First = Callable[[], str | None]
"""Runs a comparison; returns the first layer that differs, None if none does."""

# By network: the layer with the fault.
_FAULTS = {
    "resnet34": "layer2.1.conv2",
    "efficientnet_b0": "features.4.1.block.1.0",
    "vit_b_16": "encoder.layers.encoder_layer_5.mlp.0",
}
_LIMITS = {"resnet34": 1.60, "efficientnet_b0": 3.0, "vit_b_16": 1.3}
_ROUNDS = 20
_PLAIN = "two plain passes"

_NOTE = """\
One picture through a network and a copy in which one filter of {faults} is scaled, over a plain pass of both. A tool is
right if it names that layer as the first to differ; pytest-torch compares within its tolerances. Not timed: {count}
faults in resnet34, one at a time, and two equal networks, of which no layer may be named."""


def measure() -> Section:
    """Time both on the CPU, and count faults that are named."""
    model, _ = seeded("resnet34")
    places = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    note = _NOTE.format(faults=" or ".join(_FAULTS.values()), count=len(places))
    actual = [row for network in _FAULTS for row in _timed(network)]
    actual += [_counted(way, [*places, None]) for way in WAYS]
    return Section("hookscope.diff, over both plain passes", note, tuple(actual))


def pair(network: str, fault: str | None) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return two networks and a picture; in the second, one filter of layer `fault` is scaled."""
    model, picture = seeded(network)
    other = deepcopy(model)
    if fault:
        with torch.no_grad():
            other.get_parameter(f"{fault}.weight")[0].mul_(1.5)
    return model, other, picture


def prepared(network: str, way: str) -> tuple[Run, Work | None]:
    """Prepare a way, or the plain passes, and run it once to judge it."""
    fault = _FAULTS[network]
    model, other, picture = pair(network, fault)
    if way in WAYS:
        compare = WAYS[way](model, other, picture)
        wrong = compare() != fault
        return compare, Work("differs" if wrong else "same", 1, int(wrong))

    def passes() -> None:
        with torch.no_grad():
            model(picture)
            other(picture)

    passes()
    return passes, None


def _timed(network: str) -> list[Measurement]:
    ways = {way: ready(_ROUNDS, partial(prepared, network, way)) for way in (_PLAIN, *WAYS)}
    settle, _ = prepared(network, _PLAIN)
    seconds = interleaved(*timeable(ways), CLOCKS["cpu"], settle, warm=True)
    return over_first(network, ways, seconds, {"hookscope": _LIMITS[network]})


def _counted(way: str, faults: list[str | None]) -> Measurement:
    """Count the faults whose layer is named first."""
    wrong = missing = 0
    for fault in faults:
        try:
            wrong += WAYS[way](*pair("resnet34", fault))() != fault
        except Exception:  # noqa: BLE001 - a peer may raise anything
            missing += 1
    work = Work("differs" if wrong or missing else "same", len(faults), wrong, missing)
    return Measurement("resnet34, one fault at a time", way, None, "×", None, work)


def _hookscope(model: nn.Module, other: nn.Module, picture: Tensor) -> First:
    def compare() -> str | None:
        actual = hookscope.diff(model, other, picture).first_differences
        return actual[0].layer if actual else None

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
