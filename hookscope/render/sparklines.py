"""Histograms small enough for a cell of a table: one block character a bar."""

import math

from hookscope.results.distribution import Distribution
from hookscope.results.histogram import BIN_COUNT, histogram

BLOCKS = "▁▂▃▄▅▆▇█"

WIDTH = 8
"""Bars in a sparkline. Our choice: three bins of `histogram` each, and as wide as a number."""

MEANING = (
    f"hist: {WIDTH} equal bins, 1st to 99th percentile of each row, the rest in the end bins; "
    "height: square root of share"
)


def sparkline(distribution: Distribution | None) -> str:
    """Draw how values are distributed, as `WIDTH` characters; "-" without a distribution.

    The bars divide the range from the 1st to the 99th percentile evenly; what lies beyond is counted in the bars at the
    ends. A height is the square root of the share, so that the few can be seen beside the many: an empty bin is blank,
    one with any value at all has the lowest block at least. Where both percentiles are one value, a single bar stands
    in the middle.
    """
    counted = histogram(distribution)
    if counted is None:
        return "-"
    if len(counted.counts) < BIN_COUNT:
        return BLOCKS[-1].center(WIDTH)
    step = BIN_COUNT // WIDTH
    bars = [sum(counted.counts[start : start + step]) for start in range(0, BIN_COUNT, step)]
    bars[0] += counted.below
    bars[-1] += counted.above
    heights = (math.ceil(math.sqrt(bar / max(bars)) * len(BLOCKS)) for bar in bars)
    return "".join(BLOCKS[height - 1] if height else " " for height in heights)
