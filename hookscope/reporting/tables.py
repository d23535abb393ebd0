"""Results as CSV, for machines: every number in full, every name harmless."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hookscope.reporting.columns import Column
from hookscope.text import safe_text

# Characters that start a formula in a spreadsheet (OWASP, "CSV Injection"), full-width forms included.
_FORMULA_STARTS = "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"


def write_tables(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Write texts under their names; return the names."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [*texts]


def csv_text(columns: Sequence[Column], rows: Iterable[Any]) -> str:
    """Return rows as CSV with a header, one line a row.

    A name that a spreadsheet would take for a formula starts with an apostrophe, and control characters are spelled
    out, so the exact names of hostile layers are in the JSON only.
    """
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
