"""Edit inputs, outputs and gradients of modules, by hooks that replace them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookscope.errors import UsageError
from hookscope.hooks.autograd import strided_copy
from hookscope.hooks.calls import Hook
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.pytree import replaceable_inputs, tensors_in, with_tensors
from hookscope.hooks.selection import module_index, parameters_by_name


class Intervention(NamedTuple):
    """An edit of a module's inputs, outputs or gradients.

    Attributes:
        place: "input": floating inputs; "output": floating outputs; "grad": the gradients of the outputs; "parameter
            grad": the gradient of a parameter.
        apply: Called with the module, or the name of the operation, and the tensor; returns its replacement.
    """

    place: Literal["input", "output", "grad", "parameter grad"]
    apply: Callable[[nn.Module | str, Tensor], Tensor]


def hook_edits(model: nn.Module, edits: Mapping[str, Sequence[Intervention]], handles: list[RemovableHandle]) -> None:
    """Register the hooks that edit modules or, for "parameter grad", parameters by name; add their handles."""
    modules, _ = module_index(model)
    parameters = parameters_by_name(model)
    # Modules of TorchScript override these methods to refuse hooks.
    before, after = nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook
    for name, wanted in edits.items():
        for edit in wanted:
            if edit.place == "parameter grad":
                parameter, layer = parameters[name]
                hook = _editor_of_gradient(edit, layer)
                handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
            elif edit.place == "input":
                handles.append(before(modules[name], Hook(edit_inputs, edit), with_kwargs=True))
            elif edit.place == "output":
                handles.append(after(modules[name], Hook(_edit_outputs, edit)))
        gradient_edits = [edit for edit in wanted if edit.place == "grad"]
        if gradient_edits:
            handles.append(after(modules[name], Hook(_edit_gradients, gradient_edits)))


def separate_edits(
    model: nn.Module, edits: Mapping[str, Sequence[Intervention]], handles: list[RemovableHandle]
) -> None:
    """Copy the outputs of modules with an edited gradient, so that the modules around them see the unedited gradient.

    Call it with the arguments of `hook_edits`, after the observing hooks are registered.
    """
    modules, _ = module_index(model)
    for name, wanted in edits.items():
        if any(edit.place == "grad" for edit in wanted):
            handles.append(nn.Module.register_forward_hook(modules[name], Hook(_edit_gradients, [])))


def edit_operation(edits: Sequence[Intervention], name: str, output: object) -> object:
    """Return an operation's output with the edits of the output and of its gradient applied."""
    for edit in edits:
        if edit.place == "output":
            output = _edit_outputs(edit, name, None, output)
    gradient_edits = [edit for edit in edits if edit.place == "grad"]
    return _edit_gradients(gradient_edits, name, None, output) if gradient_edits else output


def separate_operation(edits: Sequence[Intervention], name: str, output: object) -> object:
    """Copy the observed output of an operation with an edited gradient; see `separate_edits`."""
    return _edit_gradients([], name, None, output) if any(edit.place == "grad" for edit in edits) else output


def edit_inputs(edit: Intervention, maker: nn.Module | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the edited arguments of a module or operation; also the pre-hook of a module."""
    tensors = replaceable_inputs(args, kwargs)
    edited = {path: edit.apply(maker, tensor) for path, tensor in tensors if tensor.is_floating_point()}
    return _edited(args, edited, maker), _edited(kwargs, edited, maker)


def _edit_outputs(edit: Intervention, maker: nn.Module | str, _args: object, output: object) -> object:
    tensors = tensors_in(output)
    edited = {slot: edit.apply(maker, tensor) for slot, tensor in tensors if tensor.is_floating_point()}
    return _edited(output, edited, maker) if edited else output


def _edit_gradients(edits: Sequence[Intervention], maker: nn.Module | str, _args: object, output: object) -> object:
    if not torch.is_grad_enabled():
        return output
    # Copies, because the observers of a submodule's outputs must see the gradient before this edit.
    tensors = [(slot, tensor) for slot, tensor in tensors_in(output) if tensor.requires_grad]
    copies = {slot: strided_copy(tensor) for slot, tensor in tensors if not missing_memory(tensor)}
    for tensor in copies.values():
        for edit in edits:
            tensor.register_hook(_editor_of_gradient(edit, maker))  # type: ignore[no-untyped-call]
    return _edited(output, copies, maker) if copies else output


def _edited(value: object, edited: Mapping[str, Tensor], maker: nn.Module | str) -> object:
    try:
        return with_tensors(value, edited)
    except TypeError as error:
        name = maker if isinstance(maker, str) else type(maker).__name__
        raise UsageError(f"An edit cannot reach the inputs or outputs of {name}: {error}.") from error


def _editor_of_gradient(edit: Intervention, maker: nn.Module | str) -> Callable[[Tensor | None], Tensor | None]:
    return lambda gradient: None if gradient is None else edit.apply(maker, gradient)
