"""Differences as dicts, and read back from a run directory, checked before anything in it is used."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hookscope.results.differences import Differences, Measures
from hookscope.results.runs.documents import from_document, to_document
from hookscope.results.runs.reading import MAX_PICTURE_BYTES, misfit, read_document, read_inside, read_record, refusal
from hookscope.results.runs.serialize import RunRecord, checked, record_from_dict

SCHEMA_VERSION = 1

_LEFT_OUT = ("provenance", "categories", "maps")

FILE = "diff.json"

# Entries whose numbers may be infinite or none.
_NUMERIC = frozenset(
    {
        *(each.name for each in fields(Measures)),
        "input_relative_l2",
        "arriving_relative_l2",
        "error",
        "error_b",
        "limit",
        "kl",
        "value",
    }
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
    return {"schema_version": SCHEMA_VERSION, **to_document(result, _LEFT_OUT)}


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
        run = StoredDifferences(
            folder, record_from_dict(document), checked(Differences, from_document(stored, _LEFT_OUT, _NUMERIC))
        )
    except ValueError as error:
        raise misfit(folder, error, FILE) from error
    indices = {row.index for row in run.result.rows}
    for grid in run.record.grids:
        if grid.row not in indices:
            raise refusal(folder, f"'{grid.path[:80]}' is of no row")
    return run
