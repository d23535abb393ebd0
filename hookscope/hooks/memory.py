"""Check that a tensor's memory is as large as its shape needs: networks may free or shrink what they return."""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})
"""The classes of tensors that override nothing."""
# How many elements share a byte.
_PACKED = {torch.quint4x2: 2, torch.quint2x4: 4}


def missing_memory(tensor: Tensor) -> str:
    """Return why reading a tensor would read memory that is not its own; "" if it would not.

    Torch checks a view against its storage only when the view is made. Sparse, nested and wrapper tensors are looked
    into; those without memory of their own, such as meta tensors, lack none.
    """
    try:
        if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided and not tensor.is_nested:  # nearly always
            held, offset = tensor.untyped_storage().nbytes(), tensor.storage_offset()
            if tensor.is_contiguous() and held >= offset * tensor.itemsize + tensor.nbytes:
                return ""
            return _lacking(tensor, _end_of(tensor))
        return next(filter(None, _lacking_in_parts(tensor)), "")
    except (RuntimeError, TypeError, AttributeError):  # no storage of its own, such as inside `torch.func`
        return ""


def _lacking(tensor: Tensor, last: int) -> str:
    """Return a message if the storage of a tensor ends before its element `last`, counted from 1; else ""."""
    held, needed = tensor.untyped_storage().nbytes(), last * tensor.itemsize
    if held >= needed or tensor.is_meta or held >= -(-needed // _PACKED.get(tensor.dtype, 1)):
        return ""
    return f"its memory was freed or shrunk: {held} bytes are left of {needed}"


def _end_of(tensor: Tensor) -> int:
    """Return where in its storage the last element of a strided tensor lies, counted from 1; 0 for an empty tensor."""
    extent = tensor.numel() if tensor.is_contiguous() else _extent(tensor.shape, tensor.stride())
    return int(tensor.storage_offset()) + extent if extent else 0


@lru_cache(maxsize=1024)
def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements lie from the first to the last in memory, both included; 0 for an empty tensor."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) if all(shape) else 0


def parts_of(tensor: Tensor) -> tuple[Tensor, ...] | None:
    """Return the tensors that a sparse tensor or a wrapper consists of; None for one with memory of its own."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return tuple(getattr(tensor, name) for name in names)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return None


def _lacking_in_parts(tensor: Tensor) -> Iterator[str]:
    parts = parts_of(tensor)
    if parts is not None:
        yield from map(missing_memory, parts)
    elif tensor.is_nested:
        described = tensor._nested_tensor_size(), tensor._nested_tensor_strides()
        extents = [_extent(tuple(size), tuple(step)) for size, step in zip(*map(Tensor.tolist, described), strict=True)]
        begins = tensor._nested_tensor_storage_offsets().tolist()
        yield _lacking(tensor, max(map(sum, zip(begins, extents, strict=True)), default=0))
    elif tensor.layout == torch.strided:
        yield _lacking(tensor, _end_of(tensor))
