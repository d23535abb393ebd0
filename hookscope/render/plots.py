"""Histograms of the outputs of layers. Imports matplotlib."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hookscope.render.plot_axes import BLUE, name_panel, our_style, panels, say
from hookscope.results.activations import LayerRow
from hookscope.results.distribution import even_edges

_MOST_BINS = 41
_LARGEST = 1e299  # beyond it the width of the range overflows


def activation_histograms(rows: Sequence[LayerRow], title: str) -> Figure:
    """Draw how the outputs of some layers are distributed, a panel each: bars are shares of the finite values."""
    with our_style():
        figure, grid = panels(("Outputs of layers", title), len(rows), 4)
        for axes, row in zip(grid, rows, strict=False):
            _draw_output(axes, row)
    return figure


def _draw_output(axes: Axes, row: LayerRow) -> None:
    statistics = row.activation
    counts = ((statistics.nan_count, "NaN"), (statistics.inf_count, "Inf"))
    remarks = [f"{count:,} {name}" for count, name in counts if count]
    remarks += [f"{statistics.zero_fraction:.0%} zero"] if statistics.zero_fraction else []
    distribution = statistics.distribution
    if distribution is not None:
        low, high = np.clip((distribution.low, distribution.high), -_LARGEST, _LARGEST).tolist()
        edges = even_edges(low, high, _MOST_BINS)
        if low == high:
            margin = abs(low) / 2 or 0.5
            edges = np.array([low - margin, low + margin])
        axes.stairs(distribution.histogram(edges) / distribution.count, edges, fill=True, color=BLUE)
        ticks = [float(edges[0]), float(edges[-1])]
        axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
    else:
        say(axes, "No distribution." if statistics.mean is not None else "No finite value.")
    name_panel(axes, row, remarks)
