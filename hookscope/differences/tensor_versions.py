"""What tensors held at a moment, so that a network can go on before they are compared."""

import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hookscope.hooks.autograd import strided_copy


class TensorVersion(NamedTuple):
    """What a tensor held at a moment.

    Attributes:
        token: Its number; one tensor has the same one until it is modified.
        tensor: The tensor or a copy; None if neither has these values any more.
        is_known: Whether the token was given out before.
    """

    token: int
    tensor: Tensor | None
    is_known: bool = False


@dataclass(slots=True)
class TensorVersions:
    """The versions of tensors that one network has paused at in one forward pass."""

    _count: int = 0
    _known: dict[int, tuple[weakref.ref[Tensor], int, int]] = field(default_factory=dict)
    _copies: weakref.WeakValueDictionary[int, Tensor] = field(default_factory=weakref.WeakValueDictionary)

    def of(self, tensor: Tensor) -> TensorVersion:
        """Return the version that a tensor has now."""
        counts = not tensor.is_inference()
        version = tensor._version if counts else 0
        known = self._known.get(id(tensor)) if counts else None
        if known is not None and known[0]() is tensor and known[1] == version:
            return TensorVersion(known[2], tensor, is_known=True)
        self._count += 1
        if counts:
            self._known[id(tensor)] = weakref.ref(tensor), version, self._count
        return TensorVersion(self._count, tensor)

    def kept(self, version: TensorVersion, *, known_too: bool) -> tuple[TensorVersion, int]:
        """Return a version that lasts, and how many bytes were copied for it.

        Args:
            version: One whose tensor, if it has one, was not modified since.
            known_too: Whether to copy a known version of which no copy is left; otherwise its tensor is None.
        """
        copied = self._copies.get(version.token)
        if copied is not None or version.tensor is None or (version.is_known and not known_too):
            return version._replace(tensor=copied), 0
        copied = strided_copy(version.tensor.detach())
        self._copies[version.token] = copied
        return version._replace(tensor=copied), _bytes(copied)


def _bytes(tensor: Tensor) -> int:
    return 0 if tensor.is_nested or tensor.layout != torch.strided else tensor.nbytes
