"""Vector graphics for a page, as the numbers that a template draws: paths, to a tenth of a pixel, ticks and names."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hookscope.render.axes import Axis, Run, asinh, block_names, log, percent, placed_names, runs_of
from hookscope.render.columns import fold_name, number_text, percent_bound, quantile_text
from hookscope.render.training_steps import Floats, columns_of, kept_runs, round_steps
from hookscope.results.statistics import QUANTILE_LEVELS, TensorStatistics
from hookscope.text import figure

WIDTH, HEIGHT = 1000, 220
LEFT, TOP, FOOT = 62, 10, 26
FRAME = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "top": TOP, "foot": FOOT}

_LABEL_PIXELS = 6.2  # a character of the axis, with room to spare
_GAP = 8  # between two names
_PHONE_PIXELS = 300  # of a plot on a screen of 390 pixels
_MOST_BLOCKS = 40


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
    marks: Sequence[float] = ()  # places from the left of marks at the foot
    mark_meaning: str = ""

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


@dataclass(frozen=True, slots=True)
class Bars:
    """A histogram as a closed path in a box of 100 x 24, with the texts of its ends."""

    path: str
    zero: float | None  # place from the left; None outside the box
    low: str
    high: str
    summary: str  # the same in words


def bars(statistics: TensorStatistics) -> Bars | None:
    """Draw the square roots of the densities between the 1st and the 99th percentile; None without values.

    Without a histogram, the quantiles give one: the share between two of them, spread evenly.
    """
    stored = statistics.histogram
    quantiles = list(statistics.quantiles or ())
    if stored is not None and any(stored.counts):
        edges = np.linspace(stored.low, stored.high, len(stored.counts) + 1)
        shares = np.array(stored.counts, np.float64)
    elif len(quantiles) == len(QUANTILE_LEVELS) and quantiles == sorted(quantiles):
        edges, shares = np.array(quantiles), np.diff(QUANTILE_LEVELS)
    else:
        return None
    low, high = float(edges[0]), float(edges[-1])
    span = high - low
    if not math.isfinite(span) or span <= 0:
        path, zero = "M48 24V0h4V24z", 50.0 if low == 0 else None
    else:
        places = (edges - low) / span * 100
        widths = np.maximum(np.diff(places), 0.8)  # equal quantiles: a peak of no width, drawn so wide
        heights = np.sqrt(shares / shares.sum() / widths)
        heights *= 23 / heights.max()
        steps = (
            f"M{_short(at)} 24v{_short(-up)}h{_short(wide)}V24z"
            for at, up, wide in zip(places, heights, widths, strict=False)
            if up
        )
        path, zero = "".join(steps), -low / span * 100 if low <= 0 <= high else None
    count = statistics.element_count
    middle = f", median {quantile_text(quantiles[len(quantiles) // 2], count)}" if quantiles else ""
    ends = quantile_text(low, count), quantile_text(high, count)
    return Bars(path, zero, *ends, f"1st percentile {ends[0]}{middle}, 99th percentile {ends[1]}")


def distributions(labels: Sequence[str], rows: Sequence[TensorStatistics], marked: Sequence[bool]) -> Figure | None:
    """Draw the quantiles of activations over depth; None if fewer than two have any."""
    if sum(row.quantiles is not None for row in rows) < 2:
        return None
    at = {
        level: [row.quantiles[QUANTILE_LEVELS.index(level)] if row.quantiles else None for row in rows]
        for level in (0.05, 0.25, 0.5, 0.75, 0.95)
    }
    known = [abs(value) for value in at[0.25] + at[0.75] if value]
    linear = float(np.median(known)) if known else 1.0
    axis = asinh(linear, [value for each in at.values() for value in each if value is not None])
    across = _across(len(rows))
    shapes = [
        ("band", _band(across, at[0.05], at[0.95], axis)),
        ("core", _band(across, at[0.25], at[0.75], axis)),
        ("line", _line(across, runs_of(enumerate(at[0.5])), axis)),
    ]
    return Figure(
        "Activations",
        f"Quantiles of the values of {len(rows)} outputs in forward order. The table of layers has the numbers.",
        labels,
        shapes,
        _ticks(axis),
        _names(labels),
        [("band", "5 to 95%"), ("core", "25 to 75%"), ("line", "median")],
        [across(place) for place, each in enumerate(marked) if each],
        "flagged",
    )


def logarithmic(
    title: str,
    names: Sequence[str],
    labels: Sequence[str],
    lines: Sequence[tuple[str, Sequence[float | None]]],
    missing: Sequence[bool],
    mark_meaning: str,
) -> Figure | None:
    """Draw positive values over depth on a logarithmic axis; None if there are none.

    `lines` are meaning and values; what has none breaks a line. A `missing` place gets a mark at the foot.
    """
    runs = [runs_of(enumerate(line), above=0.0) for _, line in lines]
    values = [value for line in runs for run in line for _, value in run]
    if not values:
        return None
    axis = log(values)
    across = _across(len(names))
    styles = ["line other", "line"] if len(lines) == 2 else ["line"]
    drawn = [(style, _line(across, line, axis)) for style, line in zip(styles, runs, strict=True)]
    return Figure(
        title,
        f"{title} over {len(names)} places, from {number_text(min(values))} to {number_text(max(values))}, "
        "on a logarithmic axis. The pages of the layers have the numbers.",
        labels,
        drawn,
        _ticks(axis),
        _names(names),
        [(style, meaning) for style, (meaning, _) in zip(styles, lines, strict=True)],
        [across(place) for place, each in enumerate(missing) if each],
        mark_meaning,
    )


def shares(title: str, labels: Sequence[str], meaning: str, values: Sequence[float | None]) -> Figure | None:
    """Draw a share of each place as a bar from 0; None if all are 0."""
    largest = max((value or 0 for value in values), default=0)
    if not largest:
        return None
    top = next(end for end in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if end >= largest)
    axis, across = percent(top), _across(len(values))
    wide = min(0.7 * (WIDTH - LEFT - 12) / max(1, len(values) - 1), 8)
    path = "".join(
        f"M{_short(across(place) - wide / 2)} {_height(axis, 0)}h{_short(wide)}V{_height(axis, value)}h-{_short(wide)}z"
        for place, value in enumerate(values)
        if value
    )
    return Figure(
        title,
        f"{title}: {meaning}, at most {percent_bound(largest)}, of {len(values)} places. The table of layers has the "
        "numbers.",
        labels,
        [("core", path)],
        _ticks(axis),
        _names(labels),
        [("core", meaning)],
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
    return Figure(
        title,
        f"{title} over {axis.unit}s {axis.low:,} to {axis.high:,}, from {figure(float(finite.min()), 4)} to "
        f"{figure(float(finite.max()), 4)}. The text above it gives the numbers at the pointer.",
        _step_labels(axis, column, steps, lines),
        shapes,
        _ticks(vertical),
        axis.names(),
        [(style, meaning) for style, meaning, _ in lines],
        sorted({round(axis.across(step)) for step in steps[foot]}),
        " or ".join(meaning for meaning, is_there in meanings.items() if is_there),
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


def _points(across: Callable[[float], float], run: Run, axis: Axis) -> list[str]:
    return [f"{_short(across(place))} {_short(_height(axis, value))}" for place, value in run]


def _line(across: Callable[[float], float], runs: Sequence[Run], axis: Axis) -> str:
    parts = []
    for run in runs:
        points = _points(across, run, axis)
        # A point alone is a plus sign: biases that start at zero have no ratio, which leaves weights as single points.
        parts.append(f"M{'L'.join(points)}" if len(points) > 1 else f"M{points[0]}m-3 0h6m-3 -3v6")
    return "".join(parts)


def _band(
    across: Callable[[float], float], low: Sequence[float | None], high: Sequence[float | None], axis: Axis
) -> str:
    # Both are missing in the same places.
    ends = zip(runs_of(enumerate(high)), runs_of(enumerate(low)), strict=True)
    there_and_back = ([*_points(across, highs, axis), *_points(across, lows[::-1], axis)] for highs, lows in ends)
    return "".join(f"M{'L'.join(points)}z" for points in there_and_back)


def _names(labels: Sequence[str]) -> list[tuple[float, str]]:
    across = _across(len(labels))
    names = [(across(place), fold_name(name, 18)) for place, name in block_names(labels)[:_MOST_BLOCKS]]
    return sorted((place, name) for place, _, name in placed_names(names, _width, 0, WIDTH, _GAP))


def _width(text: str) -> float:
    return len(text) * _LABEL_PIXELS


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
