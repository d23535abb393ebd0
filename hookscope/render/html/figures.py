"""Vector graphics for a page, as the numbers that a template draws: paths, to a tenth of a pixel, ticks and names."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hookscope.render.columns import fold_name, number_text, percent_bound, quantile_text
from hookscope.render.overviews.charts import log_ticks, tail_of, within_blocks
from hookscope.render.training_steps import Floats, columns_of, kept_places, pieces, round_steps
from hookscope.results.statistics import QUANTILE_LEVELS, TensorStatistics
from hookscope.text import figure

WIDTH, HEIGHT = 1000, 220
LEFT, TOP, FOOT = 62, 10, 26
FRAME = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "top": TOP, "foot": FOOT}

_LABEL_PIXELS = 6.2  # a character of the axis, with room to spare
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
            is_at_end = not _fits(place, text)
            at, wide = (place - LEFT) / (WIDTH - LEFT) * _PHONE_PIXELS, len(text) * _LABEL_PIXELS + 8
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
    known = np.array([abs(value) for value in at[0.25] + at[0.75] if value], np.float64)
    axis = _Asinh(float(np.median(known)) if known.size else 1.0, [value for each in at.values() for value in each])
    across = _across(len(rows))
    shapes = [
        ("band", _band(across, at[0.05], at[0.95], axis.height)),
        ("core", _band(across, at[0.25], at[0.75], axis.height)),
        ("line", _line(across, at[0.5], axis.height)),
    ]
    return Figure(
        "Activations",
        f"Quantiles of the values of {len(rows)} outputs in forward order. The table of layers has the numbers.",
        labels,
        shapes,
        axis.ticks(),
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
    values = [value for _, line in lines for value in line if value and value > 0]
    if not values:
        return None
    axis = _Log(min(values), max(values))
    across = _across(len(names))
    styles = ["line other", "line"] if len(lines) == 2 else ["line"]
    drawn = [
        (style, _line(across, [value if value and value > 0 else None for value in line], axis.height))
        for style, (_, line) in zip(styles, lines, strict=True)
    ]
    return Figure(
        title,
        f"{title} over {len(names)} places, from {number_text(min(values))} to {number_text(max(values))}, "
        "on a logarithmic axis. The pages of the layers have the numbers.",
        labels,
        drawn,
        axis.ticks(),
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
    across = _across(len(values))
    wide = min(0.7 * (WIDTH - LEFT - 12) / max(1, len(values) - 1), 8)
    path = "".join(
        f"M{_short(across(place) - wide / 2)} {_scaled(0)}h{_short(wide)}V{_scaled(value / top)}h-{_short(wide)}z"
        for place, value in enumerate(values)
        if value
    )
    return Figure(
        title,
        f"{title}: {meaning}, at most {percent_bound(largest)}, of {len(values)} places. The table of layers has the "
        "numbers.",
        labels,
        [("core", path)],
        [(_scaled(share), f"{share * top * 100:g}%") for share in (0.0, 0.5, 1.0)],
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
    most: int = 900

    @property
    def places(self) -> int:
        """How many places there are."""
        return min(self.most, self.high - self.low + 1)

    def across(self, step: float) -> float:
        """Return where a step is, from the left."""
        return round(LEFT + 4 + (step - self.low) / max(1, self.high - self.low) * (WIDTH - LEFT - 12), 1)

    def names(self) -> list[tuple[float, str]]:
        """Return round steps, with where they are, as far as their numbers fit; the first is called "step"."""
        numbers = round_steps(self.low, self.high, 8)
        names = [
            (self.across(step), f"step {step:,}" if not place else f"{step:,}") for place, step in enumerate(numbers)
        ]
        return [(left, text) for left, text in names if left + len(text) * _LABEL_PIXELS <= WIDTH]


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
    vertical = (
        _Log(finite[finite > 0].min(), finite.max()) if logarithmic else _Asinh(_scale_of(finite), finite.tolist())
    )
    column = columns_of(steps, axis.low, axis.high, axis.places)
    foot = marked.copy()
    meanings = {mark_meaning: bool(marked.any())}
    shapes = []
    for style, _, values in lines:
        drawn = np.where(values == 0, np.inf, values) if logarithmic else values
        foot |= np.isinf(drawn)
        for meaning, places in (("NaN or Inf", np.isinf(values)), ("0", logarithmic & (values == 0))):
            meanings[meaning] = meanings.get(meaning, False) or bool(places.any())
        path = [
            _line(_placed(axis, steps[piece]), drawn[piece].tolist(), vertical.height)
            for piece in pieces(kept_places(column, drawn), drawn)
        ]
        shapes.append((style, "".join(path)))
    return Figure(
        title,
        f"{title} over steps {axis.low:,} to {axis.high:,}, from {figure(float(finite.min()), 4)} to "
        f"{figure(float(finite.max()), 4)}. The text above it gives the numbers at the pointer.",
        _step_labels(axis, column, steps, lines),
        shapes,
        vertical.ticks(),
        axis.names(),
        [(style, meaning) for style, meaning, _ in lines],
        sorted({round(axis.across(step)) for step in steps[foot]}),
        " or ".join(meaning for meaning, is_there in meanings.items() if is_there),
    )


def _placed(axis: StepAxis, steps: NDArray[np.int64]) -> Callable[[float], float]:
    return lambda place: axis.across(int(steps[int(place)]))


def _scale_of(finite: Floats) -> float:
    return float(np.median(np.abs(finite[finite != 0]))) if finite.any() else 1.0


def _step_labels(
    axis: StepAxis, column: NDArray[np.int64], steps: NDArray[np.int64], lines: Sequence[tuple[str, str, Floats]]
) -> list[str]:
    """Return the numbers at each place in words: "step 12: loss 0.31", "steps 120 to 129: loss 0.29 to 0.33"."""
    labels = [""] * axis.places
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    for start, end in zip(starts, [*starts[1:], column.size], strict=True):
        first, last = steps[start], steps[end - 1]
        words = [f"{meaning} {_extent(values[start:end])}" for _, meaning, values in lines]
        name = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        labels[column[start]] = f"{name}: {', '.join(words)}"
    return labels


def _extent(values: Floats) -> str:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "NaN or Inf" if np.isinf(values).any() else "-"
    low, high = figure(float(finite.min()), 4), figure(float(finite.max()), 4)
    words = low if low == high else f"{low} to {high}"
    return f"{words}, NaN or Inf" if np.isinf(values).any() else words


class _Asinh:
    """A vertical axis, linear around zero and logarithmic far from it."""

    def __init__(self, linear: float, values: Sequence[float | None]) -> None:
        self._linear = linear or 1.0
        self._top = max((abs(value) for value in values if value is not None and value > 0), default=0.0)
        self._bottom = max((abs(value) for value in values if value is not None and value < 0), default=0.0)

    def _unit(self, value: float) -> float:
        # asinh of a quotient that would overflow
        quotient = abs(value) / self._linear
        far = math.asinh(quotient) if math.isfinite(quotient) else math.log(abs(value)) - math.log(self._linear)
        return math.copysign(far, value)

    def height(self, value: float) -> float:
        high, low = self._unit(self._top), -self._unit(self._bottom)
        return _scaled((self._unit(value) - low) / ((high - low) or 1.0))

    def ticks(self) -> list[tuple[float, str]]:
        chosen = [(self.height(0.0), "0")]
        for end, sign in ((self._top, 1), (self._bottom, -1)):
            greatest = math.floor(math.log10(end)) if end else 0
            powers = [10.0**power for power in range(greatest, greatest - 8, -1)] if end else []
            between = [digit * power for power in powers for digit in (5, 2) if digit * power <= end]
            far = [value for value in powers if value >= self._linear / 3]
            more = [value for value in between if len(far) < 2 and value >= self._linear / 3]
            chosen += [(self.height(sign * each), f"{'-' * (sign < 0)}{_tick_text(each)}") for each in (*far, *more)]
        return _apart(chosen)


class _Log:
    """A vertical axis of powers of ten."""

    def __init__(self, low: float, high: float) -> None:
        room = max(0.06 * math.log10(high / low if high / low < math.inf else 1e300), 0.1)
        self._bottom, self._top = math.log10(low) - 2 * room, math.log10(high) + room

    def height(self, value: float) -> float:
        return _scaled((math.log10(value) - self._bottom) / (self._top - self._bottom))

    def ticks(self) -> list[tuple[float, str]]:
        return [(self.height(value), _tick_text(value)) for value in log_ticks(self._bottom, self._top)]


def _scaled(share: float) -> float:
    return round(TOP + (1 - share) * (HEIGHT - FOOT - TOP), 1)


def _tick_text(value: float) -> str:
    mantissa, power = f"{value:.1e}".split("e")
    return (
        f"{value:.2g}"
        if -3 <= int(power) <= 1
        else f"{value:.0f}"
        if 0 < int(power) <= 4
        else f"{float(mantissa):g}e{int(power)}"
    )


def _apart(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Keep the ticks, first ones first, that stand clear of those kept."""
    kept: list[tuple[float, str]] = []
    for height, text in ticks:
        if all(abs(height - other) >= 16 for other, _ in kept):
            kept.append((height, text))
    return kept


def _across(count: int) -> Callable[[float], float]:
    step = (WIDTH - LEFT - 12) / max(1, count - 1)
    return lambda place: round(LEFT + 4 + place * step, 1)


def _runs(values: Sequence[float | None]) -> Iterator[tuple[int, list[float]]]:
    """Yield the stretches without gaps: where each begins, and its values."""
    stretch: list[float] = []
    for place, value in enumerate([*values, None]):
        if value is not None:
            stretch.append(value)
        elif stretch:
            yield place - len(stretch), stretch
            stretch = []


def _points(across: Callable[[float], float], start: int, heights: Sequence[float]) -> list[str]:
    return [f"{_short(across(start + offset))} {_short(height)}" for offset, height in enumerate(heights)]


def _line(across: Callable[[float], float], values: Sequence[float | None], height: Callable[[float], float]) -> str:
    parts = []
    for start, stretch in _runs(values):
        points = _points(across, start, [*map(height, stretch)])
        # A point alone is a plus sign: biases that start at zero have no ratio, which leaves weights as single points.
        parts.append(f"M{'L'.join(points)}" if len(points) > 1 else f"M{points[0]}m-3 0h6m-3 -3v6")
    return "".join(parts)


def _band(
    across: Callable[[float], float],
    low: Sequence[float | None],
    high: Sequence[float | None],
    height: Callable[[float], float],
) -> str:
    parts = []
    # Both are missing in the same places.
    for (start, lows), (_, highs) in zip(_runs(low), _runs(high), strict=True):
        there, back = (_points(across, start, [*map(height, values)]) for values in (highs, lows))
        parts.append(f"M{'L'.join([*there, *reversed(back)])}z")
    return "".join(parts)


def _names(names: Sequence[str]) -> list[tuple[float, str]]:
    """Name the places where a block of layers begins: outer blocks, or inner ones where those say little."""
    kept: list[tuple[float, str]] = []
    layers = within_blocks(names)
    for depth in (1, 2, 3):
        inner = _block_names([".".join(name.split(".")[:depth]) for name in layers])
        kept = inner if len(inner) > len(kept) else kept
        if len(kept) >= 5:
            break
    return kept


def _block_names(blocks: Sequence[str]) -> list[tuple[float, str]]:
    across = _across(len(blocks))
    starts = [place for place, block in enumerate(blocks) if not place or blocks[place - 1] != block]
    lengths = dict(zip(starts, np.diff([*starts, len(blocks)]).tolist(), strict=True))
    kept: list[tuple[float, float]] = []
    names: list[tuple[float, str]] = []
    for place in sorted(starts, key=lambda start: (-lengths[start], start))[:_MOST_BLOCKS]:
        text = fold_name(tail_of(blocks[place]), 18)
        wide = len(text) * _LABEL_PIXELS + 8
        left = across(place) if _fits(across(place), text) else across(place) - wide
        if left >= 0 and all(left + wide <= other or left >= other + width for other, width in kept):
            kept.append((left, wide))
            names.append((across(place), text))
    return sorted(names)


def _fits(place: float, text: str) -> bool:
    return place + len(text) * _LABEL_PIXELS <= WIDTH


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
