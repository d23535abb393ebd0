"""Statistics by channel. Those by input and channel come from compiled code that reads a tensor once: channels.c."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.statistics.native import address_of_float32, load_kernel, useful_threads


class ChannelNumbers(NamedTuple):
    """Numbers by input and channel, each (N, C).

    Attributes:
        mean: Of the values.
        deviations: Sum of squared deviations from that mean.
        high: Greatest value.
        low: Smallest value.
        positions: First position of the greatest value, in row-major order; -1 for values up to the threshold.
    """

    mean: NDArray[np.float64]
    deviations: NDArray[np.float64]
    high: NDArray[np.float64]
    low: NDArray[np.float64]
    positions: NDArray[np.int64]


def reduce_by_channel(values: Tensor, thresholds: NDArray[np.float64] | None) -> ChannelNumbers | None:
    """Reduce an activation (N, C, ...) by input and channel.

    Args:
        values: Not empty, and not missing memory; only read.
        thresholds: Positions are found for greatest values above these, (C,); None for all.

    Returns:
        None if a value is not finite, or if compiled code cannot read the tensor: it is not float32 on the CPU, has
        gaps both between channels and between positions, or is expanded along a position.
    """
    kernel, address = load_kernel(), address_of_float32(values)
    step = position_step(values)
    if kernel is None or not address or not step or 1 not in (step, values.stride(1)):
        return None
    inputs, channels = values.shape[:2]
    sizes = inputs, channels, values[0, 0].numel()
    steps = values.stride(0), values.stride(1), step
    mean, deviations, high, low = np.empty((4, inputs, channels))
    numbers = ChannelNumbers(mean, deviations, high, low, np.empty((inputs, channels), np.int64))
    threads = useful_threads(values.numel(), torch.get_num_threads())
    return numbers if kernel.reduce_channels(address, sizes, steps, thresholds, numbers, threads) else None


def position_step(values: Tensor) -> int:
    """Return the step in memory between neighbouring positions of (N, C, ...); 0 if it varies."""
    step = expected = 0
    for size, stride in zip(values.shape[:1:-1], values.stride()[:1:-1], strict=True):
        if size == 1:
            continue
        if not stride or (expected and stride != expected):  # expanded, or with gaps
            return 0
        step = step or stride
        expected = stride * size
    return step or 1


def channel_moments(values: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return mean and population variance of each channel, (C,), of floating values that are not empty.

    Narrower dtypes are computed in float32.
    """
    values = values if values.dtype == torch.float64 else values.float()
    if values.is_cpu and axis == 1:  # more than twice as fast as var_mean
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
        return mean, variance
    others = [dim for dim in range(values.dim()) if dim != axis]
    if not others:
        return values, torch.zeros_like(values)
    variance, mean = torch.var_mean(values, others, correction=0)
    return mean, variance
