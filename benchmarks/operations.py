"""Statistics of every module call and of every operation of the networks' own code, over the plain passes."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from importlib import import_module

import torch
from torch import Tensor, nn

from benchmarks.capture_ways import fetched, four, wrapped_by_torchlens
from benchmarks.comparing import Budget, Ready, over_first, ready, timeable
from benchmarks.findings import Measurement, Section, Work
from benchmarks.networks import seeded
from benchmarks.same_work import Found, Rows, judge
from benchmarks.timing import CLOCKS, Run, interleaved
from hookscope.hooks.callers import has_own_operations
from hookscope.inspection.backward import inspect_gradients
from hookscope.inspection.forward import inspect
from hookscope.results.activations import LayerRow

_NETWORKS = ("resnet34", "densenet121", "efficientnet_b0")
_BOTH, _LENS, _GRADIENTS = "hookscope", "torchlens", "hookscope, gradients"
_BUDGETS: dict[str, dict[str, Budget]] = {
    "resnet34": {_BOTH: (1.30, None), _GRADIENTS: (1.30, None)},
    "densenet121": {_BOTH: (1.70, None)},
}
_ROUNDS = {"resnet34": 90, "densenet121": 40}
_OTHER_ROUNDS = 12
_LENS_ROUNDS = 2

_NOTE = """\
All modules, and all operations that the network's own code calls, but not what torch's own layers call internally.
torchlens traces every operation; it is timed with mean, std, min and max of the operations that are compared, and
hookscope's rows are compared with these. Gradients are those of the outputs of all modules and operations, over the
plain forward and backward passes."""


def measure() -> Section:
    """Measure every network on the CPU."""
    found = [each for network in _NETWORKS for each in (*_forward(network), *_backward(network))]
    return Section("Statistics of every module call and operation", _NOTE, tuple(found))


def _forward(network: str) -> list[Measurement]:
    model, batch = seeded(network)
    own = deepcopy(model)

    def plain(net: nn.Module) -> None:
        with torch.no_grad():
            net(batch)

    labels = [row.label for row in _operations(model, batch)]
    with wrapped_by_torchlens():
        expected = _torchlens(deepcopy(model), batch, labels)()

    def prepare(way: Callable[[], Found]) -> tuple[Run, Work]:
        return way, judge(way(), expected)

    turns = _ROUNDS.get(network, _OTHER_ROUNDS)
    ours, theirs = deepcopy(model), deepcopy(model)
    ways = {
        "plain forward": Ready(None, partial(plain, own), turns),
        _BOTH: ready(turns, partial(prepare, partial(_inspected, ours, batch))),
    }
    with wrapped_by_torchlens():
        ways[_LENS] = ready(_LENS_ROUNDS, partial(prepare, _torchlens(theirs, batch, labels)))
    around = {_LENS: wrapped_by_torchlens}
    seconds = interleaved(*timeable(ways), CLOCKS["cpu"], partial(plain, model), warm=True, around=around)
    return over_first(network, ways, seconds, _BUDGETS.get(network, {}))


def _backward(network: str) -> list[Measurement]:
    model, batch = seeded(network)
    own, ours = deepcopy(model), deepcopy(model)

    def plain(net: nn.Module) -> None:
        net.zero_grad()
        net(batch).sum().backward()

    def gradients() -> None:
        inspect_gradients(ours, batch, "sum", ["*"], ops=True)

    turns = max(8, _ROUNDS.get(network, _OTHER_ROUNDS) // 3)
    ways = {
        "plain forward and backward": Ready(None, partial(plain, own), turns),
        _GRADIENTS: Ready(None, gradients, turns),
    }
    seconds = interleaved(*timeable(ways), CLOCKS["cpu"], partial(plain, model))
    return over_first(network, ways, seconds, _BUDGETS.get(network, {}))


def _operations(model: nn.Module, batch: Tensor) -> list[LayerRow]:
    return [row for row in inspect(model, batch, ["*"], ops=True).rows if row.owner is not None]


def _inspected(model: nn.Module, batch: Tensor) -> Found:
    return partial(_statistics, inspect(model, batch, ["*"], ops=True).rows)


def _statistics(rows: Sequence[LayerRow]) -> Rows:
    seen = {row.label: row.activation for row in rows if row.owner is not None}
    return {name: (each.mean or 0.0, each.std or 0.0, each.min or 0.0, each.max or 0.0) for name, each in seen.items()}


def _torchlens(model: nn.Module, batch: Tensor, labels: list[str]) -> Callable[[], Rows]:
    """All operations by `torchlens.trace`; those of the network's own code come in the order of the labels."""
    trace = import_module("torchlens").trace
    own = {name for name, module in model.named_modules() if has_own_operations(module)}

    def run() -> Rows:
        with torch.no_grad():
            log = trace(model, batch)
            outputs = [
                each.out
                for each in log
                if each.func_name not in (None, "none", "identity")
                and (each.modules[-1].rpartition(":")[0] if each.modules else "").removeprefix("self") in own
            ]
            return fetched(dict(zip(labels, map(four, outputs), strict=True)))

    return run
