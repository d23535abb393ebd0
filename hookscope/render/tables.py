"""Results as CSV and JSON text, for machines: every number in full, every name harmless."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from hookscope.results import (
    QUANTILE_LEVELS,
    Inspection,
    LayerRow,
    ModelInfo,
    ModuleRow,
    Prediction,
    TensorStatistics,
)
from hookscope.text import safe_text, shape_text, strict_json

SCHEMA_VERSION = 1

_QUANTILE_NAMES = tuple(f"q{round(level * 100):02d}" for level in QUANTILE_LEVELS)

_CSV_COLUMNS = (
    *("index", "layer", "call", "slot", "kind", "parameter_count", "shape", "dtype", "element_count"),
    *("mean", "std", "min", "max", "mean_abs", "l2", "zero_fraction", "nan_count", "inf_count"),
    *("channel_axis", "channel_count", "dead_channel_count", "dead_channel_fraction"),
    *_QUANTILE_NAMES,
    *("sample_count", "unmeasured", "flags", "aliases"),
)

_NO_STATISTICS = TensorStatistics((), "none", 0)

# What a spreadsheet takes for the start of a formula (OWASP, "CSV Injection"), full-width forms included.
_FORMULA_STARTS = "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"


def inspection_to_dict(inspection: Inspection) -> dict[str, Any]:
    """Return all of `inspection` but its feature maps as dicts, lists, text and numbers.

    Names are those of `hookscope.results`, with two differences: a prediction is one entry a class, and quantiles are
    keyed by level ("q05"). The weights' list of categories is left out; predictions carry the names that matter.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "model": _model(inspection.model),
        "inputs": [asdict(record) for record in inspection.inputs],
        "seed": inspection.seed,
        "device": inspection.device,
        "dtype": inspection.dtype,
        "timings": dict(inspection.timings),
        "warnings": list(inspection.warnings),
        "failure": asdict(inspection.failure) if inspection.failure else None,
        "predictions": [
            {"input_index": prediction.input_index, "classes": _classes(prediction)}
            for prediction in inspection.predictions
        ],
        "rows": [_row(row) for row in inspection.rows],
        "uncalled": [asdict(layer) for layer in inspection.uncalled],
    }


def inspection_to_json(inspection: Inspection, extra: Mapping[str, Any] | None = None) -> str:
    """Return `inspection` as strict JSON: `inspection_to_dict`, followed by the entries of `extra`."""
    return strict_json({**inspection_to_dict(inspection), **(extra or {})})


def rows_to_json(inspection: Inspection) -> str:
    """Return the layer rows and the layers that never ran as strict JSON, one row a line."""
    return strict_json(
        {
            "schema_version": SCHEMA_VERSION,
            "rows": [_row(row) for row in inspection.rows],
            "uncalled": [asdict(layer) for layer in inspection.uncalled],
        }
    )


def rows_to_csv(inspection: Inspection) -> str:
    """Return the layer rows as CSV with a header, one line a row.

    Shapes read "1x64x112x112"; a missing value is an empty cell; flags and aliases are joined by ";". A name that a
    spreadsheet would take for a formula starts with an apostrophe, and control characters are spelled out, so the exact
    names of hostile layers are in the JSON only.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=_CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_record(row) for row in inspection.rows)
    return text.getvalue()


def modules_to_json(rows: Sequence[ModuleRow]) -> str:
    """Return the modules of a network as strict JSON, one module a line; names are those of `ModuleRow`."""
    return strict_json({"schema_version": SCHEMA_VERSION, "modules": [asdict(row) for row in rows]})


def _record(row: LayerRow) -> dict[str, str]:
    """Return the cells of one CSV line."""
    statistics = row.activation
    values = {**_statistics(statistics), **(_quantiles(statistics) or {})}
    cells = {column: _number(values.get(column)) for column in _CSV_COLUMNS}
    return cells | {
        "index": str(row.index),
        "layer": _name(row.layer),
        "call": str(row.call),
        "slot": _name(row.slot),
        "kind": _name(row.kind),
        "parameter_count": str(row.parameter_count),
        "shape": "" if "not a tensor" in row.flags else shape_text(statistics.shape),
        "dtype": _name(statistics.dtype),
        "unmeasured": _name(statistics.unmeasured or ""),
        "flags": ";".join(row.flags),
        "aliases": _name(";".join(alias.replace(";", r"\x3b") for alias in row.aliases)),
    }


def _name(name: str) -> str:
    return f"'{safe_text(name)}" if name.startswith(tuple(_FORMULA_STARTS)) else safe_text(name)


def _number(value: float | None) -> str:
    # float() first: NumPy's own floats write their type into repr.
    return "" if value is None else repr(float(value)) if isinstance(value, float) else str(value)


def _model(model: ModelInfo) -> dict[str, Any]:
    return {
        "name": model.name,
        "kind": model.kind,
        "weights": model.weights,
        "random": model.random,
        "sha256": model.sha256,
        "parameter_count": model.parameter_count,
        "arguments": dict(model.arguments),
    }


def _classes(prediction: Prediction) -> list[dict[str, Any]]:
    names = prediction.class_names or (None,) * len(prediction.class_indices)
    return [
        {"index": index, "name": name, "probability": probability}
        for index, name, probability in zip(prediction.class_indices, names, prediction.probabilities, strict=True)
    ]


def _row(row: LayerRow) -> dict[str, Any]:
    return asdict(replace(row, activation=_NO_STATISTICS)) | {"activation": _statistics(row.activation)}


def _statistics(statistics: TensorStatistics) -> dict[str, Any]:
    result = asdict(replace(statistics, sample=None)) | {
        "quantiles": _quantiles(statistics),
        "dead_channel_fraction": statistics.dead_channel_fraction,
    }
    del result["sample"]  # a table is for reading
    return result


def _quantiles(statistics: TensorStatistics) -> dict[str, float] | None:
    if statistics.quantiles is None:
        return None
    return dict(zip(_QUANTILE_NAMES, statistics.quantiles, strict=True))
