"""What the network saw of each input, as a picture: preprocessing undone as far as its colours go."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hookscope.results.inputs import Preprocessing


def thumbnails(values: NDArray[np.floating], preprocessing: Preprocessing) -> list[NDArray[np.uint8]]:
    """Return the pictures in a batch, (H, W, 3) or (H, W), resized and cropped as the network got them.

    Normalisation is undone: value x std + mean, which gives 0 to 1 again; what lies outside is cut off, and what is not
    finite is black. Of a clip the first frame is shown. There are none if `values`, (N, C, H, W) or (N, C, T, H, W) as
    handed to the network, are no pictures of 1 or 3 channels.
    """
    if values.ndim == 5:
        values = values[:, :, 0]
    if values.ndim != 4 or values.shape[1] not in {1, 3} or 0 in values.shape:
        return []
    channels = np.asarray(values, np.float32)
    for factors, undo in ((preprocessing.std, np.multiply), (preprocessing.mean, np.add)):
        if factors:
            channels = undo(channels, _per_channel(factors))
    shades = np.clip(np.nan_to_num(channels, nan=0.0, posinf=0.0, neginf=0.0), 0, 1) * 255 + 0.5
    pixels = shades.astype(np.uint8).transpose(0, 2, 3, 1)  # (N, H, W, C)
    return [each[:, :, 0] if each.shape[2] == 1 else each for each in pixels]


def _per_channel(values: Sequence[float]) -> NDArray[np.float32]:
    return np.array(values, np.float32)[:, None, None]
