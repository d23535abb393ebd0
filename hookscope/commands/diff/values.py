"""Values of tensors at moments of a pass, kept in a spool, and comparisons of A's and B's."""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count
from operator import add
from typing import Any

import torch
from torch import Tensor

from hookscope.commands.diff.measures import Sums, coarser, comparable, sums_of
from hookscope.hooks.autograd import strided_copy
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import RowKey, shape_of
from hookscope.inputs.batches import length_of
from hookscope.inspection.batch_shapes import BatchShapes, Shape
from hookscope.inspection.saved_tensors import SavedTensors, spool_tensor
from hookscope.results.differences import Measures
from hookscope.results.runs.tensors import DTYPES, TensorSpool
from hookscope.statistics.storage import has_memory

A, B, REFERENCE = range(3)
"""Positions of the networks in sequences."""

# Bytes of copies in memory; further copies go to a temporary file.
_MOST_IN_MEMORY = 2 * 2**30

_value_numbers = count()


class Value:
    """The value of a tensor at a moment.

    Attributes:
        read: Returns the tensor or a copy; None if the tensor is gone.
        number: Identifies the value; a tensor has a new one after it is written to.
        sums: Sums by the number of the value of A that this value was compared with; None if not comparable.
    """

    __slots__ = ("dtype", "number", "read", "shape", "sums")

    def __init__(self, tensor: Tensor, read: Callable[[], Any] | None = None) -> None:
        """Take the value of a tensor; without `read`, the tensor must not be overwritten."""
        self.shape, self.dtype, self.number = shape_of(tensor), tensor.dtype, next(_value_numbers)
        self.read = read or (lambda: tensor)
        self.sums: dict[int, Sums | None] = {}

    def sums_with(self, other: "Value", first_input: int, count: int, channel_axis: int | None = None) -> Sums | None:
        """Return the sums of this value, as A, and another, as B; None if they cannot be compared.

        Args:
            other: The value of B.
            first_input: Position in the run of the first input of the batch.
            count: Number of inputs in the batch.
            channel_axis: The axis of channels; None without one.
        """
        cached = other.sums.get(self.number)
        if self.number in other.sums and (cached is None or channel_axis is None or cached.squares is not None):
            return cached
        a, b = self.read(), other.read()
        first = first_input if a is not None and length_of(a) == count else 0
        other.sums[self.number] = sums = None if a is None or b is None else sums_of(a, b, first, channel_axis)
        return sums


class Spool:
    """Copies of tensors: in memory up to a limit, then in a temporary file."""

    def __init__(self) -> None:
        """Start empty; the file is deleted with this object."""
        self._bytes = 0
        self._file: TensorSpool | None = None

    def keep(self, tensor: Tensor) -> Value:
        """Copy a tensor; return the value of the copy."""
        try:
            copied = strided_copy(tensor)
        except RuntimeError:
            if missing_memory(tensor):  # the comparison reports it
                return Value(tensor)
            raise
        self._bytes += copied.nbytes if has_memory(copied) else 0
        if self._bytes > _MOST_IN_MEMORY and has_memory(copied) and str(copied.dtype).removeprefix("torch.") in DTYPES:
            return Value(tensor, self._write(copied))
        return Value(copied)

    def _write(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Write a tensor to the file, with its axes in the order of memory; return a function that reads it."""
        self._file = file = self._file or TensorSpool()
        axes = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        places, device = [axes.index(axis) for axis in range(tensor.dim())], tensor.device
        saved = SavedTensors(file, {"": spool_tensor(file, tensor.permute(axes))})
        return lambda: saved[""].permute(places).to(device)


@dataclass(slots=True)
class Versions:
    """The values of tensors in one pass.

    Attributes:
        make: Makes the value of a tensor that is new or was written to.
    """

    make: Callable[[Tensor], Value]
    _values: dict[int, tuple[weakref.ref[Tensor], int, Value]] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> Value:
        """Return the present value of a tensor."""
        if tensor.is_inference():  # writes to it are not counted
            return self.make(tensor)
        cached, version = self._values.get(id(tensor)), tensor._version
        if cached is not None and cached[0]() is tensor and cached[1] == version:
            return cached[2]
        value = self.make(tensor)
        self._values[id(tensor)] = weakref.ref(tensor), version, value
        return value


@dataclass(slots=True)
class Compared:
    """A tensor of A and its partners in the other networks, compared over batches.

    Attributes:
        sums: By pair of networks.
        dtype: The coarser floating dtype of A and B.
        note: Why A and B cannot be compared in some batch.
        shapes: In how many batches of which size the tensors of A and of B had which shapes; with a `note`, only
            batches that it is about.
        place_b: The place of B's output, for an output of a layer; it alone has the next fields.
        inputs: Sums of A and B for each input tensor of the layer; () if they cannot be compared.
        input_shapes_differ: Whether the shape of an input tensor is different in B.
        added: Sums of A's output and the output of B's layer on A's input; None without them.
        not_added: Why there is no `added`.
    """

    sums: dict[tuple[int, int], Sums] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    note: str = ""
    shapes: dict[tuple[int, Shape, Shape], int] = field(default_factory=dict)
    place_b: RowKey = ("", 0, "")
    inputs: tuple[Sums, ...] = ()
    input_shapes_differ: bool = False
    added: Sums | None = None
    not_added: str = ""

    def merge(self, other: "Compared") -> None:
        """Merge the comparison of other batches."""
        for pair, sums in other.sums.items():
            self.sums[pair] = self.sums.get(pair, Sums()) + sums
        self.dtype = other.dtype
        if other.note and not self.note:
            self.note, self.shapes = other.note, other.shapes
        elif other.note or not self.note:
            for shapes, times in other.shapes.items():
                self.shapes[shapes] = self.shapes.get(shapes, 0) + times
        are_known = len(self.inputs) == len(other.inputs)
        self.inputs = tuple(map(add, self.inputs, other.inputs)) if are_known else ()
        self.input_shapes_differ |= other.input_shapes_differ
        if other.added is not None:
            self.added = other.added if self.added is None else self.added + other.added
        self.not_added = self.not_added or other.not_added

    @property
    def whole_shapes(self) -> tuple[Shape, Shape]:
        """The shapes of A's and B's tensors over all batches."""
        sides = BatchShapes(), BatchShapes()
        for (inputs, *shapes), times in self.shapes.items():
            for seen, shape in zip(sides, shapes, strict=True):
                seen.add(inputs, shape, times)
        return sides[A].whole, sides[B].whole

    @property
    def measures(self) -> Measures | None:
        """The measures of A and B; None if some batch could not be compared."""
        return self.sums[A, B].measured(self.dtype) if (A, B) in self.sums and not self.note else None

    @property
    def errors(self) -> tuple[float | None, float | None]:
        """The relative L2 errors of A and of B against the reference; None if they were not compared."""
        error, error_b = (self.sums.get((network, REFERENCE)) for network in (A, B))
        return None if error is None else error.error, None if error_b is None else error_b.error

    @property
    def input_relative_l2(self) -> float | None:
        """The largest relative L2 difference of any input, infinite where shapes differ; None without inputs."""
        return math.inf if self.input_shapes_differ else largest([sums.relative_l2 for sums in self.inputs])


def largest(norms: Sequence[float]) -> float | None:
    """Return the largest number; NaN if one is, None if there are none."""
    return math.nan if any(map(math.isnan, norms)) else max(norms, default=None)


def compared(
    values: Sequence[Value], first_input: int = 0, count: int = -1, channel_axis: int | None = None
) -> Compared:
    """Compare the values that the networks have in a batch; the other arguments are those of `Value.sums_with`."""
    shapes = count, values[A].shape, values[B].shape
    result = Compared(dtype=coarser(values[A].dtype, values[B].dtype), shapes={shapes: 1})
    for first, other in combinations(range(len(values)), 2):
        axis = channel_axis if (first, other) == (A, B) else None
        sums = values[first].sums_with(values[other], first_input, count, axis)
        if sums is not None:
            result.sums[first, other] = sums
    if (A, B) not in result.sums:
        result.note = comparable(values[A].read(), values[B].read())
    return result
