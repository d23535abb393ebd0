"""Compare what a network computes with hooks to what it computes without them."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import shape_of
from hookscope.hooks.pytree import tensors_in
from hookscope.inspection.state.held_values import same_bits
from hookscope.inspection.state.own_code import statements_of
from hookscope.results.activations import Verification
from hookscope.statistics.storage import stored_values
from hookscope.text import exception_line, figure


class Outcome(NamedTuple):
    """The result of a pass.

    Attributes:
        tensors: The output's tensors by path, without their graph.
        loss: None without one.
        gradients: The gradients of parameters by name; empty if they are not compared.
        is_exact: Whether gradients are summed in the same order each time, and so to the same bits.
    """

    tensors: dict[str, Tensor]
    loss: float | None = None
    gradients: Mapping[str, Tensor | None] = {}
    is_exact: bool = True


def outcome_of(output: object, loss: float | None = None) -> Outcome:
    """Return the result of a forward pass, ready to be compared."""
    with torch._C.DisableTorchFunctionSubclass():
        return Outcome({path: tensor.detach() for path, tensor in tensors_in(output)}, loss)


def verify_outcome(
    hooked: Outcome, layers: Sequence[str], with_hooks: Callable[[Sequence[str]], Outcome]
) -> Verification:
    """Tell whether a network without hooks returns the same as with hooks on all `layers`, in execution order.

    `with_hooks` runs it once more from the same state on the same input, with hooks on some layers alone. Where the
    outcomes differ the first layer is named whose hooks make a difference, found by halving.
    """
    try:
        reference = with_hooks(())
        if not difference(hooked, reference):
            return Verification("same")
        again = with_hooks(())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the model's code may raise anything
        return Verification("not repeatable", f"a second pass raises {exception_line(error)}")
    if varies := difference(reference, again):
        return Verification("not repeatable", varies)
    low, high = 0, len(layers)  # hooks on the first `low` change nothing, those on the first `high` do
    while high - low > 1:
        middle = (low + high) // 2
        if difference(with_hooks(layers[:middle]), reference):
            high = middle
        else:
            low = middle
    return Verification("differs", difference(hooked, reference), layers[high - 1] if layers else "")


def verification_warnings(verification: Verification | None, model: str) -> tuple[str, ...]:
    """Return a warning if the numbers may not be those without hooks."""
    if verification is None or verification.status != "differs":
        return ()
    first = f" The first layer whose hooks change it: {verification.layer}." if verification.layer else ""
    sentence = f"{model} computes a different result with hooks than without: {verification.difference}.{first}"
    return (f"{sentence} All numbers shown are with hooks.",)


def difference(first: Outcome, second: Outcome) -> str:
    """Return how two outcomes differ, in a few words; "" where they are the same, bit for bit.

    Gradients that are not exact may differ by rounding.
    """
    if first.tensors.keys() != second.tensors.keys():
        return "the outputs have different parts"
    for path, tensor in first.tensors.items():
        other, where = second.tensors[path], path and f" at {path}"
        if shape_of(tensor) != shape_of(other) or tensor.dtype != other.dtype:
            return f"the outputs have different shapes or dtypes{where}"
        lost = [bool(missing_memory(side)) for side in (tensor, other)]
        if lost[0] != lost[1]:
            return f"the memory of one output was freed{where}"
        if not any(lost) and not _same_bits(tensor, other):
            return f"the outputs differ by up to {_largest_difference(tensor, other)}{where}"
    if first.loss != second.loss and {repr(first.loss), repr(second.loss)} != {"nan"}:
        return f"the losses are {first.loss!r} and {second.loss!r}"
    return _difference_of_gradients(first, second)


def _difference_of_gradients(first: Outcome, second: Outcome) -> str:
    for name, gradient in first.gradients.items():
        other = second.gradients.get(name)
        if (gradient is None) != (other is None):
            return f"only one of the two passes gives {name} a gradient"
        if gradient is None or other is None or missing_memory(gradient) or missing_memory(other):
            continue
        if _stored(gradient).shape != _stored(other).shape:
            return f"the gradients of {name} have different shapes"
        is_exact = first.is_exact and second.is_exact
        if not _same_bits(gradient, other) and (is_exact or not _same_but_for_order(gradient, other, second.gradients)):
            return f"the gradients of {name} differ by up to {_largest_difference(gradient, other)}"
    return ""


def _same_but_for_order(first: Tensor, second: Tensor, others: Mapping[str, Tensor | None]) -> bool:
    """Tell whether two gradients of a parameter differ by no more than another order of summation explains.

    The limit is ours: half of the digits of their dtype and, because terms may cancel, 64 times the rounding of the
    greatest gradient.
    """
    epsilon = torch.finfo(first.dtype).eps
    greatest = max(_norm(tensor) for tensor in others.values() if tensor is not None and not missing_memory(tensor))
    allowed = math.sqrt(epsilon) * _norm(second) + 64 * epsilon * greatest
    return _norm(_stored(first).detach() - _stored(second).detach()) <= allowed


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_in_double(tensor)))


def _in_double(tensor: Tensor) -> Tensor:
    """Return the stored values in double precision, on the CPU: other devices may lack it."""
    values = _stored(tensor.detach()).cpu()
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def asks_for_identity(modules: Collection[nn.Module]) -> bool:
    """Tell whether modules' own code asks whether two values are one object: then no alias may stand for one.

    Comparisons with a constant or a global name, such as None, do not count. Torch's own classes do not ask, except for
    attention, of the tensors it is given at once.
    """
    return any(statement.asks for statement in statements_of(modules))


def _same_bits(first: Tensor, second: Tensor) -> bool:
    a, b = _stored(first), _stored(second)
    if same_bits(a, b):
        return True
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())  # NaN where NaN is


def _largest_difference(first: Tensor, second: Tensor) -> str:
    a, b = _in_double(first), _in_double(second)
    if a.shape != b.shape:
        return figure(math.inf)
    apart = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)  # Inf minus the same Inf is NaN
    return figure(float(apart.nan_to_num(math.inf).max()))


def _stored(tensor: Tensor) -> Tensor:
    return stored_values(tensor, ())[0]
