"""Results as CSV, for machines: every number in full, every name harmless."""

import csv
import io
from collections.abc import Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from hookscope.render.columns import Column, machine_columns
from hookscope.render.comparison import CHANGES
from hookscope.render.cost_text import COSTS
from hookscope.render.layer_columns import (
    gradient_columns,
    layer_table_of,
    module_columns,
    module_rows,
    parameter_columns,
)
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.comparison import Comparison
from hookscope.results.cost import NetworkCost
from hookscope.results.gradients import Gradients, InputGradients
from hookscope.results.network import ModuleTable
from hookscope.results.token_norms import HighToken, MassiveActivation
from hookscope.text import safe_text

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
    rows = []
    for row in inspection.rows:
        listed: list[HighToken | MassiveActivation] = (
            [] if row.tokens is None else [*row.tokens.high, *row.tokens.massive]
        )
        rows += [(row, each) for each in listed]
    return csv_text(
        (
            Column("label").on(itemgetter(0)),
            Column("what", value=lambda pair: "high norm" if isinstance(pair[1], HighToken) else "massive activation"),
            Column("input", value=lambda pair: inspection.inputs[pair[1].input_index].name),
            Column("token").on(itemgetter(1)),
            Column("place", value=lambda pair: pair[0].tokens.place(pair[1].token)),
            Column("channel", value=partial(_either, "channel")),
            Column("value", value=lambda pair: pair[1].norm if isinstance(pair[1], HighToken) else pair[1].value),
            *(Column(key, value=partial(_either, key)) for key in ("limit", "median")),
        ),
        rows,
    )


def _either(key: str, pair: tuple[LayerRow, HighToken | MassiveActivation]) -> float | None:
    return getattr(pair[1], key, None)


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


def inputs_to_csv(inputs: Sequence[InputGradients]) -> str:
    """Return gradient norms of inputs alone as CSV with a header, one line an input, one column a layer's output."""
    labels = dict.fromkeys(label for each in inputs for label in each.rows_l2)
    norms = [Column(f"l2 {label}", value=partial(_norm, label)) for label in labels]
    return csv_text([*machine_columns("name", "loss", "parameters_l2"), *norms], inputs)


def _norm(label: str, each: InputGradients) -> float | None:
    return each.rows_l2.get(label)


def csv_text(columns: Sequence[Column], rows: Iterable[Any]) -> str:
    """Return rows as CSV with a header. Every text is made harmless here."""
    named = [column for column in columns if column.key]
    readers = [column.read for column in named]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_cell(column.key) for column in named])
    writer.writerows([_cell(read(row)) for read in readers] for row in rows)
    return text.getvalue()


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
