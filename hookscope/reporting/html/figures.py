"""Vector graphics for a page, as the numbers that a template draws: paths, to a tenth of a pixel, ticks and names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len

from hookscope.reporting.axes import Axis, Run, placed_names
from hookscope.reporting.columns import fold_name, number_text
from hookscope.reporting.document import DepthChart, Series, StepChart, StepCharts
from hookscope.reporting.plots import MOST_COLUMNS, Plot, depth_plot, step_plot, values_of
from hookscope.reporting.steps import Floats, columns_of, span_text
from hookscope.text import counted, figure, percent_text, safe_text

WIDTH, HEIGHT = 1000, 220
LEFT, TOP, FOOT = 62, 10, 26
_FRAME = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "top": TOP, "foot": FOOT}

_LABEL_PIXELS = 6.2  # a letter of the axis, with room to spare; a Chinese letter takes two
_GAP = 8  # between two names
_PHONE_PIXELS = 300  # width of a plot on a screen of 390 pixels


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot over depth."""

    title: str
    summary: str  # for somebody who cannot see it
    labels: Sequence[str]  # where a click on each place leads
    shapes: Sequence[tuple[str, str]]  # style and path, from back to front
    ticks: Sequence[tuple[float, str]]  # height and text
    names: Sequence["PlacedName"]
    keys: Sequence[tuple[str, str]]  # style and meaning
    marks: Sequence[tuple[str, str, Sequence[float]]] = ()  # style, meaning, and places from the left, at the foot

    frame = _FRAME


@dataclass(frozen=True, slots=True)
class PlacedName:
    """A name under a plot.

    Attributes:
        share: Its place as a share of the plot's width, in percent.
        is_at_end: Whether the text ends at its place, as it would leave the plot.
        fits_phone: Whether it has room where the plot is as narrow as on a phone.
    """

    text: str
    place: float
    share: float
    is_at_end: bool
    fits_phone: bool


def over_depth(chart: DepthChart) -> Figure | None:
    """Draw values over depth; None if there are none."""
    plot = depth_plot(chart)
    if plot is None:
        return None
    text, scale = (number_text, ", on a logarithmic axis") if chart.axis == "log" else (percent_text, "")
    values = values_of(plot.lines)
    extent = f"from {text(min(values))} to {text(max(values))}{scale}"
    summary = f"{chart.title} over {counted(plot.count, 'place')}, {extent}. The tables have the numbers."
    return _figure(plot, summary, chart.labels)


def over_steps(part: StepCharts, chart: StepChart) -> Figure | None:
    """Draw numbers over steps; None if none is finite."""
    plot = step_plot(part, chart)
    if plot is None:
        return None
    finite = np.concatenate([values[np.isfinite(values)] for _, values in chart.lines])
    extent = " to ".join(figure(float(end), 4) for end in (finite.min(), finite.max()))
    span = span_text(part.low, part.high, part.unit)
    summary = f"{chart.title} over {span}, from {extent}. The text above it gives the numbers at the pointer."
    return _figure(plot, summary, _step_labels(part, chart, min(plot.count, MOST_COLUMNS)))


def _figure(plot: Plot, summary: str, labels: Sequence[str]) -> Figure:
    across = _across(plot.count)
    shapes = [(_style(series), _shape(series, across, runs, plot.axis)) for series, runs in plot.lines]
    names = [(across(place), fold_name(name, 18)) for place, name in plot.names]
    return Figure(
        plot.title,
        summary,
        [*map(safe_text, labels)],
        shapes,
        [(round(TOP + (1 - share) * (HEIGHT - FOOT - TOP), 1), words) for share, words in plot.axis.ticks],
        _names_with_room(names),
        [(style, series.name) for (style, _), (series, _) in zip(shapes, plot.lines, strict=True)],
        [
            ("mark dim" if level == "dim" else "mark", words, sorted({round(across(place)) for place in places}))
            for words, level, places in [(plot.ground[0], "", plot.ground[1]), *plot.marks]
        ],
    )


def _names_with_room(names: Sequence[tuple[float, str]]) -> list[PlacedName]:
    """Leave out names that would overlap others; return the rest from left to right."""
    placed = placed_names(names, _width, 0, WIDTH, _GAP)
    scale = _PHONE_PIXELS / (WIDTH - LEFT)
    on_phones = [((place - LEFT) * scale, text) for place, _, text in placed]
    kept = {(place, begin < place) for place, begin, _ in placed_names(on_phones, _width, 0, _PHONE_PIXELS + 8, _GAP)}
    return [
        PlacedName(
            text, place, round((place - LEFT) / (WIDTH - LEFT) * 100, 2), begin < place, (at, begin < place) in kept
        )
        for (place, begin, text), (at, _) in sorted(zip(placed, on_phones, strict=True))
    ]


def _style(series: Series) -> str:
    return "core" if series.shape == "area" else f"line {series.colour}{' dots' * (series.shape == 'dots')}"


def _shape(series: Series, across: Callable[[float], float], runs: Sequence[Run], axis: Axis) -> str:
    """Return the path of a line, of dots, or of bars from 0."""
    points = [(across(place), value) for run in runs for place, value in run]
    if series.shape == "line":
        return _line(across, runs, axis)
    if series.shape == "dots":
        return "".join(f"M{_short(left)} {_short(_height(axis, value))}h.01" for left, value in points)
    wide = min(0.7 * (across(1) - across(0)), 8)
    return "".join(
        f"M{_short(left - wide / 2)} {_height(axis, 0)}h{_short(wide)}V{_height(axis, value)}h-{_short(wide)}z"
        for left, value in points
        if value
    )


def _step_labels(part: StepCharts, chart: StepChart, count: int) -> list[str]:
    """Return the text for each column: "step 12: loss 0.31", "steps 120 to 129: loss 0.29 to 0.33"."""
    labels = [""] * count
    column = columns_of(part.steps, part.low, part.high, count)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    for start, end in zip(starts, [*starts[1:], column.size], strict=True):
        words = [f"{meaning} {_extent(values[start:end])}" for meaning, values in chart.lines]
        name = span_text(part.steps[start], part.steps[end - 1], part.unit)
        labels[column[start]] = f"{name}: {', '.join(words)}"
    return labels


def _extent(values: Floats) -> str:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "NaN or Inf" if np.isinf(values).any() else "-"
    low, high = figure(float(finite.min()), 4), figure(float(finite.max()), 4)
    words = low if low == high else f"{low} to {high}"
    return f"{words}, NaN or Inf" if np.isinf(values).any() else words


def _height(axis: Axis, value: float) -> float:
    return round(TOP + (1 - axis.share(value)) * (HEIGHT - FOOT - TOP), 1)


def _across(count: int) -> Callable[[float], float]:
    step = (WIDTH - LEFT - 12) / max(1, count - 1)
    return lambda place: round(LEFT + 4 + place * step, 1)


def _line(across: Callable[[float], float], runs: Sequence[Run], axis: Axis) -> str:
    parts = []
    for run in runs:
        points = [f"{_short(across(place))} {_short(_height(axis, value))}" for place, value in run]
        # A lone point is drawn as a plus sign: as a line it would be invisible.
        parts.append(f"M{'L'.join(points)}" if len(points) > 1 else f"M{points[0]}m-3 0h6m-3 -3v6")
    return "".join(parts)


def _width(text: str) -> float:
    return cell_len(text) * _LABEL_PIXELS


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
