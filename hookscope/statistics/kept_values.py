"""Up to 256 values of each input in a tensor, at fixed places, so that runs can be compared without saved tensors.

The places depend on one input's shape and its channel axis alone, not on the number of inputs, strides or the device.
Up to 256 values per input are all kept. From larger tensors, each of up to 256 channels gets an equal share, to within
one value; of more channels, 256 evenly spread ones get one value each. A channel's positions are cut into as many equal
parts as it has values. The place within a part varies by channel, so that corners of maps are not favoured.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_KEPT = 256
_UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

# Any number of multiples of the golden ratio, modulo 1, is spread evenly. In units of 2^-16.
_GOLDEN, _UNITS = 40503, 2**16

# Cached shapes: a network has some dozens.
_MOST_SHAPES = 512


def kept_values(tensor: Tensor, channel_axis: int | None = None, inputs: int = 1) -> NDArray[np.floating] | None:
    """Return the kept values of each input, (N, K), as floats on the CPU; integers become float64.

    Args:
        tensor: Any shape, dtype, strides and device that lacks no memory, see `missing_memory`; only read. Complex
            elements count as two.
        channel_axis: The axis that counts channels; None for none.
        inputs: Number of inputs in the tensor, if its shape fits: see `by_input`.

    Returns:
        None for sparse, ragged and meta tensors.
    """
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        return None
    if not tensor.numel():
        return np.zeros((1, 0), np.float32)
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    dtype = tensor.dtype
    is_float8 = dtype.is_floating_point and dtype.itemsize == 1
    if is_float8 or dtype in _UNSIGNED:  # torch cannot `take` from these
        tensor = tensor.view(torch.uint8 if is_float8 else _UNSIGNED[dtype])
    values, channel_axis = by_input(tensor, channel_axis, inputs)
    taken = values.take(kept_places(values.shape, channel_axis, values.device)).view(dtype)
    if dtype.is_floating_point and dtype.itemsize < 4:
        taken = taken.float()
    array = taken.cpu().numpy()
    return array if array.dtype.kind == "f" else array.astype(np.float64)


def joined(batches: Sequence[NDArray[np.floating]]) -> NDArray[np.floating]:
    """Return the values of several batches as one array, (N, K); (1, all values) if inputs differ in shape."""
    if len(batches) == 1:
        return batches[0]
    if len({batch.shape[1] for batch in batches}) > 1:
        return np.concatenate([batch.reshape(1, -1) for batch in batches], 1)
    return np.concatenate(batches)


def by_input(tensor: Tensor, channel_axis: int | None, inputs: int) -> tuple[Tensor, int | None]:
    """Return a view of a tensor as (inputs, ...), and the axis that counts channels there.

    Axis 0 counts inputs, or several slices of each input, such as windows; or axis 1 of (T, N, D) counts them. Any
    other tensor counts as one input.
    """
    slices = tensor.size(0) if tensor.dim() else 0
    if slices != inputs and tensor.dim() == 3 and tensor.size(1) == inputs:
        return tensor.transpose(0, 1), None if channel_axis is None else (1, None, 2)[channel_axis]
    if slices == inputs:
        return tensor, channel_axis or None
    axis = None if channel_axis is None else channel_axis + 1
    if not slices or slices % inputs:
        return tensor[None], axis
    return tensor.view(inputs, slices // inputs, *tensor.shape[1:]), axis


@lru_cache(_MOST_SHAPES)
def kept_places(shape: torch.Size, channel_axis: int | None, device: torch.device) -> Tensor:
    """Return the flat indices of the kept values in a tensor (N, ...): (N, K).

    They are computed on the device, because copying them to an accelerator would wait for it.
    """
    size = math.prod(shape[1:])
    channels, inner = (1, 1) if channel_axis is None else (shape[channel_axis], math.prod(shape[channel_axis + 1 :]))
    kept_channels, space = min(channels, MOST_KEPT), size // max(channels, 1)
    with torch.inference_mode(False), torch.no_grad():
        number = torch.arange(min(size, MOST_KEPT), device=device)
        places = number
        if size > MOST_KEPT:
            row, part = number % kept_channels, number // kept_channels
            parts = (MOST_KEPT - 1 - row) // kept_channels + 1
            begin, end = part * space // parts, (part + 1) * space // parts
            at = begin + number * _GOLDEN % _UNITS * (end - begin) // _UNITS
            channel = row * channels // kept_channels
            places = (at // inner * channels + channel) * inner + at % inner
        return torch.arange(shape[0], device=device)[:, None] * size + places
