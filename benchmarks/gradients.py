"""Gradients of every module call's output, over the plain forward and backward passes."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch
from torch import Tensor, nn

from benchmarks.capture_ways import by_hand, fetched, first_tensor, four
from benchmarks.comparing import Budget, Ready, over_first, ready, timeable
from benchmarks.findings import Measurement, Section, Work
from benchmarks.networks import NETWORKS, TIMM_NETWORKS, label, seeded
from benchmarks.same_work import TOLERANCES, Found, Rows, judge
from benchmarks.timing import CLOCKS, Run, interleaved
from hookscope.inspection.backward import inspect_gradients
from hookscope.results.gradients import GradientRow
from hookscope.results.network import row_label

Prepare = Callable[[nn.Module, Tensor, Tensor, Sequence[GradientRow]], Callable[[], Found]]

_BUDGETS: dict[tuple[str, str], dict[str, Budget]] = {("cpu", "resnet34"): {"hookscope": (1.20, 1.15)}}
_ROUNDS = {"resnet34": 180}  # where a budget is: medians of 60 still differ by 2% from one measurement to the next
_OTHER_ROUNDS = 8

_NOTE = """\
The loss is the output times fixed weights, summed. hookscope and the hand-written tensor hooks compute statistics of
all activations, gradients of outputs and gradients of parameters; full backward hooks those of the outputs' gradients,
with `.item()`. captum returns the gradients of outputs, and is timed with four statistics of each. Rows are gradients
of outputs; a row is wrong if mean, std, min or max differs from hookscope's, which are compared with those of the
tensor hooks. Making rows of hookscope's result is not timed."""


def measure(device: str) -> Section:
    """Measure every network on a device; values found on CUDA are compared with those found on the CPU."""
    found = [each for network in NETWORKS for each in _measure_network(network, device)]
    return Section("Gradients of every module call, over plain forward and backward", _NOTE, tuple(found))


_TIMM_PICTURES = 8
_TIMM_BUDGET: Budget = (1.50, None)
_TIMM_ROUNDS = 9

_TIMM_NOTE = """\
As above, on small timm networks with many layers, where the cost per module call weighs most: with eight pictures at a
time, and with one picture, over the plain passes with one."""


def measure_timm() -> Section:
    """Measure networks of timm on the CPU."""
    found = [each for network in TIMM_NETWORKS for each in _measure_timm(network)]
    return Section("Gradients of every module call in networks of timm", _TIMM_NOTE, tuple(found))


def _measure_timm(network: str) -> list[Measurement]:
    several = _measure_passes(network, _TIMM_PICTURES, {"hookscope": _TIMM_BUDGET})
    _, one = _measure_passes(network, 1, {})
    return [*several, replace(one, way="hookscope, one picture")]


def _measure_passes(network: str, count: int, budgets: Mapping[str, Budget]) -> list[Measurement]:
    model, batch = seeded(f"timm {network}", count=count)
    weights = torch.randn(count, 1000, generator=torch.Generator().manual_seed(1))
    ways = {
        "plain forward and backward": Ready(None, partial(_step, deepcopy(model), batch, weights), _TIMM_ROUNDS),
        "hookscope": Ready(None, hookscope_way(deepcopy(model), batch, weights, ()), _TIMM_ROUNDS),
    }
    seconds = interleaved(*timeable(ways), CLOCKS["cpu"], partial(_step, model, batch, weights))
    return over_first(network, ways, seconds, budgets)


def _step(network: nn.Module, batch: Tensor, weights: Tensor) -> None:
    """Run forward and backward without hookscope."""
    (network(batch) * weights).sum().backward()
    network.zero_grad()


def gradient_rows(model: nn.Module, batch: Tensor, weights: Tensor) -> tuple[GradientRow, ...]:
    """Return hookscope's gradients of outputs."""

    def loss(output: object, _batch: object) -> Tensor:
        return (first_tensor(output) * weights).sum()

    return inspect_gradients(model, batch, loss, ["*"]).gradients


def statistics_of(rows: Sequence[GradientRow]) -> Rows:
    """Return mean, std, min and max by label, of those that have a gradient."""
    seen = {label(row): row.gradient for row in rows if row.gradient.mean is not None}
    return {name: (each.mean or 0.0, each.std or 0.0, each.min or 0.0, each.max or 0.0) for name, each in seen.items()}


def hookscope_way(model: nn.Module, batch: Tensor, weights: Tensor, _: Sequence[GradientRow]) -> Callable[[], Found]:
    """All statistics by `inspect_gradients`."""
    return lambda: partial(statistics_of, gradient_rows(model, batch, weights))


def tensor_hooks(model: nn.Module, batch: Tensor, weights: Tensor, _: Sequence[GradientRow]) -> Callable[[], Rows]:
    """The same by hooks on the outputs, with `.item()`, written by hand."""

    def run() -> Rows:
        found: dict[str, tuple[float, ...]] = {}
        calls: dict[str, int] = {}

        def keep(row: str, gradient: Tensor) -> None:
            found[row] = by_hand(gradient)[:4]

        def hook(name: str) -> Callable[..., None]:
            def look(_module: nn.Module, _inputs: object, output: object) -> None:
                tensor = first_tensor(output)
                row = row_label(name, calls.setdefault(name, 0), "")
                calls[name] += 1
                by_hand(tensor.detach())
                tensor.register_hook(partial(keep, row))  # type: ignore[no-untyped-call]

            return look

        handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
        (model(batch) * weights).sum().backward()
        for handle in handles:
            handle.remove()
        for parameter in model.parameters():
            if parameter.grad is not None:
                by_hand(parameter.grad)
        model.zero_grad()
        return found

    return run


def full_backward_hooks(
    model: nn.Module, batch: Tensor, weights: Tensor, _: Sequence[GradientRow]
) -> Callable[[], Rows]:
    """The gradients of outputs by full backward hooks with `.item()`; a repeated module's last call comes first."""
    given = batch.clone().requires_grad_()

    def run() -> Rows:
        found: dict[str, list[tuple[float, ...]]] = {}

        def hook(name: str) -> Callable[..., None]:
            return lambda _module, _inputs, outputs: found.setdefault(name, []).insert(0, by_hand(outputs[0])[:4])

        handles = [module.register_full_backward_hook(hook(name)) for name, module in model.named_modules()]
        try:
            (model(given) * weights).sum().backward()
        finally:
            for handle in handles:
                handle.remove()
        model.zero_grad()
        given.grad = None
        return {row_label(name, call, ""): row for name, rows in found.items() for call, row in enumerate(rows)}

    return run


def captum(model: nn.Module, batch: Tensor, weights: Tensor, rows: Sequence[GradientRow]) -> Callable[[], Rows]:
    """The gradients of outputs by captum; it takes modules that return one tensor."""
    layers = list(dict.fromkeys(row.layer for row in rows if row.gradient.mean is not None and not row.slot))
    attribution = import_module("captum.attr").LayerGradientXActivation(
        lambda given: (model(given) * weights).sum(1),
        [model.get_submodule(layer) for layer in layers],
        multiply_by_inputs=False,
    )

    def run() -> Rows:
        gradients = attribution.attribute(batch)
        return fetched(
            {row_label(layer, 0, ""): four(first_tensor(each)) for layer, each in zip(layers, gradients, strict=True)}
        )

    return run


# With the share of turns each takes part in, in percent.
WAYS: dict[str, tuple[Prepare, int]] = {
    "hookscope": (hookscope_way, 100),
    "tensor hooks by hand, .item()": (tensor_hooks, 5),
    "full backward hooks, .item()": (full_backward_hooks, 5),
    "captum LayerGradientXActivation": (captum, 5),
}


def _measure_network(network: str, device: str) -> list[Measurement]:
    model, batch = seeded(network, device)
    on_cpu = (*seeded(network), torch.randn(1, 1000, generator=torch.Generator().manual_seed(1)))
    weights = on_cpu[2].to(device)
    rows = gradient_rows(*on_cpu)
    by_hooks = tensor_hooks(*on_cpu, rows)()

    def prepare(name: str, way: Prepare) -> tuple[Run, Work]:
        run = way(deepcopy(model), batch, weights, rows)
        wanted = by_hooks if name == "hookscope" else statistics_of(rows)
        return run, judge(run(), wanted, tolerance=TOLERANCES[device])

    turns = _ROUNDS.get(network, _OTHER_ROUNDS)
    # On a network of its own, as each way has one: what ran last finds its weights in the cache.
    ways = {"plain forward and backward": Ready(None, partial(_step, deepcopy(model), batch, weights), turns)}
    for name, (way, percent) in WAYS.items():
        ways[name] = ready(max(2, turns * percent // 100), partial(prepare, name, way))
    seconds = interleaved(*timeable(ways), CLOCKS[device], partial(_step, model, batch, weights), warm=True)
    return over_first(network, ways, seconds, _BUDGETS.get((device, network), {}))
