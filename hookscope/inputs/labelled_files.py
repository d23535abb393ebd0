"""Find pictures with their labels: in a folder of class folders, as torchvision's ImageFolder has it, or a CSV file."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hookscope.checkpoints.fileformat import open_regular
from hookscope.errors import CheckpointError, InputError
from hookscope.inputs.finding import find_inputs
from hookscope.text import counted, printable

# Our choice: a million lines of usual length.
_MOST_BYTES = 2**28

_COLUMNS = ("path", "label")


@dataclass(frozen=True, slots=True)
class LabelledFiles:
    """Pictures or tensor files with a label each.

    Attributes:
        source: The folder or CSV file, as it was named.
        labels: By path, in the order in which they are read.
        in_folders: Whether labels are names of folders.
        notes: What was left out, in sentences.
    """

    source: str
    labels: Mapping[str, str]
    in_folders: bool
    notes: tuple[str, ...] = ()

    def label_of(self, input_name: str) -> str:
        """Return the label of an input by the name in its record: a path, behind it "[2]" for one of several."""
        return self.labels[input_name if input_name in self.labels else input_name.rpartition("[")[0]]

    def spread(self, count: int) -> list[Path]:
        """Return about `count` of the files, evenly spread; all if there are no more."""
        paths = [*map(Path, self.labels)]
        return [paths[at * len(paths) // count] for at in range(count)] if len(paths) > count else paths


def find_labelled(source: Path) -> LabelledFiles:
    """Return the pictures below the class folders of a folder, or those that a CSV file lists.

    Below a folder the first folder's name is the label. A CSV file has a path, relative to the file's own folder, and a
    label on each line; with a first line that names the columns "path" and "label" it may have others.

    Raises:
        InputError: If it does not exist, has no folder with pictures in it, or has a line that cannot be read.
        NothingMatchedError: If a folder holds no picture.
    """
    return _in_folders(source) if source.is_dir() else _in_csv(source)


def _in_folders(folder: Path) -> LabelledFiles:
    notes: list[str] = []
    paths = find_inputs([str(folder)], notes.append)
    below = {str(path): path.relative_to(folder).parts for path in paths}
    labels = {path: parts[0] for path, parts in below.items() if len(parts) > 1}
    shown = printable(str(folder))
    if not labels:
        raise InputError(f"--data {shown} has no folders of pictures: give a folder with one for each class, or a CSV.")
    if beside := len(paths) - len(labels):
        notes.append(f"{shown}: {counted(beside, 'picture')} beside the class folders left out.")
    return LabelledFiles(str(folder), labels, in_folders=True, notes=tuple(notes))


def _in_csv(path: Path) -> LabelledFiles:
    shown = printable(str(path))
    try:
        with open_regular(path) as file:
            content = file.read(_MOST_BYTES + 1)
    except CheckpointError as error:  # as `open_regular` raises it, which says why
        raise InputError(f"--data cannot be read: {error}") from error
    if len(content) > _MOST_BYTES:
        raise InputError(f"--data {shown} is over the limit of {_MOST_BYTES} bytes for a CSV of labels.")
    try:
        lines = csv.reader(content.decode("utf-8-sig").splitlines(keepends=True), strict=True)
        labels = _labels(((lines.line_num, row) for row in lines), path, shown)
    except (UnicodeDecodeError, csv.Error) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else printable(str(error))
        raise InputError(
            f"--data {shown} is no CSV of labels: {reason}. Give a folder of class folders, or lines of path,label."
        ) from error
    if not labels:
        raise InputError(f"--data {shown} lists no picture. Give lines of path,label.")
    return LabelledFiles(str(path), labels, in_folders=False)


def _labels(rows: Iterable[tuple[int, list[str]]], path: Path, shown: str) -> dict[str, str]:
    """Return the labels by path in rows, each behind the number of its line; InputError if one is wrong."""
    labels: dict[str, str] = {}
    columns, width = (0, 1), 2
    for index, (line, row) in enumerate(rows):
        cells = [cell.strip() for cell in row]
        lowered = [cell.casefold() for cell in cells]
        if index == 0 and all(name in lowered for name in _COLUMNS):
            columns, width = (lowered.index("path"), lowered.index("label")), len(row)
            continue
        if not any(cells):
            continue
        if len(cells) != width or not all(cells[column] for column in columns):
            raise InputError(
                f"--data {shown}, line {line}: {counted(len(cells), 'field')}, where a path and a label are"
                " wanted. Give path,label on each line."
            )
        file = str(path.parent / cells[columns[0]])
        if file in labels:
            raise InputError(f"--data {shown}, line {line}: '{printable(file, 80)}' is listed twice.")
        labels[file] = cells[columns[1]]
    return labels
