"""Fold rows that repeat an earlier row, because a module returned its input."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

from hookscope.results.activations import Activations, FeatureMaps, LayerRow, MapSummary
from hookscope.results.gradients import GradientRow, Gradients
from hookscope.results.network import row_label
from hookscope.results.token_norms import TokenMap

Key = tuple[str, int, str]
"""(layer, call, slot) of an output."""

Run = TypeVar("Run", Activations, Gradients)
Row = TypeVar("Row", bound=LayerRow | GradientRow)
Maps = TypeVar("Maps", FeatureMaps, MapSummary, TokenMap)

_VALUES = attrgetter(*(f"activation.{name}" for name in ("shape", "min", "max", "mean", "l2", "nan_count")))

# Operations that use the shape and dtype of their input but not its values, as for the first state of a recurrence.
_CONSTANTS = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})


def reduced(run: Run, left_out: Collection[str] = (), *, folds: bool = False, numbers: bool = False) -> Run:
    """Leave out the rows in `left_out`, which were measured for verdicts alone; fold and number the others on request.

    In `inputs`, a row that was left out is replaced by its own inputs; an operation, if its module returns the same
    values, by the module. In `duplicate_of`, it is replaced by the first of the rows that repeat it. Folding leaves out
    rows that repeat an earlier row, and lists their labels in `duplicates` of that row; a second fold changes nothing.
    Rows keep their numbers unless `numbers`, which numbers them by position; maps follow their rows, or are left out.
    """
    left_out = frozenset(left_out)
    rows, gone = _parted(_from_modules(run.rows, left_out), left_out)
    measured: Sequence[GradientRow] = run.gradients if isinstance(run, Gradients) else ()
    gradients, without = _parted(measured, left_out)
    constants = {label for label, row in gone.items() if row.owner is not None and row.kind in _CONSTANTS}
    inputs = {label: () if label in constants else row.inputs for label, row in gone.items()}
    taken_by = {label: row.taken_by or () for label, row in without.items()}
    if folds and (into := repeated(rows, gradients)):
        taken_by |= {row.label: row.taken_by or () for row in gradients if row.role == "output" and _key(row) in into}
        rows = _folded(rows, into)
        calls = {(row.layer, row.call) for row in rows}
        of_calls = [row for row in gradients if row.role == "output" or (row.layer, row.call) in calls]
        gradients = _folded(of_calls, into)
    changes: dict[str, Any] = {"rows": _resolved(rows, "inputs", inputs, numbers=numbers)}
    maps: dict[str, Sequence[LayerRow | GradientRow]]
    if isinstance(run, Gradients):
        changes["gradients"] = _resolved(gradients, "taken_by", taken_by, numbers=numbers)
        maps = {"gradient_maps": gradients}
    else:
        maps = dict.fromkeys(("feature_maps", "map_summaries", "token_maps"), rows)
    if numbers:
        changes |= {name: _of_rows(getattr(run, name), of) for name, of in maps.items()}
    return replace(run, **changes)


def _from_modules(rows: Sequence[LayerRow], left_out: Collection[str]) -> Iterator[LayerRow]:
    """Yield rows; if a module returns the values of a left-out operation, inputs of later rows name the module."""
    returned_by: dict[str, str] = {}
    made: dict[str | None, list[LayerRow]] = defaultdict(list)  # operations by the module whose code calls them
    latest: dict[str, tuple[int, list[LayerRow]]] = {}  # the latest call of each module, with its operations
    for row in rows:
        inputs = tuple([returned_by.get(label, label) for label in row.inputs])
        yield row if inputs == row.inputs else replace(row, inputs=inputs)
        if row.label in left_out:
            made[row.owner].append(row)
            continue
        call, operations = latest.get(row.layer, (-1, []))
        if call != row.call:
            operations = made.pop(row.layer, [])
            latest[row.layer] = row.call, operations
        values = _VALUES(row) if operations else ()
        returned_by |= {entry.label: row.label for entry in operations if _VALUES(entry) == values}


def repeated(rows: Sequence[LayerRow], gradients: Sequence[GradientRow]) -> dict[Key, str]:
    """Return the outputs that `reduced` folds, each with the label of the row that it repeats.

    Such an output has the activation of an earlier row and, after a backward pass, its gradient; and if gradients of
    the call's inputs were measured, they repeat earlier ones too.
    """
    into = {_key(row): row.duplicate_of for row in rows if row.duplicate_of}
    outputs = {_key(row): row.duplicate_of for row in gradients if row.role == "output"}
    differing = {(row.layer, row.call) for row in gradients if row.role == "input" and not row.duplicate_of}
    into = {key: outputs.get(key, label) for key, label in into.items()}
    return {key: label for key, label in into.items() if label and key[:2] not in differing}


def _parted(rows: Iterable[Row], left_out: Collection[str]) -> tuple[list[Row], dict[str, Row]]:
    """Return the rows that stay, and the left-out rows by label; the first duplicate of a left-out row replaces it."""
    first: dict[str, str] = {}
    stay: list[Row] = []
    gone: dict[str, Row] = {}
    for row in rows:
        if row.label in left_out:
            gone[row.label] = row
        elif row.duplicate_of in left_out:
            shown = first.setdefault(row.duplicate_of, row.label)
            stay.append(replace(row, duplicate_of="" if shown == row.label else shown))
        else:
            stay.append(row)
    return stay, gone


def _key(row: LayerRow | GradientRow) -> Key:
    return row.layer, row.call, row.slot


def _folded(rows: Sequence[Row], into: Mapping[Key, str]) -> list[Row]:
    """Leave out the rows of outputs in `into`, and list them in the rows that they repeat. Gradients of inputs stay."""
    duplicates: dict[str, list[str]] = {}
    for key, label in into.items():
        duplicates.setdefault(label, []).append(row_label(*key))
    stay: list[Row] = []
    for row in rows:
        if isinstance(row, GradientRow) and row.role == "input":
            stay.append(row)
        elif _key(row) not in into:
            labels = duplicates.get(row.label)
            stay.append(replace(row, duplicates=(*row.duplicates, *labels)) if labels else row)
    return stay


def _resolved(
    rows: Sequence[Row], name: str, left_out: Mapping[str, Sequence[str]], *, numbers: bool
) -> tuple[Row, ...]:
    """In field `name`, replace each label of a row left out by the labels that `left_out` has for it; number the rows.

    All changes are made at once, because copies are slow.
    """
    if not (left_out or numbers):
        return tuple(rows)
    behind = dict(left_out)  # with chains of rows left out resolved, so that each chain is followed only once
    for label, labels in left_out.items():
        behind[label] = _behind(labels, behind)
    fields = ("index", "backward_index") if name == "taken_by" else ("index",)
    positions = {field: _positions(rows, field) for field in fields if numbers}
    changed = []
    for row in rows:
        labels = getattr(row, name)
        values: dict[str, Any] = {field: places[getattr(row, field)] for field, places in positions.items()}
        values[name] = labels and _behind(labels, behind)
        values = {field: value for field, value in values.items() if value != getattr(row, field)}
        changed.append(replace(row, **values) if values else row)
    return tuple(changed)


def _behind(labels: Sequence[str], left_out: Mapping[str, Sequence[str]]) -> Sequence[str]:
    while not left_out.keys().isdisjoint(labels):
        labels = tuple(dict.fromkeys(other for label in labels for other in left_out.get(label, (label,))))
    return labels


def _positions(rows: Sequence[LayerRow | GradientRow], field: str) -> dict[int | None, int | None]:
    """Return the numbers in a field, each with its rank."""
    numbers = sorted(number for row in rows if (number := getattr(row, field)) is not None)
    return {None: None, **{number: rank for rank, number in enumerate(numbers)}}


def _of_rows(maps: Sequence[Maps], rows: Sequence[LayerRow | GradientRow]) -> tuple[Maps, ...]:
    """Return the maps of these rows, renumbered; the rows themselves must still have their old numbers."""
    numbers = {row.index: number for number, row in enumerate(rows)}
    stay = ((group, numbers[group.row]) for group in maps if group.row in numbers)
    return tuple(group if group.row == number else replace(group, row=number) for group, number in stay)
