"""Find where differences come from: rounding, the layer, or its inputs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hookscope.results.differences import DifferenceRow, FirstDifference, Origin

# The largest rounding of one layer, as a relative L2 norm, in units in the last place: of the dtype that stores values,
# and of the one that accumulates sums. In float32, 8.1e-6; in bfloat16, 0.031. Our choice: sums of some 10,000
# products, in any order, stay below a third of it.
_STORED_ULPS = 4
_SUMMED_ULPS = 64


def rounding_limit(eps: float, layers_before: int) -> float:
    """Return the relative L2 norm up to which rounding explains the difference of two outputs.

    Errors of many layers add up as a random walk: with the square root of their number.

    Args:
        eps: Machine epsilon of the coarsest dtype that the networks compute in.
        layers_before: How many layers have run by then, that layer included.
    """
    summed = min(eps, 2.0**-23)  # half precision is summed in float32
    return (_STORED_ULPS * eps + _SUMMED_ULPS * summed) * math.sqrt(max(layers_before, 1))


def exceeds(relative_l2: float | None, limit: float) -> bool:
    """Return whether a difference is beyond rounding; NaN is."""
    return relative_l2 is not None and not relative_l2 <= limit


def with_origins(
    rows: Sequence[DifferenceRow], eps: float, sizes: Mapping[str, int] | None = None
) -> tuple[tuple[DifferenceRow, ...], tuple[FirstDifference, ...]]:
    """Return rows with their limit and origin, and where differences begin.

    Args:
        rows: In A's order of execution, containers included: they show differences that arise between the layers that
            they call.
        eps: As for `rounding_limit`.
        sizes: By name, how many layers a row stands for whose parts have no rows; 1 for others.
    """
    sizes = sizes or {}
    judged: list[DifferenceRow] = []
    first_differences: list[FirstDifference] = []
    first_seen = False
    layers = {row.layer for row in rows}
    depth = 0
    for at, row in enumerate(rows):
        depth += sizes.get(row.layer, 1)
        limit = rounding_limit(eps, depth)
        single = rounding_limit(eps, sizes.get(row.layer, 1))
        total = None if row.measures is None else row.measures.relative_l2
        origin = _origin(row, total, limit, single, first_seen=first_seen)
        if not first_seen and exceeds(total, limit):
            first_seen = True
            if row.added is None or exceeds(row.added.relative_l2, single) or exceeds(row.input_relative_l2, limit):
                first_differences.append(_first(rows[at:], limit, total or 0.0, layers))
        judged.append(replace(row, limit=limit, origin=origin))
    if any(row.added is not None for row in rows):
        first_differences = _of_single_layers(judged, first_differences, eps, sizes)
    return tuple(judged), tuple(first_differences)


def _origin(row: DifferenceRow, total: float | None, limit: float, single: float, *, first_seen: bool) -> Origin:
    origin: Origin = "unclear"
    if total == 0:
        origin = "equal"
    elif row.added is not None and exceeds(row.added.relative_l2, single):
        origin = "begins"
    elif total is not None and not exceeds(total, limit):
        origin = "rounding"
    elif total is not None and row.added is not None:
        origin = "passed on"
    elif total is not None and row.input_relative_l2 is not None:
        arrives = exceeds(row.input_relative_l2, limit)
        origin = "begins" if not arrives else "unclear" if first_seen else "passed on"
    return origin


def _first(rows: Sequence[DifferenceRow], limit: float, total: float, layers: set[str]) -> FirstDifference:
    """Return where the difference begins that the first of these rows shows.

    That is its layer if the layer's inputs agree, else the code of the nearest module around it whose inputs do: a
    container that is called with a difference only passes it on.
    """
    row = rows[0]
    if not exceeds(row.input_relative_l2, limit):
        return FirstDifference(row.layer, row.label, _has_parts(row.layer, layers), total)
    owner, colon, _ = row.layer.partition(":")
    around = owner.removeprefix("(model)") if colon else _around(row.layer)
    calls = {each.layer: each for each in reversed(rows)}  # a module around the row finishes after it
    while around and not (around in calls and not exceeds(calls[around].input_relative_l2, limit)):
        around = _around(around)
    return FirstDifference(around, row.label, in_own_code=True, relative_l2=total)


def _around(layer: str) -> str:
    return layer.rpartition(".")[0]


def _has_parts(layer: str, layers: set[str]) -> bool:
    return any(_is_inside(other, layer) for other in layers)


def _of_single_layers(
    rows: Sequence[DifferenceRow], first: Sequence[FirstDifference], eps: float, sizes: Mapping[str, int]
) -> list[FirstDifference]:
    """Return the layers that add a difference by themselves, at their first calls that do.

    A container is among them only if the layers inside it add none.
    """
    layers = {row.layer for row in rows}
    first_differences = {each.layer: each for each in first}
    for row in _adding(rows, eps, sizes):
        first_differences.setdefault(
            row.layer, FirstDifference(row.layer, row.label, _has_parts(row.layer, layers), _added(row))
        )
    return [*first_differences.values()]


def _adding(rows: Sequence[DifferenceRow], eps: float, sizes: Mapping[str, int]) -> list[DifferenceRow]:
    layers = [row.layer for row in rows]
    adding = [row for row in rows if exceeds(_added(row), rounding_limit(eps, _size(row.layer, layers, sizes)))]
    return [row for row in adding if not any(_is_inside(other.layer, row.layer) for other in adding)]


def _size(layer: str, layers: Sequence[str], sizes: Mapping[str, int]) -> int:
    inside = [each for each in layers if _is_inside(each, layer)]
    return sizes.get(layer, 1) + sum(sizes.get(each, 1) for each in inside)


def _added(row: DifferenceRow) -> float:
    return row.added.relative_l2 if row.added else 0.0


def _is_inside(layer: str, around: str) -> bool:
    return layer != around and (not around or layer.startswith((f"{around}.", f"{around}:")))
