"""Fold rows that repeat another: a module that passes its input through shows a tensor that was shown before."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from hookscope.results.activations import Activations, FeatureMaps, LayerRow, MapSummary
from hookscope.results.gradients import GradientRow, Gradients
from hookscope.results.network import row_label
from hookscope.results.token_norms import TokenMap

Key = tuple[str, int, str]
"""(layer, call, slot) of an output."""

Run = TypeVar("Run", Activations, Gradients)
Row = TypeVar("Row", bound=LayerRow | GradientRow)
Maps = TypeVar("Maps", FeatureMaps, MapSummary, TokenMap)


def fold_repeats(run: Run) -> Run:
    """Leave out the rows that repeat another, and name them in the row that stays.

    Rows keep their numbers: see `numbered`. To fold twice is to fold once.
    """
    into = repeated(run)
    if not into:
        return run
    rows = _folded(run.rows, into)
    if isinstance(run, Activations):
        return replace(run, rows=tuple(rows))
    calls = {(row.layer, row.call) for row in rows}
    stay = [each for each in run.gradients if each.role == "output" or (each.layer, each.call) in calls]
    taken_by = {row.label: row.taken_by or () for row in run.gradients if row.role == "output" and _key(row) in into}
    return replace(run, rows=tuple(rows), gradients=_taken_by_others(_folded(stay, into), taken_by))


def without_rows(run: Run, left_out: Collection[str]) -> Run:
    """Leave out some rows, by label, that were measured for verdicts alone.

    Tensors that came from one of them are listed as coming from its inputs; a row that repeats one repeats the next
    such row, if any. Rows keep their numbers: see `numbered`.
    """
    if not left_out:
        return run
    inputs = {row.label: row.inputs for row in run.rows if row.label in left_out}
    rows = []
    for row in _repeating_others(run.rows, left_out):
        resolved = _resolved(row.inputs, inputs) or ()
        rows.append(row if resolved == row.inputs else replace(row, inputs=resolved))
    if isinstance(run, Activations):
        return replace(run, rows=tuple(rows))
    taken_by = {row.label: row.taken_by or () for row in run.gradients if row.label in left_out}
    stay = _taken_by_others(_repeating_others(run.gradients, left_out), taken_by)
    return replace(run, rows=tuple(rows), gradients=stay)


def numbered(run: Run) -> Run:
    """Number the rows by their places, after some were left out; maps follow their rows, or are left out with them."""
    if isinstance(run, Activations):
        maps, summaries = _of_rows(run.feature_maps, run.rows), _of_rows(run.map_summaries, run.rows)
        norms = _of_rows(run.token_maps, run.rows)
        return replace(run, rows=_by_place(run.rows), feature_maps=maps, map_summaries=summaries, token_maps=norms)
    arrived = sorted(each.backward_index for each in run.gradients if each.backward_index is not None)
    order: dict[int | None, int | None] = {index: position for position, index in enumerate(arrived)}
    gradients = tuple(
        replace(each, index=index, backward_index=order.get(each.backward_index))
        if (each.index, each.backward_index) != (index, order.get(each.backward_index))
        else each
        for index, each in enumerate(run.gradients)
    )
    maps = _of_rows(run.gradient_maps, run.gradients)
    return replace(run, rows=_by_place(run.rows), gradients=gradients, gradient_maps=maps)


def _repeating_others(rows: Sequence[Row], left_out: Collection[str]) -> list[Row]:
    """Return the rows that are not left out; of those that repeat one left out, the first stands for the others."""
    first: dict[str, str] = {}
    stay: list[Row] = []
    for row in rows:
        if row.label in left_out:
            continue
        if row.repeats in left_out:
            shown = first.setdefault(row.repeats, row.label)
            stay.append(replace(row, repeats="" if shown == row.label else shown))
        else:
            stay.append(row)
    return stay


def repeated(run: Activations | Gradients) -> dict[Key, str]:
    """Return the outputs that `fold_repeats` leaves out, each with the label of the row that stands for it.

    Their activation repeats an earlier one and, after a backward pass, so does their gradient, and those of the call's
    inputs where they were measured.
    """
    into = {_key(row): row.repeats for row in run.rows if row.repeats}
    if isinstance(run, Activations):
        return into
    outputs = {_key(row): row.repeats for row in run.gradients if row.role == "output"}
    differing = {(row.layer, row.call) for row in run.gradients if row.role == "input" and not row.repeats}
    into = {key: outputs.get(key, label) for key, label in into.items()}
    return {key: label for key, label in into.items() if label and key[:2] not in differing}


def _key(row: LayerRow | GradientRow) -> Key:
    return row.layer, row.call, row.slot


def _folded(rows: Sequence[Row], into: Mapping[Key, str]) -> list[Row]:
    """Leave out the rows of some outputs; those that stay name them. Gradients of inputs stay."""
    also: dict[str, list[str]] = {}
    for key, label in into.items():
        also.setdefault(label, []).append(row_label(*key))
    stay: list[Row] = []
    for row in rows:
        if isinstance(row, GradientRow) and row.role == "input":
            stay.append(row)
        elif _key(row) not in into:
            stay.append(replace(row, also=(*row.also, *also[row.label])) if row.label in also else row)
    return stay


def _resolved(labels: Sequence[str] | None, left_out: Mapping[str, Sequence[str]]) -> tuple[str, ...] | None:
    """Replace rows that are left out by the rows that take their outputs."""
    while labels is not None and any(label in left_out for label in labels):
        labels = [*dict.fromkeys(other for label in labels for other in left_out.get(label, (label,)))]
    return None if labels is None else tuple(labels)


def _taken_by_others(rows: Sequence[GradientRow], left_out: Mapping[str, Sequence[str]]) -> tuple[GradientRow, ...]:
    """Return the rows with those that take the outputs of rows left out in place of these; `left_out` by label."""
    resolved = ((row, _resolved(row.taken_by, left_out)) for row in rows)
    return tuple(row if takers == row.taken_by else replace(row, taken_by=takers) for row, takers in resolved)


def _by_place(rows: Sequence[LayerRow]) -> tuple[LayerRow, ...]:
    return tuple(row if row.index == index else replace(row, index=index) for index, row in enumerate(rows))


def _of_rows(maps: Sequence[Maps], rows: Sequence[Row]) -> tuple[Maps, ...]:
    """Return the maps of these rows, which still have the numbers that the maps know them by."""
    numbers = {row.index: number for number, row in enumerate(rows)}
    stay = ((each, numbers[each.row]) for each in maps if each.row in numbers)
    return tuple(each if each.row == number else replace(each, row=number) for each, number in stay)
