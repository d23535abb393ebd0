"""Maps of A-B for a picture: of rows where a difference begins, and of others over the depth."""

import math
from collections.abc import Collection

import numpy as np

from hookscope.reporting.grids import block_means
from hookscope.reporting.overviews.maps import MOST_STAGES
from hookscope.results.activations import FeatureMaps, MapSummary
from hookscope.results.differences import Differences, spread

_LONGEST_SIDE = 160  # pixels of a map, as in `MapSummary`

LEGEND = (
    "A-B for the first input. Above, the mean of |A-B| over channels; below, A-B in the channel where it is largest. "
    "Each map has its own scale, shown below it; 0 is the darkest colour. NaN and Inf are magenta."
)
LEGEND_OF_SEQUENCES = "Of a sequence, each row is a channel and each column a step or a token."


def summarised(maps: FeatureMaps, kind: str) -> MapSummary:
    """Reduce A-B, (C, H, W) or (C, T, H, W) of a clip, to the mean of |A-B| and A-B in its largest channel."""
    values = maps.values[:, maps.values.shape[1] // 2] if maps.arrangement == "frames" else maps.values
    with np.errstate(invalid="ignore", over="ignore"):
        strength = np.square(values, dtype=np.float64).sum(axis=(1, 2))
        mean = np.abs(values).mean(axis=0, dtype=np.float64)
    channel = int(np.nan_to_num(strength, nan=math.inf).argmax())
    step = -(-max(mean.shape) // _LONGEST_SIDE)
    height, width = mean.shape
    return MapSummary(
        maps.row,
        maps.label,
        kind,
        maps.input_index,
        block_means(mean, step),
        block_means(values[channel], step),
        channel,
        maps.channel_count,
        (height, width),
    )


def shown_maps(result: Differences, begins: Collection[int]) -> list[FeatureMaps]:
    """Return maps in the order of running: of the rows `begins`, and of the largest differences over the depth."""
    drawable = [maps for maps in result.maps if maps.arrangement != "vector" and min(maps.values.shape[-2:]) > 1]
    amounts = {row.index: row.relative_l2 or 0.0 for row in result.rows}
    sizes = {index: math.inf if math.isnan(amount) else amount for index, amount in amounts.items()}
    return spread(drawable, MOST_STAGES, lambda maps: maps.row in begins, lambda maps: sizes.get(maps.row, 0.0))
