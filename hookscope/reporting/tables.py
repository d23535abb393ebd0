"""Results as CSV, for machines: every number in full, every name harmless."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter, methodcaller
from pathlib import Path
from typing import Any

from hookscope.reporting.columns import Column, machine_columns
from hookscope.reporting.layer_columns import layer_table_of
from hookscope.results.activations import Activations
from hookscope.results.gradients import Gradients, InputGradients
from hookscope.results.token_norms import HighToken
from hookscope.text import safe_text

# Characters that start a formula in a spreadsheet (OWASP, "CSV Injection"), full-width forms included.
_FORMULA_STARTS = "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"


def write_tables(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Write texts under their names; return the names."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [*texts]


def rows_to_csv(inspection: Activations | Gradients) -> str:
    """Return the layer rows as CSV with a header, one line a row.

    A name that a spreadsheet would take for a formula starts with an apostrophe, and control characters are spelled
    out, so the exact names of hostile layers are in the JSON only.
    """
    return csv_text(*layer_table_of(inspection))


def tokens_to_csv(inspection: Activations) -> str:
    """Return high-norm tokens and massive activations as CSV with a header, one line each, as `rows_to_csv` does."""
    rows = [(row, token) for row in inspection.rows if row.tokens for token in (*row.tokens.high, *row.tokens.massive)]
    return csv_text(
        (
            Column("label").on(itemgetter(0)),
            Column("what", value=lambda pair: "high norm" if isinstance(pair[1], HighToken) else "massive activation"),
            Column("input", value=lambda pair: inspection.inputs[pair[1].input_index].name),
            Column("token").on(itemgetter(1)),
            Column("place", value=lambda pair: pair[0].tokens.place(pair[1].token)),
            Column("channel", value=lambda pair: getattr(pair[1], "channel", None)),
            Column("value", value=lambda pair: pair[1].norm if isinstance(pair[1], HighToken) else pair[1].value),
            Column("limit", value=lambda pair: getattr(pair[1], "limit", None)),
            Column("median", value=lambda pair: getattr(pair[1], "median", None)),
        ),
        rows,
    )


def inputs_to_csv(inputs: Sequence[InputGradients]) -> str:
    """Return gradient norms of inputs alone as CSV with a header, one line an input, one column a layer's output."""
    labels = dict.fromkeys(label for gradients in inputs for label in gradients.rows_l2)
    norms = [Column(f"l2 {label}", value=methodcaller("get", label)).on(attrgetter("rows_l2")) for label in labels]
    return csv_text([*machine_columns("name", "loss", "parameters_l2"), *norms], inputs)


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
    """Write a value into a cell: None as nothing, a number in full, names joined by ";" and without formulas."""
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
