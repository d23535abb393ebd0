"""Differences as dicts, and read back from a run directory, checked before anything in it is used."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from hookscope.results.comparison import Prediction
from hookscope.results.differences import Differences, Measures
from hookscope.results.runs.reading import MAX_PICTURE_BYTES, read_document, read_inside, read_record, refusal
from hookscope.results.runs.serialize import RunRecord, as_json, checked, prediction_fields, record_from_dict

SCHEMA_VERSION = 1

_LEFT_OUT = ("provenance", "categories", "maps")

FILE, PLOT = "diff.json", "difference_over_depth.png"

# Numbers that JSON does not have, in entries that are numbers.
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NUMERIC = frozenset(
    {*(each.name for each in fields(Measures)), "input_relative_l2", "error", "error_b", "limit", "kl", "value"}
)


@dataclass(frozen=True, slots=True)
class StoredDifferences:
    """A run of `diff` as it lies on the disk."""

    folder: Path
    record: RunRecord
    result: Differences

    def read_picture(self, path: str) -> bytes:
        """Return the bytes of a picture of the run; raises as `read_inside`."""
        return read_inside(self.folder, path, MAX_PICTURE_BYTES)


def differences_to_dict(result: Differences) -> dict[str, Any]:
    """Return all of `result` as dicts, lists, text and numbers; of measures `sqnr_db` too.

    Numbers that JSON does not have are "NaN", "Infinity" and "-Infinity"; probabilities are null, as in other results.
    """
    return {"schema_version": SCHEMA_VERSION, **_plain(result)}


def _plain(value: Any) -> Any:
    if isinstance(value, Prediction):
        value = as_json(value)
        for each in value["classes"]:
            each["probability"] = None if math.isnan(each["probability"]) else each["probability"]
    elif is_dataclass(value):
        named = {each.name: getattr(value, each.name) for each in fields(value) if each.name not in _LEFT_OUT}
        value = named | ({"sqnr_db": value.sqnr_db} if isinstance(value, Measures) else {})
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [*map(_plain, value)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def read_differences(folder: Path) -> StoredDifferences:
    """Read what `hookscope diff` wrote.

    Raises:
        InputError: If it is no run, was cut short, is of another version, or its files do not match its record.
    """
    document = read_record(folder)
    if document.get("verb") != "diff":
        raise refusal(folder, "it is not a run of `hookscope diff`", "Give the folder of one.")
    stored = read_document(folder, FILE, SCHEMA_VERSION)
    try:
        run = StoredDifferences(folder, record_from_dict(document), checked(Differences, _restored(stored)))
    except ValueError as error:
        place, reason = error.args
        raise refusal(folder, f"its {FILE} is not as hookscope writes it: {place[:80]}: {reason[:100]}") from error
    indices = {row.index for row in run.result.rows}
    for grid in run.record.grids:
        if grid.row not in indices:
            raise refusal(folder, f"'{grid.path[:80]}' is of no row")
    return run


def _restored(value: Any, name: str = "") -> Any:
    """Return a document with the numbers and predictions that results have."""
    if isinstance(value, dict):
        restored = {each: _restored(entry, each) for each, entry in value.items() if each not in _LEFT_OUT}
        return restored | prediction_fields(value["classes"]) if "classes" in value else restored
    if isinstance(value, list):
        return [_restored(each, name) for each in value]
    return _NUMBERS.get(value, value) if isinstance(value, str) and name in _NUMERIC else value
