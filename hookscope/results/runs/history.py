"""A run by its checkpoints as dicts, and read back from a run directory, checked before anything in it is used."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from hookscope.results.comparison import Prediction
from hookscope.results.history import History
from hookscope.results.runs.reading import read_document, read_record, refusal
from hookscope.results.runs.serialize import RunRecord, as_json, checked, prediction_fields, record_from_dict

SCHEMA_VERSION = 1

FILE = "history.json"

_LEFT_OUT = ("provenance",)

# Numbers that JSON does not have, in entries that are numbers.
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
NUMERIC = frozenset({"drift", "drift_from_first", "norm", "min", "max", "mean", "std", "rates", "steps"})
"""Entries whose numbers may be infinite or none."""


@dataclass(frozen=True, slots=True)
class StoredHistory:
    """A run of `history` as it lies on the disk."""

    folder: Path
    record: RunRecord
    result: History


def history_to_dict(result: History) -> dict[str, Any]:
    """Return all of `result` as dicts, lists, text and numbers; `exit_code` is that of the command.

    Numbers that JSON does not have are "NaN", "Infinity" and "-Infinity"; probabilities are null, as in other results.
    """
    return {"schema_version": SCHEMA_VERSION, "exit_code": result.exit_code, **_plain(result)}


def _plain(value: Any) -> Any:
    if isinstance(value, Prediction):
        value = as_json(value)
        for each in value["classes"]:
            each["probability"] = None if math.isnan(each["probability"]) else each["probability"]
    elif is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value) if each.name not in _LEFT_OUT}
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [*map(_plain, value)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def read_history(folder: Path) -> StoredHistory:
    """Read what `hookscope history` wrote.

    Raises:
        InputError: If it is no such run, was cut short, is of another version, or its parts do not belong together.
    """
    document = read_record(folder)
    stored = read_document(folder, FILE, SCHEMA_VERSION)
    try:
        result: History = checked(History, _restored(stored))
        run = StoredHistory(folder, record_from_dict(document), result)
    except ValueError as error:
        place, reason = error.args
        raise refusal(folder, f"its {FILE} is not as hookscope writes it: {place[:80]}: {reason[:100]}") from error
    count = len(result.files)
    named = [*(each.file for each in result.rows), *(each.file for each in result.activations)]
    named += [at for each in result.verdicts for at in (each.first, each.before or 0, *each.files)]
    named += [file.compared_with or 0 for file in result.files]
    if [file.index for file in result.files] != [*range(count)] or any(at >= count for at in named):
        raise refusal(folder, f"its {FILE} names files that it does not list")
    return run


def _restored(value: Any, name: str = "") -> Any:
    """Return a document with the numbers and predictions that results have."""
    if isinstance(value, dict):
        restored = {each: _restored(entry, each) for each, entry in value.items() if each not in _LEFT_OUT}
        return restored | prediction_fields(value["classes"]) if "classes" in value else restored
    if isinstance(value, list):
        return [_restored(each, name) for each in value]
    return _NUMBERS.get(value, value) if isinstance(value, str) and name in NUMERIC else value
