"""Reduce an activation (N, C, ...) to numbers for each input and channel, (N, C), in the hook.

On the CPU compiled code reads float32 values once. All else is reduced by torch in float64: other dtypes, values that
are not all finite, and tensors on other devices, whose numbers are moved over once for each batch.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks.autograd import plain_arithmetic
from hookscope.statistics.channels import reduce_by_channel
from hookscope.statistics.storage import as_real_floats, is_dense

MOST_PLACE_AXES = 3
"""Outputs with at most this many axes besides batch and channels keep positions: three, as for clips."""


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
        positions: Where the greatest value first is, in row-major order; -1 where it is too small for the lists.
    """

    places: tuple[int, ...]
    finite: NDArray[np.float64]
    mean: NDArray[np.float64]
    deviations: NDArray[np.float64]
    high: NDArray[np.float64]
    low: NDArray[np.float64]
    positions: NDArray[np.int64]


@dataclass(slots=True)
class RowsOnDevice:
    """`ChannelRows` on an accelerator, (6, N, C): finite, mean, deviations, high, low, positions."""

    places: tuple[int, ...]
    values: Tensor = field(repr=False)

    def fetched(self) -> ChannelRows:
        """Copy the numbers to the CPU."""
        finite, mean, deviations, high, low, positions = self.values.cpu().double().numpy()
        return ChannelRows(self.places, finite, mean, deviations, high, low, positions.astype(np.int64))


Reduced = ChannelRows | RowsOnDevice


def real_floats(tensor: Tensor) -> Tensor:
    """Return the values of a dense tensor in a real floating dtype that is wide enough for sums."""
    values = tensor.detach()
    values = values.dequantize() if values.is_quantized else values
    if values.device.type == "mps" and not values.is_floating_point():  # it has no float64
        values = values.cpu()
    return as_real_floats(values)


def reduce_channels(tensor: Tensor, channel_axis: int, thresholds: NDArray[np.float64] | None) -> "Reduced | None":
    """Reduce an activation (N, ..., C, ...); None for a sparse, nested, meta or empty tensor.

    Positions are found where a channel's greatest value exceeds its threshold, (C,): everywhere with None, and with
    thresholds of another length.
    """
    if not is_dense(tensor):
        return None
    with plain_arithmetic():
        values = real_floats(tensor).movedim(channel_axis, 1)
        places = tuple(values.shape[2:])
        if not values.is_cpu:
            return RowsOnDevice(places, _reduced(values))
        if thresholds is not None and thresholds.size != values.shape[1]:
            thresholds = None  # compiled code would read beyond them
        reduced = reduce_by_channel(values if places else values.unsqueeze(2), thresholds)
        if reduced is None:  # input by input, as copies in float64 are large
            return RowsOnDevice(places, torch.cat([_reduced(value.unsqueeze(0)) for value in values], 1)).fetched()
        finite = np.full(reduced.high.shape, float(math.prod(places)))
        return ChannelRows(places, finite, *reduced)


def _reduced(values: Tensor) -> Tensor:
    """Reduce (N, C, ...) to the values of `RowsOnDevice`, (6, N, C)."""
    flat = values.flatten(2) if values.dim() > 2 else values.unsqueeze(2)
    wide = flat.to(torch.float32 if values.device.type == "mps" else torch.float64)
    is_finite = wide.isfinite()
    finite = is_finite.sum(2).to(wide.dtype)
    zeroed = torch.where(is_finite, wide, 0)
    mean = zeroed.sum(2) / finite.clamp(min=1)
    deviations = torch.where(is_finite, wide - mean.unsqueeze(2), 0).square_().sum(2)
    floored = torch.where(is_finite, wide, -math.inf)
    low = torch.where(is_finite, wide, math.inf).amin(2)
    high = floored.amax(2)
    place = torch.arange(floored.shape[2], device=floored.device)  # `argmax` may return any of equal values
    first = torch.where(floored == high.unsqueeze(2), place, floored.shape[2]).amin(2).to(wide.dtype)
    return torch.stack([finite, mean, deviations, high, low, first])
