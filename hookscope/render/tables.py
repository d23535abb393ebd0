"""Results as CSV, for machines: every number in full, every name harmless."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from hookscope.render.columns import Column
from hookscope.render.comparison import CHANGES
from hookscope.render.cost_text import COSTS
from hookscope.render.layer_columns import (
    gradient_columns,
    layer_table_of,
    module_columns,
    module_rows,
    parameter_columns,
)
from hookscope.results.activations import Activations
from hookscope.results.attention import Attention, HeadRow
from hookscope.results.comparison import Comparison
from hookscope.results.cost import NetworkCost
from hookscope.results.gradients import Gradients, InputGradients
from hookscope.results.network import ModuleTable
from hookscope.results.token_norms import HighToken, MassiveActivation
from hookscope.text import safe_text

_TOKEN_COLUMNS = ("label", "what", "input", "token", "place", "channel", "value", "limit", "median")

# Characters that start a formula in a spreadsheet (OWASP, "CSV Injection"), full-width forms included.
_FORMULA_STARTS = "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"


def rows_to_csv(inspection: Activations | Gradients) -> str:
    """Return the layer rows as CSV with a header, one line a row.

    A name that a spreadsheet would take for a formula starts with an apostrophe, and control characters are spelled
    out, so the exact names of hostile layers are in the JSON only.
    """
    return csv_text(*layer_table_of(inspection))


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
    return csv_text((Column("layer"), *COSTS), cost.modules)


def modules_to_csv(table: ModuleTable) -> str:
    """Return the modules of a network as CSV with a header, one line a module, with their costs if they were taken."""
    return csv_text(module_columns(table.rows, table.cost), module_rows(table.rows, table.cost))


def gradients_to_csv(inspection: Gradients) -> str:
    """Return the gradients of outputs and inputs as CSV with a header, one line a row, as `rows_to_csv` does."""
    return csv_text(gradient_columns(inspection), inspection.gradients)


def parameters_to_csv(inspection: Gradients) -> str:
    """Return the gradients of parameters as CSV with a header, one line a parameter, as `rows_to_csv` does."""
    return csv_text(parameter_columns(inspection), inspection.parameters)


def changes_to_csv(comparison: Comparison) -> str:
    """Return what edits changed as CSV with a header, one line a row: statistics without the edits and with them."""
    return csv_text(CHANGES, comparison.changes)


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


def csv_text(columns: Sequence[Column], rows: Iterable[Any]) -> str:
    """Return rows as CSV with a header. Every text is made harmless here."""
    named = [column for column in columns if column.key]
    readers = [column.read for column in named]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_cell(column.key) for column in named])
    writer.writerows([_cell(read(row)) for read in readers] for row in rows)
    return text.getvalue()


def _csv(columns: Sequence[str], records: Iterable[Mapping[str, object]]) -> str:
    """Write the entries of records that have a column. Every text is made harmless here."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, columns))
    writer.writerows([_cell(record.get(column)) for column in columns] for record in records)
    return text.getvalue()


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
