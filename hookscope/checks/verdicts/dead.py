"""Judge layers and weights whose gradient is exactly zero: what stops it, and whether that is a fault."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hookscope.checks.verdicts.activations import RECTIFIERS
from hookscope.checks.verdicts.flow import Key, Takers, idle_branches, idle_modules, takers_of
from hookscope.checks.verdicts.reading import (
    arrived_outputs,
    counted,
    gates,
    gates_near,
    is_matrix,
    is_within,
    key,
    listed,
    owner,
)
from hookscope.results.gradients import GradientRow, Gradients, ParameterRow, Verdict
from hookscope.results.statistics import TensorStatistics

# They leave out residual branches by chance: torchvision's, timm's.
_STOCHASTIC_DEPTH = frozenset({"StochasticDepth", "DropPath"})

# Beside an L2 below this, the next factor of the chain rule may fall out of float32, whose smallest value is 1e-45.
# Our choice.
_NEAR_UNDERFLOW = 1e-35


@dataclass(slots=True)
class _Stop:
    """Outputs with a zero gradient, and where it stops.

    Attributes:
        rows: All of them, in forward order.
        last: Those whose gradient would come from the takers, or from the loss.
        takers: What is computed from those and has a gradient itself; empty if only the loss is.
    """

    rows: list[GradientRow] = field(default_factory=list)
    last: list[GradientRow] = field(default_factory=list)
    takers: dict[Key, GradientRow] = field(default_factory=dict)


def dead_gradient(inspection: Gradients) -> Iterator[Verdict]:
    """Object to layers and weights on the path whose gradient is exactly zero, and say what stops it.

    Layers whose gradient stops at one place are one verdict. A weight that is zero itself, and gets a gradient, is
    about to open: residual branches and heads are often started so. A branch that stochastic depth has left out in this
    pass is well. So are outputs of a module that gets a gradient at another call or output, those of a module beside
    which a parallel one gets one, unless it is known what is wrong with them, and what leads to such outputs alone, if
    it is the loss that gives them none: detectors have levels without an object, mixtures have experts without a token.
    An output that the loss alone gives none is a warning, for another output gets one: it may be for want of a target.
    """
    activations = {key(row): row.activation for row in inspection.rows}
    zero_weights = gates(inspection)
    outputs = arrived_outputs(inspection)
    takers = takers_of(outputs)
    shared = idle_modules(outputs)
    idle = shared | idle_branches(outputs, takers)
    dead = False
    closed: dict[str, None] = {}
    gated = 0
    for stop in _stops(outputs, takers):
        following: list[str | None] = [row.layer for row in stop.takers.values()] or [None]
        near = [name for row in stop.last for layer in following for name in gates_near(zero_weights, row.layer, layer)]
        closed |= dict.fromkeys(near)
        gated += len(stop.rows) if near else 0
        cause = _known_cause(stop, activations)
        excused = shared if cause else idle
        if not near and not all(key(row) in excused for row in (stop.rows if stop.takers else stop.last)):
            verdict = _verdict(stop, cause, inspection.mode == "train")
            dead |= verdict.level == "fail"
            yield verdict
    if closed:
        one = len(closed) == 1
        message = (
            f"{listed([*closed])} {'is' if one else 'are'} all zero and block{'s' if one else ''} the gradient of"
            f" {counted(gated, 'output')}: exactly 0 (limit: above 0) until the first update."
        )
        yield Verdict("dead-gradient", "warn", next(iter(closed)), message)
    if not dead:  # a weight after a dead layer is dead for that reason
        yield from _dead_weights(inspection, zero_weights)


def _stops(outputs: Sequence[GradientRow], takers: Takers) -> Iterable[_Stop]:
    """Return the places where gradients become zero, in forward order of what is before them."""
    places: dict[Key, Key] = {}
    stops: dict[Key, _Stop] = {}
    for row in reversed(outputs):
        if row.status != "zero":
            continue
        after = [each for each in takers[key(row)] if each is not None]
        alive = [each for each in after if each.status != "zero"]
        beyond = [places[key(each)] for each in after if key(each) in places]
        is_last = bool(alive) or None in takers[key(row)] or not beyond
        places[key(row)] = key(alive[0]) if alive else (row.layer, -1, "") if is_last else beyond[0]
        stop = stops.setdefault(places[key(row)], _Stop())
        stop.rows.insert(0, row)
        stop.last[:0] = [row] if is_last else []
        stop.takers |= {key(each): each for each in alive}
    return reversed(stops.values())


def _known_cause(stop: _Stop, activations: Mapping[Key, TensorStatistics]) -> str:
    """Return what is seen to be wrong at the place where a gradient stops; "" for nothing."""
    for row in stop.takers.values():
        if row.kind in RECTIFIERS and _is_zero(activations.get(key(row))):
            return f"every output of '{row.label}' ({row.kind}) is 0"
        if _l2(row.gradient) < _NEAR_UNDERFLOW:
            return f"it underflows, ‖grad_output‖ of '{row.label}' being {_l2(row.gradient):.1e}"
    return ""


def _verdict(stop: _Stop, cause: str, is_training: bool) -> Verdict:
    last, takers = stop.rows[-1], [*stop.takers.values()]
    level: Literal["fail", "warn"] = "fail"
    others = f" and {counted(len(stop.rows) - 1, 'output')} before it" if stop.rows[1:] else ""
    # A container has the gradient of the child whose output it returned.
    inner = [row for at, row in enumerate(takers) if not any(is_within(each.layer, row.layer) for each in takers[:at])]
    named = ", ".join(f"'{row.label}' ({row.kind})" for row in inner[:3])
    if not takers:
        cause = "the loss does not change with it"
        level = "fail" if last.taken_by is None else "warn"
    elif is_training and all(row.kind in _STOCHASTIC_DEPTH for row in takers):
        cause = f"{named} left the branch out by chance; give more inputs"
        level = "warn"
    elif cause:
        pass
    elif last.taken_by is None:
        cause = f"nothing gets through {named}"
    else:
        cause = f"it is lost in {named} or on the way from there"
    message = f"The gradient of the output of '{last.label}'{others} is exactly 0 everywhere (limit: above 0): {cause}."
    return Verdict("dead-gradient", level, last.label, message)


def _dead_weights(inspection: Gradients, zero_weights: Sequence[ParameterRow]) -> Iterator[Verdict]:
    """Object to weights with a zero gradient though the output of their layer gets one."""
    alive = {row.layer for row in arrived_outputs(inspection) if row.status == "gradient"}
    names = [
        each.name
        for each in inspection.parameters
        if each.status == "zero"
        and is_matrix(each)
        and owner(each) in alive
        and not gates_near(zero_weights, owner(each))
    ]
    if names:
        message = (
            f"{listed(names)} {'gets' if len(names) == 1 else 'get'} a gradient of exactly 0 (limit: above 0), though"
            " the output does not: what the layer takes in is zero everywhere."
        )
        yield Verdict("dead-gradient", "fail", names[0], message)


def _is_zero(statistics: TensorStatistics | None) -> bool:
    return statistics is not None and statistics.zero_fraction == 1


def _l2(statistics: TensorStatistics) -> float:
    return statistics.l2 or 0.0
