"""A run by its checkpoints as dicts, and read back from a run directory, checked before anything in it is used."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookscope.results.history import History
from hookscope.results.runs.documents import from_document, to_document
from hookscope.results.runs.reading import misfit, read_document, read_record, refusal
from hookscope.results.runs.serialize import RunRecord, checked, record_from_dict

SCHEMA_VERSION = 1

FILE = "history.json"

_LEFT_OUT = ("provenance",)

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
    return {"schema_version": SCHEMA_VERSION, "exit_code": result.exit_code, **to_document(result, _LEFT_OUT)}


def read_history(folder: Path) -> StoredHistory:
    """Read what `hookscope history` wrote.

    Raises:
        InputError: If it is no such run, was cut short, is of another version, or its parts do not belong together.
    """
    document = read_record(folder)
    stored = read_document(folder, FILE, SCHEMA_VERSION)
    try:
        result: History = checked(History, from_document(stored, _LEFT_OUT, NUMERIC))
        run = StoredHistory(folder, record_from_dict(document), result)
    except ValueError as error:
        raise misfit(folder, error, FILE) from error
    count = len(result.files)
    named = [*(each.file for each in result.rows), *(each.file for each in result.activations)]
    named += [at for each in result.verdicts for at in (each.first, each.before or 0, *each.files)]
    named += [file.compared_with or 0 for file in result.files]
    if [file.index for file in result.files] != [*range(count)] or any(at >= count for at in named):
        raise refusal(folder, f"its {FILE} names files that it does not list")
    return run
