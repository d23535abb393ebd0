"""Statistics of stored tensors, a piece at a time, so that a file larger than memory can be looked through."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.errors import is_out_of_memory
from hookscope.models.array_values import ARRAY_TYPES, PIECE_ELEMENTS, Values, values_of

# Tensors that are neither dense nor small are views of something else, which nobody stores on purpose.
_GATHER_BYTES_LIMIT = 2**28


class ValueReader:
    """Reads tensors' values; holds the work space for it. Each thread needs one."""

    def __init__(self) -> None:
        """Start without work space."""
        self._space = bytearray()

    def in_file(self, file: BinaryIO, begin: int, layout: Tensor) -> Values | None:
        """Return the statistics of a strided tensor in a file; None for a view too scattered to be gathered.

        Its storage begins at byte `begin` of the file; dtype, sizes, strides and offset of `layout`, a tensor on any
        device, say which bytes are its own. Raises EOFError if the file ends before the tensor does.
        """
        sizes, strides, repeats = _distinct(layout)
        begin += int(layout.storage_offset()) * layout.element_size()
        if not layout.numel() or _is_dense(sizes, strides):
            count = math.prod(sizes) if layout.numel() else 0
            return self._values(self._pieces(file, begin, layout.dtype, count), layout.dtype, repeats)
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if max(span, math.prod(sizes)) * layout.element_size() > _GATHER_BYTES_LIMIT:
            return None
        gathered = torch.cat([piece.clone() for piece in self._pieces(file, begin, layout.dtype, span)])
        return self._values(_in_pieces(gathered.as_strided(sizes, strides).reshape(-1)), layout.dtype, repeats)

    def in_memory(self, tensor: Tensor) -> Values | None:
        """Return the statistics of a tensor in memory, of any layout; None as for `in_file`, and without data."""
        if tensor.is_meta:
            return None
        if tensor.layout is not torch.strided:
            values = tensor.coalesce().values() if tensor.is_sparse else tensor.values()
            return self._values(_in_pieces(values.reshape(-1)), tensor.dtype, 1, zeros=tensor.numel() - values.numel())
        if tensor.is_quantized:
            by_channel = tensor.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric)
            return self._values(iter([tensor]) if by_channel else _in_pieces(tensor.reshape(-1)), tensor.dtype, 1)
        tensor = tensor.resolve_conj().resolve_neg()
        sizes, strides, repeats = _distinct(tensor)
        if not tensor.numel() or _is_dense(sizes, strides):
            flat = tensor.as_strided((math.prod(sizes) if tensor.numel() else 0,), (1,))
        elif math.prod(sizes) * tensor.element_size() > _GATHER_BYTES_LIMIT:
            return None
        else:
            flat = tensor.as_strided(sizes, strides).reshape(-1)
        return self._values(_in_pieces(flat), tensor.dtype, repeats)

    def _pieces(self, file: BinaryIO, begin: int, dtype: torch.dtype, count: int) -> Iterator[Tensor]:
        """Yield so many elements of a file in pieces, all in the same work space: each is overwritten by the next."""
        file.seek(begin)
        self._space = self._space or bytearray(PIECE_ELEMENTS * 16)
        while count:
            piece = memoryview(self._space)[: min(PIECE_ELEMENTS, count) * dtype.itemsize]
            if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]  # typeshed leaves it out of BinaryIO
                raise EOFError("the file ends within a tensor")
            count -= len(piece) // dtype.itemsize
            yield torch.frombuffer(piece, dtype=dtype)

    def _values(self, pieces: Iterable[Tensor], dtype: torch.dtype, repeats: int, *, zeros: int = 0) -> Values | None:
        """Return the statistics of the pieces of a tensor, every element `repeats` times, and of further zeros."""
        name = str(dtype).removeprefix("torch.")
        known = "complex" if dtype.is_complex else name if name in ARRAY_TYPES else "float32"
        try:
            return values_of(map(_array, pieces), known, repeats, zeros)
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
    elif piece.is_complex():
        piece = piece.to(torch.complex128)
    elif piece.is_floating_point() and piece.itemsize == 1:  # NumPy has no float8
        piece = piece.float()
    array: NDArray[Any] = piece.numpy()
    return array


# A format without NaN and Inf, and without arithmetic (Open Compute Project, "Microscaling Formats", 2023).
_ALWAYS_FINITE = {torch.float4_e2m1fn_x2}


def _distinct(layout: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return sizes and strides without the axes along which nothing differs, and how often each element is there."""
    axes = [(size, stride) for size, stride in zip(layout.shape, layout.stride(), strict=True) if size != 1]
    kept = [(size, stride) for size, stride in axes if stride]
    repeats = math.prod(size for size, stride in axes if not stride)
    return tuple(size for size, _ in kept), tuple(stride for _, stride in kept), repeats


def _is_dense(sizes: Iterable[int], strides: Iterable[int]) -> bool:
    """Return whether the elements fill one stretch of the storage, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if stride != expected:
            return False
        expected *= size
    return True


def _in_pieces(flat: Tensor) -> Iterator[Tensor]:
    for begin in range(0, flat.numel(), PIECE_ELEMENTS):
        yield flat[begin : begin + PIECE_ELEMENTS]
