"""Find where differences come from: rounding, the layer, or its inputs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hookscope.commands.diff.alignment import is_inside
from hookscope.results.differences import DifferenceRow, FirstDifference, Origin, OutputDifference

# The largest rounding of one layer, as a relative L2 norm, in units in the last place of the dtype that stores values,
# and of the dtype that sums them. In float32, 8.1e-6; in bfloat16, 0.031. Sums of some 10,000 products, in any order,
# stay below a third of it.
_STORED_ULPS = 4
_SUMMED_ULPS = 64

# A layer enlarges the rounding of its inputs by less than this factor.
_GROWTH = 10


def rounding_limit(eps: float, layers_before: int) -> float:
    """Return the relative L2 norm up to which rounding explains the difference of two outputs.

    Errors of many layers add up as a random walk: with the square root of their number.

    Args:
        eps: Machine epsilon of the coarsest dtype that the networks compute in.
        layers_before: Number of layers that have run, with the layer of the outputs.
    """
    summed = min(eps, 2.0**-23)  # half precision is summed in float32
    return (_STORED_ULPS * eps + _SUMMED_ULPS * summed) * math.sqrt(max(layers_before, 1))


def exceeds(relative_l2: float | None, limit: float) -> bool:
    """Tell whether a difference is beyond rounding; NaN is."""
    return relative_l2 is not None and not relative_l2 <= limit


def with_origins(
    rows: Sequence[DifferenceRow],
    eps: float,
    sizes: Mapping[str, int] | None = None,
    outputs: Sequence[OutputDifference] = (),
    *,
    same_inputs: bool = True,
) -> tuple[tuple[DifferenceRow, ...], tuple[FirstDifference, ...]]:
    """Return rows with their limit and origin, and where differences begin.

    Args:
        rows: In A's order of execution. Containers are among them: they show differences that arise between the layers
            that they call.
        eps: As for `rounding_limit`.
        sizes: By name of a layer whose parts have no rows, the number of layers in it; 1 for other layers.
        outputs: Of the networks. A difference in them has not disappeared, even if the last rows agree.
        same_inputs: Whether both networks have the same inputs. If not, a difference only begins in layers whose inputs
            agree nevertheless.
    """
    sizes = sizes or {}
    judged: list[DifferenceRow] = []
    first_seen = False
    depth = 0
    for row in rows:
        size = sizes.get(row.layer, 1)
        depth += size
        limit = rounding_limit(eps, depth)
        origin = origin_of(row, limit, rounding_limit(eps, size), first_seen=first_seen)
        judged.append(replace(row, limit=limit, origin=origin))
        first_seen = first_seen or _differs(judged[-1], limit)
    begins = _first_and_later(judged, eps, sizes)
    if not same_inputs:
        given_same = {row.label for row in judged if _has_equal_inputs(row)}
        begins = [first for first in begins if first.row in given_same and not (first.in_own_code and not first.layer)]
    if any(row.added is not None for row in rows):
        begins = _with_adding_layers(judged, begins, eps, sizes)
    stays = any(exceeds(output.relative_l2, rounding_limit(eps, depth)) for output in outputs)
    return tuple(judged), _with_ends(judged, begins, stays=stays)


def _differs(row: DifferenceRow, limit: float | None = None) -> bool:
    if row.measures is None:
        return row.shape != row.shape_b
    return exceeds(row.relative_l2, row.limit if limit is None else limit)


def origin_of(row: DifferenceRow, limit: float, single: float = math.inf, *, first_seen: bool = False) -> Origin:
    """Return where a row's difference comes from.

    Args:
        row: Any row.
        limit: The limit of the difference of its outputs.
        single: The limit of the difference that a layer adds by itself.
        first_seen: Whether an earlier row differs.
    """
    total, differs = row.relative_l2, _differs(row, limit)
    origin: Origin = "unclear"
    if total == 0:
        origin = "equal"
    elif row.added is not None and exceeds(row.added.relative_l2, single):
        origin = "begins"
    elif total is not None and not differs:
        origin = "rounding"
    elif total is not None and row.added is not None:
        origin = "passed on"
    elif differs and row.arriving_relative_l2 is not None:
        arrives = exceeds(row.arriving_relative_l2, limit)
        origin = "begins" if not arrives else "unclear" if first_seen else "passed on"
    return origin


def _first_and_later(rows: Sequence[DifferenceRow], eps: float, sizes: Mapping[str, int]) -> list[FirstDifference]:
    """Return where the first difference begins, and later layers whose inputs agree and whose outputs differ.

    A container is a later layer only if no layer inside it can cause its difference.
    """
    differing = [at for at, row in enumerate(rows) if _differs(row)]
    if not differing:
        return []
    row = rows[differing[0]]
    begins: list[FirstDifference] = []
    single = rounding_limit(eps, sizes.get(row.layer, 1))
    if row.added is None or exceeds(row.added.relative_l2, single) or exceeds(row.arriving_relative_l2, row.limit):
        begins.append(_first_difference(rows, differing[0]))
    later = [rows[at] for at in differing[1:] if rows[at].added is None and _has_equal_inputs(rows[at])]
    inside = {start.layer for start in begins} | {entry.layer for entry in later}
    inside |= {rows[at].layer for at in differing if rows[at].arriving_relative_l2 is None}
    begins += [
        _begins_in(row, rows, row.relative_l2)
        for row in later
        if not any(is_inside(layer, row.layer) for layer in inside)
    ]
    by_layer: dict[str, FirstDifference] = {}
    for first in begins:
        by_layer.setdefault(first.layer, first)
    return [*by_layer.values()]


def _has_equal_inputs(row: DifferenceRow) -> bool:
    prior, total = row.arriving_relative_l2, row.relative_l2
    return prior is not None and prior <= row.limit and not (total is not None and total <= row.limit + _GROWTH * prior)


def _first_difference(rows: Sequence[DifferenceRow], at: int) -> FirstDifference:
    """Return where a difference begins; its first row is at index `at`.

    It begins in the row's layer if the inputs of the layer agree. Otherwise it begins in the code of the nearest module
    around the layer whose inputs agree: a container whose inputs differ only passes the difference on.
    """
    row = rows[at]
    if not exceeds(row.arriving_relative_l2, row.limit):
        return _begins_in(row, rows, row.relative_l2)
    owner, colon, _ = row.layer.partition(":")
    around = owner.removeprefix("(model)") if colon else row.layer.rpartition(".")[0]
    calls = {other.layer: other for other in reversed(rows[at:])}  # a module around the row finishes after it
    while around and not (around in calls and not exceeds(calls[around].arriving_relative_l2, row.limit)):
        around = around.rpartition(".")[0]
    if around and calls[around].arguments:  # an edited input
        return FirstDifference(around, calls[around].label, in_own_code=False, relative_l2=calls[around].relative_l2)
    return FirstDifference(around, row.label, in_own_code=True, relative_l2=row.relative_l2)


def _with_ends(
    rows: Sequence[DifferenceRow], begins: Sequence[FirstDifference], *, stays: bool
) -> tuple[FirstDifference, ...]:
    """Note which differences are gone again before the next one begins, and put these last.

    If a difference `stays` in the outputs of the networks, the last difference is not gone, and no layer without a
    partner undoes one.
    """
    places = {row.label: at for at, row in enumerate(rows)}
    passed_on = max((at for at, row in enumerate(rows) if _differs(row) and not _has_equal_inputs(row)), default=-1)
    starts = sorted(places[difference.row] for difference in begins if _differs(rows[places[difference.row]]))
    differences = []
    for first in begins:
        at = places[first.row]
        end = next((start for start in starts if start > at), None)
        gone_at = "" if stays and end is None else _gone_at(rows[at:end], is_last=end is None)
        if not (gone_at or stays) and at > passed_on and not _differs(rows[-1]):  # a layer without a partner undoes it
            gone_at = next(row.label for row in rows[at:] if not _differs(row))
        differences.append(replace(first, gone_at=gone_at))
    return tuple(sorted(differences, key=lambda difference: bool(difference.gone_at)))


def _gone_at(rows: Sequence[DifferenceRow], *, is_last: bool) -> str:
    """Return the label of the row from which on all rows agree; "" if the difference of the first row stays."""
    if not _differs(rows[0]):
        return rows[0].label
    for at, row in enumerate(rows):
        if not _differs(row) and (
            exceeds(row.arriving_relative_l2, row.limit) or (is_last and row.arriving_relative_l2 is None)
        ):
            return "" if any(map(_differs, rows[at:])) else row.label
    return ""


def _begins_in(row: DifferenceRow, rows: Sequence[DifferenceRow], relative_l2: float | None) -> FirstDifference:
    """Return a difference that begins in a row's layer: in its own code if other rows are inside the layer."""
    in_own_code = any(is_inside(other.layer, row.layer) for other in rows)
    return FirstDifference(row.layer, row.label, in_own_code, relative_l2)


def _with_adding_layers(
    rows: Sequence[DifferenceRow], first: Sequence[FirstDifference], eps: float, sizes: Mapping[str, int]
) -> list[FirstDifference]:
    """Return `first` and the layers that add a difference by themselves, at their first such calls.

    A container is added only if no layer inside it adds a difference.
    """
    first_differences = {difference.layer: difference for difference in first}
    added = [(row, row.added.relative_l2) for row in rows if row.added is not None]
    adding = [(row, amount) for row, amount in added if exceeds(amount, _own_limit(row, rows, eps, sizes))]
    for row, amount in adding:
        if not any(is_inside(other.layer, row.layer) for other, _ in adding):
            first_differences.setdefault(row.layer, _begins_in(row, rows, amount))
    return [*first_differences.values()]


def _own_limit(row: DifferenceRow, rows: Sequence[DifferenceRow], eps: float, sizes: Mapping[str, int]) -> float:
    inside = [other.layer for other in rows if is_inside(other.layer, row.layer)]
    return rounding_limit(eps, sum(sizes.get(layer, 1) for layer in (row.layer, *inside)))
