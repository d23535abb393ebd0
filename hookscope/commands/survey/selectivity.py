"""How much of what a channel does depends on the class of the input."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hookscope.commands.survey.channel_totals import ChannelTotals

# A spread between inputs below this share of the mean is rounding in float32.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Selectivity:
    """The best class of each channel, -1 for none, and epsilon squared, NaN for none; (C,)."""

    best: NDArray[np.int64]
    share: NDArray[np.float64]

    @classmethod
    def none(cls, channels: int) -> "Selectivity":
        """Return that of channels without classes."""
        return cls(np.full(channels, -1), np.full(channels, np.nan))


def selectivity(totals: ChannelTotals) -> Selectivity:
    """Return epsilon squared of the means over positions by class (Kelley, PNAS 21, 1935, 554-559).

    With K classes, N inputs, and the sums of squares between classes B and over all T, it is
    (B - (K - 1) (T - B) / (N - K)) / T.
    """
    channels = totals.high.size
    labels = sorted(totals.by_class)
    count = int(totals.pooled.count.max(initial=0))
    if len(labels) < 2 or count <= len(labels):
        return Selectivity.none(channels)
    sizes = np.array([totals.by_class[label][0] for label in labels])
    means = np.stack([totals.by_class[label][1:] for label in labels]) / sizes[:, None]  # (K, C)
    between = (sizes[:, None] * (means - totals.pooled.mean) ** 2).sum(0)
    whole = totals.pooled.deviations
    within = np.maximum(whole - between, 0) / (count - len(labels))
    varies = whole / count > (_ROUNDING * totals.pooled.mean) ** 2
    share = np.full(channels, np.nan)
    np.divide(between - (len(labels) - 1) * within, whole, out=share, where=varies)
    best = np.where(varies, np.array(labels)[means.argmax(0)], -1)
    return Selectivity(best, share)
