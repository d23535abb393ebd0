"""Reduce a training of any length to the columns of a picture, and keep the extremes of every column.

Curves are thinned by M4, which keeps the first, smallest, largest and last value of every column. The curve drawn from
these looks like the curve drawn from all values (Jugel et al. 2014, "M4: A Visualization-Oriented Time Series Data
Aggregation", VLDB 7 (10)).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.reporting.axes import Run, spread
from hookscope.reporting.palettes import ALL_ZERO, LEVEL_COUNT, NON_FINITE, palette_image

Floats = NDArray[np.float64]

LARGEST = 1e150  # beyond it a square overflows
_ZERO_DISTANCE = 1e9  # from 0 to any value on a logarithmic scale; NaN and Inf are even further away


def as_floats(values: Iterable[float | None]) -> Floats:
    """Return numbers as an array: NaN for a missing number, Inf for NaN and infinite numbers."""
    return np.array([*map(drawable, values)], np.float64)


def columns_of(steps: NDArray[np.int64], low: int, high: int, count: int) -> NDArray[np.int64]:
    """Return the column, 0 to `count` - 1, of each step from `low` to `high`."""
    return (steps - low) * count // (high - low + 1)


def kept_places(column: NDArray[np.int64], values: Floats) -> NDArray[np.int64]:
    """Return the positions of the finite values that M4 keeps, in order; `column` must ascend."""
    finite = np.flatnonzero(np.isfinite(values))
    if not finite.size:
        return finite
    by_value = finite[np.lexsort((values[finite], column[finite]))]
    ends = [np.flatnonzero(np.diff(column[rows], prepend=-1)) for rows in (finite, by_value)]
    kept = [rows[places] for rows, places in zip((finite, by_value), ends, strict=True)]
    kept += [rows[np.append(places[1:], rows.size) - 1] for rows, places in zip((finite, by_value), ends, strict=True)]
    return np.unique(np.concatenate(kept))


def kept_runs(column: NDArray[np.int64], steps: NDArray[np.int64], values: Floats) -> list[Run]:
    """Return the steps and values that M4 keeps, in the runs that one line connects: it breaks at Inf only."""
    kept = kept_places(column, values)
    breaks = np.cumsum(np.isinf(values))[kept]
    runs = np.split(kept, np.flatnonzero(np.diff(breaks)) + 1)
    return [[*zip(steps[run].tolist(), values[run].tolist(), strict=True)] for run in runs if run.size]


def round_steps(low: int, high: int, most: int) -> list[int]:
    """Return the first step and round steps after it, at most `most` in all: 1, 500, 1,000."""
    span = max(1, high - low)
    power = 10 ** max(0, math.floor(math.log10(span / most)))
    by = next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) <= most - 1)
    return [low, *(step for step in range((low // by + 1) * by, high + 1, by) if step - low >= 0.6 * by)]


def span_text(first: int, last: int, unit: str = "step") -> str:
    """Return "step 12", or "steps 120 to 129"."""
    return f"{unit} {first:,}" if first == last else f"{unit}s {first:,} to {last:,}"


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One number of every parameter, or of every layer's output, over the watched steps.

    Attributes:
        key: Short unique name: "gradient-norm".
        names: Names of the rows, in the order of the network.
        columns: First and last step of each column.
        values: (rows, columns): NaN for a missing value, Inf for NaN and infinite values.
        share: Whether values are shares, 0-1, on a linear scale; otherwise the scale is logarithmic.
        last: Last value of each row over all watched steps, encoded as in `values`.
        largest: Largest finite value of each row, and the first step with it; NaN and 0 without one.
        nonfinite_counts: Number of watched steps with NaN or Inf, for each row.
        left_out: Number of rows for which there was no room.
        watched_count: Number of watched steps; it exceeds the number of columns if they were thinned.
        column_names: Names of the columns if they are not steps; empty for steps.
    """

    key: str
    title: str
    names: tuple[str, ...]
    columns: tuple[tuple[int, int], ...]
    values: Floats
    share: bool
    last: Floats
    largest: tuple[tuple[float, int], ...]
    nonfinite_counts: tuple[int, ...]
    left_out: int
    watched_count: int
    column_names: tuple[str, ...] = ()

    @property
    def scale(self) -> tuple[float, float] | None:
        """Ends of the colour scale: 0 and 1 for shares, else extremes of finite values above 0; None without one."""
        if self.share:
            return 0.0, 1.0
        shown = self.values[np.isfinite(self.values) & (self.values > 0)]
        return (float(shown.min()), float(shown.max())) if shown.size else None

    def picture(self, ground: int) -> Image.Image:
        """Return the colours as a picture with a palette, a pixel for each value, `ground` where there is none."""
        levels = np.full(self.values.shape, ground, np.uint8)
        low, high = self.scale or (1.0, 1.0)
        on_scale = np.isfinite(self.values) & ((self.values >= 0) if self.share else (self.values > 0))
        values = self.values[on_scale]
        if not self.share:
            values, low, high = np.log10(values), math.log10(low), math.log10(high)
        shares = ((values - low) / ((high - low) or 1.0)).clip(0, 1)
        levels[on_scale] = (shares * (LEVEL_COUNT - 1) + 0.5).astype(np.uint8)
        levels[np.isinf(self.values)] = NON_FINITE
        levels[self.values == 0] = ALL_ZERO
        return palette_image(levels)


def drawable(value: float | None) -> float:
    """Return NaN for None, and Inf for a number that is not finite, or whose square would overflow."""
    if value is None:
        return math.nan
    if not abs(value) < LARGEST:
        return math.inf
    return value if abs(value) > 1 / LARGEST else 0.0


def heat_map(
    key: str,
    title: str,
    rows: Mapping[str, Sequence[float | None]],
    steps: Sequence[int],
    most: tuple[int, int],
    named: AbstractSet[str],
    *,
    share: bool,
) -> HeatMap | None:
    """Return numbers by row and step as a heat map of at most so many rows and columns; None without a number.

    A column of several steps shows the value furthest from the row's median: first NaN and Inf, then 0 on a logarithmic
    scale. If there is not room for all rows, the rows in `named` are kept, then rows with NaN or Inf, then rows spread
    evenly.
    """
    full = np.array([as_floats(row) for row in rows.values()])
    if not full.size or np.isnan(full).all():
        return None
    kept = _kept_rows([*rows], full, most[0], named)
    names, full = [[*rows][row] for row in kept], full[kept]
    parts = np.array_split(np.arange(len(steps)), min(len(steps), most[1]))
    finite = np.where(np.isfinite(full), full, -math.inf)
    tops = zip(finite.max(axis=1).tolist(), finite.argmax(axis=1).tolist(), strict=True)
    last = full.shape[1] - 1 - (~np.isnan(full))[:, ::-1].argmax(axis=1)
    return HeatMap(
        key,
        title,
        tuple(names),
        tuple((steps[part[0]], steps[part[-1]]) for part in parts),
        full if len(parts) == len(steps) else _thinned(full, parts, share=share),
        share,
        full[np.arange(len(names)), last],
        tuple((top, steps[place]) if top > -math.inf else (math.nan, 0) for top, place in tops),
        tuple(np.isinf(full).sum(axis=1).tolist()),
        len(rows) - len(names),
        len(steps),
    )


def _kept_rows(names: Sequence[str], full: Floats, most: int, named: AbstractSet[str]) -> list[int]:
    rows = range(len(names))
    if len(names) <= most:
        return [*rows]
    broken = np.asarray(np.isinf(full).any(axis=1))
    first = sorted((row for row in rows if names[row] in named or broken[row]), key=lambda row: names[row] not in named)
    others = [row for row in rows if names[row] not in named and not broken[row]]
    return sorted([*first[:most], *(others[place] for place in spread(len(others), max(0, most - len(first))))])


def _thinned(full: Floats, parts: Sequence[NDArray[np.int64]], *, share: bool) -> Floats:
    """Return a column for each part of the steps: in each row the value furthest from the row's median."""
    with np.errstate(divide="ignore"):
        scaled = full if share else np.log10(np.where(full > 0, full, math.nan))
    finite = np.where(np.isfinite(scaled), scaled, math.nan)
    medians = np.array([np.median(row[~np.isnan(row)]) if not np.isnan(row).all() else 0.0 for row in finite])
    distances = np.where(np.isnan(finite), -1.0, np.abs(finite - medians[:, None]))
    distances = np.where((full == 0) & (not share), _ZERO_DISTANCE, distances)
    distances = np.where(np.isinf(full), math.inf, distances)
    picked = [part[0] + distances[:, part].argmax(axis=1) for part in parts]
    return np.stack([full[np.arange(len(full)), places] for places in picked], axis=1)
