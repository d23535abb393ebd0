"""Vector graphics for a page, as the numbers that a template draws: paths, to a tenth of a pixel, ticks and names."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len

from hookscope.reporting.axes import Axis, Run, asinh, block_names, log, percent, placed_names, runs_of
from hookscope.reporting.columns import fold_name, number_text, percent_text
from hookscope.reporting.document import DepthChart, Series
from hookscope.reporting.steps import Floats, columns_of, kept_runs, round_steps
from hookscope.text import figure

WIDTH, HEIGHT = 1000, 220
LEFT, TOP, FOOT = 62, 10, 26
_FRAME = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "top": TOP, "foot": FOOT}

_LABEL_PIXELS = 6.2  # a letter of the axis, with room to spare; one of Chinese takes two
_GAP = 8  # between two names
_PHONE_PIXELS = 300  # of a plot on a screen of 390 pixels
_MOST_BLOCKS = 40
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # where an axis of shares may end


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot over depth."""

    title: str
    summary: str  # for somebody who cannot see it
    labels: Sequence[str]  # where a click on each place leads
    shapes: Sequence[tuple[str, str]]  # style and path, from back to front
    ticks: Sequence[tuple[float, str]]  # height and text
    names: Sequence[tuple[float, str]]  # place from the left and text
    keys: Sequence[tuple[str, str]]  # style and meaning
    marks: Sequence[tuple[str, str, Sequence[float]]] = ()  # style, meaning, and places from the left, at the foot

    frame = _FRAME

    @property
    def placed_names(self) -> list["PlacedName"]:
        """The names, and which of them have room on a phone as well."""
        placed: list[PlacedName] = []
        taken = 0.0
        for place, text in self.names:
            is_at_end = place + _width(text) > WIDTH
            at, wide = (place - LEFT) / (WIDTH - LEFT) * _PHONE_PIXELS, _width(text) + _GAP
            left = at - wide if is_at_end else at
            fits_phone = left >= taken and left + wide <= _PHONE_PIXELS + 8
            taken = left + wide if fits_phone else taken
            share = round((place - LEFT) / (WIDTH - LEFT) * 100, 2)
            placed.append(PlacedName(text, place, share, is_at_end, fits_phone))
        return placed


@dataclass(frozen=True, slots=True)
class PlacedName:
    """A name under a plot.

    Attributes:
        share: Its place as a share of the plot's width, in percent.
        is_at_end: Whether the text ends at its place: the last ones would leave the plot.
        fits_phone: Whether it has room where the plot is as narrow as on a phone.
    """

    text: str
    place: float
    share: float
    is_at_end: bool
    fits_phone: bool


def over_depth(chart: DepthChart, leads_to: Sequence[str] = ()) -> Figure | None:
    """Draw values over depth; None if there are none. `leads_to` is where a click on each place leads, if elsewhere."""
    labels, across = chart.labels, _across(len(chart.labels))
    above = 0.0 if chart.axis == "log" else -math.inf
    runs = [(series, runs_of(enumerate(series.values), above)) for series in chart.shown]
    values = [value for _, lines in runs for line in lines for _, value in line]
    if not values:
        return None
    largest = max(values)
    is_log = chart.axis == "log"
    axis = log(values) if is_log else percent(next((end for end in _SHARES if end >= largest), 1.0))
    text = number_text if is_log else percent_text
    scale = ", on a logarithmic axis" if is_log else ""
    shapes = [(_style(series), _shape(series, across, lines, axis)) for series, lines in runs]
    meaning, pointed_at = chart.ground
    marks = [("mark", meaning, pointed_at)]
    marks += [("mark dim" if level == "dim" else "mark", words, marked) for words, level, marked in chart.marks]
    return Figure(
        chart.title,
        f"{chart.title} over {len(labels)} places, from {text(min(values))} to {text(largest)}{scale}. The tables have "
        "the numbers.",
        leads_to or labels,
        shapes,
        _ticks(axis),
        _names(labels),
        [(style, series.name) for (style, _), (series, _) in zip(shapes, runs, strict=True)],
        [
            (style, words, [across(place) for place, is_marked in enumerate(marked) if is_marked])
            for style, words, marked in marks
        ],
    )


def _style(series: Series) -> str:
    return "core" if series.shape == "area" else f"line {series.colour}{' dots' * (series.shape == 'dots')}"


def _shape(series: Series, across: Callable[[float], float], runs: Sequence[Run], axis: Axis) -> str:
    """Return the path of a line, of dots, or of bars from 0."""
    points = [(across(place), value) for run in runs for place, value in run]
    if series.shape == "line":
        return _line(across, runs, axis)
    if series.shape == "dots":
        return "".join(f"M{_short(left)} {_short(_height(axis, value))}h.01" for left, value in points)
    wide = min(0.7 * (WIDTH - LEFT - 12) / max(1, len(series.values) - 1), 8)
    return "".join(
        f"M{_short(left - wide / 2)} {_height(axis, 0)}h{_short(wide)}V{_height(axis, value)}h-{_short(wide)}z"
        for left, value in points
        if value
    )


@dataclass(frozen=True, slots=True)
class StepAxis:
    """The horizontal axis of steps from `low` to `high`.

    Attributes:
        places: The places that a pointer tells apart: the steps, or columns of them.
    """

    low: int
    high: int
    unit: str = "step"
    most: int = 900

    @property
    def places(self) -> int:
        """How many places there are."""
        return min(self.most, self.high - self.low + 1)

    def across(self, step: float) -> float:
        """Return where a step is, from the left."""
        return _across(self.high - self.low + 1)(step - self.low)

    def names(self) -> list[tuple[float, str]]:
        """Return round steps, with where they are, as far as their numbers fit; the first has the unit."""
        numbers = round_steps(self.low, self.high, 8)
        names = [
            (self.across(step), f"{self.unit} {step:,}" if not place else f"{step:,}")
            for place, step in enumerate(numbers)
        ]
        return [(left, text) for left, text in names if left + _width(text) <= WIDTH]


def over_steps(
    title: str,
    axis: StepAxis,
    steps: NDArray[np.int64],
    lines: Sequence[tuple[str, str, Floats]],
    marked: NDArray[np.bool_],
    mark_meaning: str = "",
) -> Figure | None:
    """Draw numbers over steps, which ascend; None if none is finite.

    `lines` are style, meaning and a value for each step, as `as_floats` returns them. The vertical axis is logarithmic
    unless some value is negative; 0 then breaks a line as Inf does, and both are marked at the foot with `marked`.
    """
    finite = np.concatenate([values[np.isfinite(values)] for _, _, values in lines])
    if not finite.size:
        return None
    logarithmic = finite.min() >= 0 and finite.max() > 0
    scale = float(np.median(np.abs(finite[finite != 0]))) if finite.any() else 1.0
    vertical = log(finite[finite > 0].tolist()) if logarithmic else asinh(scale, finite.tolist())
    column = columns_of(steps, axis.low, axis.high, axis.places)
    foot = marked.copy()
    meanings = {mark_meaning: bool(marked.any())}
    shapes = []
    for style, _, values in lines:
        drawn = np.where(values == 0, np.inf, values) if logarithmic else values
        foot |= np.isinf(drawn)
        for meaning, places in (("NaN or Inf", np.isinf(values)), ("0", logarithmic & (values == 0))):
            meanings[meaning] = meanings.get(meaning, False) or bool(places.any())
        shapes.append((style, _line(axis.across, kept_runs(column, steps, drawn), vertical)))
    places = sorted({round(axis.across(step)) for step in steps[foot]})
    return Figure(
        title,
        f"{title} over {axis.unit}s {axis.low:,} to {axis.high:,}, from {figure(float(finite.min()), 4)} to "
        f"{figure(float(finite.max()), 4)}. The text above it gives the numbers at the pointer.",
        _step_labels(axis, column, steps, lines),
        shapes,
        _ticks(vertical),
        axis.names(),
        [(style, meaning) for style, meaning, _ in lines],
        [("mark", " or ".join(meaning for meaning, is_there in meanings.items() if is_there), places)],
    )


def _step_labels(
    axis: StepAxis, column: NDArray[np.int64], steps: NDArray[np.int64], lines: Sequence[tuple[str, str, Floats]]
) -> list[str]:
    """Return the numbers at each place in words: "step 12: loss 0.31", "steps 120 to 129: loss 0.29 to 0.33"."""
    labels = [""] * axis.places
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    for start, end in zip(starts, [*starts[1:], column.size], strict=True):
        first, last = steps[start], steps[end - 1]
        words = [f"{meaning} {_extent(values[start:end])}" for _, meaning, values in lines]
        name = f"{axis.unit} {first:,}" if first == last else f"{axis.unit}s {first:,} to {last:,}"
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


def _ticks(axis: Axis) -> list[tuple[float, str]]:
    return [(round(TOP + (1 - share) * (HEIGHT - FOOT - TOP), 1), words) for share, words in axis.ticks]


def _across(count: int) -> Callable[[float], float]:
    step = (WIDTH - LEFT - 12) / max(1, count - 1)
    return lambda place: round(LEFT + 4 + place * step, 1)


def _line(across: Callable[[float], float], runs: Sequence[Run], axis: Axis) -> str:
    parts = []
    for run in runs:
        points = [f"{_short(across(place))} {_short(_height(axis, value))}" for place, value in run]
        # A point alone is a plus sign: biases that start at zero have no ratio, which leaves weights as single points.
        parts.append(f"M{'L'.join(points)}" if len(points) > 1 else f"M{points[0]}m-3 0h6m-3 -3v6")
    return "".join(parts)


def _names(labels: Sequence[str]) -> list[tuple[float, str]]:
    across = _across(len(labels))
    names = [(across(place), fold_name(name, 18)) for place, name in block_names(labels)[:_MOST_BLOCKS]]
    return sorted((place, name) for place, _, name in placed_names(names, _width, 0, WIDTH, _GAP))


def _width(text: str) -> float:
    return cell_len(text) * _LABEL_PIXELS


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
