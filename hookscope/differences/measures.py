"""Measure the difference of two tensors in float64, with little extra memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add

import numpy as np
import torch
from torch import Tensor

from hookscope.hooks.memory import missing_memory
from hookscope.results.differences import ChannelShare, Measures, NonFinite
from hookscope.statistics.difference import SquaredSums, squared_sums

# Elements compared at a time. On the CPU few enough that torch does not wake other threads, and that the float64 copies
# stay in a core's cache.
_CPU_CHUNK = 2**15
_DEVICE_CHUNK = 2**24

# A channel with more than this share of the squared difference is the culprit.
_CULPRIT_FRACTION = 0.5
# Channels are examined if the difference exceeds this share of A's norm: below, it is mostly rounding.
_LOOKS_AT_CHANNELS = 1e-6
# With fewer channels one of them easily has the larger part.
_FEWEST_CHANNELS = 4


@dataclass(slots=True)
class Sums:
    """Sums over the elements of tensors A and B, from which `measured` follows.

    Attributes:
        a: Sum of squares of A; `b` of B, `difference` of A-B; `product` is the sum of A times B.
        max_abs: Largest magnitude of A-B so far, at `max_at`, where A's value is `max_value`.
        unequal: Number of elements that differ.
        count: Number of elements.
        nonfinite: Elements that are not finite in one tensor and not the same in the other, which are not in the sums:
            those that are NaN and infinite in A, then those in B.
        mismatched: How many these are.
        squares: Sum of squares of A-B by channel, (C,), if an axis counts channels.
    """

    a: float = 0.0
    b: float = 0.0
    product: float = 0.0
    difference: float = 0.0
    max_abs: float = 0.0
    max_at: tuple[int, ...] | None = None
    max_value: float = 0.0
    unequal: int = 0
    count: int = 0
    mismatched: int = 0
    nonfinite: tuple[int, int, int, int] = (0, 0, 0, 0)
    squares: Tensor | None = None

    def add(self, a: Tensor, b: Tensor, first_input: int = 0, channel_axis: int | None = None) -> None:
        """Add the elements of two `comparable` tensors.

        Args:
            a: Any shape, also nested.
            b: Same shape.
            first_input: Position in the run of the first input on axis 0.
            channel_axis: The axis that counts channels; None if none does.
        """
        if a.is_nested:
            self._add_parts(a, b, first_input)
            return
        sums = squared_sums(a, b, channel_axis)
        if sums is not None:
            self._add_found(sums, a, first_input)
            if sums.mismatched:
                self._add_nonfinite(a, b)
            return
        device = _common_device(a, b)
        a, b = plain(a, device), plain(b, device)
        shape = tuple(a.shape)
        flat_a, flat_b = a.reshape(-1), b.reshape(-1)
        self.count += flat_a.numel()
        step = _CPU_CHUNK if flat_a.device.type == "cpu" else _DEVICE_CHUNK
        largest = (self.max_abs, -1, 0.0)
        for start in range(0, flat_a.numel(), step):
            part_a, part_b = flat_a[start : start + step], flat_b[start : start + step]
            if torch.equal(part_a, part_b):
                values = part_a.double()
                own = float(values.dot(values))
                if math.isfinite(own):
                    self.a += own
                    self.b += own
                    self.product += own
                    continue
            found = self._add_part(part_a.double(), part_b.double(), start, largest[0])
            largest = found if found[1] >= 0 else largest
        if largest[1] >= 0:
            self.max_abs, at, self.max_value = largest
            place = tuple(map(int, np.unravel_index(at, shape)))
            self.max_at = (place[0] + first_input, *place[1:]) if place else ()
        if channel_axis is not None and (self.unequal or self.mismatched):
            self._add_squares(squares_by_channel(a, b, channel_axis))

    def _add_parts(self, a: Tensor, b: Tensor, first_input: int) -> None:
        """Add the tensors that two nested tensors hold."""
        for index, (part_a, part_b) in enumerate(zip(a.unbind(), b.unbind(), strict=True)):
            part = Sums()
            part.add(part_a, part_b)
            if part.max_at is not None:
                part.max_at = (first_input + index, *part.max_at)
            self.merge(part)

    def _add_found(self, found: SquaredSums, a: Tensor, first_input: int) -> None:
        """Add the sums that compiled code returned."""
        place = found.max_at
        largest = 0.0 if place is None or found.max_abs <= self.max_abs else found.max_abs
        at = (place[0] + first_input, *place[1:]) if place else place
        value = float(a[place]) if largest and place is not None else 0.0
        sums = (found.a, found.b, found.product, found.difference, largest, at, value)
        self.merge(Sums(*sums, found.unequal, a.numel(), found.mismatched, squares=found.squares))

    def _add_squares(self, squares: Tensor | None) -> None:
        if squares is not None and (self.squares is None or len(self.squares) == len(squares)):
            self.squares = squares if self.squares is None else self.squares + squares

    def _add_part(self, a: Tensor, b: Tensor, start: int, at_least: float) -> tuple[float, int, float]:
        """Add some elements, in float64.

        Returns:
            Their largest difference, its place and A's value there; the place is -1 if it is at most `at_least`.
        """
        differences = a - b
        of_difference = float(differences.dot(differences))
        if not math.isfinite(of_difference):
            same = (a == b) | (a.isnan() & b.isnan())
            counted = a.isfinite() & b.isfinite()
            self.mismatched += int((~counted & ~same).sum())
            self._add_nonfinite(a, b)
            a, b = a.where(counted, 0.0), b.where(counted, 0.0)
            differences = a - b
            of_difference = float(differences.dot(differences))
        self.a += float(a.dot(a))
        self.b += float(b.dot(b))
        self.product += float(a.dot(b))
        self.difference += of_difference
        self.unequal += int(differences.count_nonzero())
        largest = max(map(abs, map(float, differences.aminmax())))
        if largest <= at_least:  # finding the place takes longer than all the rest
            return 0.0, -1, 0.0
        at = int(differences.abs_().argmax())
        return largest, start + at, float(a[at])

    def _add_nonfinite(self, a: Tensor, b: Tensor) -> None:
        differ = ~((a == b) | (a.isnan() & b.isnan()))
        found = [int((values & differ).sum()) for values in (a.isnan(), a.isinf(), b.isnan(), b.isinf())]
        self.nonfinite = _added(self.nonfinite, found)

    def merge(self, other: "Sums") -> None:
        """Merge the sums of other elements."""
        if other.max_abs > self.max_abs:
            self.max_abs, self.max_at, self.max_value = other.max_abs, other.max_at, other.max_value
        self.a += other.a
        self.b += other.b
        self.product += other.product
        self.difference += other.difference
        self.unequal += other.unequal
        self.count += other.count
        self.mismatched += other.mismatched
        self.nonfinite = _added(self.nonfinite, other.nonfinite)
        self._add_squares(other.squares)

    @property
    def relative_l2(self) -> float:
        """As `Measures.relative_l2`."""
        if self.mismatched:
            return math.nan
        if not self.difference:
            return 0.0
        return math.sqrt(self.difference / self.a) if self.a else math.inf

    @property
    def error(self) -> float:
        """The relative L2 difference with B as the reference."""
        return replace(self, a=self.b).relative_l2

    def measured(self, dtype: torch.dtype) -> Measures:
        """Return the measures; `dtype` is the coarser of the two, for `ulps`."""
        norms = math.sqrt(self.a) * math.sqrt(self.b)
        cosine = None if not norms else max(min(self.product / norms, 1.0), -1.0)
        has_place = self.unequal or not self.mismatched
        reference = max(abs(self.max_value), self.max_abs)
        ulps = self.max_abs / _spacing(reference, dtype) if dtype.is_floating_point and has_place else None
        return Measures(
            relative_l2=self.relative_l2,
            cosine=cosine if self.difference or cosine is None else 1.0,
            max_abs=self.max_abs if has_place else None,
            max_at=self.max_at,
            ulps=ulps,
            unequal_fraction=(self.unequal + self.mismatched) / self.count if self.count else 0.0,
            nonfinite=NonFinite(*self.nonfinite, self.count) if self.mismatched else None,
        )


def _added(counts: Sequence[int], more: Sequence[int]) -> tuple[int, int, int, int]:
    nan_a, inf_a, nan_b, inf_b = map(add, counts, more)
    return nan_a, inf_a, nan_b, inf_b


def comparable(a: Tensor, b: Tensor) -> str:
    """Return why two tensors cannot be compared element by element, in a few words; "" if they can."""
    for side, tensor in (("A", a), ("B", b)):
        is_dense = tensor.is_nested == (a.is_nested and b.is_nested) and (
            tensor.is_nested or tensor.layout == torch.strided
        )
        if not is_dense or tensor.is_meta:
            return f"{side} is no dense tensor"
        if not tensor.is_nested and missing_memory(tensor):
            return f"the memory of {side} was freed"
    if _sizes(a) != _sizes(b):
        return "shapes differ"
    if a.is_complex() != b.is_complex():
        return "one is complex, the other real"
    return ""


def _sizes(tensor: Tensor) -> list[torch.Size]:
    """Return the shape of a tensor, of a nested one those of its parts."""
    return [each.shape for each in tensor.unbind()] if tensor.is_nested else [tensor.shape]


def plain(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the values of a dense tensor on a device: complex ones as pairs, quantised ones dequantised."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(device)


def _common_device(a: Tensor, b: Tensor) -> torch.device:
    """Return the device to compare two tensors on: theirs if they share one, else the CPU."""
    return a.device if a.device == b.device and a.device.type != "mps" else torch.device("cpu")


def coarser(a: Tensor, b: Tensor) -> torch.dtype:
    """Return the coarser floating dtype of the two; A's dtype if one is not floating."""
    if not (a.dtype.is_floating_point and b.dtype.is_floating_point):
        return a.dtype
    return max((a.dtype, b.dtype), key=lambda each: torch.finfo(each).eps)


def culprit(sums: Sums) -> ChannelShare | None:
    """Return the channel with most of the squared difference; None if there is none, or it is mostly rounding."""
    squares = sums.squares
    if squares is None or len(squares) < _FEWEST_CHANNELS or sums.relative_l2 < _LOOKS_AT_CHANNELS:
        return None
    total = float(squares.sum())
    if not total or not math.isfinite(total):
        return None
    channel = int(squares.argmax())
    fraction = float(squares[channel]) / total
    return ChannelShare(channel, len(squares), fraction) if fraction > _CULPRIT_FRACTION else None


def squares_by_channel(a: Tensor, b: Tensor, axis: int) -> Tensor:
    """Return the squared difference by channel in float64, (C,); one input at a time, to spare memory."""
    device = _common_device(a, b)
    a, b = plain(a, device), plain(b, device)
    if not (a.is_floating_point() and b.is_floating_point()):  # booleans cannot be subtracted, and uint8 wraps around
        a, b = a.double(), b.double()
    total = torch.zeros(a.shape[axis], dtype=torch.float64)
    for one, other in zip(a, b, strict=True):
        differences = (one - other).double().movedim(axis - 1, 0).reshape(a.shape[axis], -1)
        total += differences.square_().sum(1).cpu()
    return total


def _spacing(value: float, dtype: torch.dtype) -> float:
    """Return the distance from a number to the next one in a floating dtype: `numpy.spacing`."""
    limits = torch.finfo(dtype)
    if abs(value) < limits.tiny:
        return limits.tiny * limits.eps
    return limits.eps * 2.0 ** (math.frexp(value)[1] - 1)
