"""Find the in-place operation that overwrites what the backward pass needs: autograd's error names no layer."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookscope.hooks.autograd import graph_leaves, graph_nodes


class Overwriting(NamedTuple):
    """A saved tensor that is overwritten before the backward pass reads it; modules are named, "" is the model."""

    saved_by: str  # the innermost module whose forward saved it
    node: str  # the backward operation that needs it: "TanhBackward0"
    overwritten_by: str | None  # the innermost module in whose forward that happened; None if it was not seen
    operation: str  # what overwrote it: "relu_"


class _Saved(NamedTuple):
    tensor: Tensor
    version: int
    module: str
    write_count: int


class _FoundError(Exception):
    """Ends the backward pass at the first saved tensor that has been overwritten."""


@dataclass(slots=True)
class _Trace:
    """What a forward pass saved and overwrote, in order."""

    running: list[str] = field(default_factory=lambda: [""])
    writes: list[tuple[int, str, str]] = field(default_factory=list)  # storage, module, operation
    found: Overwriting | None = None

    def pack(self, tensor: Tensor) -> _Saved:
        return _Saved(tensor, tensor._version, self.running[-1], len(self.writes))

    def unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor._version == saved.version:
            return saved.tensor
        storage = _storage(saved.tensor)
        later = (write[1:] for write in self.writes[saved.write_count :] if write[0] == storage)
        node = torch._C._current_autograd_node()
        self.found = Overwriting(saved.module, node.name() if node is not None else "", *next(later, (None, "")))
        raise _FoundError


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own has no types
    """Notes every operation that writes to one of its arguments."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.trace = trace

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = [value] if isinstance(value, Tensor) else [each for each in value or () if each is not None]
                name = function._schema.name.rpartition("::")[2]
                self.trace.writes += [(_storage(each), self.trace.running[-1], name) for each in written]
        return function(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def find_overwriting(modules: Mapping[str, nn.Module], loss: Callable[[], Tensor]) -> Overwriting | None:
    """Run forward and backward until the backward pass needs a tensor that has been overwritten; None if none is.

    `modules` are all of the network, by name; `loss` runs it and its loss, without other hooks.
    """
    trace = _Trace()
    hooks = torch.autograd.graph.saved_tensors_hooks(trace.pack, trace.unpack)
    with suppress(_FoundError), _named(modules, trace.running), hooks:
        with _Writes(trace):
            value = loss()
        torch.autograd.grad(value, graph_leaves(graph_nodes(value)), retain_graph=True, allow_unused=True)
    return trace.found


def overwriting_message(model: str, modules: Mapping[str, nn.Module], found: Overwriting) -> str:
    """Return the sentence for an error message about a network of this name."""

    def called(layer: str) -> str:
        return f"{layer or '(model)'} ({type(modules[layer]).__name__})"

    by = "an operation" if found.overwritten_by is None else f"{found.operation} in {called(found.overwritten_by)}"
    return (
        f"{model} cannot be differentiated, with or without hookscope: {by} overwrites in place what "
        f"{called(found.saved_by)} saved for its backward pass ({found.node}). Let it work on a copy "
        f"(inplace=False). The gradients shown are what they would be then."
    )


@contextmanager
def _named(modules: Mapping[str, nn.Module], running: list[str]) -> Iterator[None]:
    """Keep the names of the modules that run on top of each other in a list."""

    def before(name: str, *_: object) -> None:
        running.append(name)

    def after(*_: object) -> None:
        running.pop()

    with ExitStack() as hooks:
        for name, module in modules.items():
            if name:
                hooks.enter_context(module.register_forward_pre_hook(partial(before, name), prepend=True))
                hooks.enter_context(module.register_forward_hook(after, always_call=True))
        yield
