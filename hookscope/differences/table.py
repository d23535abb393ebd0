"""Turn what a run has gathered into rows, and list what has no partner."""

from collections.abc import Iterator, Sequence

from hookscope.differences.alignment import Pairing
from hookscope.differences.measures import culprit
from hookscope.differences.meeting import Meeting, Row
from hookscope.differences.party import Party, Shown
from hookscope.results.differences import DifferenceRow, Match, Unmatched

_A, _B, _REFERENCE = range(3)

Place = tuple[str, int, int]
"""(layer, call, which of its tensors)."""


def paired_rows(parties: Sequence[Party], meeting: Meeting, pairing: Pairing) -> list[DifferenceRow]:
    """Return a row for each pair of outputs, those of modules around others too, in A's order of execution."""
    rows: list[DifferenceRow] = []
    for place, shown in parties[_A].shown.items():
        row, partner = meeting.rows.get(place), pairing.partner(place[:2])
        if row is None or partner is None:
            continue
        other = parties[_B].shown[(*partner[0], place[2])]
        unchanged = parties[_A].passed_through.get(place) and parties[_B].passed_through.get((*partner[0], place[2]))
        if not unchanged:
            rows.append(_row(len(rows), shown, other, partner[1], row))
    return rows


def _row(index: int, shown: Shown, other: Shown, matched: Match, row: Row) -> DifferenceRow:
    measured = row.sums.get((_A, _B))
    errors = [row.sums[pair].error if pair in row.sums else None for pair in ((_A, _REFERENCE), (_B, _REFERENCE))]
    return DifferenceRow(
        index=index,
        layer=shown.layer,
        label=shown.label,
        kind=shown.kind,
        label_b=other.label,
        kind_b=other.kind,
        matched=matched,
        shape=shown.shape,
        shape_b=other.shape,
        dtype=shown.dtype,
        dtype_b=other.dtype,
        measures=None if measured is None else measured.measured(row.coarser),
        input_relative_l2=row.input_relative_l2,
        added=None if row.added is None else row.added.measured(row.coarser),
        error=errors[0],
        error_b=errors[1],
        channel=None if measured is None else culprit(measured),
        note=row.note,
    )


def rows_by_place(rows: Sequence[DifferenceRow], party: Party) -> dict[Place, DifferenceRow]:
    """Return the rows by the place of A's output."""
    by_label = {row.label: row for row in rows}
    return {place: by_label[shown.label] for place, shown in party.shown.items() if shown.label in by_label}


def listed(rows: Sequence[DifferenceRow], parties: Sequence[Party]) -> tuple[DifferenceRow, ...]:
    """Return the rows of the layers and operations that are selected."""
    return tuple(row for row in rows if parties[_A].lists(row.layer))


def not_matched(parties: Sequence[Party], meeting: Meeting, pairing: Pairing, *, with_b: bool) -> tuple[Unmatched, ...]:
    """Return the outputs of A, and of B, that have no partner."""
    backwards = pairing.inverse()
    result = [*_alone(parties[_A], parties[_B], "A", pairing, meeting)]
    if with_b:
        result += _alone(parties[_B], parties[_A], "B", backwards, meeting)
    return tuple(result)


def _alone(party: Party, other: Party, side: str, pairing: Pairing, meeting: Meeting) -> Iterator[Unmatched]:
    for place, shown in party.shown.items():
        if party.passed_through.get(place) or not party.lists(shown.layer):
            continue
        partner = pairing.partner(place[:2])
        key = place if side == "A" or partner is None else (*partner[0], place[2])
        if partner is not None and key in meeting.rows:
            continue
        reason = _reason(place, party, other, "B" if side == "A" else "A", pairing)
        yield Unmatched("A" if side == "A" else "B", shown.label, shown.kind, shown.shape, reason)


def _reason(place: Place, party: Party, other: Party, title: str, pairing: Pairing) -> str:
    name = pairing.names.get(place[0])
    if name is None:
        return f"{title} has no such layer" if place[0] in party.hooked else f"{title} calls no such operation"
    own = len({call for layer, call, _ in party.shown if layer == place[0]})
    others = len({call for layer, call, _ in other.shown if layer == name[0]})
    if others == own:
        return f"{title} returns fewer tensors there"
    return f"{title} does not call it" if not others else f"called {_times(own)} here, {_times(others)} by {title}"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
