"""`hookscope.grads` over the plain forward and backward passes, beside hooks by hand and captum."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor, nn

import hookscope
from benchmarks.activations import by_hand, fetched, first_tensor, four
from benchmarks.comparing import UNCHECKED, Layerwise, Way
from benchmarks.findings import Section
from benchmarks.networks import Row, layers_of, statistics_of
from benchmarks.same_work import Found, Rows
from hookscope.results.network import row_label

_NOTE = """\
As for `hookscope.activations`, with the sum of the output as loss. hookscope measures activations, gradients of outputs
and gradients of parameters; so do the tensor hooks by hand. Full backward hooks and captum get gradients of outputs,
captum's timed with mean, std, min and max of each. Rows are gradients of outputs."""


def _plain(model: nn.Module, batch: Tensor) -> None:
    model.zero_grad()
    model(batch).sum().backward()


def _hookscope(model: nn.Module, batch: Tensor, _rows: Sequence[Row], **options: Any) -> Callable[[], Found]:
    return lambda: partial(statistics_of, hookscope.grads(model, batch, loss="sum", **options).gradients)


def _tensor_hooks(model: nn.Module, batch: Tensor, rows: Sequence[Row]) -> Callable[[], Rows]:
    def run() -> Rows:
        actual: dict[str, tuple[float, ...]] = {}
        calls: dict[str, int] = {}

        def keep(row: str, gradient: Tensor) -> None:
            actual[row] = by_hand(gradient)[:4]

        def hook(name: str) -> Callable[..., None]:
            def look(_module: nn.Module, _inputs: object, output: object) -> None:
                tensor = first_tensor(output)
                row = row_label(name, calls.setdefault(name, 0), "")
                calls[name] += 1
                by_hand(tensor.detach())
                tensor.register_hook(partial(keep, row))  # type: ignore[no-untyped-call]

            return look

        handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in layers_of(rows)]
        _plain(model, batch)
        for handle in handles:
            handle.remove()
        for parameter in model.parameters():
            if parameter.grad is not None:
                by_hand(parameter.grad)
        return actual

    return run


def _full_backward_hooks(model: nn.Module, batch: Tensor, rows: Sequence[Row]) -> Callable[[], Rows]:
    """Take the gradients of outputs; those of a repeated module's last call come first."""
    inputs = batch.clone().requires_grad_()

    def run() -> Rows:
        actual: dict[str, list[tuple[float, ...]]] = {}

        def hook(name: str) -> Callable[..., None]:
            return lambda _module, _inputs, outputs: actual.setdefault(name, []).insert(0, by_hand(outputs[0])[:4])

        handles = [model.get_submodule(name).register_full_backward_hook(hook(name)) for name in layers_of(rows)]
        try:
            _plain(model, inputs)
        finally:
            for handle in handles:
                handle.remove()
        inputs.grad = None
        return {row_label(name, call, ""): row for name, rows in actual.items() for call, row in enumerate(rows)}

    return run


def _captum(model: nn.Module, batch: Tensor, rows: Sequence[Row]) -> Callable[[], Rows]:
    """Take the gradients of outputs of the modules that return one tensor."""
    layers = layers_of(row for row in rows if row.statistics.mean is not None and not row.slot)
    attribution = import_module("captum.attr").LayerGradientXActivation(
        lambda inputs: model(inputs).sum(1), [model.get_submodule(layer) for layer in layers], multiply_by_inputs=False
    )

    def run() -> Rows:
        gradients = zip(layers, attribution.attribute(batch), strict=True)
        return fetched({row_label(layer, 0, ""): four(first_tensor(gradient)) for layer, gradient in gradients})

    return run


_BY_HAND = "tensor hooks by hand, .item()"

GRADIENTS = Layerwise(
    plain=_plain,
    rows=lambda model, batch: hookscope.grads(model, batch, loss="sum").gradients,
    ways={
        "hookscope": Way(_hookscope, rounds=0),
        UNCHECKED: Way(partial(_hookscope, verify=False), rounds=0),
        _BY_HAND: Way(_tensor_hooks),
        "full backward hooks, .item()": Way(_full_backward_hooks),
        "captum LayerGradientXActivation": Way(_captum),
    },
    by_hand=_BY_HAND,
    limits={
        "resnet34": 1.35,
        "vit_b_16": 1.12,
        "densenet121": 1.8,
        "efficientnet_b0": 1.9,
        "timm mobilenetv2_050": 3.0,
    },
)


def measure(device: str = "cpu") -> Section:
    """Measure all ways on every network."""
    return Section("hookscope.grads, over plain forward and backward", _NOTE, GRADIENTS.measure(device))
