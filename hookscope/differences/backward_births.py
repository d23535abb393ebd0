"""Tell where differences of gradients come from: the backward pass of a layer, the activations, or the loss."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hookscope.differences.births import exceeds, rounding_limit
from hookscope.results.differences import Birth, DifferenceRow
from hookscope.results.gradients import GradientRow, ParameterRow

# Rounding turns the sign of a value near 0, and with it what ReLU or max pooling passes back, with about the chance of
# its relative difference d. A layer of 1 / (1000 d) values has one turned in one case of 1,000, which is a relative L2
# of sqrt(1000 d). Our choice.
_TURNED = 1000

# A layer that only passes a difference on makes it less than so many times larger. Our choice.
_GROWTH = 10


@dataclass(frozen=True, slots=True)
class Compared:
    """A pair of gradients, of an output or an input of a layer's call.

    Attributes:
        site: A's.
        relative_l2: Infinite where one side alone has a gradient; None where they cannot be compared, or autograd does
            not track the tensor on one side.
    """

    site: GradientRow
    row: DifferenceRow
    relative_l2: float | None


@dataclass(frozen=True, slots=True)
class ComparedParameter:
    """A pair of gradients of a parameter.

    Attributes:
        owner: The layer of A that it belongs to.
        relative_l2: As in `Compared`.
        squares: Sum of squares of A's gradient, and of A-B.
    """

    owner: str
    row: DifferenceRow
    relative_l2: float | None
    squares: tuple[float, float]


@dataclass(slots=True)
class _Call:
    """One call of one layer of A.

    Attributes:
        first: Position of its first input among the sites, in the order of the forward pass; `last` of its last output.
    """

    layer: str
    call: int
    first: int
    last: int
    outputs: list[Compared] = field(default_factory=list)
    inside: list[Compared] = field(default_factory=list)  # and its inputs
    parameters: list[ComparedParameter] = field(default_factory=list)
    layers: set[str] = field(default_factory=set)

    @property
    def arriving(self) -> float:
        """The largest difference among the gradients of its outputs."""
        return _largest(each.relative_l2 for each in self.outputs)

    @property
    def leaving(self) -> float:
        """The largest difference among those of its inputs, its parameters, and everything inside.

        The parameters of a layer count as one: the gradient of a bias may be 0 but for rounding, as before a
        normalisation or in the keys of attention.
        """
        inside = _largest(each.relative_l2 for each in self.inside)
        by_layer: dict[str, list[ComparedParameter]] = {}
        for each in self.parameters:
            by_layer.setdefault(each.owner, []).append(each)
        return _largest((inside, *map(_jointly, by_layer.values())))


def _jointly(parameters: Sequence[ComparedParameter]) -> float | None:
    """Return the relative L2 norm over all parameters of a layer."""
    if any(each.relative_l2 is not None and not math.isfinite(each.relative_l2) for each in parameters):
        return _largest(each.relative_l2 for each in parameters)
    of_a, difference = (math.fsum(each.squares[at] for each in parameters) for at in range(2))
    return math.sqrt(difference / of_a) if of_a else math.inf if difference else 0.0


def backward_births(
    sites: Sequence[GradientRow],
    compared: Sequence[Compared],
    parameters: Sequence[ComparedParameter],
    activations: Sequence[DifferenceRow],
    eps: float,
    edited: Collection[str] = (),
) -> tuple[tuple[Birth, ...], dict[str, float]]:
    """Return where differences of gradients are born, and what arrives at each layer.

    A difference is born in a call whose activations and whose outputs' gradients agree, while the gradients of its
    inputs, of its parameters or of anything inside do not; a container is named only if no call inside is.

    Args:
        sites: A's outputs and inputs, in the order of the forward pass.
        compared: Those that have a partner.
        parameters: Pairs of gradients of parameters.
        activations: The rows of outputs, containers included, with their limits.
        eps: As for `rounding_limit`.
        edited: Layers of A whose partner's gradient is edited.

    Returns:
        Births in the order of the backward pass, and by layer the largest difference among its outputs' gradients.
    """
    calls = _calls(sites, compared, parameters)
    turned = _forward(activations)
    worst = max((each for each in turned.values()), default=0.0)
    born: list[tuple[_Call, float]] = []
    for each in calls:
        forward = max((turned[layer] for layer in each.layers if layer in turned), default=worst)
        limit = _limit(eps, forward, each, calls)
        arriving, leaving = each.arriving, each.leaving
        added = exceeds(_own(leaving, arriving), limit) and not leaving <= _GROWTH * arriving
        if forward < math.inf and not exceeds(arriving, limit) and added:
            born.append((each, limit))
    deepest = [each for each in born if not any(_is_within(other[0], each[0]) for other in born)]
    births: dict[str, Birth] = {}
    # What no fault has reached is equal, bit for bit if the activations are: behind a fault, a difference that larger
    # gradients hide may show again.
    untouched = rounding_limit(eps, 1) if worst else 0.0
    for call, limit in sorted(deepest, key=lambda each: -each[0].last):
        if not births or not exceeds(call.arriving, untouched):
            found = _birth(call, limit, edited)
            births.setdefault(found.layer, found)
    whole = next((each for each in calls if not each.layer), None)
    if (
        whole is not None
        and not births
        and worst < math.inf
        and exceeds(whole.arriving, _limit(eps, worst, whole, calls))
    ):
        first = max(whole.outputs, key=lambda each: each.relative_l2 or 0.0)
        births[""] = Birth("", first.row.label, in_own_code=False, relative_l2=whole.arriving)
    arrived: dict[str, float] = {}
    for each in calls:
        if any(one.relative_l2 is not None for one in each.outputs):
            arrived[each.layer] = _largest((arrived.get(each.layer), each.arriving))
    return tuple(births.values()), arrived


def with_arriving(row: DifferenceRow, arriving: float | None, births: Collection[str], limit: float) -> DifferenceRow:
    """Return the row of a gradient with its origin; `arriving` is the difference at the outputs of its layer."""
    total = None if row.measures is None else row.measures.relative_l2
    row = replace(row, input_relative_l2=arriving, limit=limit)
    if row.label in births:
        return replace(row, origin="born")
    if total is None:
        return row
    if not exceeds(total, limit):
        return replace(row, origin="rounding" if total else "equal")
    return replace(row, origin="passed on") if exceeds(arriving, limit) else row


def _calls(
    sites: Sequence[GradientRow], compared: Sequence[Compared], parameters: Sequence[ComparedParameter]
) -> list[_Call]:
    calls: dict[tuple[str, int], _Call] = {}
    for position, site in enumerate(sites):
        known = calls.setdefault((site.layer, site.call), _Call(site.layer, site.call, position, position))
        known.last = position
    places = {id(site): position for position, site in enumerate(sites)}
    of_layer: dict[str, list[_Call]] = {}
    for call in calls.values():
        of_layer.setdefault(call.layer, []).append(call)
    for each in compared:
        calls[each.site.layer, each.site.call].outputs += [each] if each.site.role == "output" else []
    for call in calls.values():
        own = {*map(id, call.outputs)}
        call.layers = {sites[at].layer for at in range(call.first, call.last + 1)}
        call.inside = [
            each for each in compared if call.first <= places[id(each.site)] <= call.last and id(each) not in own
        ]
        call.parameters = [
            each
            for each in parameters
            if (users := of_layer.get(each.owner))
            and all(call.first <= user.first and user.last <= call.last for user in users)
        ]
    for shared in (each for each in of_layer.values() if len(each) > 1):
        # A parameter's gradient is the sum over calls: it tells of one only where those of all others agree.
        owned = [each for each in parameters if each.owner == shared[0].layer]
        if owned and not any(call.arriving for call in shared):
            shared[-1].parameters += owned
    return [*calls.values()]


def _forward(activations: Sequence[DifferenceRow]) -> dict[str, float]:
    """Return by layer how far its inputs and outputs differ; infinite if that is more than rounding."""
    found: dict[str, float] = {}
    for row in activations:
        values = [row.input_relative_l2, None if row.measures is None else row.measures.relative_l2]
        value = _largest(values)
        value = math.inf if exceeds(value, row.limit) else value
        found[row.layer] = max(found.get(row.layer, 0.0), value)
    return found


def _limit(eps: float, forward: float, call: _Call, calls: Sequence[_Call]) -> float:
    """Return up to what relative L2 norm rounding explains a difference of gradients at a call."""
    plain = rounding_limit(eps, len(calls) + sum(each.last > call.first for each in calls))
    return max(plain, math.sqrt(_TURNED * forward)) if forward < math.inf else plain


def _own(leaving: float, arriving: float) -> float:
    """Return what a call adds to the difference that arrives at it."""
    if math.isnan(leaving) or math.isinf(leaving):
        return leaving
    return math.sqrt(max(leaving**2 - arriving**2, 0.0))


def _largest(values: Iterable[float | None]) -> float:
    known = [each for each in values if each is not None]
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)


def _is_within(call: _Call, around: _Call) -> bool:
    """Tell whether a call happens inside another."""
    return call is not around and around.first <= call.first and call.last <= around.last


def _birth(call: _Call, limit: float, edited: Collection[str]) -> Birth:
    """Return where a call's own difference shows first in the backward pass."""
    shown = [each for each in call.inside if exceeds(each.relative_l2, limit)]
    shown.sort(key=lambda each: (_arrival(each), each.row.index))
    parameters = [each for each in call.parameters if exceeds(each.relative_l2, limit)]
    if not shown:
        first = max(parameters or call.parameters, key=lambda each: each.squares[1])
        return Birth(call.layer, first.row.label, first.owner != call.layer, first.relative_l2 or 0.0)
    site = shown[0].site
    is_of_output = site.role == "output"
    if is_of_output and site.layer in edited:
        return Birth(site.layer, shown[0].row.label, in_own_code=False, relative_l2=shown[0].relative_l2 or 0.0)
    in_own_code = is_of_output or len(call.layers) > 1
    return Birth(call.layer, shown[0].row.label, in_own_code, shown[0].relative_l2 or 0.0)


def _arrival(each: Compared) -> float:
    return math.inf if each.site.backward_index is None else each.site.backward_index


def missing(a: GradientRow | ParameterRow, b: GradientRow | ParameterRow) -> float | None:
    """Return the relative L2 norm that stands for a gradient which one side alone has; None if that tells nothing."""
    has, has_not = (a, b) if a.status in ("gradient", "zero") else (b, a)
    if has.status == "zero" and has_not.status == "not reached":
        return 0.0
    return math.inf if has_not.status == "not reached" else None


def owners(names: Mapping[str, str], layers: Collection[str]) -> dict[str, str]:
    """Return the layers that parameters belong to, the nearest around them that ran; `names` has their owners."""
    found = {}
    for name, owner in names.items():
        around = owner
        while around and around not in layers:
            around = around.rpartition(".")[0]
        found[name] = around
    return found
