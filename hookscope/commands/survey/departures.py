"""The first layer where an input leaves its class: it is farther from the mean of the class than chance puts members.

The input and n members of its class are one group. In every layer the distance of each to the mean of the group is
measured in median absolute deviations from the median distance. Were the input like the members, any of the n + 1 would
as often be the one with the greatest such distance over all layers: the share of those that reach as far as the input
does in a layer is the p-value of that layer, for all layers together (the permutation test of the greatest statistic,
Westfall and Young, Resampling-Based Multiple Testing, 1993, section 2.6).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hookscope.results.failures import DEPARTURE_RATE

FEWEST_MEMBERS = 19
"""With fewer members no p-value is as low as `DEPARTURE_RATE`."""

# A spread below this share of the distances is rounding in float32.
_ROUNDING = 1e-6


def departure_p_values(
    features: Sequence[NDArray[np.float32]], members: Sequence[NDArray[np.float32]]
) -> NDArray[np.float64]:
    """Return the p-value of each layer, (L,).

    Args:
        features: Features of the input, (C,) for each layer.
        members: Those of the members of the class, (n, C) for each layer.
    """
    reaches = np.stack(
        [_reaches(vector, others) for vector, others in zip(features, members, strict=True)], 1
    )  # (n + 1, L)
    greatest = reaches.max(1)
    shares: NDArray[np.float64] = (greatest[:, None] >= reaches[0]).mean(0)
    return shares


def first_departure(p_values: NDArray[np.float64]) -> int | None:
    """Return the first layer where an input leaves its class; None for none."""
    (places,) = np.nonzero(p_values <= DEPARTURE_RATE)
    return int(places[0]) if places.size else None


def _reaches(features: NDArray[np.float32], members: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the distances of an input and the members to their mean, in deviations from the median, (n + 1,)."""
    group = np.concatenate([features[None], members]).astype(np.float64)
    group = np.nan_to_num(group)
    distances = np.sqrt(((group - group.mean(0)) ** 2).sum(1))
    apart = distances - np.median(distances)
    spread = max(float(np.median(np.abs(apart))), _ROUNDING * float(np.sqrt((group**2).sum(1)).max()))
    return apart / spread if spread else np.zeros_like(apart)
