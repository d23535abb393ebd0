"""All channels of an activation as one map, and its strongest channel, by compiled code: see maps.c.

Torch reads the activation three times, and asks for memory as large. What compiled code does not read is left to it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hookscope.statistics.native import address_of_float32, load_kernel


class CombinedMaps(NamedTuple):
    """Two maps of each input's activation.

    Attributes:
        combined: The mean over channels, or their root mean square, (n, H, W).
        strongest: The channel with the largest L2 norm, (n, H, W); one with NaN before one with Inf before any other.
        channels: Which channels these are, (n,).
    """

    combined: Tensor
    strongest: Tensor
    channels: Tensor


def combine_maps(maps: Tensor, *, squared: bool, rounding: float) -> CombinedMaps | None:
    """Read maps once; None if compiled code cannot read them, or there is none.

    Args:
        maps: (n, C, H, W), not empty, and not missing memory.
        squared: Whether the combined map is the root mean square over channels; else it is the mean.
        rounding: A mean is 0 where it is no more than this share of the root mean square of an input's values.
    """
    kernel, address = load_kernel(), address_of_float32(maps)
    inputs, channels, height, width = maps.shape
    apart, channel_step, row_step, step = maps.stride()
    if kernel is None or not address or row_step != width * step or 1 not in (channel_step, step):
        return None
    combined, strongest = torch.empty(2, inputs, height, width).unbind()
    sizes = channels, height * width, channel_step, step
    indices = []
    for at in range(inputs):
        values, before = address + at * apart * maps.itemsize, at * height * width * maps.itemsize
        written = combined.data_ptr() + before, strongest.data_ptr() + before
        indices.append(kernel.combine_maps(values, sizes, written, squared=squared, rounding=rounding))
    return CombinedMaps(combined.sqrt_() if squared else combined, strongest, torch.tensor(indices))
