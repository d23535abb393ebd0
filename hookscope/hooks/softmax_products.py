"""Follow what a softmax returned until it is multiplied with values: attention that a network writes out itself."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hookscope.hooks.callers import argument
from hookscope.hooks.observed import version_of

# What leaves the weights as they are, but for their dtype, dropout, or axes in front of queries and keys.
_SAME = frozenset({"to", "type_as", "type", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach"})
_DROPPED = frozenset({"dropout", "feature_dropout"})
_VIEWED = frozenset({"view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze", "expand"})
_MOVED = frozenset({"transpose", "swapaxes", "swapdims", "permute", "mT"})
_CLEANED = frozenset({"nan_to_num"})
FOLLOWED = _CLEANED | _SAME | _DROPPED | _VIEWED | _MOVED

# Softmaxes that wait for a product: that of class scores never gets one.
_MOST_WAITING = 4


class _Followed(NamedTuple):
    """A tensor that holds a softmax's weights.

    Attributes:
        weights: What the softmax returned, with its axes as the tensor has them.
        keys_last: Whether keys are the last axis, and queries the one before it; else the other way round.
    """

    tensor: "weakref.ref[Tensor]"
    weights: Tensor
    version: int
    keys_last: bool


class Product(NamedTuple):
    """Weights (..., queries, keys) that meet values; `changed` if the network has written into them before."""

    weights: Tensor
    changed: bool
    values: Tensor
    keys_of_values: int


class SoftmaxProducts:
    """The softmaxes of one forward pass that have not met values yet."""

    def __init__(self) -> None:
        """Start with none."""
        self._followed: OrderedDict[int, _Followed] = OrderedDict()

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Tensor) -> bool:
        """Follow what a softmax returned; tell whether it is over the last axis, as attention's is."""
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
        followed = self._known(source)
        if followed is None or not isinstance(output, Tensor) or not isinstance(source, Tensor) or output is source:
            return
        weights, keys_last = followed.weights, followed.keys_last
        if name in _CLEANED:
            weights = output
        elif name in _MOVED or name in _VIEWED:
            weights = func(weights, *args[1:], **{key: value for key, value in kwargs.items() if key != "input"})
            if name in _MOVED:
                keys_last = _moved(followed.keys_last, source, output)
            elif output.shape[-2:] != source.shape[-2:]:
                return
        version = version_of(output) if name in _CLEANED else followed.version
        self._note(output, weights, version, keys_last=keys_last)

    def product(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product | None:
        """Return the weights in a product with values, if one operand is such; they are then followed no further."""
        if name == "einsum":
            return self._einsum(args)
        if len(args) < 2:
            args = (*args, *(kwargs[key] for key in ("other", "mat2", "tensor2") if key in kwargs))
        if len(args) != 2 or not all(isinstance(argument, Tensor) for argument in args):
            return None
        left, right = self._known(args[0]), self._known(args[1])
        if left is not None and left.keys_last:
            return self._met(args[0], left, args[1], -2)
        if right is not None and not right.keys_last:
            return self._met(args[1], right, args[0], -1)
        return None

    def _einsum(self, args: Sequence[Any]) -> Product | None:
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        if not args or not isinstance(args[0], str):
            return None
        inputs, _, made = args[0].replace(" ", "").partition("->")
        names = inputs.split(",")
        for place, (weights, operand) in enumerate(zip(names, operands, strict=False)):
            followed = self._known(operand)
            key = weights[-1:]
            others = [at for at, name in enumerate(names) if at != place and key in name]
            if followed is None or not followed.keys_last or not made or key in made or len(others) != 1:
                continue
            values, given_values = names[others[0]], operands[others[0]]
            met = self._met(operand, followed, given_values, values.index(key) - len(values))
            query = [weight for weight in weights if weight not in values]
            if len(query) == 1 and query[0] in made and "." not in weights + values:
                return _by_names(met, weights, values, query[0])
            return met if weights[-2:-1] in made else None
        return None

    def _met(self, tensor: Tensor, followed: _Followed, values: Tensor, axis: int) -> Product:
        self._followed.pop(id(tensor))
        weights = followed.weights if followed.keys_last else followed.weights.transpose(-2, -1)
        return Product(weights.detach(), version_of(followed.weights) != followed.version, values, axis)

    def _known(self, tensor: object) -> _Followed | None:
        followed = self._followed.get(id(tensor)) if self._followed else None
        return followed if followed is not None and followed.tensor() is tensor else None

    def _note(self, tensor: Tensor, weights: Tensor, version: int, *, keys_last: bool) -> None:
        self._followed[id(tensor)] = _Followed(weakref.ref(tensor), weights, version, keys_last)
        while len(self._followed) > _MOST_WAITING:
            self._followed.popitem(last=False)


def _by_names(met: Product, weights: str, values: str, query: str) -> Product:
    """Return a product by einsum with axes in order: those of both in the values' order, then queries, keys."""
    key, shared = weights[-1], [value for value in values if value in weights[:-1]]
    features = [value for value in values if value not in weights]
    return met._replace(
        weights=met.weights.permute([weights.index(letter) for letter in (*shared, query, key)]),
        values=met.values.permute([values.index(letter) for letter in (*shared, key, *features)]),
        keys_of_values=-1 - len(features),
    )


def _moved(keys_last: bool, tensor: Tensor, output: Tensor) -> bool:
    """Tell whether keys are still the last axis, by the strides of a permuted view."""
    if output.shape[-2:] == tensor.shape[-2:] and output.stride()[-2:] == tensor.stride()[-2:]:
        return keys_last
    return not keys_last
