"""Where a model raised: whose error it is, in which layer, and what may help."""

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import Tensor, nn

from hookscope.errors import is_out_of_memory
from hookscope.hooks.autograd import history_is_lost
from hookscope.hooks.operations import is_networks_own, looks_up_a_name, run_networks
from hookscope.hooks.pytree import tensors_in
from hookscope.results.network import Failure
from hookscope.text import exception_line, printable

# The rooms whose code runs inside the model's, in hooks: what is raised there is no error of the model.
_HOOKSCOPES_OWN = tuple(
    f"{Path(__file__).parents[1] / room}{os.sep}" for room in ("hooks", "inspection", "statistics", "commands/diff")
)
# Losses that are given by name.
_LOSSES = f"{Path(__file__).parent / 'losses'}{os.sep}"


def locate(modules: Mapping[str, nn.Module], error: BaseException) -> Failure:
    """Find the innermost of the modules on the traceback: each call leaves a frame there, hooked or not."""
    names = {id(module): name for name, module in modules.items()}
    module = modules[""]
    inputs: list[tuple[str, Tensor]] = []
    frames = [trace.tb_frame for trace in _traces(error)]
    for frame in frames:
        running = frame.f_locals.get("self")
        if frame.f_code.co_name == "_call_impl" and isinstance(running, nn.Module) and id(running) in names:
            module = running
            inputs = tensors_in(frame.f_locals.get("args")) + tensors_in(frame.f_locals.get("kwargs"))
    with torch._C.DisableTorchFunctionSubclass():
        shapes = tuple(
            f"{path} {tensor.size(0)} nested" if tensor.is_nested else f"{path} {tuple(tensor.shape)}"
            for path, tensor in inputs
        )
    hint = _hint_of_arguments(module, error) or _hint_of_dict(modules[""], frames[-1:])
    return Failure(names[id(module)], type(module).__name__, shapes, exception_line(error) + hint)


def _traces(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _hint_of_arguments(module: nn.Module, error: BaseException) -> str:
    """Return a hint with the arguments of forward if it was called with an unknown one; "" for other errors."""
    if not (isinstance(error, TypeError) and "forward() got an unexpected keyword argument" in str(error)):
        return ""
    names = [printable(parameter) for parameter in inspect.signature(module.forward).parameters]
    shown = f"its arguments are {', '.join(names)}" if len(names) > 1 else f"its one argument is {''.join(names)}"
    return f"; {shown}" if names else "; it has no arguments"


def _hint_of_dict(network: nn.Module, innermost: Sequence[FrameType]) -> str:
    """Return a hint if the network's code looks up a name in a tensor, as in a dict; "" for other errors."""
    called = [frame.f_locals for frame in innermost if frame.f_code is run_networks.__code__]
    if not called or not looks_up_a_name(called[0]["func"], called[0]["args"]):
        return ""
    hint = f"; the network looks up '{printable(called[0]['args'][-1], 80)}' in a tensor, as in a dict"
    names = [printable(parameter) for parameter in inspect.signature(network.forward).parameters]
    return f"{hint}; its one argument is {names[0]}" if len(names) == 1 else hint


def reraise_internal(error: BaseException) -> BaseException:
    """Return the error if the model raised it; one that comes out of a hook is ours, and is raised again."""
    for trace in islice(_traces(error), 1, None):  # the first frame is the call of the model
        if trace.tb_frame.f_code.co_filename.startswith(_HOOKSCOPES_OWN) and not is_networks_own(trace):
            raise error
    return error


def reraise_of_own_loss(error: BaseException, output: object) -> None:
    """Raise the error again if a built-in loss raised it on ordinary numbers: then the bug is in hookscope.

    Tensors without data or elements, without a history that they should have, of subclasses and of dtypes that torch
    does not compute with are the model's.
    """
    is_in_loss = any(trace.tb_frame.f_code.co_filename.startswith(_LOSSES) for trace in _traces(error))
    if is_in_loss and not is_out_of_memory(error) and all(_is_ordinary(tensor) for _, tensor in tensors_in(output)):
        raise error


def _is_ordinary(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.is_meta or tensor.is_nested or tensor.is_quantized or not tensor.numel():
        return False
    has_values = tensor.layout == torch.strided and (tensor.dtype.itemsize > 1 or not tensor.is_floating_point())
    return has_values and not history_is_lost(tensor)


def failure_message(model: str, failure: Failure, error: BaseException, phase: str = "forward") -> str:
    """Return the sentence for an error message about a network of this name; the phase may be "backward"."""
    where = f"{failure.layer or '(model)'} ({failure.kind})"
    inputs = ", ".join(failure.input_shapes) or "no tensor"
    if len(failure.input_shapes) == 1:
        inputs = f"an input of shape {inputs.removeprefix('[0] ')}"
    remark = f", given {inputs}" if phase == "forward" else ""
    place = f"in its {phase} pass at {where}{remark}"
    if is_out_of_memory(error):
        hint = "give fewer inputs at a time (a smaller batch) or smaller ones"
        return f"{model} ran out of memory {place}: {hint}. {failure.error}"
    return f"{model} raised {place}: {failure.error}{failure.remedy()}"
