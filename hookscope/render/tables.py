"""Results as CSV and JSON text, for machines: every number in full, every name harmless."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from hookscope.render.histograms import histogram
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.comparison import Change, Comparison, Prediction
from hookscope.results.gradients import GradientRow, Gradients, InputGradients, ParameterRow
from hookscope.results.network import ModelInfo, ModuleRow
from hookscope.results.statistics import QUANTILE_LEVELS, TensorStatistics
from hookscope.text import safe_text, shape_text, strict_json

SCHEMA_VERSION = 1

_QUANTILE_NAMES = tuple(f"q{round(level * 100):02d}" for level in QUANTILE_LEVELS)

_NUMBERS = ("mean", "std", "min", "max", "mean_abs", "l2", "zero_fraction", "nan_count", "inf_count")

_LAYER_COLUMNS = (
    *("index", "layer", "call", "slot", "kind", "parameter_count", "shape", "dtype", "element_count"),
    *_NUMBERS,
    *("channel_axis", "channel_count", "dead_channel_count", "dead_channel_fraction"),
    *_QUANTILE_NAMES,
    *("unmeasured", "flags", "aliases", "repeats", "also"),
)
_GRADIENT_COLUMNS = (
    *("index", "backward_index", "layer", "call", "slot", "role", "kind", "status", "shape", "dtype", "element_count"),
    *_NUMBERS,
    *_QUANTILE_NAMES,
    *("unmeasured", "remark", "aliases", "repeats", "also"),
)
_PARAMETER_COLUMNS = (
    *("index", "name", "kind", "trainable", "status", "shape", "dtype", "element_count"),
    *_NUMBERS,
    *("weight_l2", "ratio"),
    *_QUANTILE_NAMES,
    *("unmeasured", "aliases"),
)

_NO_STATISTICS = TensorStatistics((), "none", 0)

# What a spreadsheet takes for the start of a formula (OWASP, "CSV Injection"), full-width forms included.
_FORMULA_STARTS = "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"


def inspection_to_dict(inspection: Activations) -> dict[str, Any]:
    """Return all of `inspection` but its feature maps as dicts, lists, text and numbers.

    Names are those of the results, with two differences: a prediction is one entry a class, and quantiles are keyed
    by level ("q05"). The weights' list of categories is left out; predictions carry the names that matter.
    """
    return _circumstances(inspection) | {
        "rows": [_row(row) for row in inspection.rows],
        "uncalled": [asdict(layer) for layer in inspection.uncalled],
    }


def gradient_inspection_to_dict(inspection: Gradients) -> dict[str, Any]:
    """Return all of `inspection` but its gradient maps as dicts, lists, text and numbers.

    Names are those of the results, with the differences of `inspection_to_dict`. A loss that is NaN or infinite
    is the text "nan", "inf" or "-inf", which JSON has no number for.
    """
    return _circumstances(inspection) | {
        "mode": inspection.mode,
        "loss": inspection.loss and asdict(inspection.loss) | {"value": _json_number(inspection.loss.value)},
        "verdicts": [asdict(verdict) for verdict in inspection.verdicts],
        "gradients": [_gradient(row) for row in inspection.gradients],
        "parameters": [_gradient(row) for row in inspection.parameters],
        "rows": [_row(row) for row in inspection.rows],
        "uncalled": [asdict(layer) for layer in inspection.uncalled],
    }


def rows_to_json(inspection: Activations | Gradients) -> str:
    """Return the layer rows and the layers that never ran as strict JSON, one row a line."""
    return strict_json(
        {
            "schema_version": SCHEMA_VERSION,
            "rows": [_row(row) for row in inspection.rows],
            "uncalled": [asdict(layer) for layer in inspection.uncalled],
        }
    )


def gradients_to_json(inspection: Gradients) -> str:
    """Return the gradients of layers and of parameters as strict JSON, one row a line."""
    return strict_json(
        {
            "schema_version": SCHEMA_VERSION,
            "gradients": [_gradient(row) for row in inspection.gradients],
            "parameters": [_gradient(row) for row in inspection.parameters],
        }
    )


def rows_to_csv(inspection: Activations | Gradients) -> str:
    """Return the layer rows as CSV with a header, one line a row.

    Shapes read "1x64x112x112"; a missing value is an empty cell; flags, aliases and labels are joined by ";". A name
    that a spreadsheet would take for a formula starts with an apostrophe, and control characters are spelled out, so
    the exact names of hostile layers are in the JSON only.
    """
    return _csv(_LAYER_COLUMNS, map(_record, inspection.rows))


def gradients_to_csv(inspection: Gradients) -> str:
    """Return the gradients of outputs and inputs as CSV with a header, one line a row, as `rows_to_csv` does."""
    return _csv(_GRADIENT_COLUMNS, map(_gradient_record, inspection.gradients))


def parameters_to_csv(inspection: Gradients) -> str:
    """Return the gradients of parameters as CSV with a header, one line a parameter, as `rows_to_csv` does."""
    return _csv(_PARAMETER_COLUMNS, map(_parameter_record, inspection.parameters))


def changes_to_csv(comparison: Comparison) -> str:
    """Return what edits changed as CSV with a header, one line a row: statistics without the edits and with them."""
    columns = ("label", "what", *(f"{name}_{when}" for name in _NUMBERS for when in ("before", "after")))
    return _csv(columns, map(_change_record, comparison.changes))


def inputs_to_csv(inputs: Sequence[InputGradients]) -> str:
    """Return gradient norms of inputs alone as CSV with a header, one line an input, one column a layer's output."""
    labels = list(dict.fromkeys(label for each in inputs for label in each.rows_l2))
    columns = ("name", "loss", "parameters_l2", *(f"l2 {_name(label)}" for label in labels))
    return _csv(columns, map(_input_record, inputs))


def modules_to_dict(rows: Sequence[ModuleRow]) -> dict[str, Any]:
    """Return the modules of a network as dicts, lists, text and numbers; names are those of `ModuleRow`."""
    return {"schema_version": SCHEMA_VERSION, "modules": [asdict(row) for row in rows]}


def comparison_to_dict(comparison: Comparison) -> dict[str, Any]:
    """Return what edits changed as dicts, lists, text and numbers; names are those of `Comparison`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "edits": list(comparison.edits),
        "losses": None if comparison.losses is None else list(map(_json_number, comparison.losses)),
        "row_count": comparison.row_count,
        "changes": [
            {
                "label": change.label,
                "what": change.what,
                "before": change.before and _statistics(change.before),
                "after": change.after and _statistics(change.after),
                "l2_ratio": change.l2_ratio,
            }
            for change in comparison.changes
        ],
    }


def _csv(columns: Sequence[str], records: Iterable[Mapping[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _record(row: LayerRow) -> dict[str, str]:
    """Return the cells of one CSV line."""
    return _statistics_cells(row.activation) | {
        **_place_cells(row),
        "parameter_count": str(row.parameter_count),
        "shape": "" if "not a tensor" in row.flags else shape_text(row.activation.shape),
        "flags": ";".join(row.flags),
    }


def _gradient_record(row: GradientRow) -> dict[str, str]:
    return _statistics_cells(row.gradient) | {
        **_place_cells(row),
        "backward_index": _number(row.backward_index),
        "role": row.role,
        "status": row.status,
        "remark": _name(row.remark),
    }


def _parameter_record(row: ParameterRow) -> dict[str, str]:
    return _statistics_cells(row.gradient) | {
        "index": str(row.index),
        "name": _name(row.name),
        "kind": _name(row.kind),
        "trainable": "true" if row.trainable else "false",
        "status": row.status,
        "weight_l2": _number(row.weight_l2),
        "ratio": _number(row.ratio),
        "aliases": _names(row.aliases),
    }


def _change_record(change: Change) -> dict[str, str]:
    sides = {"before": change.before, "after": change.after}
    numbers = {
        f"{name}_{when}": _number(None if statistics is None else getattr(statistics, name))
        for name in _NUMBERS
        for when, statistics in sides.items()
    }
    return {"label": _name(change.label), "what": change.what, **numbers}


def _input_record(each: InputGradients) -> dict[str, str]:
    norms = {f"l2 {_name(label)}": _number(norm) for label, norm in each.rows_l2.items()}
    return norms | {
        "name": _name(each.name),
        "loss": _number(each.loss),
        "parameters_l2": _number(each.parameters_l2),
    }


def _place_cells(row: LayerRow | GradientRow) -> dict[str, str]:
    """Return the cells that say which tensor a row is about."""
    return {
        "index": str(row.index),
        "layer": _name(row.layer),
        "call": str(row.call),
        "slot": _name(row.slot),
        "kind": _name(row.kind),
        "aliases": _names(row.aliases),
        "repeats": _name(row.repeats),
        "also": _names(row.also),
    }


def _statistics_cells(statistics: TensorStatistics) -> dict[str, str]:
    values = {**_statistics(statistics), **dict.fromkeys(_QUANTILE_NAMES), **(_quantiles(statistics) or {})}
    return {name: _number(value) for name, value in values.items() if name not in ("shape", "quantiles")} | {
        "shape": shape_text(statistics.shape),
        "dtype": _name(statistics.dtype),
        "unmeasured": _name(statistics.unmeasured or ""),
    }


def _names(names: Iterable[str]) -> str:
    return _name(";".join(name.replace(";", r"\x3b") for name in names))


def _name(name: str) -> str:
    return f"'{safe_text(name)}" if name.startswith(tuple(_FORMULA_STARTS)) else safe_text(name)


def _number(value: float | None) -> str:
    # float() first: NumPy's own floats write their type into repr.
    return "" if value is None else repr(float(value)) if isinstance(value, float) else str(value)


def _json_number(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))


def _circumstances(inspection: Activations | Gradients) -> dict[str, Any]:
    """Return what was run on what, and what came of it as a whole."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": _model(inspection.model),
        "inputs": [asdict(record) for record in inspection.inputs],
        "seed": inspection.seed,
        "device": inspection.device,
        "dtype": inspection.dtype,
        "timings": dict(inspection.timings),
        "verification": asdict(inspection.verification) if inspection.verification else None,
        "warnings": list(inspection.warnings),
        "notes": list(inspection.notes),
        "failure": asdict(inspection.failure) if inspection.failure else None,
        "predictions": [
            {"input_index": prediction.input_index, "classes": _classes(prediction)}
            for prediction in inspection.predictions
        ],
    }


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


def _gradient(row: GradientRow | ParameterRow) -> dict[str, Any]:
    return asdict(replace(row, gradient=_NO_STATISTICS)) | {"gradient": _statistics(row.gradient)}


def _statistics(statistics: TensorStatistics) -> dict[str, Any]:
    result = asdict(replace(statistics, distribution=None)) | {
        "quantiles": _quantiles(statistics),
        "dead_channel_fraction": statistics.dead_channel_fraction,
    }
    del result["distribution"]  # a table is for reading
    counted = histogram(statistics.distribution)
    return result | {"histogram": counted and asdict(counted)}


def _quantiles(statistics: TensorStatistics) -> dict[str, float] | None:
    if statistics.quantiles is None:
        return None
    return dict(zip(_QUANTILE_NAMES, statistics.quantiles, strict=True))
