"""Channels that do what another one does, by their correlation over a sample of the inputs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

THRESHOLD = 0.99
"""From this correlation on, in magnitude, a channel counts as a duplicate."""

FEWEST_INPUTS = 32
"""Of fewer inputs correlations are high by chance."""

MOST_CHANNELS = 8192
"""Of more channels, pairs are too many to look at: logits of a large vocabulary."""

_BLOCK = 512
# A spread below this share of the mean is rounding in float32.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Duplicates:
    """For each channel, the channel that it follows, -1 for none, and their correlation, NaN for none; (C,)."""

    of: NDArray[np.int64]
    correlation: NDArray[np.float64]

    @classmethod
    def none(cls, channels: int) -> "Duplicates":
        """Return that of channels that were not compared."""
        return cls(np.full(channels, -1), np.full(channels, np.nan))


def duplicates(sample: NDArray[np.float32]) -> Duplicates:
    """Return for each channel the lower-numbered one that it follows most closely, if it does: see `THRESHOLD`.

    Args:
        sample: Means over positions, (S, C).
    """
    count, channels = sample.shape
    twins = Duplicates.none(channels)
    if count < FEWEST_INPUTS or not 1 < channels <= MOST_CHANNELS:
        return twins
    wide = sample.astype(np.float64)
    centred = wide - wide.mean(0)
    norms = np.sqrt((centred**2).sum(0))
    varies = norms > _ROUNDING * np.sqrt((wide**2).sum(0))
    unit = np.divide(centred, norms, out=np.zeros_like(centred), where=varies)
    for begin in range(0, channels, _BLOCK):
        end = min(begin + _BLOCK, channels)
        correlations = unit[:, begin:end].T @ unit[:, :end]
        later = np.arange(end) >= np.arange(begin, end)[:, None]
        magnitudes = np.where(later, -1.0, np.abs(correlations))
        nearest = magnitudes.argmax(1)
        rows = np.arange(end - begin)
        (chosen,) = np.nonzero(magnitudes[rows, nearest] >= THRESHOLD)
        twins.of[begin + chosen] = nearest[chosen]
        twins.correlation[begin + chosen] = correlations[chosen, nearest[chosen]].clip(-1, 1)
    return twins
