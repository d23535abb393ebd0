"""Estimate the distance of two tensors from their count sketches.

A sketch is `SKETCH_WIDTH` numbers, see `hookscope.statistics.sketch`. It is linear in the tensor, so the difference of
two sketches is the sketch of the difference, and the length of a sketch estimates that of its tensor.
"""

import math

import numpy as np
from numpy.typing import NDArray

Sketch = NDArray[np.float32] | NDArray[np.float64]

SKETCH_WIDTH = 256

SQUARE_ERROR = math.sqrt(2 / SKETCH_WIDTH)
"""Relative standard error of an estimated squared norm, 8.8%, at most: with signs that are independent by fours, its
expectation is |x|^2 and its variance 2 / k times the sum over i != j of x_i^2 x_j^2, whichever of them share a sum.

Source: Thorup, Zhang 2004, "Tabulation based 4-universal hashing with applications to second moment estimation"."""

NORM_ERROR = SQUARE_ERROR / 2
"""The same of an estimated norm, 4.4%: the derivative of a square root.

Where a few elements hold most of the norm it is nearly always exact, and far off if two of them share a sum."""

RESOLUTION = 1e-6
"""Tensors nearer to each other than this, in units of their norm, cannot be distinguished: float32 rounds."""


def estimated_distance(first: Sketch, second: Sketch) -> float:
    """Estimate |A - B|, the Euclidean distance of two tensors of one shape.

    Args:
        first: The sketch of A, (256,).
        second: The sketch of B, (256,).

    Returns:
        The distance, within `NORM_ERROR` of the true one as a standard error, or within `RESOLUTION` of |A|; exactly 0
        for equal tensors that were sketched in the same way.
    """
    return float(np.linalg.norm(np.subtract(first, second, dtype=np.float64)))


def estimated_cosine(first: Sketch, second: Sketch, norms: tuple[float, float] | None = None) -> float | None:
    """Estimate the cosine of the angle between A and B.

    It is taken from their distance, so that it is the more exact the nearer they are.

    Args:
        first: The sketch of A, (256,).
        second: The sketch of B, (256,).
        norms: |A| and |B|, if they are known; else they are estimated too.

    Returns:
        -1 to 1; None if A or B is zero. With known norms its standard error is 0.088 |A - B|^2 / (2 |A| |B|) at most.
    """
    if norms is None:
        norms = float(np.linalg.norm(first.astype(np.float64))), float(np.linalg.norm(second.astype(np.float64)))
    scale = 2 * norms[0] * norms[1]
    if not scale:
        return None
    distance = estimated_distance(first, second)
    return max(-1.0, min(1.0, ((norms[0] - norms[1]) ** 2 - distance**2) / scale + 1))
