"""Read the stored elements of tensors of any layout and dtype, in memory order."""

import math
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks.memory import PLAIN_TENSORS, missing_memory
from hookscope.text import an


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole tensor if it is distributed over processes; any other tensor unchanged.

    Sharded parameters, as of FSDP2 and tensor parallelism, are gathered from all processes, one at a time: each process
    must call this for the same tensors in the same order, as their passes do. A reduction of a DTensor itself may cover
    the local shard alone, as `norm().item()` does in torch 2.15.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        tensor = tensor.detach().full_tensor()
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    return tensor


def plain_array(tensor: Tensor) -> NDArray[Any]:
    """Return a dense tensor on the CPU as an array of the same memory, which is only read.

    After `.numpy()`, the network could no longer resize its tensor's storage. Raises RuntimeError as `refuse_wrapper`.
    """
    refuse_wrapper(tensor)
    return np.from_dlpack(tensor)


def refuse_wrapper(tensor: Tensor) -> None:
    """Raise RuntimeError for a tensor without memory of its own, such as a MaskedTensor or FakeTensor.

    Torch would export an arbitrary address, and the functions of a wrapper may warn or raise anything.
    """
    if not has_memory(tensor):
        raise RuntimeError(f"{an(type(tensor).__name__)} has no memory of its own")


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a strided tensor's values in C order, (n,), on the CPU."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)  # `reshape` may keep a stride of 0


def is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor holds a value for each place: it is not sparse, ragged, empty or without memory."""
    return has_memory(tensor) and tensor.numel() > 0


def has_memory(tensor: Tensor) -> bool:
    """Tell whether all values of a tensor, if it has any, lie where its address says: not in parts of a wrapper."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    if type(tensor) in PLAIN_TENSORS or not (tensor.numel() and (tensor.is_cpu or tensor.is_cuda)):
        return True
    return tensor.untyped_storage().device == tensor.device and tensor.data_ptr() != 0


def stored_values(tensor: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...], int]:
    """Return the stored elements as a strided tensor, the logical shape, and the number of zeros that are not stored.

    Raises:
        RuntimeError: If the memory of the tensor was freed, or torch cannot read its layout.
    """
    if missing := missing_memory(tensor):
        raise RuntimeError(missing)
    tensor = gathered(tensor)
    if tensor.layout == torch.strided and not tensor.is_nested:
        return (tensor.dequantize() if tensor.is_quantized else tensor), shape, 0
    if tensor.is_nested:
        parts = tensor.unbind()
        flat = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)
        sizes = zip(*(part.shape for part in parts), strict=True)
        return flat, (len(parts), *(sides[0] if len({*sides}) == 1 else -1 for sides in sizes)), 0
    if tensor.layout == torch.sparse_coo:
        stored = tensor.coalesce().values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        stored = tensor.values()
    else:
        return tensor.to_dense(), shape, 0
    return stored, shape, math.prod(shape) - stored.numel()


def as_real_floats(flat: Tensor) -> Tensor:
    """Return the elements in a real floating dtype that is wide enough for sums."""
    if flat.is_complex():  # measured by modulus, which may overflow the dtype of its parts
        return flat.to(torch.complex128).abs()
    if not flat.is_floating_point():
        return flat.double()
    return flat.float() if flat.itemsize < 4 else flat  # sums in half precision overflow, float8 has no sums


def without_float8(values: Tensor) -> Tensor:
    """Return float8 values as float32, because torch does not promote float8; other values unchanged."""
    return values.float() if values.is_floating_point() and values.itemsize == 1 else values


def in_memory_order(values: Tensor, channel_axis: int | None) -> tuple[Tensor, tuple[int, int, int]]:
    """Permute the axes into memory order, and return the place of the channels.

    Returns:
        The values, contiguous if the tensor is dense, and (before, C, after): the flat values viewed with this shape
        have channels on axis 1. C is 1 without channels.
    """
    position = channel_axis
    if not values.is_contiguous():  # channels_last and transposed tensors may still be dense
        order = sorted(range(values.dim()), key=values.stride, reverse=True)
        values = values.permute(order)
        position = None if channel_axis is None else order.index(channel_axis)
    if position is None:
        return values, (1, 1, values.numel())
    sizes = values.shape
    return values, (math.prod(sizes[:position]), sizes[position], math.prod(sizes[position + 1 :]))
