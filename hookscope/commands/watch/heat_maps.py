"""Heat maps of a watched training: parameters and layers over its steps."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hookscope.reporting.steps import HeatMap, drawable, kept_rows, thinned
from hookscope.results.training import TrainingLog, WatchedLayer, WatchedParameter, WatchedStep


def heat_maps(log: TrainingLog, most_columns: int, most_rows: int, named: Iterable[str] = ()) -> list[HeatMap]:
    """Return the heat maps of a training, without maps that have no number.

    A column of several watched steps shows the value furthest from the row's median: first NaN and Inf, then 0 on a
    logarithmic scale. If there is not room for all rows, the rows in `named` are kept, then those with NaN or Inf, then
    rows spread evenly over the network.
    """
    watched = sorted(log.watched, key=lambda step: step.step)
    maps = (_heat_map(kind, watched, most_columns, most_rows, {*named}) for kind in _KINDS)
    return [heat_map for heat_map in maps if heat_map is not None]


@dataclass(frozen=True, slots=True)
class _Kind:
    """The number that a heat map shows, and how to read it from a watched step, by name of the row."""

    key: str
    title: str
    share: bool
    read: Callable[[WatchedStep], dict[str, float]]
    with_empty_rows: bool = False  # keeps the rows of frozen parameters


def _of_parameters(read: Callable[[WatchedParameter], float | None]) -> Callable[[WatchedStep], dict[str, float]]:
    return lambda step: {row.name: drawable(read(row)) for row in step.parameters}


def _of_layers(read: Callable[[WatchedLayer], float | None]) -> Callable[[WatchedStep], dict[str, float]]:
    return lambda step: {row.label: drawable(read(row)) for row in step.layers}


def _gradient_norm(row: WatchedParameter) -> float | None:
    return math.inf if row.gradient_nonfinite_count else row.gradient_norm


_KINDS = (
    _Kind("gradient-norm", "Gradient norm", False, _of_parameters(_gradient_norm), with_empty_rows=True),
    _Kind("update-ratio", "Update ratio, ‖Δw‖ / ‖w‖", False, _of_parameters(lambda row: row.update_ratio)),
    _Kind("dead-share", "Dead channels", True, _of_layers(lambda row: row.dead_channel_fraction)),
    _Kind("saturated-share", "Saturated values", True, _of_layers(lambda row: row.saturated_fraction)),
)


def _heat_map(
    kind: _Kind, watched: Sequence[WatchedStep], most_columns: int, most_rows: int, named: set[str]
) -> HeatMap | None:
    read = [kind.read(step) for step in watched]
    names = list(dict.fromkeys(name for column in read for name in column))
    full = np.array([[column.get(name, math.nan) for column in read] for name in names], np.float64)
    if not full.size or np.isnan(full).all():
        return None
    if not kind.with_empty_rows:
        has_values = np.asarray(~np.isnan(full).all(axis=1))
        names, full = [name for name, has in zip(names, has_values, strict=True) if has], full[has_values]
    row_count = len(names)
    kept = kept_rows(names, full, most_rows, named)
    names, full = [names[row] for row in kept], full[kept]
    steps = [step.step for step in watched]
    parts = np.array_split(np.arange(len(steps)), min(len(steps), most_columns))
    finite = np.where(np.isfinite(full), full, -math.inf)
    at = finite.argmax(axis=1)
    largest = finite[np.arange(len(names)), at]
    has_value = ~np.isnan(full)
    last = full.shape[1] - 1 - has_value[:, ::-1].argmax(axis=1)
    return HeatMap(
        kind.key,
        kind.title,
        tuple(names),
        tuple((steps[part[0]], steps[part[-1]]) for part in parts),
        full if len(parts) == len(steps) else thinned(full, parts, share=kind.share),
        kind.share,
        full[np.arange(len(names)), last],
        tuple(
            (float(top), steps[place]) if top > -math.inf else (math.nan, 0)
            for top, place in zip(largest, at, strict=True)
        ),
        tuple(np.isinf(full).sum(axis=1).tolist()),
        row_count - len(names),
        len(steps),
    )
