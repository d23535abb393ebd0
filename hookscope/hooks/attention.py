"""See attention where it is computed, whoever wrote the module: by the torch functions that its forward calls.

A `TorchFunctionMode` sees three entries: `F.scaled_dot_product_attention`, `F.multi_head_attention_forward`, whose
inner calls no mode sees, and a softmax followed by a product with values. Results are unchanged: weights are computed
after the call, from what it was given, without a random number.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookscope.hooks.attention_rows import (
    AttentionRows,
    MultiHeadCall,
    NotExactError,
    of_scaled_dot_product,
    of_weights,
)
from hookscope.hooks.autograd import plain_arithmetic
from hookscope.hooks.callers import argument, operation_name
from hookscope.hooks.operations import forwards, run_networks
from hookscope.hooks.running import ModuleInput, running_modules
from hookscope.hooks.softmax_products import FOLLOWED, Product, SoftmaxProducts

Entry = Literal["scaled dot product", "multi-head", "softmax", "flex"]


class AttentionCall(NamedTuple):
    """One place where attention is computed.

    Attributes:
        entry: What the network called.
        running: The modules of the network that run, the innermost first.
        rows: The weights; None where they cannot be had.
        reason: Why not, in a few words; "" where they can.
        product: The product with values, of a softmax.
        grids: Sizes of maps that convolutions and poolings returned before it, (h, w), in order.
        roll: The size (h, w) of the latest map that was rolled towards its first row and column since the attention
            before, and how far; None without one.
        patches: What the first convolution returned that cuts the picture into patches; None without one.
    """

    entry: Entry
    running: tuple[ModuleInput, ...]
    rows: AttentionRows | None
    reason: str
    product: Product | None
    grids: tuple[tuple[int, int], ...]
    roll: tuple[tuple[int, int], tuple[int, int]] | None
    patches: Tensor | None = None


_GRIDS = frozenset({"conv2d", "avg_pool2d", "max_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"})
_PRODUCTS = frozenset({"matmul", "bmm", "einsum"})
_FUSED = "scaled_dot_product_attention"
_MULTI_HEAD = "multi_head_attention_forward"
_FLEX = "flex_attention"
_LOOKED_AT = _GRIDS | _PRODUCTS | FOLLOWED | {_FUSED, _MULTI_HEAD, _FLEX, "softmax", "roll"}


class AttentionMode(TorchFunctionMode):
    """Hands each attention of a network's forward pass to `take`, as soon as it was computed.

    Attributes:
        softmaxes: Names of the modules that have called a softmax over the last axis.
    """

    def __init__(self, modules: Mapping[str, nn.Module], take: Callable[[AttentionCall], None]) -> None:
        """See the attention of these modules, all of the network by name."""
        super().__init__()
        self._names = {id(module): name for name, module in modules.items()}
        self._take = take
        self.softmaxes: dict[str, None] = {}
        self.restart()

    def restart(self) -> None:
        """Begin another forward pass."""
        self._products = SoftmaxProducts()
        self._grids: list[tuple[int, int]] = []
        self._roll: tuple[tuple[int, int], tuple[int, int]] | None = None
        self._patches: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, and look at it if it is part of an attention."""
        keywords = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # flex attention compiles itself, and traces this function, too
            return func(*args, **keywords)
        name = operation_name(func)
        if name not in _LOOKED_AT:
            return run_networks(func, args, keywords)
        call = MultiHeadCall()
        output = run_networks(call.noting(func) if name == _MULTI_HEAD else func, args, keywords)
        if name == _FUSED:
            self._attention("scaled dot product", of_scaled_dot_product, args, keywords, sys._getframe(1))
        elif name == _MULTI_HEAD:
            self._attention("multi-head", call.rows, args, keywords, sys._getframe(1))
        elif name == _FLEX:
            self._hand_on("flex", sys._getframe(1), None, "flex attention")
        elif name in _PRODUCTS:
            met = self._products.product(name, args, keywords)
            if met is not None:
                self._met(met, sys._getframe(1))
        elif name in FOLLOWED:
            with torch.no_grad():
                self._products.follow(name, func, args, keywords, output)
        elif isinstance(output, Tensor):
            self._note(name, args, keywords, output)
        return output

    def _note(self, name: str, args: Any, kwargs: Mapping[str, Any], output: Tensor) -> None:
        """Note what places of tokens, or the weights of an attention, are known by."""
        if name == "softmax":
            if self._products.begin(args, kwargs, output):
                self.softmaxes |= {module.name: None for module in running_modules(sys._getframe(2), self._names)[:1]}
        elif name in _GRIDS and output.dim() == 4:
            self._grids.append((output.shape[-2], output.shape[-1]))
            if self._patches is None and name == "conv2d" and _cuts_patches(args, kwargs):
                self._patches = output.detach()
        elif name == "roll":
            self._rolled(args, kwargs)

    def _attention(
        self, entry: Entry, rows_of: Callable[..., AttentionRows], args: Any, kwargs: Any, frame: FrameType
    ) -> None:
        try:
            self._hand_on(entry, frame, rows_of(*args, **kwargs), "")
        except NotExactError as error:
            self._hand_on(entry, frame, None, str(error))

    def _met(self, met: Product, frame: FrameType) -> None:
        if met.changed:
            self._hand_on("softmax", frame, None, "its weights are overwritten between softmax and values")
        else:
            self._hand_on("softmax", frame, of_weights(met.weights), "", met)

    def _hand_on(
        self, entry: Entry, frame: FrameType, rows: AttentionRows | None, reason: str, product: Product | None = None
    ) -> None:
        running = running_modules(frame, self._names)
        call = AttentionCall(entry, running, rows, reason, product, tuple(self._grids), self._roll, self._patches)
        self._roll = None
        if not call.running:
            return
        with plain_arithmetic():
            self._take(call)

    def _rolled(self, args: Any, kwargs: Any) -> None:
        """Note a cyclic shift of maps (N, H, W, C) towards their first row and column; shifts back do not count."""
        tensor, shifts, axes = (argument(args, kwargs, at, name) for at, name in enumerate(("input", "shifts", "dims")))
        if not isinstance(tensor, Tensor) or tensor.dim() != 4 or tuple(axes or ()) != (1, 2):
            return
        down, across = (int(shift) for shift in shifts)
        if down <= 0 and across <= 0:
            self._roll = ((tensor.shape[1], tensor.shape[2]), (-down, -across))


def _cuts_patches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a convolution has a kernel as large as its stride, of more than one pixel."""
    weight, stride = argument(args, kwargs, 1, "weight"), argument(args, kwargs, 3, "stride", 1)
    sides = (stride, stride) if isinstance(stride, int) else tuple(stride)
    return isinstance(weight, Tensor) and tuple(weight.shape[2:]) == sides and max(sides) > 1


forwards(AttentionMode.__torch_function__)
