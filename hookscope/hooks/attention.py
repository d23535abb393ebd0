"""Observe attention where it is computed, in any module: by the torch functions that its forward calls.

A `TorchFunctionMode` sees three entries: `F.scaled_dot_product_attention`, `F.multi_head_attention_forward`, whose
inner calls no mode sees, and a softmax followed by a product with values. Results are unchanged: weights are computed
after the call, from its arguments, without drawing a random number.
"""

import sys
import weakref
from collections import OrderedDict
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
from hookscope.hooks.attributes import argument
from hookscope.hooks.autograd import plain_arithmetic
from hookscope.hooks.callers import operation_name
from hookscope.hooks.observed import version_of
from hookscope.hooks.operations import forwards, run_networks
from hookscope.hooks.running import ModuleInput, running_modules

Entry = Literal["scaled dot product", "multi-head", "softmax", "flex"]


class Product(NamedTuple):
    """Weights (..., queries, keys) times values; `changed`: the network wrote to the weights before it."""

    weights: Tensor
    changed: bool
    values: Tensor
    keys_of_values: int


class AttentionCall(NamedTuple):
    """One place where attention is computed.

    Attributes:
        entry: Which of the functions was called.
        running: The modules of the network that run, the innermost first.
        rows: The weights; None if they cannot be computed.
        reason: Why they cannot be, in a few words; "" if they can.
        product: The product of a softmax with values; None for the other functions.
        grids: Sizes of maps that convolutions and poolings returned before it, (h, w), in order.
        roll: Size (h, w) of the latest map that was rolled towards its first row and column after the previous
            attention, and by how many rows and columns; None without one.
        patches: The output of the first convolution that cuts the picture into patches; None without one.
    """

    entry: Entry
    running: tuple[ModuleInput, ...]
    rows: AttentionRows | None
    reason: str
    product: Product | None
    grids: tuple[tuple[int, int], ...]
    roll: tuple[tuple[int, int], tuple[int, int]] | None
    patches: Tensor | None = None


# Operations that keep the weights, but for their dtype, dropout, or the axes in front of queries and keys.
_SAME = frozenset({"to", "type_as", "type", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach"})
_DROPPED = frozenset({"dropout", "feature_dropout"})
_VIEWED = frozenset({"view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze", "expand"})
_MOVED = frozenset({"transpose", "swapaxes", "swapdims", "permute", "mT"})
_CLEANED = frozenset({"nan_to_num"})
_FOLLOWED = _CLEANED | _SAME | _DROPPED | _VIEWED | _MOVED

# At most this many softmaxes wait for their product; the softmax of class scores never gets one.
_MOST_WAITING = 4

_GRIDS = frozenset({"conv2d", "avg_pool2d", "max_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"})
_PRODUCTS = frozenset({"matmul", "bmm", "einsum"})
_FUSED = "scaled_dot_product_attention"
_MULTI_HEAD = "multi_head_attention_forward"
_FLEX = "flex_attention"
_LOOKED_AT = _GRIDS | _PRODUCTS | _FOLLOWED | {_FUSED, _MULTI_HEAD, _FLEX, "softmax", "roll"}


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
        self._products = _SoftmaxProducts()
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
            product = self._products.product(name, args, keywords)
            if product is not None:
                rows = None if product.changed else of_weights(product.weights)
                reason = "" if rows else "its weights are overwritten between softmax and values"
                self._hand_on("softmax", sys._getframe(1), rows, reason, product if rows else None)
        elif name in _FOLLOWED:
            with torch.no_grad():
                self._products.follow(name, func, args, keywords, output)
        elif isinstance(output, Tensor):
            self._note(name, args, keywords, output)
        return output

    def _note(self, name: str, args: Any, kwargs: Mapping[str, Any], output: Tensor) -> None:
        """Note softmaxes, and the sizes, patches and rolls of maps, from which the places of tokens follow."""
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
        several = axes if isinstance(axes, tuple | list) else ()  # `torch.roll` also takes one number, or none
        if not isinstance(tensor, Tensor) or tensor.dim() != 4 or [axis % 4 for axis in several] != [1, 2]:
            return
        down, across = (int(shift) for shift in shifts)
        if down <= 0 and across <= 0:
            self._roll = ((tensor.shape[1], tensor.shape[2]), (-down, -across))


def _cuts_patches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether kernel and stride are equal and larger than one pixel."""
    weight, stride = argument(args, kwargs, 1, "weight"), argument(args, kwargs, 3, "stride", 1)
    sides = (stride, stride) if isinstance(stride, int) else tuple(stride)
    return isinstance(weight, Tensor) and tuple(weight.shape[2:]) == sides and max(sides) > 1


forwards(AttentionMode.__torch_function__)


class _Followed(NamedTuple):
    """A tensor that holds a softmax's weights.

    Attributes:
        weights: The output of the softmax, with its axes in the tensor's order.
        keys_last: Whether the last two axes are queries and keys; else they are keys and queries.
    """

    tensor: "weakref.ref[Tensor]"
    weights: Tensor
    version: int
    keys_last: bool


class _SoftmaxProducts:
    """The softmaxes of one forward pass that have not met values yet."""

    def __init__(self) -> None:
        self._followed: OrderedDict[int, _Followed] = OrderedDict()

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Tensor) -> bool:
        """Follow the output of a softmax if it is over the last axis, as in attention; return whether it is."""
        axis = argument(args, kwargs, 1, "dim")
        if not isinstance(axis, int) or weights.dim() < 2 or axis not in (-1, weights.dim() - 1):
            return False
        self._note(weights, weights, version_of(weights), keys_last=True)
        return True

    def follow(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], output: object
    ) -> None:
        """Follow weights through an operation that leaves them as they are."""
        source = argument(args, kwargs, 0, "input")
        followed = self._followed_as(source)
        if followed is None or not isinstance(output, Tensor) or not isinstance(source, Tensor) or output is source:
            return
        weights, keys_last, version = followed.weights, followed.keys_last, followed.version
        if name in _CLEANED:
            weights, version = output, version_of(output)
        elif name in _MOVED or name in _VIEWED:
            if name == "view" and not weights.is_contiguous() and version_of(weights) == version:
                weights = weights.contiguous()  # as the tensor may be, which was copied since
                version = version_of(weights)
            weights = func(weights, *args[1:], **{key: value for key, value in kwargs.items() if key != "input"})
            if name in _MOVED:
                keys_last = _are_keys_last(followed.keys_last, source, output)
            elif output.shape[-2:] != source.shape[-2:]:
                return
        self._note(output, weights, version, keys_last=keys_last)

    def product(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product | None:
        """Return the product if it is of weights, which are then followed no further, and values; else None."""
        if name == "einsum":
            return self._einsum(args)
        if len(args) < 2:
            args = (*args, *(kwargs[key] for key in ("input", "other", "mat2", "tensor2") if key in kwargs))
        if len(args) != 2 or not all(isinstance(argument, Tensor) for argument in args):
            return None
        left, right = self._followed_as(args[0]), self._followed_as(args[1])
        if left is not None and left.keys_last:
            return self._product_with(args[0], left, args[1], -2)
        if right is not None and not right.keys_last:
            return self._product_with(args[1], right, args[0], -1)
        return None

    def _einsum(self, args: Sequence[Any]) -> Product | None:
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        if not args or not isinstance(args[0], str):
            return None
        inputs, _, result = args[0].replace(" ", "").partition("->")
        names = inputs.split(",")
        for place, (weights, operand) in enumerate(zip(names, operands, strict=False)):
            followed = self._followed_as(operand)
            key = weights[-1:]
            others = [at for at, letters in enumerate(names) if at != place and key in letters]
            if followed is None or not followed.keys_last or not result or key in result or len(others) != 1:
                continue
            values, given_values = names[others[0]], operands[others[0]]
            product = self._product_with(operand, followed, given_values, values.index(key) - len(values))
            query = [letter for letter in weights if letter not in values]
            if len(query) == 1 and query[0] in result and "." not in weights + values:
                return _by_names(product, weights, values, query[0])
            return product if weights[-2:-1] in result else None
        return None

    def _product_with(self, tensor: Tensor, followed: _Followed, values: Tensor, axis: int) -> Product:
        self._followed.pop(id(tensor))
        weights = followed.weights if followed.keys_last else followed.weights.transpose(-2, -1)
        return Product(weights.detach(), version_of(followed.weights) != followed.version, values, axis)

    def _followed_as(self, tensor: object) -> _Followed | None:
        followed = self._followed.get(id(tensor)) if self._followed else None
        return followed if followed is not None and followed.tensor() is tensor else None

    def _note(self, tensor: Tensor, weights: Tensor, version: int, *, keys_last: bool) -> None:
        self._followed[id(tensor)] = _Followed(weakref.ref(tensor), weights, version, keys_last)
        while len(self._followed) > _MOST_WAITING:
            self._followed.popitem(last=False)


def _by_names(product: Product, weights: str, values: str, query: str) -> Product:
    """Order the axes of an einsum's operands: shared axes as in the values, then queries and keys, or keys and D."""
    key, shared = weights[-1], [letter for letter in values if letter in weights[:-1]]
    features = [letter for letter in values if letter not in weights]
    return product._replace(
        weights=product.weights.permute([weights.index(letter) for letter in (*shared, query, key)]),
        values=product.values.permute([values.index(letter) for letter in (*shared, key, *features)]),
        keys_of_values=-1 - len(features),
    )


def _are_keys_last(keys_last: bool, tensor: Tensor, output: Tensor) -> bool:
    """Tell whether keys are still the last axis, by the strides of a permuted view."""
    if output.shape[-2:] == tensor.shape[-2:] and output.stride()[-2:] == tensor.stride()[-2:]:
        return keys_last
    return not keys_last
