"""Find pictures with their labels: in class folders, as torchvision's ImageFolder has them, a CSV or a JSON file."""

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from hookscope.checkpoints.fileformat import bounded_text
from hookscope.errors import InputError
from hookscope.inputs.clips import digest_of
from hookscope.inputs.find_files import find_inputs
from hookscope.parameters import arg
from hookscope.text import counted, printable

_MOST_BYTES = 2**28  # a million lines of usual length

_INDICATORS = {"0": False, "0.0": False, "1": True, "1.0": True}
_Rows = Sequence[tuple[int, list[str]]]
_Listed = tuple[int, str, Sequence[str]]  # line, path, labels
_Labels = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class LabelledFiles:
    """Pictures or tensor files with their labels.

    `labels` are by path, in the order in which they are read: a label, or any number of them with `multi_label`.
    `notes` are sentences about what was left out, `columns` the labels of a CSV file that has a column for each.
    """

    source: str
    labels: Mapping[str, tuple[str, ...]]
    in_folders: bool
    notes: tuple[str, ...] = ()
    multi_label: bool = False
    columns: tuple[str, ...] = ()

    def labels_of(self, input_name: str) -> tuple[str, ...]:
        """Return the labels of an input by the name in its record: a path, followed by "[2]" for one of several."""
        return self.labels[input_name if input_name in self.labels else input_name.rpartition("[")[0]]

    def spread(self, count: int) -> list[Path]:
        """Return about `count` of the files, evenly spread; all if there are no more."""
        paths = [*map(Path, self.labels)]
        return [paths[at * len(paths) // count] for at in range(count)] if len(paths) > count else paths


def or_several() -> str:
    """Return the end of advice about a label for each picture: the option for several."""
    return f", or {arg('multi_label')} for several labels of a picture"


def find_labelled(source: Path, *, multi_label: bool = False) -> LabelledFiles:
    """Return the pictures below the class folders of a folder, or those that a CSV or JSON file lists.

    Below a folder the first folder's name is the label. A CSV file has a path, relative to the file's own folder, and a
    label on each line; with a first line that names the columns "path" and "label" it may have others. A JSON file is
    an object of labels by path.

    With `multi_label` a picture may have any number of labels. Equal files in several class folders are one picture. A
    line of a CSV file may have more labels after the first, in further fields or separated by ";" or "|", and lines
    with the same path are joined; or the first line is "path" and all labels, and the others have 0 or 1 for each
    label. In JSON the labels are a list. Raises InputError if the source is missing, has no labelled pictures or cannot
    be read; NothingMatchedError if a folder holds no picture.
    """
    if source.is_dir():
        return _in_folders(source, multi_label)
    content = bounded_text(source, "a folder of class folders, or a CSV or JSON file of labels", _MOST_BYTES)
    read = _in_json if source.suffix.lower() == ".json" else _in_csv
    labelled = read(content, source, multi_label)
    if not any(labelled.labels.values()):
        listed = "no labels" if labelled.labels else "no picture"
        wanted = "an object of labels by path" if read is _in_json else "lines of path,label"
        raise InputError(f"{arg('data')} {printable(str(source))} lists {listed}. Give {wanted}.")
    return labelled


def _in_folders(folder: Path, multi_label: bool) -> LabelledFiles:
    notes: list[str] = []
    paths = find_inputs([str(folder)], notes.append)
    below = {str(path): path.relative_to(folder).parts for path in paths}
    labels: _Labels = {path: (parts[0],) for path, parts in below.items() if len(parts) > 1}
    shown = printable(str(folder))
    if not labels:
        source = f"{arg('data')} {shown}"
        raise InputError(
            f"{source} has no class folders: give a folder with a folder of pictures for each class, or a CSV."
        )
    if beside := len(paths) - len(labels):
        notes.append(f"{shown}: {counted(beside, 'picture')} outside the class folders left out.")
    if multi_label:
        labels = _with_equal_files_joined(labels)
        several = sum(len(label) > 1 for label in labels.values())
        notes.append(f"{shown}: {counted(several, 'picture')} in several class folders, by equal content.")
    return LabelledFiles(str(folder), labels, in_folders=True, notes=tuple(notes), multi_label=multi_label)


def _with_equal_files_joined(labels: Mapping[str, tuple[str, ...]]) -> _Labels:
    """Join files of equal content under the first path, with all their labels; only equal sizes are read."""
    sizes: defaultdict[int, list[str]] = defaultdict(list)
    for path in labels:
        try:
            sizes[Path(path).stat().st_size].append(path)
        except OSError:  # reading reports it
            sizes[-1].append(path)
    digests = {path: _digest(path) if len(paths) > 1 else path for paths in sizes.values() for path in paths}
    first: dict[str, str] = {}
    joined: defaultdict[str, list[str]] = defaultdict(list)
    for path, (label,) in labels.items():
        joined[first.setdefault(digests[path], path)].append(label)
    return {path: tuple(dict.fromkeys(group)) for path, group in joined.items()}


def _digest(path: str) -> str:
    try:
        return digest_of(Path(path))
    except OSError:
        return path


def _in_csv(content: str, path: Path, multi_label: bool) -> LabelledFiles:
    shown = f"{arg('data')} {printable(str(path))}"
    try:
        lines = csv.reader(StringIO(content, newline=""), strict=True)
        rows = [(lines.line_num, cells) for row in lines if any(cells := [cell.strip() for cell in row])]
    except csv.Error as error:
        raise InputError(
            f"{shown} is not a CSV of labels: {printable(str(error))}. Give a folder of class folders, "
            "or lines of path,label."
        ) from error
    head = [cell.casefold() for cell in rows[0][1]] if rows else []
    places = (head.index("path"), head.index("label")) if {"path", "label"} <= {*head} else None
    remedy: str | None = None
    columns: tuple[str, ...] = ()
    if multi_label and places is None and "path" in head and len(head) > 1:
        columns = tuple(cell for cell in rows[0][1] if cell.casefold() != "path")
        if len({*columns}) < len(head) - 1 or not all(columns):
            raise InputError(f"{shown}: two columns of the first line have one name, or a column has none.")
        listed, remedy = _by_column(rows, shown), ""
    elif multi_label:
        listed = _several_a_line(rows[places is not None :], places, len(head), shown)
    else:
        width = 2 if places is None else len(head)
        remedy = f" Give path,label on each line{or_several()}."
        listed = _one_a_line(rows[places is not None :], places or (0, 1), width, shown, remedy)
    labels = _by_path(listed, path.parent, shown, remedy)
    return LabelledFiles(str(path), labels, in_folders=False, multi_label=multi_label, columns=columns)


def _by_path(listed: Iterable[_Listed], folder: Path, shown: str, remedy: str | None) -> _Labels:
    """Return labels by path; a path that is listed twice has all of its labels, or is an error with a `remedy`."""
    labels: _Labels = {}
    for line, name, group in listed:
        file = str(folder / name)
        if file in labels and remedy is not None:
            here = f"{shown}, line {line}" if line else shown
            raise InputError(f"{here}: '{printable(file, 80)}' is listed twice.{remedy}")
        labels[file] = tuple(dict.fromkeys((*labels.get(file, ()), *group)))
    return labels


def _one_a_line(rows: _Rows, places: tuple[int, int], width: int, shown: str, remedy: str) -> Iterator[_Listed]:
    for line, cells in rows:
        if len(cells) != width or not all(cells[place] for place in places):
            raise InputError(f"{shown}, line {line}: {counted(len(cells), 'field')}, not a path and a label.{remedy}")
        yield line, cells[places[0]], [cells[places[1]]]


def _several_a_line(rows: _Rows, places: tuple[int, int] | None, width: int, shown: str) -> Iterator[_Listed]:
    for line, cells in rows:
        if places and len(cells) <= max(places):
            raise InputError(f"{shown}, line {line}: {counted(len(cells), 'field')}, fewer than the first line.")
        file, *fields = cells if places is None else [*(cells[place] for place in places), *cells[width:]]
        if not file:
            raise InputError(f"{shown}, line {line}: no path. Give path,label,label… on each line.")
        labels = (label.strip() for field in fields for label in re.split(r"[;|]", field))
        yield line, file, [*filter(None, labels)]


def _by_column(rows: _Rows, shown: str) -> Iterator[_Listed]:
    (_, head), *lines = rows
    at = [cell.casefold() for cell in head].index("path")
    for line, row in lines:
        here = f"{shown}, line {line}"
        if len(row) != len(head) or not row[at]:
            raise InputError(f"{here}: {counted(len(row), 'field')}, not a path and {counted(len(head) - 1, 'label')}.")
        pairs = [(name, cell) for column, (name, cell) in enumerate(zip(head, row, strict=True)) if column != at]
        if wrong := next((pair for pair in pairs if pair[1] not in _INDICATORS), None):
            name, cell = (printable(text, 80) for text in wrong)
            raise InputError(f"{here}: '{cell}' for the label '{name}', not 0 or 1.")
        yield line, row[at], [name for name, cell in pairs if _INDICATORS[cell]]


def _in_json(content: str, path: Path, multi_label: bool) -> LabelledFiles:
    shown = f"{arg('data')} {printable(str(path))}"
    wanted = '{"a.jpg": ["cat", "dog"]}' if multi_label else '{"a.jpg": "cat"}'
    try:
        document = json.loads(content, object_pairs_hook=tuple)  # a dict would keep the last of equal keys
    except (ValueError, RecursionError) as error:
        raise InputError(f"{shown} is not JSON of labels: {printable(str(error), 200)}. Give {wanted}.") from error
    if not isinstance(document, tuple):
        raise InputError(f"{shown} is not a JSON object of labels by path. Give {wanted}.")
    listed: list[_Listed] = []
    for file, held in document:
        group = _json_labels(held)
        if group is None or (len(group) != 1 and not multi_label):
            count, remedy = ("no label", "") if group is None else (counted(len(group), "label"), or_several())
            raise InputError(f"{shown}: '{printable(file, 80)}' has {count}. Give {wanted}{remedy}.")
        listed.append((0, file, group))
    labels = _by_path(listed, path.parent, shown, f" Give {wanted}.")
    return LabelledFiles(str(path), labels, in_folders=False, multi_label=multi_label)


def _json_labels(held: Any) -> list[str] | None:
    labels = held if isinstance(held, list) else [held]
    if not all(type(label) in {str, int} and str(label).strip() for label in labels):
        return None
    return [str(label).strip() for label in labels]
