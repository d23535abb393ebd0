"""Rows of networks that ran: of outputs with a partner, and a list of outputs without one."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from hookscope.commands.diff.alignment import Pairing
from hookscope.commands.diff.hooked_network import HookedNetwork, Key, OutputForm
from hookscope.commands.diff.measures import culprit
from hookscope.commands.diff.passes import Row
from hookscope.commands.diff.values import A, B
from hookscope.results.differences import FEWER_TENSORS, UNPAIRED_CALL, DifferenceRow, Match, Unmatched
from hookscope.text import figure, in_words, printable


def paired_rows(
    networks: Sequence[HookedNetwork], compared: Mapping[Key, Row], pairing: Pairing
) -> list[DifferenceRow]:
    """Return a row for each pair of outputs, containers included, in A's order of execution.

    The index counts only rows of layers that have rows in the result.
    """
    rows: list[DifferenceRow] = []
    listed = 0
    for place, form in networks[A].output_forms.items():
        row, partner = compared.get(place), pairing.partner(place[:2])
        if row is None or partner is None:
            continue
        other = networks[B].output_forms[row.place_b]
        unchanged = networks[A].passed_through.get(place) and networks[B].passed_through.get(row.place_b)
        if not unchanged:
            paired = _row(listed, form, other, partner[1], row)
            if any(edit.place == "input" for edit in networks[B].edits.by_name.get(other.layer, ())):
                # The input before the edit is not known.
                paired = replace(paired, arguments="with an edited input", arriving_relative_l2=None)
            rows.append(paired)
            listed += networks[A].has_rows(form.layer)
    return rows


def _row(index: int, form: OutputForm, other: OutputForm, matched: Match, row: Row) -> DifferenceRow:
    measured = row.output.sums.get((A, B))
    words, total, arriving = _arguments(form, other, row)
    error, error_b = row.output.errors
    return DifferenceRow(
        index=index,
        layer=form.layer,
        label=form.label,
        kind=form.kind,
        label_b=other.label,
        kind_b=other.kind,
        matched=matched,
        shape=row.output.shapes[A].whole,
        shape_b=row.output.shapes[B].whole,
        dtype=form.dtype,
        dtype_b=other.dtype,
        measures=row.output.measures,
        input_relative_l2=total,
        arriving_relative_l2=arriving,
        source="" if form.operation is None else form.operation.source,
        arguments=words,
        added=None if row.added is None else row.added.measured(row.output.dtype),
        error=error,
        error_b=error_b,
        channel=None if measured is None else culprit(measured),
        note=row.output.note or row.note,
    )


def _arguments(form: OutputForm, other: OutputForm, row: Row) -> tuple[str, float | None, float | None]:
    """Return in words which constants and stored tensors of an operation differ, and how far its inputs differ.

    The first norm is over all inputs, the second over outputs of layers; both are None if an input was overwritten.
    """
    total = row.input_relative_l2
    if form.operation is None or other.operation is None:
        return "", total, total
    of_a, two = (
        {path: repr(value) for path, value in operation.constants} for operation in (form.operation, other.operation)
    )
    differing = [path for path in of_a if two.get(path, of_a[path]) != of_a[path]]
    parts = [] if sorted(of_a.values()) == sorted(two.values()) else [_constant(path, of_a, two) for path in differing]
    if None in form.inputs:
        return in_words(parts), None, None
    if row.input_shapes_differ or len(row.inputs) != len(form.inputs):
        return in_words(parts), total, total
    amounts = [(name, sums.relative_l2) for name, sums in zip(form.inputs, row.inputs, strict=True)]
    stored = [(printable(name), figure(value, 3)) for name, value in amounts if name and value]
    parts += [f"given {name}, which differs by {amount}" for name, amount in stored]
    arriving = [value for name, value in amounts if not name]
    if not arriving:
        return in_words(parts), total, 0.0 if parts else None
    return in_words(parts), total, float(np.max(arriving))  # NaN if one is


def _constant(path: str, of_a: Mapping[str, str], two: Mapping[str, str]) -> str:
    name = f"{path[2:-2]}=" if path.startswith("['") else ""
    return f"given {name}{printable(of_a[path], 40)} in A and {name}{printable(two[path], 40)} in B"


def unmatched(
    networks: Sequence[HookedNetwork], compared: Mapping[Key, Row], pairing: Pairing, *, with_b: bool
) -> tuple[Unmatched, ...]:
    """Return the outputs of A that have no partner, with the reason, and outputs of B if `with_b`."""
    a, b = networks[:2]
    paired_b = {row.place_b for row in compared.values()}
    of_b = _unpaired(b, a, "B", pairing.inverse(), paired_b) if with_b else ()
    return (*_unpaired(a, b, "A", pairing, compared), *of_b)


def _unpaired(
    network: HookedNetwork,
    other: HookedNetwork,
    side: Literal["A", "B"],
    pairing: Pairing,
    paired: Collection[Key],
) -> Iterator[Unmatched]:
    for place, form in network.output_forms.items():
        if place not in paired and network.has_rows(form.layer) and not network.passed_through.get(place):
            reason = _reason(place, network, other, "B" if side == "A" else "A", pairing)
            yield Unmatched(side, form.label, form.kind, form.shape, reason)


def _reason(place: Key, network: HookedNetwork, other: HookedNetwork, title: str, pairing: Pairing) -> str:
    namesake = pairing.namesake(place[0])
    calls, others = (
        Counter((layer, call) for layer, call, _ in side.output_forms if layer == name)
        for side, name in ((network, place[0]), (other, namesake[0] if namesake is not None else None))
    )
    if namesake is None or (not others and place[0] not in network.hooked):
        return f"{title} has no such layer" if place[0] in network.hooked else f"{title} calls no such operation"
    if not others:
        return f"{title} does not call it"
    if len(calls) != len(others):
        return f"called {_times(len(calls))} here, {_times(len(others))} by {title}"
    fewer = others[namesake[0], place[1]] < calls[place[:2]]
    return f"{title} {FEWER_TENSORS}" if fewer else UNPAIRED_CALL


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
