"""From the name of a loss to its value: built-in losses, users' functions, and which of several outputs they take."""

import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from hookscope.errors import ModelError, UsageError, is_out_of_memory, nearest
from hookscope.hooks.attributes import attribute_of
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.pytree import tensors_given, tensors_in
from hookscope.inputs.batches import Batch
from hookscope.inspection.losses.formulas import LOSSES, OF_ONE, OVER_ALL, LossValue, differentiable, real
from hookscope.inspection.losses.targets import (
    Output,
    TargetKind,
    Task,
    count_error,
    per_input,
    read_target,
    value_target,
)
from hookscope.parameters import arg
from hookscope.results.network import is_output_of_key
from hookscope.text import exception_line, safe_text, shape_text

# A loss of one output takes the output with the first of these names, as torchvision, timm and Hugging Face use them.
_MAIN_NAMES = ("logits", "out", "output")
_OWN_TARGETS: tuple[TargetKind, ...] = ("class", "zeros", "noise", "self", "tensor")


Loss = Callable[[object, Batch], LossValue]


def choose_loss(
    loss: str | Callable[..., object],
    *,
    target: str | int | Tensor | None = None,
    target_name: str = "",
    seed: int = 0,
    categories: Sequence[str] = (),
    output_key: str | None = None,
    input_count: int | None = None,
) -> Loss:
    """Return the function that computes a loss from a model's output and its batch.

    What each loss is, for an output x and a target t:

    - `ce`, `nll`: -log p(t), mean over the batch and, for dense outputs, over positions. p is softmax(x) for `ce`,
      exp(x) for `nll`. For an output that is a softmax already, both take log x.
    - `logit`: x(t), sum over the batch, mean over positions; log x(t) of an output that is a softmax already.
    - `bce`: -t log p - (1 - t) log(1 - p), mean over all elements. p is sigmoid(x), or x if that is what x is already.
    - `mse`: (x - t)^2. `l1`: |x - t|. `huber`: (x - t)^2 / 2 where |x - t| < 1, else |x - t| - 1/2. Means over all
      elements.
    - `sum`: x, sum over all elements of all floating outputs.
    - `projection`: r x, sum over all elements of all floating outputs, r seeded standard normal.

    Losses of one output take the one called "logits", "out" or "output", or else the first. Classes lie on axis 1, and
    on the last of three axes (N, T, C), unless the other has as many values as there are `categories`. Without a
    target, the losses of classes take the output's own argmax, `bce` 0.5, and `mse`, `l1` and `huber` seeded standard
    normal noise. Random numbers are drawn on the CPU in float32, with a generator for each input, so they do not depend
    on the batch that an input is in; input 0 has the seed itself. Losses are computed in float32 or float64, outside
    autocast; a loss that is NaN or Inf is a value like others.

    If the model returns a mapping of 0-d tensors, as detectors do in training, `projection` and `sum` are its sum.

    Args:
        loss: A name in `LOSSES`, or a function: called with the model's output (with the chosen one if `output_key` is
            given), and with the target tensor after it if a target is given. It returns a 0-d tensor.
        target: A class index or name, or several with commas, one per input; "zeros", "noise", "self" (the input); or
            a tensor of class indices, probabilities or values, for one input or for each input of the run.
        target_name: What to call a target tensor: the name of its file.
        seed: Of projection and noise.
        categories: Class names by index, if known.
        output_key: Chooses one of several outputs: "logits", "['out']", ".logits", "[0]".
        input_count: Inputs of the whole run, for targets given per input; None if a single batch holds them all.

    Raises:
        UsageError: If there is no such loss or class, or the loss takes no such target; when it is called, if the
            output does not fit. ModelError then if a user's function raises.

    Source:
        The formulas are those of torch.nn.functional. The defaults are ours: a plain sum has no gradient behind
        a softmax or a normalisation, a random projection of all outputs (a random vector-Jacobian product) does.
    """
    if isinstance(loss, str):
        _check_name(loss)
        name, kinds = loss, LOSSES[loss]
    else:
        name, kinds = _name_of(loss), _OWN_TARGETS
    wanted = read_target(name, kinds, target, target_name, categories)
    if not isinstance(loss, str):
        _check_parameters(loss, name, has_target=target is not None)
    if input_count is not None and len(wanted.classes) not in (0, 1, input_count):
        raise count_error(wanted.classes, input_count)

    def compute(output: object, batch: Batch) -> LossValue:
        all_outputs = [Output(*pair) for pair in tensors_in(output)]
        floating = [entry for entry in all_outputs if differentiable(entry.tensor)]
        outputs = floating if output_key is None else [output_at(floating, output_key)]
        for leaf in outputs:
            missing = "a meta tensor holds no data" if leaf.tensor.is_meta else missing_memory(leaf.tensor)
            if missing:
                raise ModelError(f"There is no loss of {leaf.label}: {missing}.")
        arguments = tensors_given(batch.args, batch.kwargs)
        inputs = tuple(tensor for _, tensor in arguments if differentiable(tensor) and not tensor.is_nested)
        count = max(batch.indices) + 1 if input_count is None else input_count
        task = Task(name, wanted, seed, tuple(categories), count, batch.indices, inputs)
        if not isinstance(loss, str):
            return _own(loss, output if output_key is None else outputs[0].tensor, outputs, task)
        if not outputs:
            returned = ", ".join(f"{entry.label} {entry.tensor.dtype}" for entry in all_outputs) or "no tensor"
            raise UsageError(f"{name} needs an output of floating-point numbers, but the model returned {returned}.")
        own_losses = isinstance(output, Mapping) and all(entry.tensor.dim() == 0 for entry in floating)
        device = outputs[0].tensor.device.type
        has_autocast = torch.amp.is_autocast_available(device)
        with torch.autocast(device, enabled=False) if has_autocast else nullcontext():
            return _built_in(outputs, task, own_losses=own_losses)

    return compute


# What torch, Keras and people call these losses, without capitals, underscores and "loss".
_OTHER_NAMES = {
    **dict.fromkeys(("crossentropy", "categoricalcrossentropy", "softmaxcrossentropy", "xent"), "ce"),
    **dict.fromkeys(("binarycrossentropy", "binarycrossentropywithlogits", "bcewithlogits", "bcelogits"), "bce"),
    **dict.fromkeys(("l2", "meansquarederror", "squarederror"), "mse"),
    **dict.fromkeys(("mae", "meanabsoluteerror", "absoluteerror"), "l1"),
    "smoothl1": "huber",
    "negativeloglikelihood": "nll",
}


def _check_name(loss: str) -> None:
    if loss not in LOSSES:
        name = re.sub("[^a-z0-9]", "", loss.lower()).removesuffix("loss")
        hint = nearest(_OTHER_NAMES.get(name, name), LOSSES, 1)
        raise UsageError(f"There is no loss '{safe_text(loss)}'.{hint} Give {', '.join(LOSSES)} or FILE.py:FUNCTION.")


def output_at(outputs: Sequence[Output], key: str) -> Output:
    """Return the output that the user's key means: "logits", "['out']", ".logits", "[0]".

    Raises:
        UsageError: If there is none; the message lists what there is.
    """
    for output in outputs:
        if output.path and is_output_of_key(output.path, key):
            return output
    paths = ", ".join(output.path for output in outputs if output.path)
    hint = f"It has {safe_text(paths)}." if paths else "It has a single one or none: leave the key out."
    raise UsageError(f"The model has no floating-point output '{safe_text(key)}'. {hint}")


def _built_in(outputs: Sequence[Output], task: Task, *, own_losses: bool) -> LossValue:
    name, used = task.loss, list(outputs)
    warnings: tuple[str, ...] = ()
    if own_losses and name in OVER_ALL:
        name, result = "loss dict sum", LossValue(torch.stack([real(output.tensor) for output in used]).sum())
    elif own_losses:
        raise UsageError(
            f"{name} needs an output, but the model returned its own losses: take {arg('loss')} projection."
        )
    elif name in OVER_ALL:
        result = OVER_ALL[name](used, task)
    else:
        main = main_output(used)
        problem = "a nested tensor" if main.tensor.is_nested else ""
        if main.tensor.is_complex() and "class" in LOSSES[name]:  # real and imaginary parts are not classes
            problem = "complex numbers"
        if problem:
            raise UsageError(f"{name} cannot compare {main.label}, {problem}: take {arg('loss')} projection or sum.")
        others = ", ".join(output.label for output in used if output is not main)
        used = [main]
        result = OF_ONE[name](main, task)
        warnings = (f"{name} is computed from {main.label} alone, not from {others}.",) if others else ()
    labels = tuple(output.label for output in used)
    if not any(output.tensor.numel() for output in used):
        warnings = (*warnings, f"{', '.join(labels)} has no elements, so {name} has no gradient.")
    return replace(result, name=name, outputs=labels, warnings=(*warnings, *result.warnings))


def main_output(outputs: Sequence[Output]) -> Output:
    """Return the output that losses of one output take: that called "logits", "out" or "output", or else the first."""
    named = {output.path: output for output in outputs}
    paths = [path for name in _MAIN_NAMES for path in (f".{name}", f"['{name}']") if path in named]
    return named[paths[0]] if paths else next((output for output in outputs if output.tensor.dim()), outputs[0])


# --- A user's own function -------------------------------------------------------------------------------------------


def _name_of(function: Callable[..., object]) -> str:
    """Return "file.py:function", or the class name of a callable object."""
    code = attribute_of(function, "__code__")
    name = attribute_of(function, "__qualname__", type(function).__qualname__)
    return safe_text(f"{Path(code.co_filename).name}:{name}" if code else name)


def _check_parameters(function: Callable[..., object], name: str, *, has_target: bool) -> None:
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # some builtins have none
        return
    problem = _misfit(signature, 1 + has_target)
    if problem and not has_target and not _misfit(signature, 2):
        raise UsageError(f"{name} needs a target: give {arg('target')}.")
    if problem:
        arguments = "the output and the target" if has_target else "the output alone (no target is given)"
        raise UsageError(f"{name}{safe_text(str(signature))} cannot be called with {arguments}: {safe_text(problem)}.")


def _misfit(signature: inspect.Signature, count: int) -> str:
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        return str(error)
    return ""


def _own(function: Callable[..., object], returned: object, outputs: Sequence[Output], task: Task) -> LossValue:
    arguments, text = [returned], ""
    if task.target.kind != "default":
        target, text = _own_target(outputs, task)
        arguments.append(target)
    try:
        value = function(*arguments)
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{task.loss} raised at {_place(function, error)}") from error
    expected = "a loss has to be a single floating-point number computed from the output, as a 0-d tensor"
    if not isinstance(value, Tensor):
        raise UsageError(f"{task.loss} returned {safe_text(type(value).__name__)}, but {expected}.")
    if value.numel() != 1 or not value.is_floating_point():
        raise UsageError(f"{task.loss} returned {shape_text(value.shape)} of {value.dtype}, but {expected}.")
    if not value.requires_grad and torch.is_grad_enabled() and any(output.tensor.requires_grad for output in outputs):
        raise UsageError(
            f"{task.loss} returned a tensor without a gradient: leave out .detach(), .item(), .numpy() and no_grad."
        )
    labels = tuple(output.label for output in outputs) or ("(model)",)
    return LossValue(value.reshape(()), text, name=task.loss, outputs=labels)


def _own_target(outputs: Sequence[Output], task: Task) -> tuple[Tensor, str]:
    """Return the target for a user's own loss, whose shape only that function can check."""
    target = task.target
    device = outputs[0].tensor.device if outputs else torch.device("cpu")
    if target.kind == "class":
        classes, text = per_input(len(task.indices), task, task.categories)
        return torch.tensor(classes, device=device), text
    if target.tensor is not None:
        per_run = target.tensor.dim() > 0 and target.tensor.shape[0] == task.input_count
        return (target.tensor[list(task.indices)] if per_run else target.tensor).to(device), target.name
    if target.kind == "self" and task.inputs:
        return task.inputs[0], "the input itself"
    if not outputs or target.kind == "self":
        raise UsageError(
            f"{task.loss} cannot be given {target.kind}: there is no floating-point tensor to make it from."
        )
    main = main_output(outputs)
    return value_target(real(main.tensor), main, task)


def _place(function: Callable[..., object], error: BaseException) -> str:
    """Return "file.py:12: TypeName: message", with the innermost line in the function's own file."""
    file = attribute_of(attribute_of(function, "__code__"), "co_filename")
    frames = traceback.extract_tb(error.__traceback__)[1:] or traceback.extract_tb(error.__traceback__)
    frame = next((summary for summary in reversed(frames) if summary.filename == file), frames[-1])
    return f"{safe_text(Path(frame.filename).name)}:{frame.lineno}: {exception_line(error)}"
