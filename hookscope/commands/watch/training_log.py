"""The file of a watched training, `watch.jsonl` in its folder: one JSON object a line, written while it trains.

A line is written at once and whole, so that a process that is killed leaves all but its last line. Objects by "type":

- "start": first in the file and wherever the training went on; has `schema_version`, and `TrainingStart`.
- "names": texts that later lines refer to by their position, counted over all "names" since the last "start".
- "step": `TrainingStep`; `largest` and `losses` hold pairs of a name's position and a number, `edits` hold pairs of a
  text's position and a count.
- "watched": `WatchedStep`; `parameters`, `layers` and `tables` are columns, so that a hundred of them stay small. A
  column without any value is left out.
- "verdict", "end": `TrainingFinding`, `TrainingEnd`.

NaN and infinities are texts, as in other JSON. Fields with their default value are left out.
"""

import errno
import json
import math
import os
import stat
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hookscope.errors import InputError, OutputError
from hookscope.parameters import arg
from hookscope.results.json_form import SCHEMA_VERSION
from hookscope.results.runs.atomic import reason_of, reported
from hookscope.results.runs.reading import read_inside, refusal
from hookscope.results.runs.store import checked, parse_json
from hookscope.results.table_rows import TableRows
from hookscope.results.training import (
    TrainingEnd,
    TrainingFinding,
    TrainingLog,
    TrainingRecord,
    TrainingStart,
    TrainingStep,
    WatchedLayer,
    WatchedParameter,
    WatchedStep,
)
from hookscope.text import json_number, plain, safe_text

if sys.platform != "win32":
    import fcntl

FILE = "watch.jsonl"
"""The file inside the folder of a watched training."""

# A larger file is not read: a million steps fit.
_MAX_BYTES = 512 * 2**20

LAST_STEP = 2**53
"""No training gets this far; numbers beyond it are not exact in every reader of JSON."""

# The end of a file that is resumed is read: lines of a network of half a million parameters fit.
_TAIL_BYTES = 64 * 2**20

# Norms in float32 have no more digits.
_DIGITS = 7

# Columns whose entries are positions in "names".
_NAMED_COLUMNS = ("name", "status", "label", "kind")


def is_training(folder: Path) -> bool:
    """Tell whether a folder looks like a watched training; it has not been read."""
    try:
        return (folder / FILE).is_file()
    except (OSError, ValueError):  # too long a name, or with a null byte
        return False


class TrainingLogFile:
    """`watch.jsonl`, open for appending, and locked against a second training.

    Attributes:
        path: The file.
        last_step: Number of the last step that it held when it was opened; 0 for a new file.
    """

    def __init__(self, folder: Path, *, resume: bool, warn: Callable[[str], None]) -> None:
        """Make the folder and its file, or open the file of an earlier training where `resume` asks for that.

        Args:
            folder: The folder; other files in it are left alone.
            resume: Append to what an earlier training wrote, if there is anything.
            warn: Called once with one line if the file cannot be written any more, as on a full disk.

        Raises:
            OutputError: If it cannot be written, another process writes it, it holds a training that is not to be
                resumed, or something that hookscope did not write.
        """
        self.path = folder / FILE
        self._warn = warn
        self._positions: defaultdict[str, int] = defaultdict()  # in "names"; a new name is the last
        self._positions.default_factory = self._positions.__len__
        with reported(folder, kind="folder"):
            self._descriptor: int | None = _opened(self.path)
        try:
            _lock(self._descriptor, folder)
            self.last_step = _last_step(self._descriptor, folder, resume=resume)
        except BaseException:
            self.close()
            raise

    def append(self, record: TrainingRecord) -> None:
        """Write one record; nothing after `close`, or after a write that failed."""
        if self._descriptor is None:
            return
        if isinstance(record, TrainingStart):
            self._positions.clear()
        text = self._lines(record).encode("ascii")
        written = 0
        try:
            while written < len(text):
                written += os.write(self._descriptor, text[written:])
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, os.lseek(self._descriptor, 0, os.SEEK_END) - written)
            self.close()
            shown = safe_text(str(self.path))
            self._warn(
                f"Cannot write '{shown}' any more: {reason_of(error)}. The training goes on; the file ends here."
            )

    def close(self) -> None:
        """Close the file and release its lock. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def _lines(self, record: TrainingRecord) -> str:
        count = len(self._positions)
        if isinstance(record, TrainingStep):
            line = _step_line(record, self._positions.__getitem__)
        else:
            line = f"{_ENCODER.encode(_document(record, self._positions.__getitem__))}\n"
        if len(self._positions) == count:
            return line
        new = plain([*self._positions][count:])
        return f"{_ENCODER.encode({'type': 'names', 'names': new})}\n{line}"


def read_training(folder: Path) -> TrainingLog:
    """Read what `hookscope.watch` wrote into a folder, also while the training runs or after it was killed.

    Raises:
        InputError: If there is no such file, it is too large, or not as hookscope writes it.
    """
    if not folder.is_dir():
        problem = "it is not a folder" if os.path.lexists(folder) else "there is no such folder"
        raise refusal(folder, problem, "Give the folder of a watched training.")
    whole, _, rest = read_inside(folder, FILE, _MAX_BYTES).rpartition(b"\n")
    records: list[TrainingRecord] = []
    names: list[str] = []
    for number, line in enumerate(whole.split(b"\n") if whole else (), start=1):
        try:
            record = _record(line, names, is_first=number == 1)
        except (ValueError, RecursionError) as error:
            raise _misfit(folder, number, error) from error
        if isinstance(record, TrainingStart) and records and not isinstance(records[-1], TrainingEnd):  # was killed
            records.append(TrainingEnd(record.step - 1, "not recorded"))
        if record is not None:
            records.append(record)
    if not records:
        raise refusal(folder, f"its {FILE} holds nothing yet", "Wait for the first step.")
    records.sort(key=lambda record: record.step)
    entries: Any = [tuple(record for record in records if isinstance(record, kind)) for kind in _TYPES.values()]
    return replace(TrainingLog(*entries), cut_short=bool(rest))


# By "type", in the order of the fields of TrainingLog.
_TYPES: Mapping[str, type] = {
    "start": TrainingStart,
    "step": TrainingStep,
    "watched": WatchedStep,
    "verdict": TrainingFinding,
    "end": TrainingEnd,
}

# The rows of a watched step, which are written as columns.
_ROWS: Mapping[str, type] = {"parameters": WatchedParameter, "layers": WatchedLayer, "tables": TableRows}

_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def _document(record: TrainingRecord, position: Callable[[str], int]) -> dict[str, Any]:
    document: dict[str, Any] = {"type": next(name for name, kind in _TYPES.items() if isinstance(record, kind))}
    if isinstance(record, TrainingStart):
        document |= {"tool": "hookscope", "schema_version": SCHEMA_VERSION}
    for field in fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            rows = _ROWS.get(field.name)
            document[field.name] = plain(value) if rows is None else _columns(rows, value, position)
    return document


def _step_line(step: TrainingStep, position: Callable[[str], int]) -> str:
    """Return the line of a step, written by hand: an encoder takes six times as long, at every step."""
    parts = [
        f'{{"type":"step","step":{step.step}',
        f'"loss":{_text(step.loss)}',
        f'"gradient_norm":{_text(step.gradient_norm)}',
        f'"norm_before_clipping":{_text(step.norm_before_clipping)}',
        f'"learning_rates":[{",".join(map(_text, step.learning_rates))}]',
    ]
    if step.skipped:
        parts.append('"skipped":true')
    parts.append(f'"largest":[{",".join([f"[{position(name)},{_short(norm)}]" for name, norm in step.largest])}]')
    if step.losses:
        parts.append(f'"losses":[{",".join([f"[{position(name)},{_text(loss)}]" for name, loss in step.losses])}]')
    if step.edits:
        parts.append(f'"edits":[{",".join([f"[{position(text)},{count}]" for text, count in step.edits])}]')
    return f"{','.join(parts)}}}\n"


def _text(value: float | None) -> str:
    if value is None:
        return "null"
    return repr(float(value)) if math.isfinite(value) else f'"{json_number(value)}"'


def _short(value: float) -> str:
    return f"{value:.{_DIGITS}g}" if math.isfinite(value) else f'"{json_number(value)}"'


def _columns(kind: Any, rows: Sequence[Any], position: Callable[[str], int]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for field in fields(kind):
        values = [getattr(row, field.name) for row in rows]
        if field.name in _NAMED_COLUMNS:
            columns[field.name] = [position(value) for value in values]
        elif any(value is not None for value in values):
            columns[field.name] = [_number(value) for value in values]
    return columns


def _number(value: float | None) -> float | str | None:
    """Return a number as short as float32 allows; whole numbers and None as they are."""
    if value is None or isinstance(value, int):
        return value
    return json_number(float(f"{value:.{_DIGITS}g}"))


def _record(line: bytes, names: list[str], *, is_first: bool) -> TrainingRecord | None:
    """Return what a line holds; None for names, which are added to `names`, and for types of a later hookscope.

    Raises:
        ValueError: With a place and what is wrong there, or with a text alone.
    """
    document = parse_json(line)
    if document is None:
        raise ValueError("it is no JSON object")
    kind = document.pop("type", None)
    if is_first or kind == "start":
        _check_start(kind, document)
        names.clear()
    if kind == "names":
        names += checked(tuple[str, ...], document.get("names"))  # type: ignore[arg-type]
        return None
    if not isinstance(kind, str) or kind not in _TYPES:
        return None
    if kind == "step":
        for field in ("largest", "losses", "edits"):
            if field in document:
                document[field] = [[_named(names, where), value] for where, value in _pairs(document[field], field)]
    if kind == "watched":
        document |= {key: _rows(_ROWS[key], document[key], names) for key in _ROWS.keys() & document.keys()}
    record: TrainingRecord = checked(_TYPES[kind], document)
    if record.step > LAST_STEP:
        raise ValueError("step", f"Input should be at most {LAST_STEP}")
    return record


def _check_start(kind: object, document: Mapping[str, Any]) -> None:
    if kind != "start" or document.get("tool") != "hookscope":
        raise ValueError("it does not begin a training that hookscope watched")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ValueError(f"it has schema version {json.dumps(version)[:20]}, and this hookscope reads {SCHEMA_VERSION}")


def _rows(kind: Any, columns: object, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return columns as a dict for each row; the types of its values are not checked."""
    if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
        raise ValueError("it has rows that are not columns")
    field_names = [field.name for field in fields(kind)]
    columns = {name: column for name, column in columns.items() if name in field_names}
    for name in _NAMED_COLUMNS:
        if name in columns:
            columns[name] = [_named(names, where) for where in columns[name]]
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise ValueError("it has columns of different lengths")
    optional = {name: None for name in field_names if name not in _NAMED_COLUMNS}
    return [
        optional | {name: column[row] for name, column in columns.items()} for row in range(max(lengths, default=0))
    ]


def _named(names: Sequence[str], where: object) -> str:
    if not isinstance(where, int) or isinstance(where, bool) or not 0 <= where < len(names):
        raise ValueError("it refers to a name that is not there")
    return names[where]


def _pairs(values: object, field: str) -> list[tuple[object, object]]:
    if not isinstance(values, list) or not all(isinstance(value, list) and len(value) == 2 for value in values):
        raise ValueError(f"its '{field}' are no pairs")
    return [(where, number) for where, number in values]


def _misfit(folder: Path, number: int, error: Exception) -> InputError:
    reason = (
        ": ".join(str(argument)[:100] for argument in error.args[:2])
        if isinstance(error, ValueError)
        else "it nests too deeply"
    )
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        reason = "it is no JSON"
    problem = f"its {FILE} is not as hookscope writes it, line {number}: {reason}"
    return refusal(folder, problem, "Give the folder of a watched training.")


def _opened(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Nothing but a regular file is opened: to open a pipe waits, and a link may point anywhere.
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(errno.EINVAL, f"its {FILE} is no regular file")
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o666)


def _lock(descriptor: int, folder: Path) -> None:
    """Lock the file for as long as it is open; go on without a lock where files cannot be locked."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _refusal(folder, "another training is being watched into it", "Name another folder") from error
    except OSError:  # some network file systems have no locks
        return


def _last_step(descriptor: int, folder: Path, *, resume: bool) -> int:
    """Return the last step that a file holds, 0 for an empty one; an unfinished last line is cut off."""
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        head = file.readline(2**16)
        start = file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        tail = file.read()
    if not tail:
        return 0
    try:
        _record(head, [], is_first=True)
    except (ValueError, RecursionError) as error:
        raise _refusal(folder, f"its {FILE} holds no watched training", "Name another folder") from error
    if not resume:
        raise _refusal(folder, "it holds a training already", f"Name another folder, or go on with {arg('resume')}")
    whole = tail[: tail.rfind(b"\n") + 1]
    os.ftruncate(descriptor, start + len(whole))
    for line in reversed(whole.splitlines()):
        with suppress(ValueError, RecursionError):
            document = parse_json(line) or {}
            step = document.get("step")
            if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
                return max(0, step - 1) if document.get("type") == "start" else step
    raise _refusal(folder, f"the end of its {FILE} is damaged", "Name another folder")


def _refusal(folder: Path, reason: str, remedy: str) -> OutputError:
    return OutputError(safe_text(f"Cannot write to '{folder}': {reason}. {remedy}."))
