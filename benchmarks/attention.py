"""`hookscope.attention` over the plain forward pass with its fused kernels, and beside unfused attention by hand."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn

import hookscope
from benchmarks.comparing import UNCHECKED, Ready, over_first, ready, timeable
from benchmarks.findings import Measurement, Section, Work
from benchmarks.networks import seeded
from benchmarks.timing import CLOCKS, Run, interleaved

_MAPS = f"{UNCHECKED}, numbers=False"
_LIMITS = {
    "vit_b_16": {UNCHECKED: 1.5},
    "timm vit_base_patch16_224": {UNCHECKED: 1.2, _MAPS: 1.05},
}
_ROUNDS = 10
# Of a weight: another order of float32 sums stays far below.
_TOLERANCE = 1e-6

_NOTE = """\
One picture: numbers of every head of every block, and the map of the class token in the last block; the plain pass has
fused kernels. By hand, the network runs without them (timm with `fused_attn` off and hooks on `attn_drop`, torchvision
with `need_weights=True`) and keeps the weights, with which hookscope's map is compared. `numbers=False` computes the
class token's row alone."""


def measure() -> Section:
    """Time attention on the CPU, and compare the class token's map with weights by hand."""
    actual: list[Measurement] = []
    for network in _LIMITS:
        actual += _measured(*seeded(network), network)
    return Section("hookscope.attention, over the plain forward pass", _NOTE, tuple(actual))


def _measured(model: nn.Module, picture: Tensor, network: str, rounds: int = _ROUNDS) -> list[Measurement]:
    own = deepcopy(model)

    def plain() -> None:
        with torch.no_grad():
            own(picture)

    by_hand = _by_hand(deepcopy(model), picture)
    expected = by_hand()

    def prepare(*, verify: bool, numbers: bool = True) -> tuple[Run, Work]:
        call = partial(hookscope.attention, deepcopy(model), picture, query="cls", verify=verify, numbers=numbers)
        return call, _judged(torch.from_numpy(call().maps[0].values), expected)

    ways = {
        "plain": Ready(None, plain, rounds),
        "hookscope": ready(rounds, partial(prepare, verify=True)),
        UNCHECKED: ready(rounds, partial(prepare, verify=False)),
        _MAPS: ready(rounds, partial(prepare, verify=False, numbers=False)),
        "unfused, by hand": Ready(None, by_hand, rounds),
    }
    seconds = interleaved(*timeable(ways), CLOCKS["cpu"], plain)
    return over_first(network, ways, seconds, _LIMITS.get(network, {}))


def _judged(actual: Tensor, expected: Tensor) -> Work:
    """Compare the class token's map, (h, w), with the mean over heads of the last block's weights, (heads, T, T)."""
    wanted = expected.mean(0)[0, -actual.numel() :].reshape(actual.shape)
    is_same = bool((actual - wanted).abs().max() <= _TOLERANCE)
    return Work("same" if is_same else "differs", 1, int(not is_same))


def _by_hand(model: nn.Module, picture: Tensor) -> Callable[[], Tensor]:
    """Return what runs the network with unfused attention and returns the last block's weights, (heads, T, T)."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, Tensor]) -> None:
        kept.append(output if isinstance(output, Tensor) else output[1])

    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(_asking_for_weights, with_kwargs=True)
            module.register_forward_hook(keep)
        elif name.endswith(".attn_drop"):
            module.register_forward_hook(keep)
        elif hasattr(module, "fused_attn"):
            module.fused_attn = False

    def run() -> Tensor:
        kept.clear()
        with torch.no_grad():
            model(picture)
        return kept[-1][0]

    return run


def _asking_for_weights(
    _module: nn.Module, args: object, kwargs: dict[str, object]
) -> tuple[object, dict[str, object]]:
    return args, {**kwargs, "need_weights": True, "average_attn_weights": False}
