"""Arrays in a run directory: .npy files of float32, checked before anything in them is used."""

import io
import math
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from hookscope.results.runs.reading import MAX_PICTURE_BYTES, read_inside


def read_array(folder: Path, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return an array of a run.

    Raises:
        InputError: As `read_inside`.
        ValueError: If the file is not the float32 array of this shape.
    """
    content = read_inside(folder, name, MAX_PICTURE_BYTES)
    file = io.BytesIO(content)
    if npy.read_magic(file) != (1, 0):
        raise ValueError("another version")
    found, by_columns, dtype = npy.read_array_header_1_0(file)
    values = np.frombuffer(content, "<f4", offset=file.tell())
    if found != tuple(shape) or by_columns or dtype != np.dtype("<f4") or values.size != math.prod(found):
        raise ValueError("another array")
    return values.reshape(shape)
