"""Statistics of stored values in NumPy arrays, a piece at a time. No torch, which takes a second to import.

Dense float32 values are read once by the compiled reduction where there is one, others by NumPy in float64.
"""

import ctypes
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookscope.statistics import library
from hookscope.statistics.reduction import Reduction, merge, reduce_array

# NumPy's type for the stored values of each of torch's dtypes. NumPy lacks some of them: see `_widened`.
ARRAY_TYPES = {
    **{f"float{bits}": f"f{bits // 8}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits // 8}" for bits in (8, 16, 32, 64)},
    "bool": "?",
    "bfloat16": "u2",
    "float8_e4m3fn": "u1",
    "float8_e5m2": "u1",
}

# Dtypes that float32 holds exactly. Other whole numbers keep their first sixteen digits in float64.
_EXACT_IN_FLOAT32 = frozenset({"bool", "int8", "uint8", "int16", "uint16", "float16", "bfloat16", "float32"})

# The values of all bytes: e5m2 is the upper half of a float16, e4m3fn has four bits of exponent and no Inf.
_BITS = np.arange(256, dtype=np.uint16)
_FLOAT8: dict[str, NDArray[np.float32]] = {
    "float8_e5m2": (_BITS << 8).view(np.float16).astype(np.float32),
    "float8_e4m3fn": ((_BITS & 0x80) << 8 | (_BITS & 0x7F) << 7).view(np.float16).astype(np.float32) * 256,
}
_FLOAT8["float8_e4m3fn"][[0x7F, 0xFF]] = np.nan


class Values(NamedTuple):
    """Statistics of a tensor's elements; of complex numbers, `zero_count` and later fields describe the moduli.

    A complex number with NaN in either part counts as NaN alone. `zero_count` and the fields after it are None for a
    dtype without arithmetic. `min` and `max` (exact), `mean` and `std` (divided by the number of elements) are of the
    finite elements; None without any.
    """

    nan_count: int
    inf_count: int
    zero_count: int | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None


def values_of(pieces: Iterable[NDArray[np.generic]], dtype: str, repeats: int = 1, zeros: int = 0) -> Values:
    """Return the statistics of a tensor in which every stored element occurs `repeats` times.

    `pieces` are the stored elements in flat arrays, of the type that `ARRAY_TYPES` has for the dtype, or complex.
    `zeros` counts the elements that a sparse tensor does not store.
    """
    total = Reduction((), "", zeros, finite_count=zeros, min=0.0, max=0.0) if zeros else Reduction((), "", 0)
    is_whole = dtype != "complex" and "float" not in dtype
    extremes = [0] * bool(zeros and is_whole)
    for piece in pieces:
        if is_whole:
            extremes += (int(piece.min()), int(piece.max()))
        total = merge(total, _reduced(_widened(piece, dtype)))
    count = total.finite_count
    return Values(
        total.nan_count * repeats,
        (total.element_count - count - total.nan_count) * repeats,
        (total.element_count - total.nonzero_count) * repeats,
        min(extremes) if extremes else total.min if count else None,
        max(extremes) if extremes else total.max if count else None,
        total.mean if count else None,
        total.unscaled(math.sqrt(total.squared_deviations / count)) if count else None,
    )


def _widened(piece: NDArray[np.generic], dtype: str) -> NDArray[np.floating]:
    if dtype == "bfloat16":  # the first half of a float32
        return (piece.astype(np.uint32) << 16).view(np.float32)
    if dtype in _FLOAT8:
        return _FLOAT8[dtype][piece.view(np.uint8)]
    if piece.dtype.kind == "c":
        with np.errstate(over="ignore", invalid="ignore"):  # the modulus of NaN and Inf is Inf
            return np.where(np.isnan(piece), np.nan, np.abs(piece.astype(np.complex128)))
    return piece.astype(np.float32 if dtype in _EXACT_IN_FLOAT32 else np.float64, copy=False)


def _reduced(values: NDArray[np.floating]) -> Reduction:
    if values.dtype == np.float32 and (compiled := _compiled()) is not None and (reduction := compiled(values)):
        return reduction
    return reduce_array(values, Reduction((), "", 0))


@cache
def _compiled() -> Callable[[NDArray[np.floating]], Reduction | None] | None:
    """Return the compiled reduction of finite float32 values, on one thread; None if this installation has none."""
    kernel = library.kernel_of("default")  # five times as fast as the checksums of the same bytes
    if kernel is None:
        return None

    def reduced(values: NDArray[np.floating]) -> Reduction | None:
        values = np.ascontiguousarray(values)
        scalars = np.empty(library.NUMBERS)
        layout = library.Layout(1, 1, values.size, 0, 1)
        results = library.Results(scalars.ctypes.data)
        outcome = kernel.reduce(values.ctypes.data, ctypes.addressof(layout), ctypes.addressof(results))
        if outcome == library.RARE:
            return None
        names = ("mean", "squared_deviations", "min", "max", "abs_sum", "square_sum", "nonzero_count")
        facts: dict[str, Any] = dict(zip(names, scalars.tolist(), strict=True))
        facts |= {"nonzero_count": int(facts["nonzero_count"]), "finite_count": values.size}
        return Reduction((), "", values.size, **facts)

    return reduced
