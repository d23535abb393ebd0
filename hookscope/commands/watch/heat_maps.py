"""Heat maps of a watched training: parameters and layers over its steps."""

import math
from collections.abc import Set as AbstractSet
from itertools import chain

from hookscope.reporting.steps import HeatMap, heat_map
from hookscope.results.training import TrainingLog, WatchedLayer, WatchedParameter

_TITLES = {
    "gradient-norm": "Gradient norm",
    "update-ratio": "Update ratio, ‖Δw‖ / ‖w‖",
    "dead-share": "Dead channels",
    "saturated-share": "Saturated values",
}


def heat_maps(
    log: TrainingLog, most_columns: int, most_rows: int, named: AbstractSet[str] = frozenset()
) -> list[HeatMap]:
    """Return the heat maps of a training, without maps that have no number; see `heat_map`."""
    maps = []
    for key, title in _TITLES.items():
        share = key.endswith("share")
        columns = [
            {row.label: _of_layer(row, key) for row in step.layers}
            if share
            else {row.name: _of_parameter(row, key) for row in step.parameters}
            for step in log.watched
        ]
        rows = {name: [column.get(name) for column in columns] for name in dict.fromkeys(chain.from_iterable(columns))}
        if key != "gradient-norm":  # which shows the empty rows of frozen parameters
            rows = {name: row for name, row in rows.items() if any(value is not None for value in row)}
        steps = [step.step for step in log.watched]
        maps.append(heat_map(key, title, rows, steps, (most_rows, most_columns), named, share=share))
    return [drawn for drawn in maps if drawn is not None]


def _of_parameter(row: WatchedParameter, key: str) -> float | None:
    if key == "update-ratio":
        return row.update_ratio
    return math.inf if row.gradient_nonfinite_count else row.gradient_norm


def _of_layer(row: WatchedLayer, key: str) -> float | None:
    return row.dead_channel_fraction if key == "dead-share" else row.saturated_fraction
