"""The operations of a loss, read from the graph of its gradient: what may make NaN there while the loss is finite."""

import re
from dataclasses import dataclass

from torch.autograd.graph import Node

# A derivative is infinite or undefined at some input where the value is finite: sqrt at 0, acos at 1. A value of log at
# 0 is infinite, but `where` may hide it, while its derivative stays.
_STEEP = frozenset(
    {
        *("Sqrt", "Rsqrt", "Reciprocal", "Pow", "Div", "Log", "Log2", "Log10", "Log1p", "Xlogy", "Logit"),
        *("LinalgVectorNorm", "Norm", "Std", "StdMean", "Cdist", "EuclideanDist", "Acos", "Asin", "Acosh", "Atanh"),
        *("Atan2", "LinalgEigh", "LinalgSvd", "LinalgInvEx", "LinalgDet"),
    }
)

# A loss has few operations of its own; those of the network begin at its last weights.
_MOST_NODES = 200


@dataclass(frozen=True, slots=True)
class LossOperations:
    """Names of operations, from the loss backwards, up to the last weights: "sqrt".

    The derivative of a steep one may not be finite where its value is.
    """

    all: tuple[str, ...]
    steep: tuple[str, ...]


def operations_of(loss: Node) -> LossOperations:
    """Return the operations between a loss and the last weights that it depends on; it may have been differentiated."""
    every: dict[str, bool] = {}
    todo, seen = [loss], {loss}
    for node in todo:
        kind = re.sub(r"Backward\d*$", "", node.name())
        below = [child for child, _ in node.next_functions if child is not None]
        touches = any(map(_is_weight, below))
        is_steep = kind in _STEEP and _may_be_steep(kind, node)
        if is_steep or not touches:
            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
            every[name] = every.get(name, False) or is_steep
        if not touches and len(todo) < _MOST_NODES:
            todo += [child for child in below if child not in seen]
            seen.update(below)
    return LossOperations((*every,), tuple(name for name, is_steep in every.items() if is_steep))


def _is_weight(node: Node) -> bool:
    """Tell whether a node is a parameter, or the transposed one of a linear layer."""
    if node.name().startswith("TBackward"):
        return any(child is not None and child.name().endswith("AccumulateGrad") for child, _ in node.next_functions)
    return node.name().endswith("AccumulateGrad")


def _may_be_steep(kind: str, node: Node) -> bool:
    if kind == "Div":  # by a number, as in a mean, it is harmless
        return len(node.next_functions) > 1 and node.next_functions[1][0] is not None
    exponent = getattr(node, "_saved_exponent", None) if kind == "Pow" and node.name() == "PowBackward0" else None
    return not (isinstance(exponent, int | float) and exponent >= 1)
