"""Statistics of stored tensors, a piece at a time; what is mapped from a file larger than memory can be, too."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.errors import is_out_of_memory
from hookscope.models.array_values import ARRAY_TYPES, Values, values_of
from hookscope.statistics.reduction import PIECE_ELEMENTS

# Tensors that are neither dense nor small are views of something else, which nobody stores on purpose.
_GATHER_BYTES_LIMIT = 2**28


def values_of_tensor(tensor: Tensor) -> Values | None:
    """Return the statistics of a tensor of any layout; None without data, and for a view too scattered to gather."""
    if tensor.is_meta:
        return None
    if tensor.layout is not torch.strided:
        values = tensor.coalesce().values() if tensor.is_sparse else tensor.values()
        return _values(_in_pieces(values.reshape(-1)), tensor.dtype, 1, zeros=tensor.numel() - values.numel())
    if tensor.is_quantized:
        by_channel = tensor.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        return _values(iter([tensor]) if by_channel else _in_pieces(tensor.reshape(-1)), tensor.dtype, 1)
    tensor = tensor.resolve_conj().resolve_neg()
    held = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]  # others show their elements again
    held = held.permute(sorted(range(held.dim()), key=held.stride, reverse=True))
    if not held.is_contiguous() and held.numel() * held.element_size() > _GATHER_BYTES_LIMIT:
        return None
    return _values(_in_pieces(held.reshape(-1)), tensor.dtype, tensor.numel() // max(held.numel(), 1))


def _values(pieces: Iterable[Tensor], dtype: torch.dtype, repeats: int, *, zeros: int = 0) -> Values | None:
    name = str(dtype).removeprefix("torch.")
    array_type = "complex" if dtype.is_complex else name if name in ARRAY_TYPES else "float32"
    try:
        return values_of(map(_array, pieces), array_type, repeats, zeros)
    except (RuntimeError, TypeError, ValueError) as error:  # a dtype without arithmetic
        if is_out_of_memory(error):
            raise
        is_whole = not (dtype.is_floating_point or dtype.is_complex)
        return Values(0, 0) if is_whole or dtype in _ALWAYS_FINITE else None


def _array(piece: Tensor) -> NDArray[Any]:
    if piece.is_quantized:
        piece = piece.dequantize()
    elif piece.dtype is torch.bfloat16:
        piece = piece.view(torch.uint16)
    elif piece.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        piece = piece.view(torch.uint8)
    elif piece.is_complex():
        piece = piece.to(torch.complex128)
    elif piece.is_floating_point() and piece.itemsize == 1:  # of the other kinds
        piece = piece.float()
    array: NDArray[Any] = piece.numpy()
    return array


# A format without NaN and Inf, and without arithmetic (Open Compute Project, "Microscaling Formats", 2023).
_ALWAYS_FINITE = {torch.float4_e2m1fn_x2}


def _in_pieces(flat: Tensor) -> Iterator[Tensor]:
    for begin in range(0, flat.numel(), PIECE_ELEMENTS):
        yield flat[begin : begin + PIECE_ELEMENTS]
