"""Layers over files as heat maps: how far each moved, how its norm grew, which filters are dead, what it puts out."""

import math
from collections.abc import Set as AbstractSet
from dataclasses import replace

from hookscope.reporting.steps import HeatMap, heat_map
from hookscope.results.history import ActivationPoint, History, LayerPoint, by_layer

_OF_LAYERS = {
    "drift": "Relative weight change per checkpoint",
    "norm": "Norm relative to the first file",
    "dead-filters": "Dead filters",
}
_OF_OUTPUTS = {"std": "Standard deviation of outputs", "dead-share": "Dead channels of outputs"}


def history_maps(result: History, most_rows: int, named: AbstractSet[str]) -> list[HeatMap]:
    """Return the heat maps of a run by its checkpoints, without maps that have no number, or no share above 0."""
    layers = by_layer(result)
    outputs: dict[str, dict[int, ActivationPoint]] = {}
    for activation in result.activations:
        outputs.setdefault(activation.label, {})[activation.file] = activation
    files, maps = [file.index for file in result.files], []
    for key, title in (_OF_LAYERS | _OF_OUTPUTS).items():
        rows: dict[str, list[float | None]] = {}
        for name, points in layers.items() if key in _OF_LAYERS else ():
            first = next((point.norm for _, point in sorted(points.items()) if point.norm), None)
            rows[name or "(model)"] = [_of_layer(points.get(at), key, first) for at in files]
        for name, seen in outputs.items() if key in _OF_OUTPUTS else ():
            rows[name or "(model)"] = [_of_output(seen.get(at), key) for at in files]
        rows = {name: row for name, row in rows.items() if any(value is not None for value in row)}
        share = key.startswith("dead")
        if not share or any(map(any, rows.values())):
            steps = [at + 1 for at in files]
            maps.append(heat_map(key, title, rows, steps, (most_rows, len(files)), named, share=share))
    labels = tuple(file.label for file in result.files)
    return [replace(drawn, column_names=labels) for drawn in maps if drawn is not None]


def _of_layer(point: LayerPoint | None, key: str, first_norm: float | None) -> float | None:
    if point is None or key == "dead-filters":
        return None if point is None else point.dead_fraction
    if point.nonfinite_count:
        return math.inf
    if key == "drift":
        return point.drift
    return None if point.norm is None or not first_norm else point.norm / first_norm


def _of_output(point: ActivationPoint | None, key: str) -> float | None:
    if point is None or key == "dead-share":
        return None if point is None else point.dead_channel_fraction
    return math.inf if point.nonfinite_count else point.std
