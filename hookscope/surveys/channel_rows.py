"""Reduce an activation (N, C, ...) to numbers for each input and channel, (N, C), in the hook.

On the CPU compiled code reads float32 values once. What it does not read takes four vectorised passes in the tensor's
dtype. Where float32 would lose digits (values far from zero that hardly vary), channels are summed again about their
means; where a value is not finite, all in float64. On other devices all is done in float64, where one transfer for each
batch brings it over.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks.autograd import plain_arithmetic
from hookscope.hooks.memory import missing_memory
from hookscope.statistics.channels import reduce_by_channel
from hookscope.statistics.library import CANCELLATION_LIMIT

MOST_PLACE_AXES = 3
"""Axes besides batch and channels by which a position is told; those of a clip."""

# Elements that are copied at a time to look for positions.
_SLAB = 2**22

_EXACT = ("high", "low", "mean", "deviations", "finite")


@dataclass(slots=True)
class ChannelRows:
    """Numbers of one output by input and channel, (N, C) float64.

    Attributes:
        places: Shape of the axes besides batch and channels.
        finite: Values that are finite.
        mean: Of the finite values; 0 without any.
        deviations: Sum of squared deviations from that mean.
        high: Greatest finite value; -Inf without any.
        low: Smallest finite value; Inf without any.
        positions: Where the greatest value first is, in row-major order, for those that may enter a list of the
            greatest; -1 for others.
    """

    places: tuple[int, ...]
    finite: NDArray[np.float64]
    mean: NDArray[np.float64]
    deviations: NDArray[np.float64]
    high: NDArray[np.float64]
    low: NDArray[np.float64]
    positions: NDArray[np.int64]

    @property
    def place_count(self) -> int:
        """Values of one channel for one input."""
        return math.prod(self.places)


@dataclass(slots=True)
class RowsOnDevice:
    """The same on an accelerator, (6, N, C): the fields of `ChannelRows` from `high` on, positions last."""

    places: tuple[int, ...]
    values: Tensor = field(repr=False)

    def fetched(self) -> ChannelRows:
        """Move it over."""
        high, low, mean, deviations, finite, positions = self.values.cpu().double().numpy()
        return ChannelRows(self.places, finite, mean, deviations, high, low, positions.astype(np.int64))


Reduced = ChannelRows | RowsOnDevice


def reduce_channels(tensor: Tensor, channel_axis: int, thresholds: NDArray[np.float64] | None) -> "Reduced | None":
    """Reduce an activation; None for one without memory, values or numbers: sparse, nested, quantised or empty.

    Args:
        tensor: (N, ..., C, ...); only read.
        channel_axis: The axis of the channels; axis 0 counts inputs.
        thresholds: Values above which a channel's position is wanted, (C,); None for all.

    Returns:
        `ChannelRows`; `RowsOnDevice` for a tensor on an accelerator.
    """
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or not tensor.numel():
        return None
    with plain_arithmetic():
        values = tensor.detach()
        values = values.dequantize() if values.is_quantized else values
        values = values.abs() if values.is_complex() else values
        if values.dtype not in (torch.float32, torch.float64):
            values = values.float()
        values = values.movedim(channel_axis, 1)
        places = tuple(values.shape[2:])
        if not values.is_cpu:
            return RowsOnDevice(places, _exact(values, with_positions=True))
        rows = _by_compiled_code(values, places, thresholds)
        if rows is not None:
            return rows
        rows = _fast(values, places)
        if rows is None:
            found = [_exact(each.unsqueeze(0), with_positions=False) for each in values]
            rows = _rows(places, torch.cat(found, 1).numpy())
        _locate(rows, values, thresholds)
        return rows


def _rows(places: tuple[int, ...], found: NDArray[np.float64]) -> ChannelRows:
    high, low, mean, deviations, finite = found[: len(_EXACT)]
    return ChannelRows(places, finite, mean, deviations, high, low, np.full(high.shape, -1, np.int64))


def _by_compiled_code(
    values: Tensor, places: tuple[int, ...], thresholds: NDArray[np.float64] | None
) -> ChannelRows | None:
    """Read the values once; None for what compiled code does not read, and for values that are not all finite."""
    found = reduce_by_channel(values, thresholds) if places and not missing_memory(values) else None
    if found is None:
        return None
    finite = np.full(found.high.shape, float(math.prod(places)))
    return ChannelRows(places, finite, found.mean, found.deviations, found.high, found.low, found.positions)


def _fast(values: Tensor, places: tuple[int, ...]) -> ChannelRows | None:
    """Reduce in the tensor's own dtype; None if a value, or a sum, is not finite."""
    axes = tuple(range(2, values.dim()))
    if not axes:
        high = values.double().numpy().copy()
        if not np.isfinite(high).all():
            return None
        ones, zeros = np.ones(high.shape), np.zeros(high.shape)
        return ChannelRows(places, ones, high, zeros, high, high, np.zeros(high.shape, np.int64))
    high, low = (each.double().numpy() for each in (values.amax(axes), values.amin(axes)))
    total = values.sum(axes).double().numpy()
    squares = torch.linalg.vector_norm(values, 2, axes).double().numpy() ** 2
    if not all(np.isfinite(each).all() for each in (high, low, total, squares)):
        return None
    count = float(math.prod(places))
    mean = total / count
    deviations = (squares - total * mean).clip(0)
    finite = np.full(high.shape, count)
    rows = ChannelRows(places, finite, mean, deviations, high, low, np.full(high.shape, -1, np.int64))
    constant = high == low
    rows.mean[constant], rows.deviations[constant] = high[constant], 0.0
    _sum_again(rows, values, squares)
    return rows


def _sum_again(rows: ChannelRows, values: Tensor, squares: NDArray[np.float64]) -> None:
    """Sum the channels anew, about their means, whose squares are mostly those of their means."""
    centres = rows.mean.mean(0)
    deviations = (rows.deviations + rows.finite * (rows.mean - centres) ** 2).sum(0)
    varying = rows.high.max(0) > rows.low.min(0)
    (lossy,) = np.nonzero(varying & (squares.sum(0) > CANCELLATION_LIMIT * deviations))
    if not lossy.size:
        return
    step = max(1, _SLAB // max(1, values[:, 0].numel()))
    count = rows.finite[:, :1]
    for begin in range(0, lossy.size, step):
        at = lossy[begin : begin + step]
        centre = torch.from_numpy(rows.mean[:, at]).to(values.dtype)
        axes = tuple(range(2, values.dim()))
        near = values.index_select(1, torch.from_numpy(at)) - centre.view(*centre.shape, *(1 for _ in axes))
        rest = near.sum(axes).double().numpy() / count  # what the mean was off by
        squared = torch.linalg.vector_norm(near, 2, axes).double().numpy() ** 2
        rows.mean[:, at] = centre.double().numpy() + rest
        rows.deviations[:, at] = (squared - count * rest**2).clip(0)
        constant = rows.high[:, at] == rows.low[:, at]
        rows.mean[:, at] = np.where(constant, rows.high[:, at], rows.mean[:, at])
        rows.deviations[:, at] = np.where(constant, 0.0, rows.deviations[:, at])


def _exact(values: Tensor, *, with_positions: bool) -> Tensor:
    """Return the fields of `_EXACT`, and positions, of (N, C, ...), as (5, N, C) or (6, N, C)."""
    flat = values.flatten(2) if values.dim() > 2 else values.unsqueeze(2)
    wide = flat.to(torch.float32 if values.device.type == "mps" else torch.float64)
    is_finite = wide.isfinite()
    finite = is_finite.sum(2).to(wide.dtype)
    zeroed = torch.where(is_finite, wide, 0)
    mean = zeroed.sum(2) / finite.clamp(min=1)
    deviations = torch.where(is_finite, wide - mean.unsqueeze(2), 0).square_().sum(2)
    high = torch.where(is_finite, wide, -math.inf)
    low = torch.where(is_finite, wide, math.inf).amin(2)
    found = [high.amax(2), low, mean, deviations, finite]
    if with_positions:
        greatest = high == found[0].unsqueeze(2)
        place = torch.arange(high.shape[2], device=high.device)  # `argmax` may return any of equal ones
        found.append(torch.where(greatest, place, high.shape[2]).amin(2).to(wide.dtype))
    return torch.stack(found)


def _locate(rows: ChannelRows, values: Tensor, thresholds: NDArray[np.float64] | None) -> None:
    """Find the positions of the greatest values that are above the thresholds."""
    if not rows.places:
        rows.positions[:] = 0
        return
    wanted = np.isfinite(rows.high) if thresholds is None else rows.high > thresholds
    inputs, channels = np.nonzero(wanted)
    array = values.numpy()
    step = max(1, _SLAB // rows.place_count)
    for begin in range(0, inputs.size, step):
        at = inputs[begin : begin + step], channels[begin : begin + step]
        picked = array[at].reshape(len(at[0]), -1)
        if (rows.finite[at] < rows.place_count).any():
            picked = np.where(np.isfinite(picked), picked, -np.inf)
        rows.positions[at] = picked.argmax(1)
