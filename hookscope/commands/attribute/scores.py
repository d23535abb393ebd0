"""Turn what a network returned into the numbers that are explained, one per input and target."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookscope.commands.attribute.targets import Wanted
from hookscope.errors import ModelError, UsageError, nearest
from hookscope.hooks.pytree import tensors_in
from hookscope.inputs.batches import Batch
from hookscope.inspection.losses.choosing import main_output, output_at
from hookscope.inspection.losses.formulas import are_probabilities, class_probabilities, real
from hookscope.inspection.losses.targets import Output
from hookscope.parameters import arg
from hookscope.results.attributions import Target
from hookscope.results.comparison import Reading
from hookscope.text import counted, exception_line, safe_text, shape_text, some_of


def _own_function_advice() -> str:
    return (
        f"give {arg('target')} FILE.py:FUNCTION, which takes what the network returns and returns one number per input"
    )


# Classes or outputs that a message names.
_NAMED = 5


class NoBoxError(UsageError):
    """The network found no box of any target in a batch."""


@dataclass(frozen=True, slots=True)
class BatchTarget:
    """One target of each input of a batch.

    Attributes:
        score: Takes what the network returned for the batch, and returns the numbers, (N,), with their graph.
        targets: Of each input; None for one that has no such target, whose number means nothing.
        classes: The classes whose scores make the numbers, by input: one, or two of a contrast; () if unknown.
        class_count: The number of classes that the network scores; None if unknown.
        reading: How the scores become probabilities.
        is_box: Whether the numbers are scores of a detector's boxes.
        is_dense: Whether each pixel has scores.
        remark: Which of several outputs holds the scores, in a sentence; "" where there is one.
    """

    score: Callable[[object], Tensor]
    targets: tuple[Target | None, ...]
    classes: tuple[frozenset[int], ...] = ()
    class_count: int | None = None
    reading: Reading = "as returned"
    is_dense: bool = False
    is_box: bool = False
    remark: str = ""


def batch_targets(
    output: object,
    batch: Batch,
    wanted: Sequence[Wanted],
    top: int | None,
    categories: Sequence[str],
    output_key: str | None,
    *,
    multi_label: bool = False,
) -> list[BatchTarget]:
    """Return the targets of a batch, in the order in which they were asked for.

    For scores (N, C), a target is the score of a class, or the difference of two. For scores at each pixel,
    (N, C, H, W), it is the sum of the class's scores over the pixels where the class is the best (Vinogradova et al.,
    Towards Interpretable Semantic Segmentation via Gradient-weighted Class Activation Mapping, AAAI 2020), or over all
    pixels if there are none; the label shows which. For torchvision's detectors it is the score of a box: the one with
    a number, or the best of a class.

    Args:
        output: What the network returned.
        batch: The inputs, N. Boxes are shares of their height and width.
        wanted: The targets; if there are none, the `top` best classes or boxes of each input.
        top: How many; None is one.
        categories: Class names by index, if they are known.
        output_key: Which of several outputs holds the scores; None for the main one.
        multi_label: Whether each class is a label by itself.

    Raises:
        UsageError: If the network returns no scores, or has no such target.
        ModelError: If the user's function raises.
    """
    count = len(batch.indices)
    if wanted and all(query.function is not None for query in wanted):
        return [_function_target(output, query, count) for query in wanted]
    boxes = _boxes(output, count)
    if boxes is not None:
        sizes = [(record.shape[-2], record.shape[-1]) for record in batch.records if len(record.shape) > 1]
        return _box_targets(boxes, wanted, top or 1, categories, sizes if len(sizes) == count else ())
    scores = _scores(output, count, output_key)
    remark = _which_output(output, scores, output_key)
    classes = scores.tensor.shape[1]
    names = categories if len(categories) == classes else ()

    def of_classes(chosen: Tensor, against: int | None = None) -> BatchTarget:
        return replace(_class_target(scores, chosen, against, names, output_key, multi_label), remark=remark)

    if not wanted:
        return [of_classes(chosen) for chosen in _best_classes(real(scores.tensor.detach()), top or 1).unbind(1)]
    targets: list[BatchTarget] = []
    for query in wanted:
        if query.function is not None:
            targets.append(_function_target(output, query, count))
        elif query.index is None:
            raise UsageError(f"{arg('target')} {query.text!r} asks for a box, but the network returns no boxes.")
        else:
            if (worst := max(query.index, query.against or 0)) >= classes:
                raise UsageError(
                    f"{arg('target')} '{safe_text(query.text)}' is class {worst}, but {scores.label} of shape "
                    f"{shape_text(scores.tensor.shape)} has {counted(classes, 'class', 'classes')}, counted from 0."
                )
            chosen = torch.full((count,), query.index, device=scores.tensor.device)
            targets.append(of_classes(chosen, query.against))
    return targets


# --- Scores of classes, one row per input or one per pixel -----------------------------------------------------------


def _scores(output: object, count: int, output_key: str | None) -> Output:
    """Return the scores as (N, C), or (N, C, H, W) or (N, C, D, H, W) where each pixel or voxel has them."""
    outputs = _outputs(output)
    if not outputs:
        raise UsageError(f"The network returns no floating-point numbers, and so no scores: {_own_function_advice()}.")
    chosen = main_output(outputs) if output_key is None else output_at(outputs, output_key)
    values = chosen.tensor
    if values.dim() in (1, 2, 4, 5) and values.shape[0] == count and values.numel():
        if values.dim() == 1:
            return chosen._replace(tensor=values.unsqueeze(1))
        if values.dim() == 2 or math.prod(values.shape[2:]) > 1:
            return chosen
        return chosen._replace(tensor=values.flatten(1))
    paths = ", ".join(choice.label for choice in outputs)
    others = f" Or give {arg('output_key')}: it has {paths}." if len(outputs) > 1 else ""
    raise UsageError(
        f"{chosen.label} of shape {shape_text(values.shape)} holds no score per class for "
        f"{counted(count, 'input')}: {_own_function_advice()}.{others}"
    )


def _outputs(output: object) -> list[Output]:
    return [Output(*pair) for pair in tensors_in(output) if pair[1].is_floating_point() and not pair[1].is_nested]


def _which_output(output: object, scores: Output, output_key: str | None) -> str:
    """Return a sentence about the output that is explained; "" where it is the only one."""
    others = [choice.label for choice in _outputs(output) if choice.path != scores.path]
    if not others:
        return ""
    hint = f" ({arg('output_key')})" if output_key is None else ""
    return (
        f"{scores.label} of shape {shape_text(scores.tensor.shape)} is explained, not {some_of(others, _NAMED)}{hint}."
    )


def _best_classes(scores: Tensor, count: int) -> Tensor:
    """Return the best classes of each input, (N, count); with scores at each pixel, the best at the most pixels."""
    count = min(count, scores.shape[1])
    if scores.dim() == 2:
        return scores.topk(count, 1).indices
    winners = scores.argmax(1).flatten(1)
    won = torch.stack([places.bincount(minlength=scores.shape[1]) for places in winners])
    return won.topk(count, 1).indices


def _class_target(
    scores: Output,
    classes: Tensor,
    against: int | None,
    names: Sequence[str],
    output_key: str | None,
    multi_label: bool,
) -> BatchTarget:
    """Return the target for one class of each input, (N,); the score of class `against` is subtracted."""
    rows = real(scores.tensor.detach())
    dense = rows.dim() > 2
    shares: Tensor | None = None
    reading: Reading = "as returned"
    pixels: Tensor | None = None
    if dense:  # the pixels stay the same when a method changes the picture
        of_input = (-1, *(1,) * (rows.dim() - 2))
        pixels = rows.argmax(1) == classes.reshape(of_input)
        nowhere = ~pixels.flatten(1).any(1)
        pixels = pixels | nowhere.reshape(of_input)
    elif rows.shape[1] > 1 or multi_label:
        shares = rows
        if not are_probabilities(rows, scores):
            shares, reading = class_probabilities(rows, scores, multi_label=multi_label)

    def of_rows(values: Tensor) -> Tensor:
        picked = values[torch.arange(len(classes), device=values.device), classes]
        if against is not None:
            picked = picked - values[:, against]
        return picked if pixels is None else picked.where(pixels, 0).flatten(1).sum(1)

    indices: list[int] = classes.cpu().tolist()
    values = of_rows(rows).cpu().tolist()
    targets = []
    for place, index in enumerate(indices):
        label = _class_name(index, names, rows.shape[1])
        if against is not None:
            label = f"{label} - {_class_name(against, names, rows.shape[1])}"
        if pixels is not None:
            count, unit = int(pixels[place].sum()), "pixel" if rows.dim() == 4 else "place"
            label = f"{label}, sum over {'all ' if nowhere[place] else ''}{counted(count, unit)}"
        probability = None if shares is None or against is not None else float(shares[place, index])
        targets.append(Target(label, values[place], index if against is None else None, probability, reading=reading))
    part = tuple(frozenset({index} if against is None else {index, against}) for index in indices)

    def score(output: object) -> Tensor:
        return of_rows(real(_scores(output, len(indices), output_key).tensor))

    return BatchTarget(score, tuple(targets), part, rows.shape[1], reading, is_dense=dense)


def _class_name(index: int, names: Sequence[str], count: int | None = None) -> str:
    if index < len(names):
        return names[index]
    return "the output" if count == 1 else f"class {index}"


def runner_up(output: object, target: BatchTarget, output_key: str | None) -> BatchTarget | None:
    """Return the best class of each input but the target's; None where the target is no single class of several."""
    if target.class_count is None or target.class_count < 2 or any(len(label) > 1 for label in target.classes):
        return None
    count = len(target.targets)
    scores = _scores(output, count, output_key)
    best = _best_classes(real(scores.tensor.detach()), 2)  # (N, 2)
    indices = torch.tensor([next(iter(label)) for label in target.classes], device=best.device)
    other = best[:, 0].where(best[:, 0] != indices, best[:, 1])
    return _class_target(scores, other, None, (), output_key, target.reading == "sigmoid")


def probabilities(output: object, target: BatchTarget, output_key: str | None) -> Tensor:
    """Return the probability of each input's class, (N,)."""
    scores = _scores(output, len(target.targets), output_key)
    rows = real(scores.tensor.detach())
    shares = {"as returned": rows, "softmax": rows.softmax(1), "sigmoid": rows.sigmoid()}[target.reading]
    indices = torch.tensor([next(iter(label)) for label in target.classes], device=rows.device)
    return shares[torch.arange(len(indices), device=rows.device), indices]


# --- Boxes -----------------------------------------------------------------------------------------------------------


def _boxes(output: object, count: int) -> Sequence[Mapping[str, Tensor]] | None:
    """Return a torchvision detector's output: boxes, labels and scores for each input; None for other networks."""
    if not isinstance(output, list | tuple) or len(output) != count:
        return None
    alike = all(isinstance(entry, Mapping) and {"boxes", "labels", "scores"} <= entry.keys() for entry in output)
    return output if alike else None


def _box_targets(
    boxes: Sequence[Mapping[str, Tensor]],
    wanted: Sequence[Wanted],
    top: int,
    categories: Sequence[str],
    sizes: Sequence[tuple[int, int]],
) -> list[BatchTarget]:
    if not wanted:
        most = max(len(box["scores"]) for box in boxes)
        if not most:
            raise NoBoxError("The network found no box, so there is none to explain: give another picture.")
        return [_box_target(boxes, [rank] * len(boxes), categories, sizes) for rank in range(min(top, most))]
    targets = []
    for query in wanted:
        if query.function is not None:
            targets.append(_function_target(boxes, query, len(boxes)))
            continue
        if query.against is not None:
            raise UsageError(
                f"{arg('target')} '{safe_text(query.text)}': each box has the score of one class. Give one class."
            )
        numbers: list[int | None] = [query.box] * len(boxes)
        if query.box is None:  # boxes come by their scores, the best first
            labels = [detected["labels"].cpu().tolist() for detected in boxes]
            numbers = [listed.index(query.index) if query.index in listed else None for listed in labels]
        targets.append(_box_target(boxes, numbers, categories, sizes))
    if not any(any(target.targets) for target in targets):
        raise NoBoxError(_no_box(wanted[0], boxes, categories))
    return targets


def _box_target(
    boxes: Sequence[Mapping[str, Tensor]],
    numbers: Sequence[int | None],
    categories: Sequence[str],
    sizes: Sequence[tuple[int, int]],
) -> BatchTarget:
    """Return the target for one box of each input, by its position in the list; None is no box."""

    def score(output: Any) -> Tensor:
        pairs = zip(output, numbers, strict=True)
        return torch.stack([_score_of_box(detected["scores"], number) for detected, number in pairs])

    targets: list[Target | None] = []
    for place, (detected, number) in enumerate(zip(boxes, numbers, strict=True)):
        if number is None or number >= len(detected["scores"]):
            targets.append(None)
            continue
        index = int(detected["labels"][number].cpu())
        name = _class_name(index, categories)
        value = float(detected["scores"][number].detach().cpu())
        left, top, right, bottom = detected["boxes"][number].detach().cpu().tolist()
        height, width = sizes[place] if sizes else (1, 1)
        box = (left / width, top / height, right / width, bottom / height) if sizes else None
        targets.append(Target(f"{name} in box {number}", value, index, box=box))
    return BatchTarget(score, tuple(targets), is_box=True)


def _score_of_box(scores: Tensor, number: int | None) -> Tensor:
    """Return the score of a box; 0 without that box, which a randomised network may not find."""
    return real(scores[number] if number is not None and number < len(scores) else scores.sum() * 0)


def _no_box(wanted: Wanted, boxes: Sequence[Mapping[str, Tensor]], categories: Sequence[str]) -> str:
    names = [_class_name(index, categories) for detected in boxes for index in detected["labels"].cpu().tolist()]
    distinct = [*dict.fromkeys(names)]
    if wanted.box is not None:
        most = max(len(detected["scores"]) for detected in boxes)
        message = f"There is no box {wanted.box}: the network found {counted(most, 'box', 'boxes')}"
        return f"{message}, counted from 0." if most else f"{message}. Give another picture."
    hint = nearest(wanted.text, distinct) or (
        f" It found {some_of(distinct, _NAMED)}." if distinct else " It found no box at all."
    )
    return f"The network found no '{safe_text(wanted.text)}'.{safe_text(hint)}"


# --- A user's own function -------------------------------------------------------------------------------------------


def _function_target(output: object, wanted: Wanted, count: int) -> BatchTarget:
    score = partial(_call_function, wanted, count)
    values = score(output)
    targets = tuple(Target(safe_text(wanted.text), float(value)) for value in values.detach().cpu())
    return BatchTarget(score, targets)


def _call_function(wanted: Wanted, count: int, output: object) -> Tensor:
    """Call the user's function; raise a UsageError unless it returns one number per input."""
    name, function = safe_text(wanted.text), wanted.function
    assert function is not None  # noqa: S101 - only targets with a function come here
    try:
        value = function(output)
    except (Exception, SystemExit) as error:
        raise ModelError(f"{name} raised {exception_line(error)}") from error
    rule = f"a target has to return one floating-point number per input, here {count}, computed from the output"
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = f"{value.dtype} values" if isinstance(value, Tensor) else safe_text(type(value).__name__)
        raise UsageError(f"{name} returned {kind}, but {rule}.")
    if value.numel() != count or value.dim() > 2 or (value.dim() and value.shape[0] != count):
        alone = f" Or give {arg('batch_size')} 1." if value.numel() == 1 else ""
        raise UsageError(f"{name} returned {shape_text(value.shape)}, but {rule}.{alone}")
    return real(value.reshape(count))
