"""Plots of gradients: flow over depth, histograms, ‖g‖/‖w‖ of parameters; and of outputs. Imports matplotlib."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray

from hookscope.render.plot_axes import (
    BLUE,
    FOOT,
    GREY,
    ORANGE,
    TOP,
    VERMILION,
    add_legend,
    add_marks,
    log_axis,
    mark_failing,
    mark_missing,
    name_panel,
    name_places,
    our_style,
    panels,
    say,
    titled_figure,
)
from hookscope.results.activations import LayerRow
from hookscope.results.distribution import Distribution, even_edges
from hookscope.results.gradients import GradientRow, Gradients, ParameterRow

_MOST_HISTOGRAMS = 12
_MOST_BINS = 41
# A linear axis hides the middle of a histogram when its tail is this many times wider.
_WIDE_TAIL = 30.0
_LARGEST = 1e299  # beyond it the width of the range overflows


def gradient_flow(inspection: Gradients) -> Figure:
    """Draw mean and greatest |gradient| over depth: of the layers' outputs above, of the parameters below.

    Biases and scales are pale marks beside the line of the weights; what a failing verdict names has a red ground.
    """
    outputs = [(row.label, row) for row in inspection.gradients if row.role == "output"]
    parameters = [(row.name, row) for row in inspection.parameters]
    with our_style():
        figure = titled_figure(_title(inspection, "Gradient flow"), 7.2)
        axes = figure.subplots(2, 1)
        _draw_flow(axes[0], "outputs of layers, in forward order", outputs, _failing(inspection))
        _draw_flow(axes[1], "parameters, in the order they are defined", parameters, _failing(inspection))
        add_legend(figure, axes)
    return figure


def gradient_histograms(inspection: Gradients, layers: Sequence[str] = ()) -> Figure:
    """Draw how the gradients of some layers' outputs are distributed, at most twelve panels, without exact zeros.

    `layers` are labels of rows; none means twelve rows spread evenly over depth, from those with a gradient.
    """
    known = [row for row in inspection.gradients if row.role == "output" and _nonzero(row) is not None]
    rows = [row for row in known if row.label in layers] if layers else known
    places = np.unique(np.linspace(0, len(rows) - 1, _MOST_HISTOGRAMS).round().astype(int)) if rows else ()
    with our_style():
        chosen = f", {len(places)} of {len(known)} layers" if len(places) < len(known) else ""
        title = _title(inspection, f"Gradients of outputs{chosen}")
        figure, grid = panels(title, len(places), min(4, max(2, len(places))))
        for axes, place in zip(grid, places, strict=False):
            _draw_histogram(axes, rows[place])
        if not len(places):
            say(grid[0], "No output has a gradient other than zero.")
    return figure


def parameter_ratios(inspection: Gradients) -> Figure:
    """Draw ‖g‖/‖w‖ of every parameter in the order they are defined, weights apart from biases and scales."""
    rows = inspection.parameters
    with our_style():
        figure = titled_figure(_title(inspection, "‖g‖/‖w‖ of parameters"), 4.6)
        axes = figure.subplots()
        if not rows:
            say(axes, "The network has no parameters.")
            return figure
        weights = np.array([row.is_matrix for row in rows])
        ratios = _positive([row.ratio for row in rows])
        places = np.arange(len(rows))
        size = 5 if len(rows) <= 160 else 3
        looks = (("weights", weights, "o", BLUE), ("biases and scales", ~weights, "D", ORANGE))
        for label, kind, marker, colour in looks:
            small = 1.0 if marker == "o" else 0.7
            axes.plot(places[kind], ratios[kind], marker, color=colour, markersize=size * small, label=label)
        if np.isfinite(ratios[weights]).any():
            median = float(np.nanmedian(ratios[weights]))
            axes.axhline(median, color=BLUE, linestyle="--", linewidth=1, label=f"median of weights, {median:.2g}")
        log_axis(axes, ratios)
        mark_missing(axes, [row.status for row in rows])
        still = [place for place, row in enumerate(rows) if row.status == "gradient" and row.weight_l2 == 0]
        add_marks(axes, still, FOOT, ("s", GREY), "parameter is 0")
        mark_failing(axes, [row.name for row in rows], _failing(inspection))
        name_places(axes, [row.name for row in rows])
        axes.set_ylabel("‖g‖/‖w‖")
        add_legend(figure, [axes])
    return figure


def activation_histograms(rows: Sequence[LayerRow], title: str) -> Figure:
    """Draw how the outputs of some layers are distributed, a panel each: bars are shares of the finite values."""
    with our_style():
        figure, grid = panels(("Outputs of layers", title), len(rows), 4)
        for axes, row in zip(grid, rows, strict=False):
            _draw_output(axes, row)
    return figure


# By the name of its file.
PLOTS: Mapping[str, Callable[[Gradients], Figure]] = {
    "gradient-flow": gradient_flow,
    "gradient-histograms": gradient_histograms,
    "parameter-ratios": parameter_ratios,
}


def _draw_flow(
    axes: Axes, title: str, named: Sequence[tuple[str, GradientRow | ParameterRow]], failing: Mapping[str, str]
) -> None:
    axes.set_title(title)
    if not named:
        say(axes, "Nothing was measured.")
        return
    names, rows = zip(*named, strict=True)
    points = [row.gradient for row in rows]
    means, greatest = (_positive([getattr(each, name) for each in points]) for name in ("mean_abs", "max_abs"))
    minor = np.array([isinstance(row, ParameterRow) and not row.is_matrix for row in rows])
    for label, values, colour, marker in (("max", greatest, ORANGE, "^"), ("mean", means, BLUE, "o")):
        _draw_line(axes, values, minor, f"{label} |gradient|", (marker, colour))
    log_axis(axes, np.concatenate([means, greatest]))
    mark_missing(axes, [row.status for row in rows])
    broken = [place for place, each in enumerate(points) if each.nan_count or each.inf_count]
    add_marks(axes, broken, TOP, ("*", VERMILION), "NaN or Inf")
    mark_failing(axes, names, failing)
    name_places(axes, names)
    axes.set_ylabel("|gradient|")


def _draw_line(
    axes: Axes, values: NDArray[np.float64], minor: NDArray[np.bool_], label: str, look: tuple[str, str]
) -> None:
    """Draw a line through the values that are not minor, and the minor ones as pale marks."""
    marker, colour = look
    (places,) = np.nonzero(~minor)
    crowded = len(values) > 160
    axes.plot(
        places,
        values[places],
        color=colour,
        marker=marker,
        markersize=4.0 if len(values) <= 60 else 2.6,
        markevery=max(1, len(places) // 40) if crowded else 1,
        linewidth=1.2,
        label=label,
    )
    if minor.any():
        (places,) = np.nonzero(minor)
        name = f"{label} of biases and scales"
        axes.plot(places, values[places], marker, color=colour, alpha=0.4, markersize=2.6, label=name)


def _draw_histogram(axes: Axes, row: GradientRow) -> None:
    values = _nonzero(row)
    if values is None:
        return
    typical, reach = _median_magnitude(values), max(values.high, -values.low)
    wide = reach / _WIDE_TAIL > typical
    bins = int(np.clip(2 * math.sqrt(values.count), 9, _MOST_BINS)) | 1  # odd: one bin holds zero
    steps = np.linspace(-1, 1, bins + 1)
    edges = typical * np.sinh(steps * math.asinh(reach / typical)) if wide else steps * reach
    edges[0], edges[-1] = -reach, reach
    shares = values.histogram(edges) / values.count
    axes.stairs(shares, edges, fill=True, color=BLUE)
    axes.axvline(0, color=GREY, linewidth=0.8)
    if wide:
        axes.set_xscale("asinh", linear_width=typical)
        ticks = [-reach, 0.0, reach]
    else:
        ticks = [-reach / 2, 0.0, reach / 2]
    axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    remarks = [f"L2 {row.gradient.l2:.2g}"] if row.gradient.l2 is not None else []
    remarks += [f"{row.gradient.zero_fraction:.0%} zero"] if row.gradient.zero_fraction else []
    counts = ((row.gradient.nan_count, "NaN"), (row.gradient.inf_count, "Inf"))
    remarks += [f"{count} {name}" for count, name in counts if count]
    remarks += ["log axis"] if wide else []
    name_panel(axes, row, remarks)


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


def _title(inspection: Gradients, what: str) -> tuple[str, ...]:
    loss = f"loss {inspection.loss.name}" if inspection.loss else "no loss"
    return what, inspection.model.name, f"{inspection.mode} mode", loss, inspection.model.weights


def _failing(inspection: Gradients) -> dict[str, str]:
    """Return the rule of the first failing verdict for each place that one names."""
    failing: dict[str, str] = {}
    for verdict in inspection.verdicts:
        for place in verdict.places if verdict.level == "fail" else ():
            if place:
                failing.setdefault(place, verdict.rule)
    return failing


def _positive(values: Sequence[float | None]) -> NDArray[np.float64]:
    """Return the values a logarithmic axis can show, NaN in place of the others."""
    return np.array([value if value and math.isfinite(value) else math.nan for value in values], np.float64)


def _nonzero(row: GradientRow) -> Distribution | None:
    return None if row.gradient.distribution is None else row.gradient.distribution.nonzero()


def _median_magnitude(distribution: Distribution) -> float:
    """Return about the median of the magnitudes: good enough to choose an axis by."""
    lows, highs, counts = distribution.spans()
    magnitudes = np.abs(lows / 2 + highs / 2)
    order = magnitudes.argsort()
    middle = np.searchsorted(np.cumsum(counts[order]), distribution.count / 2)
    return float(magnitudes[order][middle])
