"""The public functions as people call them, on a module and a batch, over the plain passes."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from torch import nn

import hookscope
from benchmarks.comparing import Budget, Ready, over_first, timeable
from benchmarks.findings import Measurement, Section
from benchmarks.networks import seeded
from benchmarks.timing import CLOCKS, Run, interleaved

_DEFAULTS, _UNCHECKED = "hookscope", "hookscope, without the self-check"
# By network and number of pictures.
_CASES = (
    *(("resnet34", 1), ("resnet34", 8), ("vit_b_16", 1), ("densenet121", 1)),
    *(("efficientnet_b0", 1), ("timm mobilenetv2_050", 1)),
)
_ACTIVATIONS: dict[str, Budget] = {
    "resnet34": (1.35, 1.25),
    "vit_b_16": (1.15, 1.10),
    "densenet121": (2.0, 1.6),
    "efficientnet_b0": (2.5, 2.0),
    "timm mobilenetv2_050": (3.5, 2.7),
}
_GRADIENTS: dict[str, Budget] = {
    "resnet34": (1.35, 1.25),
    "vit_b_16": (1.12, 1.08),
    "densenet121": (1.8, 1.5),
    "efficientnet_b0": (1.9, 1.6),
    "timm mobilenetv2_050": (3.0, 2.3),
}
_ROUNDS = {"vit_b_16": 10, "resnet34": 24}
_OTHER_ROUNDS = 16

_OTHERS = ("resnet34", "densenet121", "efficientnet_b0")
_OTHERS_NOTE = """\
The public functions on a module and noise of 224 × 224, with their defaults. `attribute` runs forward and backward, and
its checks several times more; `diff` runs two networks; `check` runs the network three times and reads its weights."""

_NOTE = """\
{} on a module and noise of 224 × 224, with the defaults of the public function: statistics, distributions, sketches and
an overview's maps of every leaf, and the self-check, which runs the network once more. Budgets are without the
self-check. {}"""
_KEPT = "malloc keeps the memory that is freed, as in the other sections."
_AS_IT_IS = "malloc is as glibc sets it, as in a user's process."


def measure_activations(*, keeps_memory: bool, device: str = "cpu") -> Section:
    """Measure `hookscope.activations` over the plain forward pass."""

    def plain(net: nn.Module, batch: torch.Tensor) -> None:
        with torch.no_grad():
            net(batch)

    note = _NOTE.format("`hookscope.activations`", _KEPT if keeps_memory else _AS_IT_IS)
    found = _measured(plain, hookscope.activations, _ACTIVATIONS, device, keeps_memory=keeps_memory)
    return Section(_titled("hookscope.activations, over the plain forward pass", keeps_memory), note, found)


def measure_gradients(*, keeps_memory: bool, device: str = "cpu") -> Section:
    """Measure `hookscope.grads` over the plain forward and backward passes."""

    def plain(net: nn.Module, batch: torch.Tensor) -> None:
        net.zero_grad()
        net(batch).sum().backward()

    note = _NOTE.format("`hookscope.grads` with the sum of the output as loss", _KEPT if keeps_memory else _AS_IT_IS)
    call = partial(hookscope.grads, loss="sum")
    found = _measured(plain, call, _GRADIENTS, device, keeps_memory=keeps_memory)
    return Section(_titled("hookscope.grads, over plain forward and backward", keeps_memory), note, found)


def measure_others() -> Section:
    """Measure `hookscope.attribute`, `diff` and `check` over the plain forward pass."""
    found = []
    for network in _OTHERS:
        model, batch = seeded(network)
        other = deepcopy(model)

        def plain(net: nn.Module = model, batch: torch.Tensor = batch) -> None:
            with torch.no_grad():
                net(batch)

        calls: dict[str, Run] = {
            "attribute": partial(hookscope.attribute, deepcopy(model), batch),
            "attribute, without checks of the map": partial(hookscope.attribute, deepcopy(model), batch, sanity="none"),
            "diff, of two networks": partial(hookscope.diff, deepcopy(model), other, batch),
            "check": partial(hookscope.check, deepcopy(model), images=batch),
        }
        ways = {"plain forward": Ready(None, plain, _OTHER_ROUNDS)}
        ways |= {name: Ready(None, call, _OTHER_ROUNDS) for name, call in calls.items()}
        seconds = interleaved(*timeable(ways), CLOCKS["cpu"], plain)
        found += over_first(network, ways, seconds, {})
    return Section("hookscope.attribute, diff and check, over the plain forward pass", _OTHERS_NOTE, tuple(found))


def _titled(title: str, keeps_memory: bool) -> str:
    return title if keeps_memory else f"{title}, malloc as it is"


def _measured(
    plain: Callable[[nn.Module, torch.Tensor], None],
    call: Callable[..., object],
    budgets: dict[str, Budget],
    device: str,
    *,
    keeps_memory: bool,
) -> tuple[Measurement, ...]:
    found = []
    for network, count in _CASES:
        model, batch = seeded(network, device, count)
        own, checked, unchecked = deepcopy(model), deepcopy(model), deepcopy(model)
        rounds = _ROUNDS.get(network, _OTHER_ROUNDS)
        ways = {
            "plain": Ready(None, partial(plain, own, batch), rounds),
            _DEFAULTS: Ready(None, partial(call, checked, batch), rounds),
            _UNCHECKED: Ready(None, partial(call, unchecked, batch, verify=False), rounds),
        }
        settle = partial(plain, model, batch)
        seconds = interleaved(*timeable(ways), CLOCKS[device], settle, keeps_memory=keeps_memory)
        subject = network if count == 1 else f"{network}, {count} pictures"
        held = {_UNCHECKED: budgets[network]} if count == 1 and keeps_memory and device == "cpu" else {}
        found += over_first(subject, ways, seconds, held)
    return tuple(found)
