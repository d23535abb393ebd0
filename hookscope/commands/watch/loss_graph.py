"""Read from the graph of a loss which layer got NaN, what makes NaN in gradients, and why the loss is below 0."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hookscope.commands.watch.torch_calls import is_loss_scale, nodes_of
from hookscope.text import some_of

# Their derivative is infinite or undefined at an input where the value is finite: sqrt at 0, acos at 1. The log of 0 is
# infinite, but `where` may hide this value and keep the derivative.
_STEEP = frozenset(
    {
        *("Sqrt", "Rsqrt", "Reciprocal", "Pow", "Div", "Log", "Log2", "Log10", "Log1p", "Xlogy", "Logit"),
        *("LinalgVectorNorm", "Norm", "Std", "StdMean", "Cdist", "EuclideanDist", "Acos", "Asin", "Acosh", "Atanh"),
        *("Atan2", "LinalgEigh", "LinalgSvd", "LinalgInvEx", "LinalgDet"),
    }
)

# A loss has few operations of its own; the network's begin at its last weights.
_MOST_OPERATIONS = 200


@dataclass(frozen=True, slots=True)
class LossOperations:
    """Names of operations, from the loss backwards, up to the last weights: "sqrt".

    A steep operation may have an infinite derivative where its value is finite.
    """

    all: tuple[str, ...]
    steep: tuple[str, ...]


def operations_of(loss: Node) -> LossOperations:
    """Return the operations between a loss and the last weights that it depends on, also after `backward`."""
    every: dict[str, bool] = {}
    todo, seen = [loss], {loss}
    for node in todo:
        kind = _name(node)
        below = [child for child, _ in node.next_functions if child is not None]
        touches = any(_weight(child) is not None for child in below)
        is_steep = kind in _STEEP and _may_be_steep(kind, node)
        if is_steep or not touches:
            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
            every[name] = every.get(name, False) or is_steep
        if not touches and len(todo) < _MOST_OPERATIONS:
            todo += [child for child in below if child not in seen]
            seen.update(below)
    return LossOperations((*every,), tuple(name for name, is_steep in every.items() if is_steep))


def _weight(node: Node | None) -> Tensor | None:
    """Return the parameter of a leaf, also where a linear layer transposes it or autocast converts it."""
    while node is not None and node.name().startswith(("TBackward", "ToCopyBackward")):
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


# The names under which operations with a weight save their input.
_INPUTS = ("mat1", "input", "self")


def broken_input(loss: Node | None, name_of: Callable[[Tensor], str]) -> str:
    """Return which layer got an input with NaN or Inf that no weight has computed, as a clause; "" if none is found."""
    for node in nodes_of(loss):
        weight = next((weight for below, _ in node.next_functions if (weight := _weight(below)) is not None), None)
        name = "" if weight is None else name_of(weight)
        where = next((where for saved in _INPUTS if name and (where := _not_finite(_saved(node, saved)))), "")
        if where:
            return f"the input of '{name.rpartition('.')[0] or name}' held {where}"
    return ""


def _saved(node: Node, name: str) -> Tensor | None:
    """Return a tensor that a node has saved; None if it has none, or if a checkpoint would have to compute it."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:
        return None
    try:
        tensor: Tensor | None = getattr(node, f"_saved_{name}")
    except RuntimeError:  # freed, or overwritten
        return None
    base = None if tensor is None else tensor._base  # a linear layer flattens its input
    return tensor if tensor is None or base is None or base.numel() != tensor.numel() else base


def _not_finite(tensor: Tensor | None) -> str:
    """Return where a tensor without gradient holds NaN or Inf, "NaN at index 3 of 64"; "" if it does not."""
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.is_floating_point()
    if tensor is None or not is_plain or tensor.requires_grad or not tensor.dim() or tensor.itemsize < 2:
        return ""
    indices = [str(index) for index, row in enumerate(tensor.isfinite()) if not row.all()]
    if not indices:
        return ""
    word = "indices" if indices[1:] else "index"
    return f"{'NaN' if tensor.isnan().any() else 'Inf'} at {word} {some_of(indices, 3)} of {len(tensor)}"


def _may_be_steep(kind: str, node: Node) -> bool:
    if kind == "Div":  # by a number, as in a mean, it is harmless
        return len(node.next_functions) > 1 and node.next_functions[1][0] is not None
    exponent = getattr(node, "_saved_exponent", None) if kind == "Pow" and node.name() == "PowBackward0" else None
    return not (isinstance(exponent, int | float) and exponent >= 1)


_OUT_OF_RANGE = "its targets lie outside 0 to 1, or weights are negative"
_NO_LOGARITHMS = "its input holds no log-probabilities: use cross_entropy, or log_softmax before it"
_WEIGHTS = "weights are negative"

# Loss functions that are never below 0, by the name of their node, with the fault if one is.
_NEVER_BELOW = {
    "NllLoss": ("nll_loss", _NO_LOGARITHMS),
    "NllLoss2D": ("nll_loss", _NO_LOGARITHMS),
    "CtcLoss": ("ctc_loss", _NO_LOGARITHMS),
    "BinaryCrossEntropy": ("binary_cross_entropy", _OUT_OF_RANGE),
    "BinaryCrossEntropyWithLogits": ("binary_cross_entropy_with_logits", _OUT_OF_RANGE),
    "MseLoss": ("mse_loss", _WEIGHTS),
    "SmoothL1Loss": ("smooth_l1_loss", _WEIGHTS),
    "HuberLoss": ("huber_loss", _WEIGHTS),
    "SoftMarginLoss": ("soft_margin_loss", _WEIGHTS),
    "MultiMarginLoss": ("multi_margin_loss", _WEIGHTS),
}

_NEVER_ABOVE = {"LogSoftmax": "log_softmax", "LogSigmoid": "logsigmoid"}

# Nodes that keep the sign of their only input.
_KEEP_SIGN = frozenset(
    {
        *("Mean", "Sum", "View", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Select", "Slice", "Index"),
        *("Gather", "Expand", "Alias", "ReshapeAlias"),
    }
)

# Between a loss function and `backward` there are few nodes.
_MOST_NODES = 16


def why_below_zero(loss: Tensor) -> str:
    """Return why a loss below 0 is wrong, as the end of a sentence; "" if it may be below 0, or if it is not known.

    Losses that may be below 0 by their kind: log-likelihoods of densities, similarities, policy gradients.
    """
    try:
        return _reason(loss.grad_fn)
    except (RuntimeError, AttributeError):  # what nodes have saved is freed, or named otherwise in this torch
        return ""


def _reason(node: Node | None) -> str:
    node, sign = _loss_function(node)
    if node is None:
        return ""
    name = _name(node)
    if name in _NEVER_ABOVE:
        return "" if sign < 0 else f"it is {_NEVER_ABOVE[name]} without a minus, so training makes it smaller"
    function, wrong = _NEVER_BELOW[name]
    below = node.next_functions[0][0]
    if function == "nll_loss" and below is not None and _name(below) == "LogSoftmax":
        function, wrong = "cross_entropy", _WEIGHTS
    if sign < 0:
        return f"it is {function} with its sign changed, so training makes {function} larger"
    return f"it is {function}, which is below 0 only if {wrong}"


def _loss_function(node: Node | None) -> tuple[Node | None, float]:
    """Return the node of the known function that a loss comes from, and the sign of the factor between."""
    sign = 1.0
    for _ in range(_MOST_NODES):
        if node is None or _name(node) in _NEVER_BELOW or _name(node) in _NEVER_ABOVE:
            return node, sign
        inputs = [below for below, _ in node.next_functions if below is not None]
        sign *= _sign_of(node) if len(inputs) == 1 else 0.0
        if not sign:
            break
        node = inputs[0]
    return None, 0.0


def _name(node: Node) -> str:
    return node.name().rstrip("0123456789").removesuffix("Backward")


def _sign_of(node: Node) -> float:
    """Return 1 if a node keeps the sign of its input, -1 if it changes it, 0 if that is not known."""
    name = _name(node)
    if name in _KEEP_SIGN:
        return 1.0
    if name == "Neg":
        return -1.0
    return _sign_of_factor(node) if name in ("Mul", "Div") else 0.0


def _sign_of_factor(node: Node) -> float:
    """Return 1 or -1 for a multiplication by a number; 0 for anything else, such as weights or rewards."""
    if is_loss_scale(node):
        return 1.0
    saved = [getattr(node, f"_saved_{name}", None) for name in ("other", "self")]
    factor = next((operand for operand in saved if operand is not None), None)
    if isinstance(factor, Tensor):
        factor = factor.item() if factor.is_cpu and factor.dim() == 0 else 0.0
    return 0.0 if not isinstance(factor, int | float) or not factor else 1.0 if factor > 0 else -1.0
