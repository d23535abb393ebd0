"""The built-in losses, in float32 or float64, as `choose_loss` describes them; they find the axis of classes.

A network may end in a softmax or a normalisation. A loss that is wrong or has no gradient there raises or warns.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F  # noqa: N812 - the name it has everywhere
from torch import Tensor

from hookscope.errors import UsageError
from hookscope.inspection.losses.targets import Output, TargetKind, Task, class_target, draw, fit, value_target
from hookscope.parameters import arg
from hookscope.results.comparison import Reading
from hookscope.text import shape_text

# Above this share of the top class, cross-entropy towards that class has little gradient left: at a share of 0.97 its
# norm with respect to the logits was 0.044, at 0.03 it was 0.97.
_CONFIDENT_SHARE = 0.9
# Below this many values a mean of 0 or a mean square of 1 may be chance.
_MIN_GROUP = 8

# Operations as autograd calls them: those that move values without changing them, and sums, which have no bound.
_MOVES = re.compile(
    r"\w*View|Reshape\w*|Squeeze|Unsqueeze|Clone|ToCopy|Slice|Select|Split|Unbind|Permute|Transpose|T|Alias"
)
_SUMS = re.compile(r"Addmm|Mm|Bmm|Baddbmm|Add|Sub|Linear|Convolution|\w*BatchNorm")


@dataclass(frozen=True, slots=True)
class LossValue:
    """A loss over one batch, 0-d with its graph, and the warnings of this batch; other fields as in `LossRecord`."""

    value: Tensor
    target: str = ""
    warnings: tuple[str, ...] = ()
    name: str = ""
    outputs: tuple[str, ...] = ()


def real(tensor: Tensor) -> Tensor:
    """Return a floating tensor as dense float32 or float64; of a complex one, both parts along a new last axis.

    The parts of a nested tensor are joined along axis 0, or flat if they differ in other axes.
    """
    if tensor.is_nested:
        parts = [real(part) for part in tensor.unbind()]
        alike = len({part.shape[1:] for part in parts if part.dim()}) == 1
        return torch.cat(parts if alike else [part.reshape(-1) for part in parts])
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


# --- Classes ---------------------------------------------------------------------------------------------------------


def _cross_entropy(output: Output, task: Task) -> LossValue:
    values = real(output.tensor)
    axis = _class_axis(values, output, task)
    rows = _rows(values, axis)  # (N, C, *positions)
    if rows.shape[1] < 2:
        raise UsageError(
            f"{task.loss} needs two classes or more, but {output.label} of shape "
            f"{shape_text(output.tensor.shape)} has {rows.shape[1]}: take {arg('loss')} bce."
        )
    log_p, normalised, warnings = _log_probabilities(rows, output, task)
    target = task.target.tensor
    if target is not None and target.is_floating_point():
        shares = _rows(fit(target.to(values), tuple(values.shape), output, task), axis)
        if not bool((shares >= 0).all() and ((shares.sum(1) - 1).abs() <= 1e-3).all()):
            raise UsageError(
                f"{task.target.name} holds floating-point numbers that are not probabilities (not negative, with a sum "
                "of 1 over the classes): give those, or class indices as whole numbers."
            )
        return LossValue(-(shares * log_p).sum(1).mean(), task.target.name, warnings)
    classes, text = class_target(rows, output, task)
    if normalised and task.target.kind == "default":
        warnings += _confidence_warning(log_p, task)
    return LossValue(F.nll_loss(log_p, classes), text, warnings)


def _logit(output: Output, task: Task) -> LossValue:
    values = real(output.tensor)
    rows = _rows(values, _class_axis(values, output, task))  # (N, C, *positions)
    classes, text = class_target(rows, output, task)
    warnings: tuple[str, ...] = ()
    if is_softmax(rows, output):
        rows, warnings = _log(rows), (_softmax_warning(output, task),)
    picked = rows.gather(1, classes.unsqueeze(1))  # (N, 1, *positions)
    return LossValue(picked.flatten(1).mean(1).sum(), text, warnings)


def _class_axis(values: Tensor, output: Output, task: Task) -> int:
    """Return the axis of `values` that counts classes; 1 for a vector of one value per input, which has none.

    With three axes the last is likelier: logits of language models are (N, T, C).
    """
    if values.dim() == 0:
        raise UsageError(f"{task.loss} needs a value per class, but {output.label} is a single number: take sum.")
    if values.dim() == 1:
        return 1 if values.shape[0] == len(task.indices) else 0
    last = values.dim() - 1
    fitting = {axis for axis in (1, last) if values.shape[axis] == len(task.categories)}
    if len(fitting) == 1:
        return fitting.pop()
    return last if values.dim() == 3 else 1


def _rows(values: Tensor, axis: int) -> Tensor:
    """Return values with their class axis as axis 1: (N, C, *positions)."""
    return values.unsqueeze(axis) if values.dim() == 1 else values.movedim(axis, 1)


def _log_probabilities(rows: Tensor, output: Output, task: Task) -> tuple[Tensor, bool, tuple[str, ...]]:
    """Return log p of each class, whether they are normalised, and any warning about that."""
    if is_softmax(rows, output):
        return _log(rows), True, (_softmax_warning(output, task),)
    if task.loss == "ce":
        return rows.log_softmax(1), True, ()
    if bool((rows.detach().logsumexp(1).abs() <= _tolerance(output)).all()):
        return rows, True, ()
    warning = f"nll reads {output.label} as log probabilities, but they are not normalised. For logits, use ce."
    return rows, False, (warning,)


def is_softmax(rows: Tensor, output: Output) -> bool:
    """Tell whether rows (N, C, ...) of an output are probabilities over the classes already."""
    return _sums_to_one(rows.detach(), {1}, _tolerance(output))


def class_probabilities(rows: Tensor, output: Output, *, multi_label: bool) -> tuple[Tensor, Reading]:
    """Return scores (N, C, ...) as probabilities, and how they became that.

    Scores of one class among several get a softmax, scores of independent labels sigmoids. Probabilities that the
    network itself returns stay as they are, see `are_probabilities`.
    """
    if are_probabilities(rows, output) if multi_label else is_softmax(rows, output):
        return rows, "as returned"
    return (rows.sigmoid(), "sigmoid") if multi_label else (rows.softmax(1), "softmax")


def are_probabilities(rows: Tensor, output: Output) -> bool:
    """Tell whether scores (N, C) of an output are probabilities of the classes already, and not logits.

    A softmax is, and so are other values that all lie in 0-1: sigmoids, of which several may be likely, or a softmax in
    a dtype too coarse to sum to 1. Logits may lie there by chance: where autograd's graph ends in a sum, as that of a
    linear layer, they are none.
    """
    is_sum = _SUMS.fullmatch(_last_step(output.tensor)) is not None
    return is_softmax(rows, output) or (not is_sum and bool(((rows >= 0) & (rows <= 1)).all()))


def _sums_to_one(values: Tensor, axes: set[int], tolerance: float) -> bool:
    """Return whether values are probabilities along one of the axes: two or more, not negative, with a sum of 1."""
    if not values.numel() or not bool((values >= 0).all()):
        return False
    sums = (values.sum(axis) for axis in axes if values.shape[axis] > 1)
    return any(bool(((total - 1).abs() <= tolerance).all()) for total in sums)


def _tolerance(output: Output) -> float:
    """Return how far sums and means may be off in the output's dtype and still count as exact."""
    return max(1e-4, 2 * torch.finfo(output.tensor.dtype).eps)


def differentiable(tensor: Tensor) -> bool:
    """Tell whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def _softmax_warning(output: Output, task: Task) -> str:
    return f"{output.label} already is a softmax (rows sum to 1), so {task.loss} takes its logarithm."


def _log(probabilities: Tensor) -> Tensor:
    # 0 counts as the smallest normal number, so that its logarithm stays finite.
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def _confidence_warning(log_p: Tensor, task: Task) -> tuple[str, ...]:
    shares = log_p.detach().exp().amax(1, keepdim=True).flatten(1).mean(1)  # (N,)
    sure = int((shares > _CONFIDENT_SHARE).sum())
    rows = "inputs" if len(shares) == len(task.indices) else "rows of the output"
    subject = f"For {sure} of {len(shares)} {rows} of a batch, the" if len(shares) > 1 else "The"
    warning = (
        f"{subject} network is more than {_CONFIDENT_SHARE:.0%} sure of the class that {task.loss} takes as its "
        f"target, so gradients are small: give a target, or take {arg('loss')} logit."
    )
    return (warning,) if sure else ()


# --- Values ----------------------------------------------------------------------------------------------------------


def _binary_cross_entropy(output: Output, task: Task) -> LossValue:
    values = real(output.tensor)
    labels, text = _binary_labels(values, output, task)
    if not bool(((labels >= 0) & (labels <= 1)).all()):
        raise UsageError(f"bce compares with numbers from 0 to 1, but its target ({text}) has others.")
    seen = values.detach()
    unit = bool(values.numel() and (seen >= 0).all() and (seen <= 1).all())
    last_step = _last_step(output.tensor)
    if unit and last_step in ("Sigmoid", "Softmax", ""):
        warning = f"{output.label} already is a probability, so bce takes its logarithm."
        return LossValue(F.binary_cross_entropy(values, labels), text, (warning,))
    warnings = (f"bce reads {output.label} as logits, although all values lie between 0 and 1.",) if unit else ()
    return LossValue(F.binary_cross_entropy_with_logits(values, labels), text, warnings)


def _binary_labels(values: Tensor, output: Output, task: Task) -> tuple[Tensor, str]:
    if task.target.kind == "default":
        return torch.full_like(values, 0.5), "0.5 everywhere"
    if task.target.kind != "class":
        return value_target(values, output, task)
    axis = _class_axis(values, output, task)
    rows = _rows(values, axis)
    if rows.shape[1] == 1:  # a single value stands for two classes, 0 and 1
        classes, text = class_target(torch.cat([rows, rows], 1), output, task)
        return classes.reshape(values.shape).to(values.dtype), text
    classes, text = class_target(rows, output, task)
    labels = torch.zeros_like(rows).scatter(1, classes.unsqueeze(1), 1.0)
    labels = labels if values.dim() == 1 else labels.movedim(1, axis)
    return labels.reshape(values.shape), f"{text}, against all others"


def _last_step(tensor: Tensor) -> str:
    """Return what autograd calls the operation that computed the values: "Sigmoid"; "" where there is no graph."""
    step, name = tensor.grad_fn, ""
    while step is not None:
        name = step.name().partition("Backward")[0]
        if not _MOVES.fullmatch(name):
            break
        step = step.next_functions[0][0]
    return name


def _elementwise(formula: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Output, Task], LossValue]:

    def compute(output: Output, task: Task) -> LossValue:
        values = real(output.tensor)
        target, text = value_target(values, output, task)
        warnings: tuple[str, ...] = ()
        if task.target.kind == "zeros":
            fixed = _fixed_size(values.detach(), task.loss, _tolerance(output))
            warnings = (_no_gradient(output, task, fixed),) if fixed else ()
        return LossValue(formula(values, target), text, warnings)

    return compute


# --- All outputs -----------------------------------------------------------------------------------------------------


def _sum(outputs: Sequence[Output], task: Task) -> LossValue:
    fixed = [(output, _fixed_sum(real(output.tensor).detach(), _tolerance(output))) for output in outputs]
    warnings = tuple(_no_gradient(output, task, reason) for output, reason in fixed if reason)
    return LossValue(torch.stack([real(output.tensor).sum() for output in outputs]).sum(), warnings=warnings)


def _projection(outputs: Sequence[Output], task: Task) -> LossValue:
    sources = task.generators()
    parts = []
    for values, drawn in chain.from_iterable(_by_generator(output.tensor, sources) for output in outputs):
        weights = draw(tuple(values.shape), drawn).to(values.device, values.dtype)
        parts.append((values * weights).sum())
    return LossValue(torch.stack(parts).sum(), f"standard normal weights (seed {task.seed})")


def _by_generator(tensor: Tensor, sources: list[torch.Generator]) -> Iterator[tuple[Tensor, Sequence[torch.Generator]]]:
    """Yield an output with its generators; for a nested output, each part with the generator of its input."""
    if not tensor.is_nested:
        yield real(tensor), sources
        return
    parts = tensor.unbind()
    for index, part in enumerate(parts):
        yield real(part), [sources[index if len(parts) == len(sources) else 0]]


# --- Losses without gradient -----------------------------------------------------------------------------------------


def _no_gradient(output: Output, task: Task, reason: str) -> str:
    against = " against zeros" if task.target.kind == "zeros" else ""
    return (
        f"{task.loss}{against} has almost no gradient by construction: {output.label} {reason}, whatever the "
        f"network does before. Take {arg('loss')} projection."
    )


def _fixed_sum(values: Tensor, tolerance: float) -> str:
    """Return why the sum of the values cannot change, or ""."""
    if _sums_to_one(values, _class_axes(values), tolerance):
        return "is a softmax whose rows sum to 1"
    for axes, count in _groups(values):
        deviation, mean = torch.std_mean(values, axes, correction=0)
        # The mean of independent numbers is off 0 by about 1 / sqrt(count) of their deviation. The limit is a
        # thousandth of that, or what rounding in the output's dtype amounts to.
        limit = max(1e-3, tolerance / 2) / math.sqrt(count)
        if bool((deviation > 0).all() and (mean.abs() <= limit * deviation).all()):
            return "is normalised to mean 0"
    return ""


def _fixed_size(values: Tensor, loss: str, tolerance: float) -> str:
    """Return why the mean square (mse) or mean modulus (l1) of the values cannot change, or ""."""
    if loss == "l1" and _sums_to_one(values, _class_axes(values), tolerance):
        return "is a softmax whose rows sum to 1"
    if loss != "mse" or not values.numel():
        return ""
    squares = values.square()
    for axis in _class_axes(values):
        if values.shape[axis] > 1 and bool(((squares.sum(axis) - 1).abs() <= 2 * tolerance).all()):
            return "is normalised to length 1"
    for axes, _ in _groups(values):
        # A thousandth, because a normalisation adds its epsilon to the variance.
        if bool(((squares.mean(axes) - 1).abs() <= max(1e-3, tolerance)).all()):
            return "is normalised to mean square 1"
    return ""


def _class_axes(values: Tensor) -> set[int]:
    return {min(1, values.dim() - 1), values.dim() - 1} if values.dim() else set()


def _groups(values: Tensor) -> list[tuple[tuple[int, ...], int]]:
    """List the axes that normalisations reduce, of an input and of a channel, with their number of values.

    Values that are normalised within smaller groups are also normalised within these.
    """
    axes = tuple(range(values.dim()))
    sets = {axes[1:], (*axes[:1], *axes[2:])} - {()}
    counts = {group: math.prod(values.shape[axis] for axis in group) for group in sets}
    return [(name, count) for name, count in counts.items() if count >= _MIN_GROUP and values.numel()]


OF_ONE: dict[str, Callable[[Output, Task], LossValue]] = {
    "ce": _cross_entropy,
    "bce": _binary_cross_entropy,
    "mse": _elementwise(F.mse_loss),
    "l1": _elementwise(F.l1_loss),
    "huber": _elementwise(F.huber_loss),
    "nll": _cross_entropy,
    "logit": _logit,
}
"""Losses of one output."""

OVER_ALL: dict[str, Callable[[Sequence[Output], Task], LossValue]] = {"sum": _sum, "projection": _projection}
"""Losses over all floating outputs."""

LOSSES: dict[str, tuple[TargetKind, ...]] = {
    "ce": ("class", "tensor"),
    "bce": ("class", "tensor", "zeros", "self"),
    "mse": ("zeros", "noise", "self", "tensor"),
    "l1": ("zeros", "noise", "self", "tensor"),
    "huber": ("zeros", "noise", "self", "tensor"),
    "nll": ("class", "tensor"),
    "sum": (),
    "logit": ("class", "tensor"),
    "projection": (),
}
"""The targets that each loss takes."""
