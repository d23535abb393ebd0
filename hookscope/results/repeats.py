"""Fold rows that repeat an earlier row, because a module returned its input."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from hookscope.results.activations import Activations, FeatureMaps, LayerRow, MapSummary
from hookscope.results.gradients import GradientRow, Gradients
from hookscope.results.network import row_label
from hookscope.results.token_norms import TokenMap

Key = tuple[str, int, str]
"""(layer, call, slot) of an output."""

Run = TypeVar("Run", Activations, Gradients)
Row = TypeVar("Row", bound=LayerRow | GradientRow)
Maps = TypeVar("Maps", FeatureMaps, MapSummary, TokenMap)


class _Staying(NamedTuple, Generic[Row]):
    """A row that stays, its label, and its changed fields, so that the row is copied only once."""

    row: Row
    label: str
    changes: dict[str, Any]

    def now(self, name: str) -> Any:
        """Return the current value of a field."""
        return self.changes[name] if name in self.changes else getattr(self.row, name)


def fold_repeats(run: Run) -> Run:
    """Leave out rows that repeat an earlier row, and list their labels in `duplicates` of that row.

    Rows keep their numbers: see `reduced`. A second fold changes nothing.
    """
    return reduced(run, folds=True)


# Operations that use the shape and dtype of their input but not its values, as for the first state of a recurrence.
_CONSTANTS = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})


def reduced(run: Run, left_out: Collection[str] = (), *, folds: bool = False, numbers: bool = False) -> Run:
    """Leave out the rows in `left_out`, which were measured for verdicts alone; fold and number the others on request.

    In `inputs`, a row that was left out is replaced by its own inputs. Of the rows that repeat it, the first replaces
    it in `duplicate_of`. Rows keep their numbers unless `numbers`, which numbers them by position; maps follow their
    rows, or are left out with them.
    """
    left_out = frozenset(left_out)
    rows, gone = _parted(run.rows, left_out)
    constants = {label for label, row in gone.items() if row.owner is not None and row.kind in _CONSTANTS}
    _resolve(rows, "inputs", {label: () if label in constants else row.inputs for label, row in gone.items()})
    if isinstance(run, Activations):
        if folds:
            rows = _folded(rows, _repeated(rows))
        changes: dict[str, Any] = {}
        if numbers:
            followers = ("feature_maps", "map_summaries", "token_maps")
            changes = {name: _of_rows(getattr(run, name), rows) for name in followers}
            _number(rows)
        return replace(run, rows=_copied(rows), **changes)
    gradients, without = _parted(run.gradients, left_out)
    _resolve(gradients, "taken_by", {label: row.taken_by or () for label, row in without.items()})
    if folds and (into := _repeated(rows, gradients)):
        rows = _folded(rows, into)
        calls = {(entry.row.layer, entry.row.call) for entry in rows}
        stay = [
            gradient
            for gradient in gradients
            if gradient.row.role == "output" or (gradient.row.layer, gradient.row.call) in calls
        ]
        outputs = [gradient for gradient in gradients if gradient.row.role == "output" and _key(gradient.row) in into]
        gradients = _folded(stay, into)
        _resolve(gradients, "taken_by", {output.label: output.now("taken_by") or () for output in outputs})
    maps = run.gradient_maps
    if numbers:
        maps = _of_rows(maps, gradients)
        _number(rows)
        _number(gradients)
        arrived = [gradient for gradient in gradients if gradient.row.backward_index is not None]
        arrived.sort(key=lambda gradient: gradient.row.backward_index or 0)
        for position, entry in enumerate(arrived):
            if entry.row.backward_index != position:
                entry.changes["backward_index"] = position
    return replace(run, rows=_copied(rows), gradients=_copied(gradients), gradient_maps=maps)


def repeated(run: Activations | Gradients) -> dict[Key, str]:
    """Return the outputs that `fold_repeats` leaves out, each with the label of the row that it repeats.

    Such an output has the activation of an earlier row and, after a backward pass, its gradient; and if gradients of
    the call's inputs were measured, they repeat earlier ones too.
    """
    return _repeated(_parted(run.rows)[0], None if isinstance(run, Activations) else _parted(run.gradients)[0])


def _repeated(
    rows: Sequence[_Staying[LayerRow]], gradients: Sequence[_Staying[GradientRow]] | None = None
) -> dict[Key, str]:
    into = {_key(row.row): label for row in rows if (label := row.now("duplicate_of"))}
    if gradients is None:
        return into
    outputs = {
        _key(gradient.row): gradient.now("duplicate_of") for gradient in gradients if gradient.row.role == "output"
    }
    differing = {
        (entry.row.layer, entry.row.call)
        for entry in gradients
        if entry.row.role == "input" and not entry.now("duplicate_of")
    }
    into = {key: outputs.get(key, label) for key, label in into.items()}
    return {key: label for key, label in into.items() if label and key[:2] not in differing}


def _parted(rows: Sequence[Row], left_out: Collection[str] = ()) -> tuple[list[_Staying[Row]], dict[str, Row]]:
    """Return the rows that stay, and the left-out rows by label; the first duplicate of a left-out row replaces it."""
    first: dict[str, str] = {}
    stay: list[_Staying[Row]] = []
    gone: dict[str, Row] = {}
    for row in rows:
        label = row.label
        if label in left_out:
            gone[label] = row
            continue
        changes: dict[str, Any] = {}
        if row.duplicate_of in left_out:
            shown = first.setdefault(row.duplicate_of, label)
            changes["duplicate_of"] = "" if shown == label else shown
        stay.append(_Staying(row, label, changes))
    return stay, gone


def _key(row: LayerRow | GradientRow) -> Key:
    return row.layer, row.call, row.slot


def _folded(rows: Sequence[_Staying[Row]], into: Mapping[Key, str]) -> list[_Staying[Row]]:
    """Leave out the rows of outputs in `into`, and list them in the rows that they repeat. Gradients of inputs stay."""
    if not into:
        return [*rows]
    duplicates: dict[str, list[str]] = {}
    for key, label in into.items():
        duplicates.setdefault(label, []).append(row_label(*key))
    stay: list[_Staying[Row]] = []
    for row in rows:
        if isinstance(row.row, GradientRow) and row.row.role == "input":
            stay.append(row)
        elif _key(row.row) not in into:
            stay.append(row)
            if row.label in duplicates:
                row.changes["duplicates"] = (*row.row.duplicates, *duplicates[row.label])
    return stay


def _resolve(rows: Sequence[_Staying[Row]], name: str, left_out: Mapping[str, Sequence[str]]) -> None:
    """In field `name`, replace each label of a row left out by the labels that `left_out` has for it."""
    if not left_out:
        return
    behind = dict(left_out)  # with chains of rows left out resolved, so that each chain is followed only once
    for label, labels in left_out.items():
        behind[label] = _behind(labels, behind)
    for row in rows:
        before = row.now(name)
        labels = before and _behind(before, behind)
        if labels is not before:
            row.changes[name] = labels


def _behind(labels: Sequence[str], left_out: Mapping[str, Sequence[str]]) -> Sequence[str]:
    while not left_out.keys().isdisjoint(labels):
        labels = tuple(dict.fromkeys(other for label in labels for other in left_out.get(label, (label,))))
    return labels


def _number(rows: Sequence[_Staying[Row]]) -> None:
    for index, row in enumerate(rows):
        if row.row.index != index:
            row.changes["index"] = index


def _copied(rows: Sequence[_Staying[Row]]) -> tuple[Row, ...]:
    return tuple([replace(row.row, **row.changes) if row.changes else row.row for row in rows])


def _of_rows(maps: Sequence[Maps], rows: Sequence[_Staying[Row]]) -> tuple[Maps, ...]:
    """Return the maps of these rows, renumbered; the rows themselves must still have their old numbers."""
    numbers = {row.row.index: number for number, row in enumerate(rows)}
    stay = ((group, numbers[group.row]) for group in maps if group.row in numbers)
    return tuple(group if group.row == number else replace(group, row=number) for group, number in stay)
