"""Results as CSV, for machines: every number in full, every name harmless."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from hookscope.results.activations import Activations, LayerRow
from hookscope.results.attention import Attention, HeadRow
from hookscope.results.comparison import Comparison
from hookscope.results.cost import ModuleCost, NetworkCost
from hookscope.results.costs_of_rows import costs_of_rows
from hookscope.results.differences import DifferenceRow, Differences, Measures, WeightDifference
from hookscope.results.gradients import GradientRow, Gradients, InputGradients, ParameterRow
from hookscope.results.history import ActivationPoint, History, WeightPoint
from hookscope.results.network import ModuleRow, ModuleTable
from hookscope.results.statistics import QUANTILE_NAMES
from hookscope.results.survey import Survey, SurveyChannel
from hookscope.results.table_rows import TableRows
from hookscope.results.token_norms import HighToken, MassiveActivation
from hookscope.text import safe_text, shape_text

_NUMBERS = ("mean", "std", "min", "max", "mean_abs", "l2", "zero_fraction", "nan_count", "inf_count")

_LAYER_COLUMNS = (
    *("index", "layer", "call", "slot", "kind", "parameter_count", "shape", "dtype", "element_count"),
    *_NUMBERS,
    *("channel_axis", "channel_count", "dead_channel_count", "dead_channel_fraction"),
    *QUANTILE_NAMES,
    *("unmeasured", "flags", "aliases", "repeats", "also", "source", "inputs"),
    *("token_norm_median", "token_norm_max", "high_norm_tokens", "massive_activations"),
)
_TOKEN_COLUMNS = ("label", "what", "input", "token", "place", "channel", "value", "limit", "median")
_GRADIENT_COLUMNS = (
    *("index", "backward_index", "layer", "call", "slot", "role", "kind", "status", "shape", "dtype", "element_count"),
    *_NUMBERS,
    *QUANTILE_NAMES,
    *("unmeasured", "remark", "aliases", "repeats", "also", "source"),
)
_PARAMETER_COLUMNS = (
    *("index", "name", "kind", "trainable", "status", "shape", "dtype", "element_count"),
    *_NUMBERS,
    *("weight_l2", "ratio"),
    *QUANTILE_NAMES,
    *("unmeasured", "aliases"),
)

_HISTORY_FILE_COLUMNS = (
    *("index", "name", "status", "counters", "exit_code", "error", "sha256"),
    *("optimiser_steps", "learning_rates", "best_class", "seconds"),
)
_COST_COLUMNS = (
    *("multiply_adds", "own_multiply_adds", "total_parameter_count", "own_parameter_count", "parameter_bytes"),
    *("own_parameter_bytes", "trainable_count", "output_bytes", "saved_bytes", "own_saved_bytes"),
    *("receptive_field", "receptive_field_stride", "receptive_field_centre", "receptive_field_at_least", "seconds"),
)

# Characters that start a formula in a spreadsheet (OWASP, "CSV Injection"), full-width forms included.
_FORMULA_STARTS = "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"


def rows_to_csv(inspection: Activations | Gradients) -> str:
    """Return the layer rows as CSV with a header, one line a row.

    A name that a spreadsheet would take for a formula starts with an apostrophe, and control characters are spelled
    out, so the exact names of hostile layers are in the JSON only.
    """
    shapeless = ({"shape": ""} if "not a tensor" in row.flags else {} for row in inspection.rows)
    records = [_record(row) | _token_cells(row) | blank for row, blank in zip(inspection.rows, shapeless, strict=True)]
    cost = inspection.cost if isinstance(inspection, Activations) else None
    if cost is None:
        return _csv(_LAYER_COLUMNS, records)
    costs = costs_of_rows(inspection.rows, cost)
    both = (record | cost_cells(each) for record, each in zip(records, costs, strict=True))
    return _csv((*_LAYER_COLUMNS, *_COST_COLUMNS), both)


def _token_cells(row: LayerRow) -> dict[str, object]:
    if row.tokens is None:
        return {}
    return {
        "token_norm_median": row.tokens.median,
        "token_norm_max": row.tokens.max,
        "high_norm_tokens": row.tokens.high_count,
        "massive_activations": row.tokens.massive_count,
    }


def tokens_to_csv(inspection: Activations) -> str:
    """Return high-norm tokens and massive activations as CSV with a header, one line each, as `rows_to_csv` does."""
    records: list[dict[str, object]] = []
    for row in inspection.rows:
        tokens = row.tokens
        if tokens is None:
            continue
        listed: list[HighToken | MassiveActivation] = [*tokens.high, *tokens.massive]
        for each in listed:
            of_norm = {"what": "high norm", "value": each.norm} if isinstance(each, HighToken) else {}
            place = {"input": inspection.inputs[each.input_index].name, "place": tokens.place(each.token)}
            records.append({"label": row.label, "what": "massive activation", **place, **_own(each), **of_norm})
    return _csv(_TOKEN_COLUMNS, records)


def cost_to_csv(cost: NetworkCost) -> str:
    """Return what each module costs as CSV with a header, one line a module, as `rows_to_csv` does."""
    return _csv(("layer", *_COST_COLUMNS), ({"layer": each.layer} | cost_cells(each) for each in cost.modules))


def modules_to_csv(table: ModuleTable) -> str:
    """Return the modules of a network as CSV with a header, one line a module, with their costs if they were taken."""
    own = [each.name for each in fields(ModuleRow)]
    known = {} if table.cost is None else {each.layer: each for each in table.cost.modules}
    records = []
    for row in table.rows:
        shapes = {name: tuple(map(shape_text, getattr(row, name))) for name in ("input_shapes", "output_shapes")}
        records.append({**_own(row), **cost_cells(known.get(row.layer) if row.owner is None else None), **shapes})
    return _csv((*own, *(name for name in _COST_COLUMNS if known and name not in own)), records)


def cost_cells(cost: ModuleCost | None) -> dict[str, object]:
    """Return the cells of a cost by column; none of a row without one."""
    if cost is None:
        return {}
    total, own, seen = cost.total, cost.own, cost.receptive_field
    cells: dict[str, object] = {
        "multiply_adds": total.multiply_adds,
        "own_multiply_adds": own.multiply_adds,
        "total_parameter_count": total.parameter_count,
        "own_parameter_count": own.parameter_count,
        "parameter_bytes": total.parameter_bytes,
        "own_parameter_bytes": own.parameter_bytes,
        "trainable_count": total.trainable_count,
        "output_bytes": cost.output_bytes,
        "saved_bytes": total.saved_bytes,
        "own_saved_bytes": own.saved_bytes,
        "seconds": cost.seconds,
    }
    if seen is not None:
        names = {"": seen.size, "_stride": seen.stride, "_centre": seen.centre}
        cells |= {f"receptive_field{name}": "x".join(f"{each:g}" for each in value) for name, value in names.items()}
        cells["receptive_field_at_least"] = seen.at_least
    return cells


def gradients_to_csv(inspection: Gradients) -> str:
    """Return the gradients of outputs and inputs as CSV with a header, one line a row, as `rows_to_csv` does."""
    return _csv(_GRADIENT_COLUMNS, map(_record, inspection.gradients))


def parameters_to_csv(inspection: Gradients) -> str:
    """Return the gradients of parameters as CSV with a header, one line a parameter, as `rows_to_csv` does."""
    return _csv(_PARAMETER_COLUMNS, map(_record, inspection.parameters))


def changes_to_csv(comparison: Comparison) -> str:
    """Return what edits changed as CSV with a header, one line a row: statistics without the edits and with them."""
    columns = ("label", "what", *(f"{name}_{when}" for name in _NUMBERS for when in ("before", "after")))
    records = (
        {"label": change.label, "what": change.what}
        | {
            f"{name}_{when}": getattr(statistics, name, None)
            for name in _NUMBERS
            for when, statistics in (("before", change.before), ("after", change.after))
        }
        for change in comparison.changes
    )
    return _csv(columns, records)


def differences_to_csv(result: Differences) -> str:
    """Return the rows of a comparison as CSV with a header, one line a pair; what has no partner comes last."""
    measured = (*(each.name for each in fields(Measures)), "sqnr_db")
    own = [each.name for each in fields(DifferenceRow) if each.name not in ("measures", "added", "channel")]
    columns = (*own, *measured, *(f"{name}_added" for name in measured), "channel", "channel_fraction")

    def numbers(measures: Measures | None, suffix: str) -> dict[str, object]:
        return {f"{name}{suffix}": getattr(measures, name, None) for name in measured}

    records: list[dict[str, object]] = []
    for row in result.rows:
        record = {**_own(row), "shape": shape_text(row.shape), "shape_b": shape_text(row.shape_b)}
        record |= {"channel": None if row.channel is None else row.channel.channel}
        record |= {"channel_fraction": None if row.channel is None else row.channel.fraction}
        records.append({**record, **numbers(row.measures, ""), **numbers(row.added, "_added")})
    for each in result.unmatched:
        label, kind, shape = (f"{name}{'' if each.side == 'A' else '_b'}" for name in ("label", "kind", "shape"))
        records.append({label: each.label, kind: each.kind, shape: shape_text(each.shape), "note": each.reason})
    return _csv(columns, records)


def weights_to_csv(result: Differences) -> str:
    """Return the tensors of a comparison of weights as CSV with a header; what has no partner comes last."""
    measured = (*(each.name for each in fields(Measures)), "sqnr_db")
    own = [each.name for each in fields(WeightDifference) if each.name != "measures"]
    records: list[dict[str, object]] = []
    for row in result.weights:
        numbers = {name: getattr(row.measures, name, None) for name in measured}
        records.append({**_own(row), "shape": shape_text(row.shape), "shape_b": shape_text(row.shape_b), **numbers})
    for each in result.unmatched:
        name, dtype, shape = (f"{name}{'' if each.side == 'A' else '_b'}" for name in ("name", "dtype", "shape"))
        records.append({name: each.label, dtype: each.kind, shape: shape_text(each.shape), "note": each.reason})
    return _csv((*own, *measured, "note"), records)


def heads_to_csv(result: Attention) -> str:
    """Return the numbers of attention heads as CSV with a header, one line a head, as `rows_to_csv` does."""
    columns = (*(each.name for each in fields(HeadRow)), "is_one_token")
    return _csv(columns, (_own(row) | {"is_one_token": row.is_one_token} for row in result.rows))


def inputs_to_csv(inputs: Sequence[InputGradients]) -> str:
    """Return gradient norms of inputs alone as CSV with a header, one line an input, one column a layer's output."""
    labels = list(dict.fromkeys(label for each in inputs for label in each.rows_l2))
    columns = ("name", "loss", "parameters_l2", *(f"l2 {label}" for label in labels))
    return _csv(
        columns, ({f"l2 {label}": norm for label, norm in each.rows_l2.items()} | _own(each) for each in inputs)
    )


def history_to_csv(result: History) -> dict[str, str]:
    """Return a run by its checkpoints as CSV files with headers, by name: files, tensors, verdicts, activations."""
    names = [each.label for each in result.files]
    files = (
        {
            **_own(each),
            "counters": tuple(f"{name}={count}" for name, count in each.counters.items()),
            "optimiser_steps": tuple(f"{point.key}={point.steps}" for point in each.optimisers),
            "learning_rates": tuple(repr(rate) for point in each.optimisers for rate in point.rates),
            "best_class": tuple(best.classes[0][0] for best in each.predictions if best.classes),
        }
        for each in result.files
    )
    tables: dict[str, tuple[Sequence[str], Iterable[Mapping[str, object]]]] = {
        "files.csv": (_HISTORY_FILE_COLUMNS, files),
        "weights.csv": (
            [each.name for each in fields(WeightPoint)],
            ({**_own(row), "file": names[row.file], "shape": shape_text(row.shape)} for row in result.rows),
        ),
        "verdicts.csv": (
            ("rule", "level", "place", "first", "before", "lasts", "message"),
            (
                {**_own(each), "place": place, "first": names[each.first], "before": _named(names, each.before)}
                for each in result.verdicts
                for place in each.places
            ),
        ),
    }
    if result.activations:
        rows = ({**_own(row), "file": names[row.file]} for row in result.activations)
        tables["activations.csv"] = ([each.name for each in fields(ActivationPoint)], rows)
    return {name: _csv(columns, records) for name, (columns, records) in tables.items()}


def channels_to_csv(result: Survey) -> str:
    """Return the channels of a survey as CSV with a header, one line a channel, as `rows_to_csv` does.

    The inputs that excite a channel most are one cell, the greatest first.
    """
    own = [each.name for each in fields(SurveyChannel) if each.name not in ("top", "halves")]
    columns = ("layer", "kind", *own, "is_dead", "top_inputs", "top_values")
    records = (
        {
            "layer": row.label,
            "kind": row.kind,
            **{name: getattr(each, name) for name in own},
            "is_dead": each.is_dead,
            "top_inputs": tuple(top.input for top in each.top),
            "top_values": tuple(repr(top.value) for top in each.top),
        }
        for row in result.rows
        for each in row.channels
    )
    return _csv(columns, records)


def embeddings_to_csv(result: Survey) -> str:
    """Return the rows used of embeddings and codebooks as CSV with a header, one line each."""
    columns = [each.name for each in fields(TableRows)]
    return _csv(columns, [{name: getattr(each, name) for name in columns} for each in result.tables])


def _named(names: Sequence[str], index: int | None) -> str | None:
    return None if index is None else names[index]


def _csv(columns: Sequence[str], records: Iterable[Mapping[str, object]]) -> str:
    """Write the entries of records that have a column. Every text is made harmless here."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, columns))
    writer.writerows([_cell(record.get(column)) for column in columns] for record in records)
    return text.getvalue()


def _record(row: LayerRow | GradientRow | ParameterRow) -> dict[str, object]:
    statistics = row.activation if isinstance(row, LayerRow) else row.gradient
    derived = {"shape": shape_text(statistics.shape), "dead_channel_fraction": statistics.dead_channel_fraction}
    quantiles = zip(QUANTILE_NAMES, statistics.quantiles or (), strict=False)
    return {**_own(statistics), **derived, **dict(quantiles), **_own(row)}


def _own(result: object) -> dict[str, object]:
    return {each.name: getattr(result, each.name) for each in fields(result)}  # type: ignore[arg-type]


def _cell(value: object) -> str:
    """Return a cell: nothing for None, a number in full, several names joined by ";", a name as harmless text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(float(value))  # NumPy's own floats write their type into repr
    if isinstance(value, tuple):
        value = ";".join(str(name).replace(";", r"\x3b") for name in value)
    guard = "'" if isinstance(value, str) and value.startswith(tuple(_FORMULA_STARTS)) else ""
    return guard + safe_text(str(value))
