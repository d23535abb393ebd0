"""Pair the rows of two stored runs, as layers of networks are paired."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hookscope.commands.diff.alignment import (
    Call,
    CallKey,
    Pairing,
    align,
    containers_of,
    is_inside,
    match_names,
    matching_names,
)
from hookscope.results.activations import LayerRow
from hookscope.results.differences import PARTS_ALONE, DifferenceRow, Match, Measures, Unmatched
from hookscope.results.gradients import GradientRow, ParameterRow

Row = LayerRow | GradientRow | ParameterRow


@dataclass(frozen=True, slots=True)
class RowPair:
    """A pair of rows.

    Attributes:
        call: (layer, call) in A, or the name of a parameter and 0; `call_b` is the same for B.
        label: The name of the tensor in a file of the run: "conv1", "conv1 grad_output", "conv1.weight grad".
    """

    a: Row
    b: Row
    call: CallKey
    call_b: CallKey
    label: str
    label_b: str
    matched: Match

    @property
    def lacking(self) -> str:
        """Which side has no gradient, in words; "" for activations, and if both sides have one."""
        for side, row in (("A", self.a), ("B", self.b)):
            if not (isinstance(row, LayerRow) or _arrived(row)):
                return f"{side} has no gradient here"
        return ""

    def measured(self, measures: Measures | None, note: str) -> DifferenceRow:
        """Return the row of the pair."""
        statistics, other = self.a.statistics, self.b.statistics
        return DifferenceRow(
            index=self.a.index,
            layer=self.call[0],
            label=self.label,
            kind=self.a.kind,
            label_b=self.label_b,
            kind_b=self.b.kind,
            matched=self.matched,
            shape=statistics.shape,
            shape_b=other.shape,
            dtype=statistics.dtype,
            dtype_b=other.dtype,
            measures=measures,
            source=self.a.source if isinstance(self.a, LayerRow) else "",
            note=note,
        )


def pair_rows(
    a: Sequence[LayerRow], b: Sequence[LayerRow], maps: Sequence[str]
) -> tuple[list[RowPair], tuple[Unmatched, ...]]:
    """Pair the outputs of two runs, and list outputs without a partner.

    Raises:
        UsageError: If a map is malformed.
        LayerNotFoundError: If a map matches nothing.
    """
    names_a, names_b = _layers(a), _layers(b)
    named = match_names(names_a, names_b, maps)
    wrapped_a, wrapped_b = _wrapped(b, a), _wrapped(a, b)
    calls_a, calls_b = (
        [call for call in _calls(rows) if not any(is_inside(call.key[0], name) for name in wrapped)]
        for rows, wrapped in ((a, wrapped_a), (b, wrapped_b))
    )
    aligned, matched = align(calls_a, calls_b, named)
    pairing = Pairing(named, aligned, frozenset(matched | aligned.keys()))
    by_place = {(row.layer, row.call, row.slot): row for row in b}
    by_label = {label: row for row in b for label in (*row.duplicates, row.label)}
    pairs: list[RowPair] = []
    taken: set[int] = set()
    for row in a:
        partner = _partner(row, pairing, by_place, by_label)
        if partner is not None and partner[0].index not in taken:
            other, how = partner
            taken.add(other.index)
            pairs.append(RowPair(row, other, _call(row), _call(other), row.label, other.label, how))
    have = {pair.a.index for pair in pairs}
    alone = [*_unmatched(a, have, "A", {*names_b}, wrapped_b), *_unmatched(b, taken, "B", {*names_a}, wrapped_a)]
    return pairs, tuple(alone)


def pair_gradients(
    a: Sequence[GradientRow], b: Sequence[GradientRow], partner: Callable[[CallKey], tuple[CallKey, Match] | None]
) -> Iterator[RowPair]:
    """Pair gradients of outputs and inputs that a side has; the tensors of a call are paired by `matching_names`."""
    slots: dict[tuple[CallKey, str], list[str]] = {}
    by_call: dict[tuple[CallKey, str], list[GradientRow]] = {}
    for row in a:
        slots.setdefault((_call(row), row.role), []).append(row.slot)
    for row in b:
        by_call.setdefault((_call(row), row.role), []).append(row)
    for row in a:
        matched, names = partner(_call(row)), slots[_call(row), row.role]
        others = [] if matched is None else by_call.get((matched[0], row.role), [])
        at = matching_names([other.slot for other in others], names)[names.index(row.slot)]
        if matched is not None and at is not None and _arrived(row, others[at]):
            label, label_b = (f"{side.label} grad_{side.role}" for side in (row, others[at]))
            yield RowPair(row, others[at], _call(row), matched[0], label, label_b, matched[1])


def pair_parameters(
    a: Sequence[ParameterRow], b: Sequence[ParameterRow], layers: Mapping[str, tuple[str, Match]]
) -> Iterator[RowPair]:
    """Pair gradients of parameters that a side has, by the name of the parameter in paired layers."""
    by_name = {row.name: row for row in b}
    for row in a:
        owner, dot, name = row.name.rpartition(".")
        partner, how = layers.get(owner, (owner, "name"))
        other = by_name.get(f"{partner}{dot}{name}")
        if other is not None and _arrived(row, other):
            yield RowPair(row, other, (row.name, 0), (other.name, 0), f"{row.name} grad", f"{other.name} grad", how)


def _arrived(*rows: GradientRow | ParameterRow) -> bool:
    return any(row.status in ("gradient", "zero") for row in rows)


def _call(row: LayerRow | GradientRow) -> CallKey:
    return row.layer, row.call


def _partner(
    row: LayerRow, pairing: Pairing, by_place: Mapping[tuple[str, int, str], LayerRow], by_label: Mapping[str, LayerRow]
) -> tuple[LayerRow, Match] | None:
    """Return the partner in B of a row of A; a row that B folded into another is found by its label."""
    partner = pairing.partner(_call(row))
    if partner is not None and (other := by_place.get((*partner[0], row.slot))) is not None:
        return other, partner[1]
    for label in (row.label, *row.duplicates):
        if label in by_label:
            return by_label[label], "name"
    return None


def _layers(rows: Sequence[LayerRow]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the layers of rows, with their numbers of parameters, and the modules that call operations."""
    owned = {row.layer: ((row.parameter_count,),) for row in rows if row.owner is None}
    return {**{row.owner: () for row in rows if row.owner is not None}, **owned}


def _calls(rows: Sequence[LayerRow]) -> list[Call]:
    """Return the calls of rows; their shapes have no batch axis."""
    calls: dict[CallKey, list[LayerRow]] = {}
    for row in rows:
        calls.setdefault(_call(row), []).append(row)
    return [
        Call(key, group[0].kind, tuple([row.shape[1:] for row in group]), ((group[0].parameter_count,),))
        for key, group in calls.items()
    ]


def _wrapped(layers: Sequence[LayerRow], others: Sequence[LayerRow]) -> set[str]:
    """Return the layers of a run of which the other run only has rows of parts."""
    listed, named = ({row.layer for row in rows if row.owner is None} for rows in (layers, others))
    inside, parts = (containers_of(row.layer.replace(":", ".") for row in rows) for rows in (layers, others))
    return (listed - named - inside) & parts


def _unmatched(
    rows: Sequence[LayerRow], taken: set[int], side: Literal["A", "B"], others: set[str], wrapped: set[str]
) -> Iterator[Unmatched]:
    other = "B" if side == "A" else "A"
    for row in rows:
        if row.index not in taken:
            kind = "operation" if row.owner is not None else "layer"
            reason = f"{other} has no such {'output' if row.layer in others else kind}"
            reason = f"{other}{PARTS_ALONE}" if row.layer in wrapped else reason
            yield Unmatched(side, row.label, row.kind, row.shape, reason)
