"""Follow gradients from output to output: what each comes from, and which zeros are nobody's fault."""

from collections.abc import Mapping, Sequence

from hookscope.checks.verdicts.reading import key
from hookscope.results.gradients import GradientRow

Key = tuple[str, int, str]
"""(layer, call, slot)."""

Takers = Mapping[Key, Sequence[GradientRow | None]]
"""By output, what is computed from it directly; None for the loss."""


def takers_of(outputs: Sequence[GradientRow]) -> Takers:
    """Return what is computed from each output; where that is not known, the next one in forward order.

    It is not known inside reentrant checkpoints, nor of what goes into one.
    """
    labelled = {row.label: row for row in outputs}
    takers: dict[Key, Sequence[GradientRow | None]] = {}
    for row, after in zip(outputs, [*outputs, None][1:], strict=True):
        known = row.taken_by is not None and (after is None or after.taken_by is not None)
        takers[key(row)] = [labelled.get(label) for label in row.taken_by or ()] if known else [after]
    return takers


def idle_modules(outputs: Sequence[GradientRow]) -> set[Key]:
    """Return the outputs whose gradient is zero though their module gets one at another call or output.

    A detector's shared head has calls for levels without an object.
    """
    alive = {row.layer for row in outputs if row.status == "gradient"}
    return {key(row) for row in outputs if row.status == "zero" and row.layer in alive}


def idle_branches(outputs: Sequence[GradientRow], takers: Takers) -> set[Key]:
    """Return the outputs whose gradient is zero while that of a parallel module is not.

    Parallel are modules of one type whose names differ in one number, if neither's output is computed from the other's:
    heads of a detector that has one for each level, experts of a mixture.
    """
    parallel: dict[tuple[str, str], set[Key]] = {}
    for row in outputs:
        if row.status == "gradient":
            for pattern in _patterns(row):
                parallel.setdefault(pattern, set()).add(key(row))
    after = {place: [key(each) for each in others if each is not None] for place, others in takers.items()}
    before: dict[Key, list[Key]] = {}
    for place, others in after.items():
        for other in others:
            before.setdefault(other, []).append(place)
    found = set()
    for row in outputs:
        alike = (
            set().union(*(parallel.get(pattern, ()) for pattern in _patterns(row))) if row.status == "zero" else set()
        )
        if alike and alike - _reached(key(row), after) - _reached(key(row), before):
            found.add(key(row))
    return found


def _patterns(row: GradientRow) -> list[tuple[str, str]]:
    """Return what a row has in common with those of parallel modules: its type, and its name but for one number."""
    parts = row.layer.split(".")
    return [
        (row.kind, ".".join((*parts[:at], "*", *parts[at + 1 :]))) for at, part in enumerate(parts) if part.isdecimal()
    ]


def _reached(start: Key, ways: Mapping[Key, Sequence[Key]]) -> set[Key]:
    """Return all outputs that can be reached from one, itself among them."""
    reached, waiting = {start}, [start]
    while waiting:
        new = set(ways.get(waiting.pop(), ())) - reached
        reached |= new
        waiting += new
    return reached
