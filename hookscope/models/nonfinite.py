"""Count NaN and Inf in stored tensors, a piece at a time, so that a file larger than memory can be looked through."""

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

# What a processor's own cache holds, about: pieces of 4 MiB took twice as long.
_PIECE_BYTES = 2**19
# Our choice: tensors that are neither dense nor small are views of something else, which nobody stores on purpose.
_GATHER_BYTES_LIMIT = 2**28

# Formats without NaN and Inf (Open Compute Project, "Microscaling Formats", 2023).
_ALWAYS_FINITE = (torch.float4_e2m1fn_x2,)

# Bits of the least magnitude that is not finite, and integers of the same width.
_NOT_FINITE_FROM = {
    torch.float8_e4m3fn: (0x7F, torch.int8),
    torch.float8_e5m2: (0x7C, torch.int8),
    torch.float16: (0x7C00, torch.int16),
    torch.bfloat16: (0x7F80, torch.int16),
    torch.float32: (0x7F80_0000, torch.int32),
    torch.float64: (0x7FF0_0000_0000_0000, torch.int64),
}


def count_stored(file: BinaryIO, begin: int, layout: Tensor) -> tuple[int, int] | None:
    """Count the non-finite elements of a tensor whose bytes lie in a file.

    Args:
        file: Open for reading; its position is moved.
        begin: Where in the file the tensor's storage begins, in bytes.
        layout: The tensor on the meta device: its dtype, sizes, strides and offset say which bytes are its own.

    Returns:
        How many elements are NaN, and how many Inf; None if the tensor is a view too scattered to be gathered.

    Raises:
        EOFError: If the file ends before the tensor does.
    """
    if not layout.numel() or not (layout.is_floating_point() or layout.is_complex()):
        return 0, 0
    begin += int(layout.storage_offset()) * layout.element_size()
    if not _is_dense(layout):
        span = 1 + sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride(), strict=True))
        if span * layout.element_size() > _GATHER_BYTES_LIMIT:
            return None
        bytes_ = b"".join(bytes(piece) for piece in _pieces(file, begin, span * layout.element_size()))
        storage = torch.frombuffer(bytearray(bytes_), dtype=layout.dtype)
        return count(storage.as_strided(layout.shape, layout.stride()))
    nan_count = inf_count = 0
    for piece in _pieces(file, begin, layout.numel() * layout.element_size()):
        found = count(torch.frombuffer(piece, dtype=layout.dtype))
        nan_count, inf_count = nan_count + found[0], inf_count + found[1]
    return nan_count, inf_count


def count(tensor: Tensor) -> tuple[int, int]:
    """Return how many elements of a tensor are NaN, and how many Inf (complex: and not NaN); integers have neither."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype in _ALWAYS_FINITE:
        return 0, 0
    nan_count = inf_count = 0
    flat, length = tensor.reshape(-1), max(1, _PIECE_BYTES // tensor.element_size())
    for begin in range(0, flat.numel(), length):
        piece = flat[begin : begin + length]
        if not _is_finite(piece):
            values = piece if piece.is_complex() or piece.itemsize > 1 else piece.float()  # float8 has no arithmetic
            is_nan = torch.isnan(values)
            nan_count += int(is_nan.sum())
            inf_count += int((torch.isinf(values) & ~is_nan).sum())
    return nan_count, inf_count


def _is_finite(values: Tensor) -> bool:
    """Say whether there is neither NaN nor Inf, from the bits: as whole numbers, both are above all others.

    NumPy and not torch, whose threads wait for each other wherever other programs want the processor too.

    Source: IEEE 754, and "FP8 Formats for Deep Learning" (Micikevicius et al. 2022) for the formats of eight bits.
    """
    real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    if real.dtype not in _NOT_FINITE_FROM:
        real = real.float()
    threshold, integers = _NOT_FINITE_FROM[real.dtype]
    bits = real.resolve_neg().view(integers).numpy()
    magnitudes = bits & np.iinfo(bits.dtype).max
    return not magnitudes.size or bool(magnitudes.max() < threshold)


def _is_dense(layout: Tensor) -> bool:
    """Say whether the elements fill one stretch of the storage, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(zip(layout.stride(), layout.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _pieces(file: BinaryIO, begin: int, byte_count: int) -> Iterator[memoryview]:
    """Yield the bytes in pieces, all in the same work space: each is overwritten by the next."""
    file.seek(begin)
    space = memoryview(bytearray(min(_PIECE_BYTES, byte_count)))
    while byte_count:
        piece = space[: min(len(space), byte_count)]
        if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]  # typeshed leaves it out of BinaryIO
            raise EOFError("the file ends within a tensor")
        byte_count -= len(piece)
        yield piece
