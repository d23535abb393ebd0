"""Layers over the depth of a network: how large their values are, exact zeros, dead channels."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hookscope.reporting.document import DepthChart, Series
from hookscope.results.activations import LayerRow, OutputRow


def size_chart(title: str, rows: Sequence[OutputRow], *behind: Series, **more: Any) -> DepthChart:
    """Return the chart of magnitudes, in front of other series; `more` are further fields of the chart."""
    values = [row.activation for row in rows]
    return DepthChart(
        title=title,
        labels=[row.label or "(model)" for row in rows],
        series=[
            *behind,
            Series("largest |x|", [value.max_abs for value in values], "orange"),
            Series("std", [value.std for value in values], "grey"),
            Series("mean |x|", [value.mean_abs for value in values]),
        ],
        marks=[("holds NaN or Inf", "fail", [bool(value.nan_count or value.inf_count) for value in values])],
        **more,
    )


def depth_charts(
    rows: Sequence[LayerRow], *, ground: tuple[str, Sequence[bool]] = ("", ()), letters: Mapping[int, str] | None = None
) -> Iterator[DepthChart]:
    """Yield the charts of rows: magnitudes, and if there are any, zeros and dead channels.

    `ground` is a highlight's meaning, and whether each row has it; `letters` stand above rows, by `LayerRow.index`.
    """
    lettered = [(letters[row.index], at) for at, row in enumerate(rows) if letters and row.index in letters]
    sizes = size_chart("Size of the values, layer by layer", rows, ground=ground, letters=lettered)
    yield sizes
    values = [row.activation for row in rows]
    zeros = Series("zeros, share of values", [value.zero_fraction for value in values], shape="area")
    dead = [value.dead_channel_fraction or None if value.has_enough_per_channel else None for value in values]
    shares = [zeros, Series("dead (all zero), share of channels", dead, "red", "dots")]
    if any(any(series.values) for series in shares):
        title = "Exact zeros and dead channels"
        yield DepthChart(title=title, labels=sizes.labels, series=shares, axis="percent", ground=ground)
