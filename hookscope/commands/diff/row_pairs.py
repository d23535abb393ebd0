"""Pairs of rows: of stored runs, of gradients, and of networks that ran, with a list of rows without a partner."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from hookscope.commands.diff.hooked_network import HookedNetwork, OutputRow
from hookscope.commands.diff.measures import Sums, culprit
from hookscope.commands.diff.values import A, B, Compared, largest
from hookscope.hooks.observed import RowKey
from hookscope.results.activations import LayerRow
from hookscope.results.differences import (
    FEWER_TENSORS,
    NOT_LISTED,
    PARTS_ALONE,
    SAME_OUTPUT,
    UNPAIRED_CALL,
    DifferenceRow,
    Match,
    Unmatched,
)
from hookscope.results.gradients import GradientRow, ParameterRow
from hookscope.text import figure, in_words, printable

Output = OutputRow | LayerRow
AnyRow = TypeVar("AnyRow", LayerRow, GradientRow)


@dataclass(slots=True)
class RowPair:
    """A pair of rows, and the comparison of their tensors.

    Attributes:
        a: An `OutputRow`, `LayerRow`, `GradientRow` or `ParameterRow`; `b` is of the same class.
        one_sided: Relative L2 of a gradient that only one side has: 0 if it is all zeros, else infinite; None if the
            other side does not track it.
    """

    a: Any
    b: Any
    matched: Match
    compared: Compared = field(default_factory=Compared)
    one_sided: float | None = None

    @property
    def label(self) -> str:
        """The name of A's tensor in a file of the run: "conv1", "conv1 grad_output", "conv1.weight grad"."""
        return _label(self.a)

    @property
    def label_b(self) -> str:
        """The name of B's tensor."""
        return _label(self.b)

    @property
    def sums(self) -> Sums:
        """The sums of A and B."""
        return self.compared.sums.get((A, B), Sums())

    def difference(self, **fields: Any) -> DifferenceRow:
        """Return the row of the pair, with the measures of its tensors unless `fields` has others."""
        tensors, measures, (error, error_b) = self.compared, self.compared.measures, self.compared.errors
        shape, shape_b = tensors.whole_shapes if tensors.shapes else (self.a.shape, self.b.shape)
        measured: dict[str, Any] = {
            "index": self.a.index,
            "layer": _call(self.a)[0],
            "label": self.label,
            "kind": self.a.kind,
            "label_b": self.label_b,
            "kind_b": self.b.kind,
            "matched": self.matched,
            "shape": shape,
            "shape_b": shape_b,
            "dtype": self.a.dtype,
            "dtype_b": self.b.dtype,
            "measures": measures,
            "source": "" if isinstance(self.a, GradientRow | ParameterRow) else self.a.source,
            "error": error,
            "error_b": error_b,
            "channel": None if measures is None else culprit(tensors.sums[A, B]),
            "note": tensors.note,
        }
        return DifferenceRow(**measured | fields)


def pair_rows(
    a: Sequence[LayerRow], b: Sequence[LayerRow], maps: Sequence[str], chosen: tuple[bool, bool]
) -> tuple[list[RowPair], tuple[Unmatched, ...]]:
    """Pair the outputs of two runs, and list outputs without a partner; `chosen` tells whether runs chose layers.

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
            pairs.append(RowPair(row, other, how))
    paired = {pair.a.index for pair in pairs}
    alone = [
        *_unmatched("A", a, paired, b, pairing, wrapped_b, chosen=chosen[B]),
        *_unmatched("B", b, taken, a, pairing.inverse(), wrapped_a, chosen=chosen[A]),
    ]
    return pairs, tuple(alone)


def pair_gradients(
    a: Sequence[GradientRow], b: Sequence[GradientRow], partner: Callable[[CallKey], tuple[CallKey, Match] | None]
) -> Iterator[RowPair]:
    """Pair gradients of outputs and inputs that at least one side has."""
    for row, other, how in _partners(a, b, partner):
        if _arrived(row, other):
            yield RowPair(row, other, how)


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
            yield RowPair(row, other, how)


def _arrived(*rows: GradientRow | ParameterRow) -> bool:
    return any(row.status in ("gradient", "zero") for row in rows)


def _call(row: Output | GradientRow | ParameterRow) -> CallKey:
    return (row.name, 0) if isinstance(row, ParameterRow) else (row.layer, row.call)


def _label(row: Output | GradientRow | ParameterRow) -> str:
    if isinstance(row, GradientRow):
        return f"{row.label} grad_{row.role}"
    return f"{row.label} grad" if isinstance(row, ParameterRow) else row.label


def _partners(
    a: Sequence[AnyRow], b: Sequence[AnyRow], partner: Callable[[CallKey], tuple[CallKey, Match] | None]
) -> Iterator[tuple[AnyRow, AnyRow, Match]]:
    """Pair the rows of paired calls; the tensors of one call are paired by `matching_names`."""
    calls_b = _by_call(b)
    for (call, role), rows in _by_call(a).items():
        paired = partner(call)
        if paired is not None:
            others = calls_b.get((paired[0], role), [])
            order = matching_names([other.slot for other in others], [row.slot for row in rows])
            yield from ((row, others[at], paired[1]) for row, at in zip(rows, order, strict=True) if at is not None)


def _by_call(rows: Sequence[AnyRow]) -> dict[tuple[CallKey, str], list[AnyRow]]:
    """Group rows by their call and, for gradients, by their role in it."""
    calls: dict[tuple[CallKey, str], list[AnyRow]] = {}
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
    *,
    chosen: bool,
) -> Iterator[Unmatched]:
    """Yield the rows that are not `paired`, with the reason; `chosen` if `others` are only of chosen layers."""
    title = "B" if side == "A" else "A"
    folded = {label: other.label for other in others for label in other.duplicates}
    has_operations = any(other.owner is not None for other in others)
    for row in rows:
        if row.index not in paired:
            partner = pairing.namesake(row.layer)
            missing = "output" if partner is not None else "layer" if row.owner is None else "operation"
            counted = "" if partner is None else _counts_differ(row, rows, others, partner[0], title)
            reason = counted or f"{title} has no such {missing}"
            if row.layer in wrapped:
                reason = f"{title}{PARTS_ALONE}"
            elif row.label in folded:
                reason = f"{SAME_OUTPUT} {folded[row.label]} in {title}"
            elif not counted and (chosen or (row.owner is not None and not has_operations)):
                reason = f"{title}{NOT_LISTED}"
            yield Unmatched(side, row.label, row.kind, row.shape, reason)


def _counts_differ(row: Output, rows: Iterable[Output], others: Iterable[Output], partner: str, title: str) -> str:
    """Return in words that `partner` is called more or less often, or returns fewer tensors; "" if neither."""
    calls, theirs = (
        Counter(_call(other) for other in side if other.layer == name)
        for side, name in ((rows, row.layer), (others, partner))
    )
    if theirs and len(calls) != len(theirs):
        return f"called {_times(len(calls))} here, {_times(len(theirs))} by {title}"
    return f"{title} {FEWER_TENSORS}" if 0 < theirs[partner, row.call] < calls[_call(row)] else ""


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def difference_rows(
    networks: Sequence[HookedNetwork], compared: Mapping[RowKey, Compared], pairing: Pairing
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
        if a.passed_through and b.passed_through:
            continue
        words, total, arriving = _arguments(a, b, row)
        if any(edit.place == "input" for edit in networks[B].edits.by_name.get(b.layer, ())):
            words, arriving = "with an edited input", None  # the input before the edit is not known
        rows.append(
            RowPair(a, b, partner[1], row).difference(
                index=listed,
                input_relative_l2=total,
                arriving_relative_l2=arriving,
                arguments=words,
                added=None if row.added is None else row.added.measured(row.dtype),
                note=row.note or row.not_added,
            )
        )
        listed += networks[A].has_row(a.layer, a.label)
    return rows


def _arguments(a: OutputRow, b: OutputRow, row: Compared) -> tuple[str, float | None, float | None]:
    """Return in words which constants and stored tensors of an operation differ, and how far its inputs differ.

    The first norm is over all inputs, the second over outputs of layers; both are None if an input was overwritten.
    """
    total = row.input_relative_l2
    if a.owner is None or b.owner is None:
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
    return in_words(parts), total, largest(arriving)


def _constant(path: str, of_a: Mapping[str, str], of_b: Mapping[str, str]) -> str:
    name = f"{path[2:-2]}=" if path.startswith("['") else ""
    return f"given {name}{printable(of_a[path], 40)} in A and {name}{printable(of_b[path], 40)} in B"


def unmatched(
    networks: Sequence[HookedNetwork], compared: Mapping[RowKey, Compared], pairing: Pairing, *, with_b: bool
) -> Iterator[Unmatched]:
    """Yield the outputs of A that have no partner, with the reason, and outputs of B if `with_b`."""
    paired: dict[Literal["A", "B"], Collection[RowKey]] = {"A": compared}
    if with_b:
        paired["B"] = {row.place_b for row in compared.values()}
    for side, places in paired.items():
        (network, other), title = (networks[:2], "B") if side == "A" else (networks[1::-1], "A")
        partners = pairing if side == "A" else pairing.inverse()
        for place, row in network.rows.items():
            if place not in places and network.has_row(row.layer, row.label) and not row.passed_through:
                reason = _reason(row, network, other, title, partners)
                yield Unmatched(side, row.label, row.kind, row.shape, reason)


def _reason(row: OutputRow, network: HookedNetwork, other: HookedNetwork, title: str, pairing: Pairing) -> str:
    partner, is_layer = pairing.namesake(row.layer), row.layer in network.hooked
    is_called = partner is not None and any(layer == partner[0] for layer, *_ in other.rows)
    if partner is None or not (is_called or is_layer):
        return f"{title} has no such layer" if is_layer else f"{title} calls no such operation"
    if not is_called:
        return f"{title} does not call it"
    return _counts_differ(row, network.rows.values(), other.rows.values(), partner[0], title) or UNPAIRED_CALL
