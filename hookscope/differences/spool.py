"""What tensors held at moments of one network's pass, kept until another network has been compared with them."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hookscope.hooks.autograd import strided_copy
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import shape_of
from hookscope.inspection.saved_tensors import SavedTensors, spool_tensor
from hookscope.results.runs.tensors import DTYPES, TensorSpool

# Bytes of copies that are held in memory; later ones go to a temporary file.
_MOST_IN_MEMORY = 2 * 2**30


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """What a tensor held at a moment.

    Attributes:
        number: One tensor has the same number until it is written to.
        read: Returns the tensor or a copy; None if the tensor is gone.
    """

    number: int
    shape: tuple[int, ...]
    read: Callable[[], Any]


class Spool:
    """Copies of tensors: in memory up to a limit, then in a temporary file."""

    def __init__(self) -> None:
        """Start empty; the file is deleted with this object."""
        self._numbers = count()
        self._bytes = 0
        self._file: TensorSpool | None = None

    def keep(self, tensor: Tensor) -> Value:
        """Return a value that lasts, whatever the tensor holds later."""
        number, shape = next(self._numbers), shape_of(tensor)
        try:
            copied = strided_copy(tensor)
        except RuntimeError:
            if missing_memory(tensor):  # the comparison says so
                return Value(number, shape, lambda: tensor)
            raise
        is_strided = copied.layout == torch.strided and not (copied.is_nested or copied.is_meta)
        self._bytes += copied.nbytes if is_strided else 0
        if self._bytes > _MOST_IN_MEMORY and is_strided and str(copied.dtype).removeprefix("torch.") in DTYPES:
            return Value(number, shape, self._written(copied))
        return Value(number, shape, lambda: copied)

    def _written(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Write a tensor to the file, its axes as they lie in memory; return what reads it."""
        self._file = file = self._file or TensorSpool()
        axes = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        places, device = [axes.index(axis) for axis in range(tensor.dim())], tensor.device
        saved = SavedTensors(file, {"": spool_tensor(file, tensor.permute(axes))})
        return lambda: saved[""].permute(places).to(device)


@dataclass(slots=True)
class Versions:
    """The values of tensors in one pass.

    Attributes:
        make: Makes the value of a tensor that is new, or was written to.
    """

    make: Callable[[Tensor], Value]
    _known: dict[int, tuple[weakref.ref[Tensor], int, Value]] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> Value:
        """Return the value that a tensor has now."""
        if tensor.is_inference():  # writes to it are not counted
            return self.make(tensor)
        known, version = self._known.get(id(tensor)), tensor._version
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        value = self.make(tensor)
        self._known[id(tensor)] = weakref.ref(tensor), version, value
        return value
