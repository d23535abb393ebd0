"""Compare two tensors by compiled code that reads both once: see difference.c.

It reads tensors that are dense, float32, on the CPU and have equal strides; callers handle all others.
"""

import ctypes
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookscope.statistics.native import dense_address_of, layout_of, load_kernel


class SquaredSums(NamedTuple):
    """Sums in float64 over the elements of tensors A and B that are finite in both.

    Attributes:
        a: Sum of squares of A; `b` is B's, `difference` is A-B's. `product` is the sum of A times B.
        max_abs: Largest magnitude of A-B, at `max_at`, where A is `max_value`; `max_at` is None if A equals B.
        unequal: Number of finite elements that differ.
        mismatched: Number of elements that differ and are NaN or infinite on a side.
        squares: Squares of A-B summed by channel, (C,), NaN if a value is not finite; None without channels.
    """

    a: float
    b: float
    product: float
    difference: float
    max_abs: float
    unequal: int
    mismatched: int
    max_at: tuple[int, ...] | None
    squares: NDArray[np.float64] | None
    max_value: float


def squared_sums(a: Tensor, b: Tensor, channel_axis: int | None = None) -> SquaredSums | None:
    """Return the sums of two tensors of equal shape; None without compiled code, or if it cannot read them."""
    kernel = load_kernel()
    address_a, address_b = (0, 0) if kernel is None else (dense_address_of(a), dense_address_of(b))
    if kernel is None or not address_a or not address_b or a.shape != b.shape or a.stride() != b.stride():
        return None
    layout = layout_of(a.shape, a.stride(), channel_axis, 1)
    if layout is None:
        return None
    squares = None if channel_axis is None else np.zeros(layout.channels)
    sizes = layout.before, layout.channels, layout.after
    (of_a, of_b, product, difference, largest), counts = kernel.sum_differences(address_a, address_b, sizes, squares)
    unequal, mismatched, at = counts
    # In a dense tensor, these quotients are the indices of the element at an offset, in any order of axes.
    axes = zip(a.shape, a.stride(), strict=True)
    place = None if at < 0 else tuple([at // step % size if size > 1 else 0 for size, step in axes])
    value = 0.0 if at < 0 else ctypes.c_float.from_address(address_a + 4 * at).value
    return SquaredSums(of_a, of_b, product, difference, largest, unequal, mismatched, place, squares, value)
