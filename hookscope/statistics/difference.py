"""How far two tensors are from each other, by compiled code that reads both once: see difference.c.

What it does not read (other dtypes than float32, other devices, differing strides) is left to its callers.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from hookscope.statistics.native import address_of, layout_of, load_kernel


class SquaredSums(NamedTuple):
    """Sums over the elements of tensors A and B, in float64; what is not finite on either side is not in them.

    Attributes:
        a: Of A squared; `b` and `difference` likewise, of B and of A-B, and `product` of A times B.
        max_abs: Largest magnitude of A-B, at `max_at`; None there if A equals B.
        unequal: Finite elements that differ.
        mismatched: Elements that are not finite on one side and not the same on the other.
        squares: Of A-B, by channel, (C,), NaN where one is not finite; None if no axis counts channels.
    """

    a: float
    b: float
    product: float
    difference: float
    max_abs: float
    unequal: int
    mismatched: int
    max_at: tuple[int, ...] | None
    squares: Tensor | None


_Sums, _Counts = ctypes.c_double * 5, ctypes.c_longlong * 3


class _Pair(ctypes.Structure):
    """`Pair` of difference.c."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("before", "channels", "after")),
        ("squares", ctypes.c_void_p),
        ("sums", ctypes.POINTER(_Sums)),
        ("counts", ctypes.POINTER(_Counts)),
    )


def squared_sums(a: Tensor, b: Tensor, channel_axis: int | None = None) -> SquaredSums | None:
    """Return the sums of two tensors of one shape; None if compiled code cannot read them, or there is none."""
    kernel = load_kernel()
    if kernel is None or not (addresses := _addresses(a, b)):
        return None
    strides = a.stride()
    layout = layout_of(a.shape, strides, channel_axis, 1)
    if layout is None:
        return None
    squares = None if channel_axis is None else torch.zeros(layout.channels, dtype=torch.float64)
    sums, counts = _Sums(), _Counts()
    sizes = layout.before, layout.channels, layout.after
    into = None if squares is None else squares.data_ptr()
    pair = _Pair(*addresses, *sizes, into, ctypes.pointer(sums), ctypes.pointer(counts))
    kernel.compare(ctypes.byref(pair))
    unequal, mismatched, at = counts
    # A dense tensor has the element at an offset where these quotients say, in whatever order its axes lie.
    axes = zip(a.shape, strides, strict=True)
    place = None if at < 0 else tuple([at // step % size if size > 1 else 0 for size, step in axes])
    of_a, of_b, product, difference, largest = sums
    return SquaredSums(of_a, of_b, product, difference, largest, unequal, mismatched, place, squares)


def _addresses(a: Tensor, b: Tensor) -> tuple[int, int] | None:
    """Return where both lie in memory, if they are laid out alike."""
    if a.shape != b.shape or a.stride() != b.stride():
        return None
    addresses = address_of(a), address_of(b)
    return addresses if all(addresses) else None
