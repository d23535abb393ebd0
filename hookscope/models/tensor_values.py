"""Statistics of stored tensors, a piece at a time; what is mapped from a file larger than memory can be, too."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.errors import is_out_of_memory
from hookscope.models.array_values import ARRAY_TYPES, Values, values_of
from hookscope.statistics.reduction import PIECE_ELEMENTS
from hookscope.statistics.storage import in_memory_order, stored_values, without_float8

# Tensors that are neither dense nor small are views of something else, which nobody stores on purpose.
_GATHER_BYTES_LIMIT = 2**28


def values_of_tensor(tensor: Tensor) -> Values | None:
    """Return the statistics of a tensor of any layout; None without data, and for a view too scattered to gather."""
    if tensor.is_meta:
        return None
    if tensor.is_quantized:
        by_channel = tensor.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        return _values((tensor.dequantize() if by_channel else tensor).reshape(-1), tensor.dtype, 1)
    stored, _, zeros = stored_values(tensor, tuple(tensor.shape))
    stored = stored.resolve_conj().resolve_neg()
    held = stored[tuple(slice(None if stride else 1) for stride in stored.stride())]  # others show their elements again
    held, _ = in_memory_order(held, None)
    if not held.is_contiguous() and held.numel() * held.element_size() > _GATHER_BYTES_LIMIT:
        return None
    return _values(held.reshape(-1), tensor.dtype, stored.numel() // max(held.numel(), 1), zeros=zeros)


def _values(flat: Tensor, dtype: torch.dtype, repeats: int, *, zeros: int = 0) -> Values | None:
    name = str(dtype).removeprefix("torch.")
    array_type = "complex" if dtype.is_complex else name if name in ARRAY_TYPES else "float32"
    pieces = torch.split(flat, PIECE_ELEMENTS) if flat.numel() else ()
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
    array: NDArray[Any] = without_float8(piece).numpy()
    return array


# A format without NaN and Inf, and without arithmetic (Open Compute Project, "Microscaling Formats", 2023).
_ALWAYS_FINITE = {torch.float4_e2m1fn_x2}
