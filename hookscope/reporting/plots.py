"""Charts as the page and the picture draw them: lines and marks by their places, the axis, the names below."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hookscope.reporting.axes import Axis, Run, asinh, block_names, linear, log, percent, runs_of
from hookscope.reporting.document import Colour, DepthChart, Level, Series, StepChart, StepCharts
from hookscope.reporting.steps import columns_of, kept_runs, round_steps

MOST_COLUMNS = 900  # in a chart over steps: about one for each pixel
_MOST_STEP_NAMES = 8
_COLOURS: Sequence[Colour] = ("grey", "orange", "blue")  # lines over steps; the last is the main line


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What a chart draws over `count` places.

    Attributes:
        lines: Series, from back to front, with places and values in the runs that a line connects.
        marks: A meaning, its level, and the places that have it, at the foot; none without places.
        ground: A highlight's meaning, and its places.
        letters: Text above places.
        names: Text below places, as far as there is room; the most important first.
    """

    title: str
    count: int
    axis: Axis
    lines: Sequence[tuple[Series, Sequence[Run]]]
    marks: Sequence[tuple[str, Level, Sequence[int]]]
    ground: tuple[str, Sequence[int]] = ("", ())
    letters: Sequence[tuple[str, int]] = ()
    names: Sequence[tuple[int, str]]


def depth_plot(chart: DepthChart) -> Plot | None:
    """Return what a chart over depth draws; None without a value."""
    is_log = chart.axis == "log"
    lines = [
        (series, runs_of(series.values, 0.0 if is_log else -math.inf)) for series in chart.series if any(series.values)
    ]
    values = values_of(lines)
    if not values:
        return None
    meaning, pointed_at = chart.ground
    return Plot(
        title=chart.title,
        count=len(chart.labels),
        axis=log(values) if is_log else percent(max(values)),
        lines=lines,
        marks=[(words, level, _places(marked)) for words, level, marked in chart.marks if any(marked)],
        ground=(meaning, _places(pointed_at)),
        letters=chart.letters,
        names=block_names(chart.labels),
    )


def step_plot(part: StepCharts, chart: StepChart) -> Plot | None:
    """Return what a chart over steps draws, thinned to the columns that it has room for; None without a finite number.

    Places are steps from `low` on. If no value is negative, the axis is logarithmic: 0 then breaks a line, as NaN and
    Inf do, and has a mark.
    """
    names, values = zip(*chart.lines, strict=True)
    numbers = np.array(values)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return None
    is_log = finite.min() >= 0 and finite.max() > 0
    axis = log if is_log else asinh if finite.max() > 0 else linear
    places, count = part.steps - part.low, part.high - part.low + 1
    column = columns_of(places, 0, count - 1, min(count, MOST_COLUMNS))
    marks: list[tuple[str, Level, NDArray[np.bool_]]] = [
        ("NaN or Inf", "fail", np.isinf(numbers).any(axis=0)),
        ("0", "dim", (numbers == 0).any(axis=0) & is_log),
        *((name, "warn", marked) for name, marked in chart.marks),
    ]
    return Plot(
        title=chart.title,
        count=count,
        axis=axis(finite[(finite > 0) | (not is_log)].tolist()),
        lines=[
            (Series(name, (), colour), kept_runs(column, places, line))
            for name, colour, line in zip(
                names, _COLOURS[-len(names) :], np.where((numbers == 0) & is_log, np.inf, numbers), strict=True
            )
        ],
        marks=[(name, level, places[marked].tolist()) for name, level, marked in marks if marked.any()],
        names=[
            (step - part.low, f"{step:,}" if place else f"{part.unit} {step:,}")
            for place, step in enumerate(round_steps(part.low, part.high, _MOST_STEP_NAMES))
        ],
    )


def values_of(lines: Sequence[tuple[Series, Sequence[Run]]]) -> list[float]:
    """Return all values of the lines of a plot."""
    return [value for _, runs in lines for run in runs for _, value in run]


def _places(marked: Sequence[bool]) -> list[int]:
    return [place for place, is_marked in enumerate(marked) if is_marked]
