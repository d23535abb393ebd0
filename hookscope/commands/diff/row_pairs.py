"""Pairs of rows, of networks that ran and of stored runs, and how the rows of stored runs find their partners."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

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
from hookscope.commands.diff.measures import culprit
from hookscope.commands.diff.values import A, B, Compared
from hookscope.results.activations import LayerRow
from hookscope.results.differences import FEWER_TENSORS, PARTS_ALONE, DifferenceRow, Match, Unmatched
from hookscope.results.gradients import GradientRow, ParameterRow

OutputRow = TypeVar("OutputRow", LayerRow, GradientRow)
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

    def difference(self, tensors: Compared | None = None, **fields: Any) -> DifferenceRow:
        """Return the row of the pair, with the measures of its tensors unless `fields` has others."""
        tensors = tensors or Compared()
        a, b, measures = self.a.statistics, self.b.statistics, tensors.measures
        (shape, shape_b), (error, error_b) = tensors.shapes, tensors.errors
        measured: dict[str, Any] = {
            "index": self.a.index,
            "layer": self.call[0],
            "label": self.label,
            "kind": self.a.kind,
            "label_b": self.label_b,
            "kind_b": self.b.kind,
            "matched": self.matched,
            "shape": shape.whole if len(shape) else a.shape,
            "shape_b": shape_b.whole if len(shape_b) else b.shape,
            "dtype": a.dtype,
            "dtype_b": b.dtype,
            "measures": measures,
            "source": self.a.source if isinstance(self.a, LayerRow) else "",
            "error": error,
            "error_b": error_b,
            "channel": None if measures is None else culprit(tensors.sums[A, B]),
            "note": tensors.note,
        }
        return DifferenceRow(**measured | fields)


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
    pairing = Pairing(named, align(calls_a, calls_b, named))
    by_label = {label: row for row in b for label in (*row.duplicates, row.label)}
    partners: dict[int, tuple[LayerRow, Match]] = {  # rows that a run has folded into others are found by label
        row.index: (by_label[label], "name")
        for row in a
        for label in (*reversed(row.duplicates), row.label)
        if label in by_label
    }
    partners |= {row.index: (other, how) for row, other, how in _partners(a, b, pairing.partner)}
    pairs: list[RowPair] = []
    taken: set[int] = set()
    for row in a:
        if row.index in partners and partners[row.index][0].index not in taken:
            other, how = partners[row.index]
            taken.add(other.index)
            pairs.append(RowPair(row, other, _call(row), _call(other), row.label, other.label, how))
    paired = {pair.a.index for pair in pairs}
    alone = [
        *_unmatched("A", a, paired, b, pairing, wrapped_b),
        *_unmatched("B", b, taken, a, pairing.inverse(), wrapped_a),
    ]
    return pairs, tuple(alone)


def pair_gradients(
    a: Sequence[GradientRow], b: Sequence[GradientRow], partner: Callable[[CallKey], tuple[CallKey, Match] | None]
) -> Iterator[RowPair]:
    """Pair gradients of outputs and inputs that at least one side has."""
    for row, other, how in _partners(a, b, partner):
        if _arrived(row, other):
            label, label_b = (f"{side.label} grad_{side.role}" for side in (row, other))
            yield RowPair(row, other, _call(row), _call(other), label, label_b, how)


def pair_parameters(
    a: Sequence[ParameterRow], b: Sequence[ParameterRow], layers: Mapping[str, tuple[str, Match]]
) -> Iterator[RowPair]:
    """Pair gradients of parameters that at least one side has, by the parameter's name in paired layers."""
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


def _partners(
    a: Sequence[OutputRow], b: Sequence[OutputRow], partner: Callable[[CallKey], tuple[CallKey, Match] | None]
) -> Iterator[tuple[OutputRow, OutputRow, Match]]:
    """Pair the rows of paired calls; the tensors of one call are paired by `matching_names`."""
    calls_b = _by_call(b)
    for (call, role), rows in _by_call(a).items():
        paired = partner(call)
        if paired is not None:
            others = calls_b.get((paired[0], role), [])
            order = matching_names([other.slot for other in others], [row.slot for row in rows])
            yield from ((row, others[at], paired[1]) for row, at in zip(rows, order, strict=True) if at is not None)


def _by_call(rows: Sequence[OutputRow]) -> dict[tuple[CallKey, str], list[OutputRow]]:
    """Group rows by their call and, for gradients, by their role in it."""
    calls: dict[tuple[CallKey, str], list[OutputRow]] = {}
    for row in rows:
        calls.setdefault((_call(row), row.role if isinstance(row, GradientRow) else ""), []).append(row)
    return calls


def _layers(rows: Sequence[LayerRow]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the layers of rows, with their numbers of parameters, and the modules that call operations."""
    owned = {row.layer: ((row.parameter_count,),) for row in rows if row.owner is None}
    return {**{row.owner: () for row in rows if row.owner is not None}, **owned}


def _calls(rows: Sequence[LayerRow]) -> list[Call]:
    """Return the calls of rows; their shapes have no batch axis."""
    return [
        Call(key, group[0].kind, tuple([row.shape[1:] for row in group]), ((group[0].parameter_count,),))
        for (key, _), group in _by_call(rows).items()
    ]


def _wrapped(layers: Sequence[LayerRow], others: Sequence[LayerRow]) -> set[str]:
    """Return the layers of a run for which the other run has only rows of parts."""
    listed, named = ({row.layer for row in rows if row.owner is None} for rows in (layers, others))
    inside, parts = (containers_of(row.layer.replace(":", ".") for row in rows) for rows in (layers, others))
    return (listed - named - inside) & parts


def _unmatched(
    side: Literal["A", "B"],
    rows: Sequence[LayerRow],
    paired: Collection[int],
    others: Sequence[LayerRow],
    pairing: Pairing,
    wrapped: Collection[str],
) -> Iterator[Unmatched]:
    title = "B" if side == "A" else "A"
    for row in rows:
        if row.index not in paired:
            partner = pairing.namesake(row.layer)
            missing = "output" if partner is not None else "layer" if row.owner is None else "operation"
            counted = "" if partner is None else counts_differ(row, rows, others, partner[0], title)
            reason = f"{title}{PARTS_ALONE}" if row.layer in wrapped else counted or f"{title} has no such {missing}"
            yield Unmatched(side, row.label, row.kind, row.shape, reason)


def counts_differ(row: LayerRow, rows: Iterable[LayerRow], others: Iterable[LayerRow], partner: str, title: str) -> str:
    """Return how many calls of a row's layer, or tensors of its call, `partner` has more or fewer; "" if as many."""
    calls, theirs = (
        Counter(_call(other) for other in side if other.layer == name)
        for side, name in ((rows, row.layer), (others, partner))
    )
    if theirs and len(calls) != len(theirs):
        return f"called {_times(len(calls))} here, {_times(len(theirs))} by {title}"
    return f"{title} {FEWER_TENSORS}" if 0 < theirs[partner, row.call] < calls[_call(row)] else ""


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
