"""Histograms of activations as one picture. Importing this imports matplotlib."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from hookscope.render.plot_axes import BLUE, our_style, plain, say
from hookscope.results.activations import LayerRow
from hookscope.results.histogram import even_edges

_ACROSS = 4
_BINS = 41
_LARGEST = 1e299  # beyond it the width of the range overflows


def activation_histograms(rows: Sequence[LayerRow], title: str) -> Figure:
    """Draw how the outputs of some layers are distributed, a panel each.

    Bars are shares of the finite values; what is not finite is counted above the panel.

    Args:
        rows: What to draw.
        title: What was run.
    """
    down = max(1, math.ceil(len(rows) / _ACROSS))
    with our_style():
        figure = Figure(figsize=(10, 0.9 + 1.75 * down), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        heading = plain(f"Outputs of layers · {title}", 110)
        figure.suptitle(heading, x=0.012, horizontalalignment="left", fontsize=11, fontweight="bold")
        grid = figure.subplots(down, _ACROSS, squeeze=False).ravel()
        for axes, row in zip(grid, rows, strict=False):
            _draw_panel(axes, row)
        for axes in grid[len(rows) :]:
            axes.set_axis_off()
    return figure


def _draw_panel(axes: Axes, row: LayerRow) -> None:
    statistics = row.activation
    counts = ((statistics.nan_count, "NaN"), (statistics.inf_count, "Inf"))
    remarks = [f"{count:,} {name}" for count, name in counts if count]
    remarks += [f"{statistics.zero_fraction:.0%} zero"] if statistics.zero_fraction else []
    distribution = statistics.distribution
    if distribution is not None:
        low, high = np.clip((distribution.low, distribution.high), -_LARGEST, _LARGEST).tolist()
        edges = even_edges(low, high, _BINS)
        if low == high:
            margin = abs(low) / 2 or 0.5
            edges = np.array([low - margin, low + margin])
        axes.stairs(distribution.histogram(edges) / distribution.count, edges, fill=True, color=BLUE)
        ticks = [float(edges[0]), float(edges[-1])]
        axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
    else:
        say(axes, "No distribution." if statistics.mean is not None else "No finite value.")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(NullLocator())
    axes.spines.left.set_visible(False)
    axes.set_title(f"{plain(row.label, 28)}\n{' · '.join(remarks)}", fontsize=8)
