"""Hook modules for the length of a `with` block. The only file that registers hooks.

What it hides: in-place layers overwrite their inputs a moment later, so outputs are looked at inside the hook; modules
are called repeatedly, share an object or return nested containers; activation checkpointing runs a forward twice;
`torch.compile` skips hooks that come after compiling; and every hook must be gone afterwards, whatever happened.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

T = TypeVar("T")


class ModuleCall(NamedTuple):
    """One call of one module.

    Attributes:
        layer: The name it was given to `capture` under.
        module: The module.
        call: 0 for its first call since the block began or `Capture.restart`, 1 for the second.
        inputs: Tensors it was called with, (path, tensor): "[0]" the first argument, "['mask']" a keyword. An in-place
            module has overwritten them by now.
    """

    layer: str
    module: nn.Module
    call: int
    inputs: Sequence[tuple[str, Tensor]]


class Observation(NamedTuple, Generic[T]):
    """What was observed of one output tensor.

    Attributes:
        layer: Name of the module.
        call: As `ModuleCall.call`.
        slot: Path inside a nested output; "" for a plain tensor.
        value: What `observe` returned; None if the module returned no tensor at all.
        passed_through: The output is an input, unchanged. Neither this nor the next is known of inference tensors.
        in_place: The module overwrote one of its inputs.
    """

    layer: str
    call: int
    slot: str
    value: T | None
    passed_through: bool
    in_place: bool


@dataclass(slots=True)
class Capture(Generic[T]):
    """What the block has shown so far.

    Attributes:
        observations: In the order in which modules finished.
        called: Names of the layers that began at least one call.
    """

    observations: list[Observation[T]] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    _calls: dict[str, int] = field(default_factory=dict)

    def restart(self) -> list[Observation[T]]:
        """Hand out the observations and begin anew, with calls counted from 0 again: once per forward pass."""
        finished, self.observations = self.observations, []
        self._calls.clear()
        return finished


@contextmanager
def capture(
    model: nn.Module,  # noqa: ARG001 - a call reads as what it does; whatever is compiled in it is found without it
    layers: Mapping[str, nn.Module],
    observe: Callable[[ModuleCall, str, Tensor], T],
) -> Iterator[Capture[T]]:
    """Observe the outputs of `layers` while the block runs the model.

    Outputs pass through unchanged. Hooks come after those the model already has, so what they replace is what is seen.
    A recomputation by activation checkpointing is not observed a second time.

    Args:
        model: The network the layers belong to; compiled parts of it run eagerly inside the block, so that hooks fire.
        layers: Modules by name. An object under two names is hooked once, under the first.
        observe: Called with the call, the slot and the output, under `no_grad` and without autocast, as soon as the
            module returns: the one moment at which the values are certain. What must outlive it, it must clone.

    Yields:
        The capture; read `observations` after the forward pass, or `restart()` between passes.
    """
    captured: Capture[T] = Capture()
    handles: list[RemovableHandle] = []
    hooked: set[int] = set()
    with _eager():
        try:
            for name, module in layers.items():
                if id(module) not in hooked:
                    hooked.add(id(module))
                    before, after = _hooks(name, captured, observe)
                    handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                    handles.append(module.register_forward_hook(after, with_kwargs=True))
            yield captured
        finally:
            for handle in handles:
                handle.remove()


def _hooks(
    layer: str, captured: Capture[T], observe: Callable[[ModuleCall, str, Tensor], T]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the forward pre-hook and the forward hook of one module."""
    entries: list[tuple[ModuleCall, list[int], tuple[Any, ...], dict[str, Any]]] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _in_backward():
            return
        index = captured._calls.get(layer, 0)
        captured._calls[layer] = index + 1
        captured.called.add(layer)
        inputs = tensors_in(args)
        if kwargs:
            inputs += tensors_in(kwargs)
        versions = [_version(tensor) for _, tensor in inputs]
        entries.append((ModuleCall(layer, module, index, inputs), versions, args, kwargs))

    def after(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if _in_backward():
            return
        call, versions, given_args, given_kwargs = entries.pop()
        while given_args is not args or given_kwargs is not kwargs:  # a call that raised, and the model went on
            call, versions, given_args, given_kwargs = entries.pop()
        in_place = versions != [_version(tensor) for _, tensor in call.inputs]
        outputs = tensors_in(output)
        if not outputs:
            captured.observations.append(Observation(layer, call.call, "", None, False, in_place))
        for slot, tensor in outputs:
            passed_through = (
                not in_place and any(tensor is given for _, given in call.inputs) and not tensor.is_inference()
            )
            with _plain_arithmetic(tensor.device.type):
                value = observe(call, slot, tensor)
            captured.observations.append(Observation(layer, call.call, slot, value, passed_through, in_place))

    return before, after


_NO_CHANGE = nullcontext()


def _plain_arithmetic(device: str) -> AbstractContextManager[object]:
    """Switch off gradients and autocast for observing, where they are on."""
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if not autocast and not torch.is_grad_enabled():
        return _NO_CHANGE
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    if autocast:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def _version(tensor: Tensor) -> int:
    """Return the tensor's in-place modification count; inference tensors keep none."""
    return 0 if tensor.is_inference() else tensor._version


def _in_backward() -> bool:
    """Tell whether a backward pass is running, which means that checkpointing is recomputing a forward."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def _eager() -> Iterator[None]:
    """Run compiled modules and functions as written: torch skips hooks that are added after compiling."""
    if "torch._dynamo" in sys.modules:  # if not, nothing is compiled, and the import would cost a second
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def tensors_in(value: object) -> list[tuple[str, Tensor]]:
    """List the tensors of a nested value with the path to each.

    Walks tensors, mappings (Hugging Face outputs are mappings), named tuples, lists, tuples, dataclasses, and the
    attributes of other objects one level deep (torchvision's `ImageList`).

    Args:
        value: What a module took or returned.

    Returns:
        (path, tensor) in order: ("", t) for a bare tensor, ("[0]", t), ("['out']", t), (".boxes", t).
    """
    if isinstance(value, torch.Tensor):
        return [("", value)]
    if type(value) is tuple and len(value) == 1 and isinstance(value[0], torch.Tensor):  # the usual arguments
        return [("[0]", value[0])]
    found: list[tuple[str, Tensor]] = []
    _walk(value, "", found, set())
    return found


def _walk(value: object, path: str, found: list[tuple[str, Tensor]], parents: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        found.append((path, value))
        return
    if value is None or isinstance(value, str | bytes | int | float | complex) or id(value) in parents:
        return
    parents = parents | {id(value)}
    for step, child in _children(value):
        _walk(child, path + step, found, parents)


def _children(value: object) -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(f".{item.name}", getattr(value, item.name, None)) for item in dataclasses.fields(value)]
    if callable(getattr(type(value), "keys", None)) and callable(getattr(type(value), "items", None)):
        return [(f"[{key!r}]", child) for key, child in value.items()]  # type: ignore[attr-defined]
    attributes = {} if isinstance(value, nn.Module) else getattr(value, "__dict__", {})
    return [(f".{name}", child) for name, child in attributes.items() if isinstance(child, torch.Tensor)]
