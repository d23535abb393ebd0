"""Sketches as a baseline keeps them: fewer numbers than were measured, as text."""

import base64

import numpy as np
from numpy.typing import NDArray

SKETCH_WIDTH = 64
"""Numbers of a sketch that are kept: sums that are this far apart in that of `hookscope.statistics.sketch` are added.

The relative standard error of a distance is then sqrt(2/64)/2, 9 %. Our choice: a quarter of the bytes at twice the
error, and limits are a power of ten away from what they divide."""


def sketch_text(sketch: NDArray[np.float64] | None) -> str | None:
    """Return a sketch, (256,), as a baseline keeps it: `SKETCH_WIDTH` sums, little-endian float32, in base64.

    None for none, and for sums that float32 does not hold.
    """
    if sketch is None:
        return None
    with np.errstate(over="ignore"):
        sums = sketch.reshape(-1, SKETCH_WIDTH).sum(0).astype("<f4") + np.float32(0)
    return base64.b64encode(sums.tobytes()).decode("ascii") if np.isfinite(sums).all() else None


def sketch_from_text(text: str) -> NDArray[np.float32]:
    """Return what `sketch_text` wrote, (`SKETCH_WIDTH`,); raises ValueError if it is something else."""
    content = base64.b64decode(text, validate=True)
    sums = np.frombuffer(content, "<f4") if len(content) == 4 * SKETCH_WIDTH else None
    if sums is None or not np.isfinite(sums).all():
        raise ValueError(f"not {SKETCH_WIDTH} finite numbers")
    return sums


def check_sketch(text: str | None, place: str) -> None:
    """Raise ValueError, with the place, for text that `sketch_from_text` does not read."""
    try:
        if text is not None:
            sketch_from_text(text)
    except ValueError as error:
        raise ValueError(f"{place} is damaged: {error}") from error
