"""What the cost of every module of a network takes to measure, beside torchinfo's summary."""

from collections.abc import Callable, Mapping
from importlib import import_module

import torch
from torch import nn
from torchvision.models import get_model

import hookscope
from benchmarks.findings import Measurement, Section, Work
from benchmarks.timing import interleaved, spread

_NETWORK = "resnet152"
_AT_MOST_SECONDS = 3.0

_NOTE = """\
From the network's name, after imports: building, running and measuring it. hookscope measures multiply-adds, bytes
saved for the backward pass, receptive fields, and each module's time as a median of several passes; torchinfo
multiply-adds and bytes of outputs, in one pass. Both count the same parameters."""

Counts = Mapping[str, int]
"""Parameters of each module with those inside it, by dotted name."""


def by_hookscope() -> Counts:
    """Measure as `hookscope layers --cost` does."""
    table = hookscope.layers(_NETWORK, cost=True)
    assert table.cost is not None
    return {module.layer: module.total.parameter_count for module in table.cost.modules}


def by_torchinfo() -> Counts:
    """Build the network and summarise it."""
    summary = import_module("torchinfo").summary(get_model(_NETWORK), (1, 3, 224, 224), verbose=0)
    names: dict[int, str] = {}
    counts = {}
    for layer in summary.summary_list:
        above = names.get(layer.depth - 1, "")
        names[layer.depth] = "" if not layer.depth else f"{above}.{layer.var_name}" if above else layer.var_name
        counts[names[layer.depth]] = layer.num_params
    return counts


def judge_counts(counts: Counts, network: nn.Module) -> Work:
    """Compare the parameters of every module with the network's."""
    wanted = {
        name: sum(parameter.numel() for parameter in module.parameters()) for name, module in network.named_modules()
    }
    missing = sum(name not in counts for name in wanted)
    wrong = sum(counts[name] != count for name, count in wanted.items() if name in counts)
    return Work("differs" if missing or wrong else "same", len(wanted), wrong, missing)


def measure() -> Section:
    """Measure both ways in turn."""
    with torch.device("meta"):
        network = get_model(_NETWORK)
    ways: dict[str, Callable[[], Counts]] = {"hookscope": by_hookscope, "torchinfo": by_torchinfo}
    works = {name: judge_counts(way(), network) for name, way in ways.items()}
    actual = []
    for name, seconds in interleaved(ways, 3).items():
        times = spread(seconds)
        at_most = _AT_MOST_SECONDS if name == "hookscope" else None
        actual.append(Measurement(f"layers {_NETWORK} --cost", name, times.median, "s", times, works[name], at_most))
    return Section("hookscope.layers with cost=True", _NOTE, tuple(actual))
