"""Read a run directory back. It may come from a stranger: everything in it is checked before use.

No file outside the folder is read, whatever `run.json` names; links are not followed.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hookscope.errors import InputError, nearest
from hookscope.regular_files import NotRegularError, read_bounded
from hookscope.results.activations import Activations
from hookscope.results.gradients import GradientRow, Gradients, ParameterRow
from hookscope.results.runs import directory, serialize
from hookscope.text import safe_text

# Larger files were not written by hookscope: JSON of a hundred thousand rows fits, and a grid of 64 million
# pixels.
_MAX_JSON_BYTES = 256 * 2**20
MAX_PICTURE_BYTES = 128 * 2**20

_MOST_SHOWN = 200  # characters of a name in a message

# Where the entries of a result are, besides run.json.
_FILES = {
    "rows": "layers.json",
    "uncalled": "layers.json",
    "gradients": "gradients.json",
    "parameters": "gradients.json",
    "over_time": "gradients.json",
}

# Entries that runs of earlier versions lack.
_ADDED_LATER = frozenset({"over_time"})


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as it lies on the disk.

    The `record` holds the other entries of `run.json`; the `result` has no feature maps, and histograms in place of
    distributions.
    """

    folder: Path
    record: serialize.RunRecord
    result: Activations | Gradients

    @property
    def gradients(self) -> tuple[GradientRow, ...]:
        """Of outputs and inputs; empty for a run without a backward pass."""
        return self.result.gradients if isinstance(self.result, Gradients) else ()

    @property
    def parameters(self) -> tuple[ParameterRow, ...]:
        """Gradients of parameters; empty for a run without a backward pass."""
        return self.result.parameters if isinstance(self.result, Gradients) else ()

    def read_picture(self, path: str) -> bytes:
        """Return the bytes of a picture that `run.json` names; raises as `read_inside`."""
        return read_inside(self.folder, path, MAX_PICTURE_BYTES)


def is_run(folder: Path) -> bool:
    """Tell whether a folder looks like a run of hookscope; it has not been read."""
    try:
        return (folder / "run.json").is_file()
    except (OSError, ValueError):  # too long a name, or with a null byte
        return False


def read_record(folder: Path) -> dict[str, Any]:
    """Return the contents of a run's `run.json`, whose "verb" is the command that made it.

    Raises:
        InputError: If the folder is no run, was cut short, or is of another version.
    """
    if not folder.is_dir():
        what = "it is not a folder" if os.path.lexists(folder) else "there is no such folder"
        raise refusal(folder, what, _nearest_runs(folder) or f"Give the folder of a run{_example(directory.RUNS)}.")
    if not os.path.lexists(folder / "run.json"):
        what = "without run.json it is not a hookscope run, or an unfinished one"
        raise refusal(folder, what, f"Give the folder of a finished run{_example(folder)}.")
    document = _read_json(folder, "run.json")
    if document.get("tool") != "hookscope":
        raise refusal(folder, "its run.json was not written by hookscope", "Give the folder of a run.")
    if document.get("verb") == "check":
        remedy = "`hookscope check CHECKPOINT --report FILE` makes the page of a check."
        raise refusal(folder, "it is the evidence of a check, not a run", remedy)
    _check_version(folder, "run.json", document, directory.SCHEMA_VERSION)
    return document


def _nearest_runs(folder: Path) -> str:
    """Return a sentence with the runs of similar names: next to the folder, or where commands write runs."""
    for place in (folder.parent, directory.RUNS):
        try:
            files = [file for name in ("run.json", "watch.jsonl") for file in sorted(place.glob(f"*/{name}"))]
            known = [str(file.parent) for file in files]
        except (OSError, ValueError):  # a name with a null byte
            continue
        if found := nearest(str(place / folder.name), known, prefix=f"{place}/"):
            return f"Give the folder of a run.{found}"
    return ""


def _example(folder: Path) -> str:
    newest = _newest_run(folder)
    return f", such as '{newest}'" if newest else ""


def _newest_run(folder: Path) -> Path | None:
    """Return the latest run directly in a folder, if there is one."""
    try:
        runs = {each.parent: each.stat().st_mtime for each in folder.glob("*/run.json")}
    except OSError:
        return None
    return max(runs, key=runs.__getitem__, default=None)


def read_document(folder: Path, name: str, readable: int) -> dict[str, Any]:
    """Return the contents of a JSON file of a run; InputError unless its schema version is `readable`."""
    document = _read_json(folder, name)
    _check_version(folder, name, document, readable)
    return document


def read_run(folder: Path) -> StoredRun:
    """Read what `hookscope activations` or `hookscope grads` wrote.

    Raises:
        InputError: If it is no run, was cut short, is of another version, or its files do not match its record.
    """
    document = read_record(folder)
    backward = document.get("verb") == "grads"
    for name in ("layers.json", "gradients.json")[: 1 + backward]:
        entries = read_document(folder, name, serialize.SCHEMA_VERSION)
        known = {key: entries.get(key) for key, file in _FILES.items() if file == name}
        document |= {key: entry for key, entry in known.items() if entry is not None or key not in _ADDED_LATER}
    try:
        run = StoredRun(
            folder, serialize.record_from_dict(document), serialize.inspection_from_dict(document, backward=backward)
        )
    except ValueError as error:
        raise misfit(folder, error, "run.json", _FILES) from error
    _check_pictures(run)
    return run


def _check_pictures(run: StoredRun) -> None:
    """Raise an InputError unless every picture is of a row and an input of the run."""
    rows = run.gradients if isinstance(run.result, Gradients) else run.result.rows
    indices, input_count = {row.index for row in rows}, len(run.result.inputs)
    for grid in run.record.grids:
        if grid.input_index >= input_count or grid.row not in indices:
            raise refusal(run.folder, f"'{grid.path[:_MOST_SHOWN]}' is of no row")
    for each in run.record.token_maps:
        fits = len(each.norms) == len(each.prefix) + math.prod(each.grid)
        if each.input_index >= input_count or each.row not in indices or not fits or not all(each.grid):
            raise refusal(run.folder, f"norms of tokens of '{each.label[:_MOST_SHOWN]}' are of no row")
    if len(run.record.thumbnails) > input_count:
        raise refusal(run.folder, "it has more thumbnails than inputs")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        document = serialize.parse_json(read_inside(folder, name, _MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise refusal(folder, f"its {name} is cut short or damaged") from error
    if document is None:
        raise refusal(folder, f"its {name} is not hookscope's")
    return document


def _check_version(folder: Path, name: str, document: dict[str, Any], readable: int) -> None:
    version = document.get("schema_version")
    if version == readable and not isinstance(version, bool):
        return
    earlier = isinstance(version, int) and not isinstance(version, bool) and 0 < version < readable
    remedy = (
        "Make the run again with this hookscope." if earlier else "Make the run and its report with the same hookscope."
    )
    what = f"its {name} has schema version {json.dumps(version)[:20]}, and this hookscope reads {readable}"
    raise refusal(folder, what, remedy)


def read_inside(folder: Path, name: str, limit: int) -> bytes:
    """Return the contents of a plain file inside `folder`; InputError for what is missing, linked or too large."""
    shown = f"its file '{name[:_MOST_SHOWN]}'"
    parts = PurePosixPath(name).parts
    if "\0" in name or "\\" in name or not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        raise refusal(folder, f"{shown} is not inside the folder")
    try:
        inside = folder.resolve()
        if (inside / name).resolve() != inside / name:
            raise refusal(folder, f"{shown} is a link, or behind one")
        content = read_bounded(inside / name, limit, follow_links=False)
    except FileNotFoundError as error:
        raise refusal(folder, f"{shown} is missing") from error
    except (NotRegularError, IsADirectoryError) as error:
        raise refusal(folder, f"{shown} is not a regular file, or too large") from error
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "no file can have such a name"
        raise refusal(folder, f"{shown}: {reason.lower()}") from error
    if len(content) > limit:
        raise refusal(folder, f"{shown} is not a regular file, or too large")
    return content


def refusal(folder: Path, what: str, remedy: str = "Run the command that made it again.") -> InputError:
    """Return the error for a run that cannot be read."""
    return InputError(safe_text(f"Cannot read the run '{folder}': {what}. {remedy}"))


def misfit(folder: Path, error: ValueError, name: str, others: Mapping[str, str] | None = None) -> InputError:
    """Return the error that says what `checked` has found in a run.

    Args:
        folder: The run directory.
        error: What `checked` raised.
        name: The file that the entries are from.
        others: The files of those that are from elsewhere, by name.
    """
    place, reason = error.args
    name = (others or {}).get(place.partition(".")[0], name)
    return refusal(folder, f"its {name} is not as hookscope writes it: {place[:80]}: {reason[:100]}")
