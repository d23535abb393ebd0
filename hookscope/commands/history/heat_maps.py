"""Layers over files as heat maps: how far each moved, how its norm grew, which filters are dead, what it puts out."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np

from hookscope.reporting.steps import HeatMap, as_floats, kept_rows
from hookscope.results.history import ActivationPoint, History, LayerPoint, by_layer

Point = TypeVar("Point")

Values = Mapping[str, Mapping[int, float | None]]
"""By row and index of file."""


def history_maps(result: History, most_rows: int, named: Iterable[str]) -> list[HeatMap]:
    """Return the heat maps of a run by its checkpoints; those in which nothing stands out are left out.

    Of more rows than find room, those in `named` are kept, then those with NaN or Inf; the others are spread.
    """
    layers = {name or "(model)": points for name, points in by_layer(result).items()}
    outputs: dict[str, dict[int, ActivationPoint]] = {}
    for activation in result.activations:
        outputs.setdefault(activation.label or "(model)", {})[activation.file] = activation
    maps = [
        ("drift", "Change since the file before, over the norm there", False, _values(layers, _drift)),
        ("norm", "Norm over that in the first file", False, _over_first(layers)),
        ("dead-filters", "Dead filters", True, _values(layers, lambda point: point.dead_fraction)),
        ("std", "Standard deviation of outputs", False, _values(outputs, lambda point: _output(point, point.std))),
        ("dead-share", "Dead channels of outputs", True, _values(outputs, lambda point: point.dead_channel_fraction)),
    ]
    drawn = (_map(result, key, title, values, most_rows, {*named}, share=share) for key, title, share, values in maps)
    return [heat_map for heat_map in drawn if heat_map is not None]


def _values(rows: Mapping[str, Mapping[int, Point]], read: Callable[[Point], float | None]) -> Values:
    return {name: {at: read(point) for at, point in points.items()} for name, points in rows.items()}


def _drift(point: LayerPoint) -> float | None:
    return math.inf if point.nonfinite_count else point.drift


def _output(point: ActivationPoint, value: float | None) -> float | None:
    return math.inf if point.nonfinite_count else value


def _over_first(layers: Mapping[str, Mapping[int, LayerPoint]]) -> Values:
    ratios: dict[str, dict[int, float | None]] = {}
    for name, points in layers.items():
        first = next((point.norm for _, point in sorted(points.items()) if point.norm), None)
        ratios[name] = {at: _ratio(point, first) for at, point in points.items()}
    return ratios


def _ratio(point: LayerPoint, first: float | None) -> float | None:
    if point.nonfinite_count:
        return math.inf
    return None if point.norm is None or not first else point.norm / first


def _map(
    result: History, key: str, title: str, values: Values, most_rows: int, named: set[str], *, share: bool
) -> HeatMap | None:
    files = [file.index for file in result.files]
    full = np.array([as_floats(row.get(at) for at in files) for row in values.values()], np.float64)
    valid = full[~np.isnan(full)] if full.size else full
    if not valid.size or (share and not valid.any()):
        return None
    names = [*values]
    has_values = np.asarray(~np.isnan(full).all(axis=1))
    names, full = [name for name, has in zip(names, has_values, strict=True) if has], full[has_values]
    kept = kept_rows(names, full, most_rows, named)
    left_out = len(names) - len(kept)
    names, full = [names[row] for row in kept], full[kept]
    finite = np.where(np.isfinite(full), full, -math.inf)
    at = finite.argmax(axis=1)
    last = full.shape[1] - 1 - (~np.isnan(full))[:, ::-1].argmax(axis=1)
    rows = np.arange(len(names))
    return HeatMap(
        key=key,
        title=title,
        names=tuple(names),
        columns=tuple((place, place) for place in range(1, len(files) + 1)),
        values=full,
        share=share,
        last=full[rows, last],
        largest=tuple(
            (float(top), int(place) + 1) if top > -math.inf else (math.nan, 0)
            for top, place in zip(finite[rows, at], at, strict=True)
        ),
        nonfinite_counts=tuple(np.isinf(full).sum(axis=1).tolist()),
        left_out=left_out,
        watched_count=len(files),
        column_names=tuple(file.label for file in result.files),
    )
