"""The targets of losses: classes, tensors of files, noise, zeros or the input, in the shape of the output."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hookscope.errors import UsageError, nearest
from hookscope.parameters import arg
from hookscope.results.network import row_label
from hookscope.text import counted, safe_text, shape_text

TargetKind = Literal["default", "class", "tensor", "zeros", "noise", "self"]

_IN_WORDS: dict[TargetKind, str] = {"class": "a class index or name", "tensor": "a tensor file"}

# Odd, so that no two inputs of a run get the same seed modulo 2**32, which is all torch's CPU generator looks at: 2**32
# over the golden ratio.
_SEED_STEP = 0x9E3779B1
# A label names this many classes one by one.
_NAMED_CLASSES = 5


class Output(NamedTuple):
    """One tensor of what the model returned."""

    path: str
    tensor: Tensor

    @property
    def label(self) -> str:
        """Name for people: "(model)", "(model)['logits']"."""
        return safe_text(row_label("", 0, self.path))


@dataclass(frozen=True, slots=True)
class Target:
    """What the user wants an output compared with; "default" leaves it to the loss."""

    kind: TargetKind = "default"
    classes: tuple[int, ...] = ()  # one for all inputs, or one per input
    tensor: Tensor | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """One loss over one batch, without its outputs."""

    loss: str
    target: Target
    seed: int
    categories: tuple[str, ...]  # () if unknown
    input_count: int  # in the whole run
    indices: tuple[int, ...]  # position in the run of each input of the batch
    inputs: tuple[Tensor, ...]  # the floating ones among the model's arguments

    def generators(self) -> list[torch.Generator]:
        """Return a random number generator for each input, the same in every batch; input 0 has the seed."""
        return [torch.Generator("cpu").manual_seed((self.seed + index * _SEED_STEP) % 2**63) for index in self.indices]


# --- Reading ---------------------------------------------------------------------------------------------------------


def read_target(
    loss: str, kinds: Sequence[TargetKind], requested: str | int | Tensor | None, name: str, categories: Sequence[str]
) -> Target:
    """Read the target that the user gave, as far as possible without an output.

    Raises:
        UsageError: If the loss, which takes `kinds`, does not take it, or there is no such class.
    """
    target, text = Target(), "a tensor" if isinstance(requested, Tensor) else str(requested)
    if requested is None:
        return target
    if isinstance(requested, Tensor):
        values = requested.detach()
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values  # like outputs
        target = Target("tensor", tensor=values, name=safe_text(name) or f"tensor {shape_text(requested.shape)}")
    elif text in ("zeros", "noise", "self"):
        target = Target(text)  # type: ignore[arg-type] # one of the kinds, by the line above
    elif "class" in kinds:
        classes = tuple(required_class(part, categories) for part in split_at_commas(text, categories))
        target = Target("class", classes=classes)
    if target.kind in kinds:
        return target
    if not kinds:
        raise UsageError(
            f"The loss {loss} takes no target: leave out {arg('target')}, or choose another, such as {arg('loss')} ce."
        )
    shown = text if isinstance(requested, Tensor) else f"'{safe_text(text)}'"
    takes = [_IN_WORDS.get(kind, kind) for kind in kinds]
    raise UsageError(f"{loss} does not take {shown} as its target. Give {', '.join(takes[:-1])} or {takes[-1]}.")


def split_at_commas(text: str, categories: Sequence[str]) -> list[str]:
    """Split at commas that are not part of a class name; the longest name counts."""
    pieces, parts = text.split(","), []
    longest = 1 + max((name.count(",") for name in categories), default=0)
    while pieces:
        ends = range(min(longest, len(pieces)), 1, -1)
        length = next((end for end in ends if class_index(",".join(pieces[:end]), categories) is not None), 1)
        parts.append(",".join(pieces[:length]))
        pieces = pieces[length:]
    return parts


def required_class(text: str, categories: Sequence[str]) -> int:
    """Return the index of the class that `text` names, as `class_index` does.

    Raises:
        UsageError: If there is no such class, with the nearest names.
    """
    index = class_index(text, categories)
    if index is not None:
        return index
    shown = safe_text(text.strip())
    if not categories:
        raise UsageError(
            f"Target class '{shown}' is not an index from 0, and the model has no class names: {arg('classes')} "
            "gives them."
        )
    raise UsageError(
        f"The model knows no class '{shown}'.{safe_text(nearest(text.strip(), categories))} Or give an index."
    )


def class_index(text: str, categories: Sequence[str]) -> int | None:
    """Return the index of the class that `text` names, by number, whole name or one of its synonyms; None if none is.

    Raises:
        UsageError: If several classes have the name.
    """
    wanted = text.strip().lower()
    if re.fullmatch(r"[0-9]{1,9}", wanted):
        return int(wanted)
    lower = [name.lower() for name in categories]
    hits = [index for index, name in enumerate(lower) if name == wanted]
    if wanted and not hits:  # "tabby" of "tabby, tabby cat"
        hits = [index for index, name in enumerate(lower) if wanted in map(str.strip, name.split(","))]
    if len(hits) > 1:
        raise UsageError(f"Several classes are named '{safe_text(wanted)}': give one of {', '.join(map(str, hits))}.")
    return hits[0] if hits else None


# --- Classes ---------------------------------------------------------------------------------------------------------


def class_target(rows: Tensor, output: Output, task: Task) -> tuple[Tensor, str]:
    """Return the class each row (N, C, *positions) is compared with: indices (N, *positions), and words for people.

    The target is "default" (each row's own argmax), "class" or "tensor" of whole numbers.

    Raises:
        UsageError: If a class is out of range, or shapes or counts do not fit.
    """
    target, shape = task.target, (rows.shape[0], *rows.shape[2:])
    names = task.categories if len(task.categories) == rows.shape[1] else ()
    if target.kind == "default":
        classes = rows.detach().argmax(1)
        if len(shape) > 1:
            return classes, f"argmax at each position, of {counted(rows.shape[1], 'class', 'classes')}"
        return classes, f"argmax: {classes_text(classes.tolist(), names)}"
    if target.tensor is None:
        chosen, text = per_input(shape[0], task, names)
        classes = torch.tensor(chosen, device=rows.device).reshape(-1, *(1 for _ in shape[1:])).expand(shape)
    elif target.tensor.is_floating_point():
        raise UsageError(f"{task.loss} takes class indices, but {target.name} holds {target.tensor.dtype}.")
    else:
        classes, text = fit(target.tensor.to(rows.device), shape, output, task).long(), target.name
    wrong = classes[(classes < 0) | (classes >= rows.shape[1])]
    if wrong.numel():
        raise UsageError(
            f"Target class {int(wrong[0])} is out of range for {task.loss}: {output.label} of shape "
            f"{shape_text(output.tensor.shape)} has classes 0 to {rows.shape[1] - 1}."
        )
    return classes, text


def per_input(row_count: int, task: Task, names: Sequence[str]) -> tuple[list[int], str]:
    """Return a class for each row of the batch, the only one or that of its input, and words for people.

    Raises:
        UsageError: If there are several, and not one for each input, or rows do not stand for inputs.
    """
    classes = task.target.classes
    if len(classes) == 1:
        return [classes[0]] * row_count, classes_text(classes, names)
    if len(classes) != task.input_count:
        raise count_error(classes, task.input_count)
    if row_count != len(task.indices):
        raise UsageError(
            f"The output has {counted(row_count, 'row')} for {counted(len(task.indices), 'input')}, so a target class "
            "for each input is not possible: give 1 for all."
        )
    chosen = [classes[index] for index in task.indices]
    return chosen, classes_text(chosen, names)


def count_error(classes: tuple[int, ...], input_count: int) -> UsageError:
    """Return the error for target classes that are neither one nor as many as the inputs."""
    several = f", or {arg('batch_axis')} 0 if a tensor file holds several inputs" if input_count == 1 else ""
    problem = f"{len(classes)} target classes are given for {counted(input_count, 'input')}"
    return UsageError(f"{problem}: give 1 or as many{several}.")


def classes_text(classes: Sequence[int], names: Sequence[str]) -> str:
    """Return "class 285, Egyptian cat", "classes 285 (Egyptian cat), 281 (tabby)"; names where they are known."""
    labels = [safe_text(names[index]) if index < len(names) else "" for index in classes[:_NAMED_CLASSES]]
    if len(classes) == 1:
        return f"class {classes[0]}" + (f", {labels[0]}" if labels[0] else "")
    shown = [f"{index} ({name})" if name else str(index) for index, name in zip(classes, labels, strict=False)]
    more = len(classes) - len(shown)
    return f"classes {', '.join(shown)}" + (f" and {more} more" if more else "")


# --- Values ----------------------------------------------------------------------------------------------------------


def value_target(values: Tensor, output: Output, task: Task) -> tuple[Tensor, str]:
    """Return what an output is compared with: a tensor of the shape and dtype of `values`, and words for people.

    The target is "zeros", "noise", "self" or "tensor"; "default" means noise.

    Raises:
        UsageError: If there is no tensor of that shape.
    """
    target, shape = task.target, tuple(values.shape)
    if target.kind == "zeros":
        return torch.zeros_like(values), "zeros"
    if target.kind == "tensor" and target.tensor is not None:
        return fit(target.tensor.to(values.device), shape, output, task).to(values.dtype), target.name
    if target.kind == "self":
        for source in task.inputs:  # both parts of complex numbers, as outputs have
            tensor = torch.view_as_real(source.resolve_conj()) if source.is_complex() else source
            if tensor.shape == shape:
                return tensor.detach().to(values.device, values.dtype), "the input itself"
        shapes = ", ".join(shape_text(tensor.shape) for tensor in task.inputs) or "no floating-point tensor"
        raise UsageError(
            f"{task.loss} cannot compare {output.label} of shape {shape_text(shape)} with the input itself, {shapes}: "
            "the target self is for networks whose output has the shape of their input."
        )
    return draw(shape, task.generators()).to(values.device, values.dtype), f"noise (seed {task.seed})"


def draw(shape: tuple[int, ...], sources: Sequence[torch.Generator]) -> Tensor:
    """Draw standard normal float32 numbers on the CPU, those of each input from its own generator.

    Where axis 0 does not count the inputs, all numbers come from the first generator.
    """
    kind: Any = {"dtype": torch.float32, "device": "cpu"}  # not the user's defaults
    if shape and shape[0] == len(sources):
        return torch.stack([torch.randn(shape[1:], generator=source, **kind) for source in sources])
    return torch.randn(shape, generator=sources[0], **kind)


def fit(tensor: Tensor, shape: tuple[int, ...], output: Output, task: Task) -> Tensor:
    """Return a target tensor in the shape that is compared, with the rows of this batch's inputs.

    The tensor has that shape, or a row for each input of the run, or is for one input with or without a batch axis.

    Raises:
        UsageError: If the shapes do not fit.
    """
    if shape and shape[0] == len(task.indices):
        if tensor.shape == shape[1:] or tensor.shape == (1, *shape[1:]):
            return tensor.expand(shape)
        if tensor.dim() == len(shape) and tensor.shape[1:] == shape[1:]:
            row_count = tensor.shape[0]
            if row_count == task.input_count:
                return tensor[list(task.indices)]
            raise UsageError(
                f"{task.loss} cannot compare {output.label} with {task.target.name}, of shape "
                f"{shape_text(tensor.shape)}, with {counted(row_count, 'row')} for "
                f"{counted(task.input_count, 'input')}: give 1 row, or as many."
            )
    elif tensor.shape == shape:
        return tensor
    raise UsageError(
        f"{task.loss} needs a target of shape {shape_text(shape)} for {output.label} of shape "
        f"{shape_text(output.tensor.shape)}, but {task.target.name} is {shape_text(tensor.shape)}."
    )
