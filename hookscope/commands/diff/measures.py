"""Measure the difference of two tensors in float64, with little extra memory."""

import math
import sys
from dataclasses import dataclass, replace
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks.memory import missing_memory
from hookscope.results.differences import ChannelShare, Measures, NonFinite
from hookscope.statistics.difference import squared_sums
from hookscope.statistics.storage import has_memory

# Elements compared at a time. On the CPU few enough that torch uses one thread, and that the float64 copies stay in a
# core's cache.
_CPU_CHUNK = 2**15
_DEVICE_CHUNK = 2**24

# A channel with more than this share of the squared difference is the culprit.
_CULPRIT_FRACTION = 0.5
# Channels are examined if the difference exceeds this share of A's norm; a smaller one is mostly rounding.
_CHANNELS_FROM = 1e-6
# With fewer channels, a single one easily has the largest part.
_FEWEST_CHANNELS = 4

# Squares of float64 values between these neither overflow nor vanish, nor do sums of them.
_SMALL, _LARGE = 1e-140, 1e140

_SQUARES = ("a", "b", "product", "difference")
_COUNTS = ("unequal", "mismatched", "count")


@dataclass(slots=True)
class Sums:
    """Sums over the elements of tensors A and B, from which `measured` follows.

    Attributes:
        a: As in `SquaredSums`, like all fields up to `max_value`.
        count: Number of elements.
        nonfinite: Numbers of `mismatched` elements that are NaN in A, Inf in A, NaN in B and Inf in B.
        scale: The sums of squares and products are of values times this power of two.
    """

    a: float = 0.0
    b: float = 0.0
    product: float = 0.0
    difference: float = 0.0
    max_abs: float = 0.0
    unequal: int = 0
    mismatched: int = 0
    max_at: tuple[int, ...] | None = None
    squares: NDArray[np.float64] | None = None
    max_value: float = 0.0
    count: int = 0
    nonfinite: tuple[int, int, int, int] = (0, 0, 0, 0)
    scale: float = 1.0

    def __add__(self, other: "Sums") -> "Sums":
        """Return the sums over the elements of both."""
        if not self.count:
            return other
        if self.scale != other.scale:
            scale = min(self.scale, other.scale)
            return self._scaled(scale) + other._scaled(scale)
        largest = other if other.max_abs > self.max_abs else self
        squares = other.squares if self.squares is None else self.squares
        if self.squares is not None and other.squares is not None and len(self.squares) == len(other.squares):
            squares = self.squares + other.squares
        added: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in (*_SQUARES, *_COUNTS)}
        added["nonfinite"] = tuple(map(add, self.nonfinite, other.nonfinite))
        return replace(largest, **added, squares=squares)

    def _scaled(self, scale: float) -> "Sums":
        factor = (scale / self.scale) ** 2
        return replace(self, scale=scale, **{name: factor * getattr(self, name) for name in _SQUARES})

    @property
    def norm(self) -> float:
        """The L2 norm of A."""
        return math.sqrt(self.a) / self.scale

    @property
    def relative_l2(self) -> float:
        """As `Measures.relative_l2`."""
        if self.mismatched:
            return math.nan
        if not self.unequal:
            return 0.0
        # The square of a difference below 1.5e-162 is 0 in float64.
        return max(math.sqrt(self.difference / self.a), sys.float_info.min) if self.a else math.inf

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
            cosine=cosine if self.unequal or cosine is None else 1.0,
            max_abs=self.max_abs if has_place else None,
            max_at=self.max_at,
            ulps=ulps,
            unequal_fraction=(self.unequal + self.mismatched) / self.count if self.count else 0.0,
            nonfinite=NonFinite(*self.nonfinite, self.count) if self.mismatched else None,
        )


def sums_of(a: Tensor, b: Tensor, first_input: int = 0, channel_axis: int | None = None) -> Sums | None:
    """Return the sums of two tensors; None if they are not `comparable`.

    Args:
        a: Any shape, also nested.
        b: Same shape.
        first_input: Position in the run of the first input on axis 0.
        channel_axis: The axis that counts channels; None if none does.
    """
    squared = squared_sums(a, b, channel_axis)
    if squared is not None:
        sums = Sums(*squared, count=a.numel())
        if sums.mismatched:
            sums.nonfinite = _nonfinite(a, b)
    elif comparable(a, b):
        return None
    else:
        sums = _sums_of_parts(a, b) if a.is_nested else _sums_by_torch(a, b, channel_axis)
    if first_input and sums.max_at:
        sums.max_at = (sums.max_at[0] + first_input, *sums.max_at[1:])
    return sums


def _sums_of_parts(a: Tensor, b: Tensor) -> Sums:
    whole = Sums()
    for index, parts in enumerate(zip(a.unbind(), b.unbind(), strict=True)):
        sums = sums_of(*parts) or Sums()
        sums.max_at = None if sums.max_at is None else (index, *sums.max_at)
        whole += sums
    return whole


def _sums_by_torch(a: Tensor, b: Tensor, channel_axis: int | None) -> Sums:
    """Return the sums of tensors that compiled code cannot read, some elements at a time."""
    device = a.device if a.device == b.device and a.device.type != "mps" else torch.device("cpu")
    shape, parts = a.shape, 2 if a.is_complex() else 1
    a, b = plain(a, device), plain(b, device)
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    step = _CPU_CHUNK if flat_a.device.type == "cpu" else _DEVICE_CHUNK
    sums = Sums()
    for start in range(0, flat_a.numel(), step):
        sums += _sums_of_chunk(flat_a[start : start + step], flat_b[start : start + step], start, parts)
    if sums.max_at is not None:
        sums.max_at = tuple(map(int, np.unravel_index(sums.max_at[0], shape)))
    if channel_axis is not None and (sums.unequal or sums.mismatched):
        sums.squares = squares_by_channel(a, b, channel_axis)
    return sums


def _sums_of_chunk(a: Tensor, b: Tensor, start: int, parts: int) -> Sums:
    """Return the sums of two vectors, which begin at `start`, in float64; a complex element takes two `parts`."""
    sums = Sums(count=a.numel() // parts)
    exact = None
    if a.dtype == b.dtype and a.dtype in (torch.int64, torch.uint64):  # float64 rounds integers beyond 2**53
        exact = a.view(torch.int64) - b.view(torch.int64)
    is_wide = torch.float64 in (a.dtype, b.dtype)
    a, b = a.double(), b.double()
    differences = a - b
    if exact is not None:
        differences = torch.where(differences.abs() < 2.0**62, exact, differences)  # larger ones may overflow
    if not math.isfinite(float(differences.dot(differences))):
        counted = a.isfinite() & b.isfinite()
        sums.mismatched = int(_any_part(~counted & _differ(a, b), parts).sum())
        sums.nonfinite = _nonfinite(a, b, parts)
        a, b = a.where(counted, 0.0), b.where(counted, 0.0)
        differences = a - b
    sums.unequal = int(_any_part(differences != 0, parts).sum())
    largest = max(float(a.abs().max()), float(b.abs().max())) if is_wide else 1.0
    if largest and not _SMALL < largest < _LARGE:
        sums.scale = 2.0 ** min(max(-math.frexp(largest)[1], -1000), 1000)
        a, b = a * sums.scale, b * sums.scale
        differences = a - b
    sums.difference = float(differences.dot(differences))
    sums.a, sums.b, sums.product = float(a.dot(a)), float(b.dot(b)), float(a.dot(b))
    if sums.unequal:
        magnitudes = differences.abs_() if parts == 1 else torch.hypot(*differences.view(-1, parts).unbind(1))
        at = int(magnitudes.argmax())
        sums.max_abs, sums.max_value = float(magnitudes[at]) / sums.scale, float(a[at * parts]) / sums.scale
        sums.max_at = (start // parts + at,)
    return sums


def _differ(a: Tensor, b: Tensor) -> Tensor:
    return ~((a == b) | (a.isnan() & b.isnan()))


def _any_part(flags: Tensor, parts: int) -> Tensor:
    return flags if parts == 1 else flags.view(-1, parts).any(1)


def _nonfinite(a: Tensor, b: Tensor, parts: int = 1) -> tuple[int, int, int, int]:
    """Return how many elements are NaN and infinite in A, and in B, but not equal in the other tensor."""
    differ, odd = _differ(a, b), (a.isnan(), a.isinf(), b.isnan(), b.isinf())
    nan_a, inf_a, nan_b, inf_b = (int(_any_part(kind & differ, parts).sum()) for kind in odd)
    return nan_a, inf_a, nan_b, inf_b


def comparable(a: Tensor, b: Tensor) -> str:
    """Return why two tensors cannot be compared element by element, in a few words; "" if they can."""
    for side, tensor in (("A", a), ("B", b)):
        if tensor.is_meta:
            return f"{side} is a meta tensor, which has no values"
        if not ((a.is_nested and b.is_nested) or has_memory(tensor)):
            return f"{side} is no dense tensor"
        if not tensor.is_nested and missing_memory(tensor):
            return f"the memory of {side} was freed"
    if _sizes(a) != _sizes(b):
        return "shapes differ"
    if a.is_complex() != b.is_complex():
        return "one is complex, the other real"
    return ""


def _sizes(tensor: Tensor) -> list[torch.Size]:
    return [part.shape for part in tensor.unbind()] if tensor.is_nested else [tensor.shape]


def plain(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a dense tensor on a device, complex values as pairs, quantised values dequantised."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(device)


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the coarser floating dtype of the two; A's if either is not floating."""
    if a == b or not (a.is_floating_point and b.is_floating_point):
        return a
    return max((a, b), key=lambda dtype: torch.finfo(dtype).eps)


def culprit(sums: Sums) -> ChannelShare | None:
    """Return the channel with most of the squared difference; None without one, or if it is mostly rounding."""
    squares = sums.squares
    if squares is None or len(squares) < _FEWEST_CHANNELS or sums.relative_l2 < _CHANNELS_FROM:
        return None
    total = float(squares.sum())
    if not total or not math.isfinite(total):
        return None
    channel = int(squares.argmax())
    fraction = float(squares[channel]) / total
    return ChannelShare(channel, len(squares), fraction) if fraction > _CULPRIT_FRACTION else None


def squares_by_channel(a: Tensor, b: Tensor, axis: int) -> NDArray[np.float64]:
    """Return the squared difference by channel in float64, (C,), computed input by input to save memory."""
    total = torch.zeros(a.shape[axis], dtype=torch.float64)
    for sample, other in zip(a, b, strict=True):
        differences = (sample.double() - other.double()).movedim(axis - 1, 0).reshape(a.shape[axis], -1)
        total += differences.square_().sum(1).cpu()
    return total.numpy()


def _spacing(value: float, dtype: torch.dtype) -> float:
    """Return the distance from a value to the next one in a floating dtype, as `numpy.spacing`."""
    limits = torch.finfo(dtype)
    if abs(value) < limits.tiny:
        return limits.tiny * limits.eps
    return limits.eps * 2.0 ** (math.frexp(value)[1] - 1)
