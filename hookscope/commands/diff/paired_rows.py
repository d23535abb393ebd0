"""Rows of networks that ran: of outputs with a partner, and a list of outputs without one."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from hookscope.commands.diff.alignment import Pairing
from hookscope.commands.diff.hooked_network import HookedNetwork
from hookscope.commands.diff.passes import Row
from hookscope.commands.diff.row_pairs import RowPair, counts_differ
from hookscope.commands.diff.values import A, B
from hookscope.hooks.observed import RowKey
from hookscope.results.activations import LayerRow
from hookscope.results.differences import UNPAIRED_CALL, DifferenceRow, Unmatched
from hookscope.text import figure, in_words, printable


def paired_rows(
    networks: Sequence[HookedNetwork], compared: Mapping[RowKey, Row], pairing: Pairing
) -> list[DifferenceRow]:
    """Return a row for each pair of outputs, containers included, in A's order of execution.

    The index counts only rows of layers that have rows in the result.
    """
    rows: list[DifferenceRow] = []
    listed = 0
    for place, a in networks[A].rows.items():
        row, partner = compared.get(place), pairing.partner(place[:2])
        if row is None or partner is None:
            continue
        b = networks[B].rows[row.place_b]
        if networks[A].passed_through.get(place) and networks[B].passed_through.get(row.place_b):
            continue
        words, total, arriving = _arguments(networks, place, row)
        if any(edit.place == "input" for edit in networks[B].edits.by_name.get(b.layer, ())):
            words, arriving = "with an edited input", None  # the input before the edit is not known
        pair = RowPair(a, b, place[:2], row.place_b[:2], a.label, b.label, partner[1])
        rows.append(
            pair.difference(
                row.output,
                index=listed,
                input_relative_l2=total,
                arriving_relative_l2=arriving,
                arguments=words,
                added=None if row.added is None else row.added.measured(row.output.dtype),
                note=row.output.note or row.note,
            )
        )
        listed += networks[A].has_rows(a.layer)
    return rows


def _arguments(networks: Sequence[HookedNetwork], place: RowKey, row: Row) -> tuple[str, float | None, float | None]:
    """Return in words which constants and stored tensors of an operation differ, and how far its inputs differ.

    The first norm is over all inputs, the second over outputs of layers; both are None if an input was overwritten.
    """
    total = row.input_relative_l2
    a, b = networks[A].arguments.get(place), networks[B].arguments.get(row.place_b)
    if a is None or b is None:
        return "", total, total
    of_a, of_b = a.constants, b.constants
    parts: list[str] = []
    if sorted(of_a.values()) != sorted(of_b.values()):
        parts += [_constant(path, of_a, of_b) for path in of_a if of_b.get(path, of_a[path]) != of_a[path]]
    if None in a.inputs:
        return in_words(parts), None, None
    if row.input_shapes_differ or len(row.inputs) != len(a.inputs):
        return in_words(parts), total, total
    amounts = [(name, sums.relative_l2) for name, sums in zip(a.inputs, row.inputs, strict=True)]
    stored = [(printable(name), figure(value, 3)) for name, value in amounts if name and value]
    parts += [f"given {name}, which differs by {amount}" for name, amount in stored]
    arriving = [value for name, value in amounts if not name]
    if not arriving:
        return in_words(parts), total, 0.0 if parts else None
    return in_words(parts), total, float(np.max(arriving))  # NaN if one is


def _constant(path: str, of_a: Mapping[str, str], of_b: Mapping[str, str]) -> str:
    name = f"{path[2:-2]}=" if path.startswith("['") else ""
    return f"given {name}{printable(of_a[path], 40)} in A and {name}{printable(of_b[path], 40)} in B"


def unmatched(
    networks: Sequence[HookedNetwork], compared: Mapping[RowKey, Row], pairing: Pairing, *, with_b: bool
) -> Iterator[Unmatched]:
    """Yield the outputs of A that have no partner, with the reason, and outputs of B if `with_b`."""
    paired: dict[Literal["A", "B"], Collection[RowKey]] = {"A": compared}
    if with_b:
        paired["B"] = {row.place_b for row in compared.values()}
    for side, places in paired.items():
        (network, other), title = (networks[:2], "B") if side == "A" else (networks[1::-1], "A")
        partners = pairing if side == "A" else pairing.inverse()
        for place, row in network.rows.items():
            if place not in places and network.has_rows(row.layer) and not network.passed_through.get(place):
                reason = _reason(row, network, other, title, partners)
                yield Unmatched(side, row.label, row.kind, row.shape, reason)


def _reason(row: LayerRow, network: HookedNetwork, other: HookedNetwork, title: str, pairing: Pairing) -> str:
    partner, is_layer = pairing.namesake(row.layer), row.layer in network.hooked
    is_called = partner is not None and any(layer == partner[0] for layer, *_ in other.rows)
    if partner is None or not (is_called or is_layer):
        return f"{title} has no such layer" if is_layer else f"{title} calls no such operation"
    if not is_called:
        return f"{title} does not call it"
    return counts_differ(row, network.rows.values(), other.rows.values(), partner[0], title) or UNPAIRED_CALL
