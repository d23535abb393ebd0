"""Where a model raised: whose error it is, in which layer, and what may help."""

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

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
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        running = frame.f_locals.get("self")
        if frame.f_code.co_name == "_call_impl" and isinstance(running, nn.Module) and id(running) in names:
            module = running
            inputs = tensors_in(frame.f_locals.get("args")) + tensors_in(frame.f_locals.get("kwargs"))
        trace = trace.tb_next
    shapes = tuple(f"{path} {_shape_text(tensor)}" for path, tensor in inputs)
    words = exception_line(error) + (_known_arguments(module, error) or _name_in_tensor(modules[""], error))
    return Failure(names[id(module)], type(module).__name__, shapes, words)


def _known_arguments(module: nn.Module, error: BaseException) -> str:
    """Return the arguments of forward behind the name of one that it does not know; "" for any other error."""
    if not (isinstance(error, TypeError) and "forward() got an unexpected keyword argument" in str(error)):
        return ""
    names = [printable(parameter) for parameter in inspect.signature(module.forward).parameters]
    if len(names) == 1:
        return f"; its one argument is {names[0]}"
    return f"; its arguments are {', '.join(names)}" if names else "; it has no arguments"


def _name_in_tensor(network: nn.Module, error: BaseException) -> str:
    """Return what helps where the network's code looks up a name in a tensor; "" for any other error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code is not run_networks.__code__:
        return ""
    called = trace.tb_frame.f_locals
    if not looks_up_a_name(called["func"], called["args"]):
        return ""
    wanted = f"; its code looks up '{printable(called['args'][-1], 80)}' in this tensor, as in a dict"
    names = [printable(parameter) for parameter in inspect.signature(network.forward).parameters]
    return f"{wanted}; its one argument is {names[0]}" if len(names) == 1 else wanted


def _shape_text(tensor: Tensor) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        return f"{tensor.size(0)} nested" if tensor.is_nested else str(tuple(tensor.shape))


def reraise_internal(error: BaseException) -> BaseException:
    """Return the error if the model raised it; one that comes out of a hook is ours, and is raised again."""
    trace = error.__traceback__.tb_next if error.__traceback__ else None  # the first frame is the call of the model
    while trace is not None:
        is_ours = trace.tb_frame.f_code.co_filename.startswith(_HOOKSCOPES_OWN)
        if is_ours and not is_networks_own(trace):
            raise error
        trace = trace.tb_next
    return error


def reraise_of_own_loss(error: BaseException, output: object) -> None:
    """Raise the error again if a built-in loss raised it on ordinary numbers: then the bug is in hookscope.

    Tensors without data or elements, without a history that they should have, of subclasses and of dtypes that torch
    does not compute with are the model's.
    """
    if not is_out_of_memory(error) and all(map(_is_ordinary, (tensor for _, tensor in tensors_in(output)))):
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename.startswith(_LOSSES):
                raise error
            trace = trace.tb_next


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
    if is_out_of_memory(error):
        return (
            f"{model} ran out of memory in its {phase} pass at {where}{remark}: give fewer inputs at a time (a smaller "
            f"batch) or smaller ones. {failure.error}"
        )
    return f"{model} raised in its {phase} pass at {where}{remark}: {failure.error}{failure.remedy}"
