"""Find the in-place operation that overwrites what the backward pass needs: autograd's error names no layer."""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookscope.hooks.attributes import argument
from hookscope.hooks.autograd import graph_leaves, graph_nodes
from hookscope.hooks.callers import CALL, code_of, frames_around, source_line, whose_code
from hookscope.inspection.state.held_values import storages_of


class Overwriting(NamedTuple):
    """A saved tensor that is overwritten before the backward pass reads it; modules are named, "" is the model.

    Lines are those of the network's own code, "net.py:14": where it calls the operation or the layer; "" if none does.
    """

    saved_by: str  # the innermost module whose forward saved it
    node: str  # the backward operation that needs it: "TanhBackward0"
    saved_at: str
    overwritten_by: str | None  # the innermost module in whose forward that happened; None if it was not seen
    operation: str  # what overwrote it: "relu_"
    overwritten_at: str


class _Saved(NamedTuple):
    tensor: Tensor
    version: int
    module: str
    line: str
    write_count: int


class _OverwrittenError(Exception):
    """Ends the backward pass at the first saved tensor that has been overwritten."""


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Records the tensors that a forward pass saves, and those that operations write to, in order."""

    supports_higher_order_operators = True

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        forwards = (code_of(module.forward) for module in modules.values())
        self.names = {id(module): name for name, module in modules.items()}
        self.codes = {CALL, *(code for code in forwards if code is not None)}
        self.writes: list[tuple[set[int], str, str, str]] = []  # storages, module, operation, line
        self.overwriting: Overwriting | None = None

    def pack(self, tensor: Tensor) -> _Saved:
        return _Saved(tensor, tensor._version, *self.place(sys._getframe(1)), len(self.writes))

    def place(self, frame: FrameType | None) -> tuple[str, str]:
        """Return the innermost module that runs, hooked or not, and the nearest line of the network's own code."""
        module: str | None = None
        nearest: FrameType | None = None
        for around in frames_around(frame):
            if nearest is None and whose_code(around.f_code) == "network":
                nearest = around
            if around.f_code in self.codes and (name := self.names.get(id(around.f_locals.get("self")))) is not None:
                module = name if module is None else module
                if nearest is not None:
                    return module, source_line(nearest)
        return module or "", ""

    def unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor._version == saved.version:
            return saved.tensor
        storages = _storages(saved.tensor)
        later = (write[1:] for write in self.writes[saved.write_count :] if write[0] & storages)
        node = torch._C._current_autograd_node()
        name = node.name() if node is not None else ""
        self.overwriting = Overwriting(saved.module, name, saved.line, *next(later, (None, "", "")))
        raise _OverwrittenError

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        schema = getattr(function, "_schema", None)  # `torch.cond` and its like have none
        for place, parameter in enumerate(schema.arguments if schema is not None else ()):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                value = argument(args, kwargs or {}, place, parameter.name)
                written = [value] if isinstance(value, Tensor) else [item for item in value or () if item is not None]
                name = function._schema.name.rpartition("::")[2]
                module, line = self.place(sys._getframe(1))
                self.writes += [(_storages(tensor), module, name, line) for tensor in written]
        return function(*args, **(kwargs or {}))


def _storages(tensor: Tensor) -> set[int]:
    return {storage._cdata for storage in storages_of(tensor)}


def find_overwriting(modules: Mapping[str, nn.Module], loss: Callable[[], Tensor]) -> Overwriting | None:
    """Run forward and backward until the backward pass needs a tensor that has been overwritten; None if none is.

    `modules` are all of the network, by name; `loss` runs it and its loss.
    """
    trace = _Trace(modules)
    hooks = torch.autograd.graph.saved_tensors_hooks(trace.pack, trace.unpack)
    with suppress(_OverwrittenError), hooks:
        with trace:
            value = loss()
        torch.autograd.grad(value, graph_leaves(graph_nodes(value)), retain_graph=True, allow_unused=True)
    return trace.overwriting


def overwriting_message(model: str, modules: Mapping[str, nn.Module], write: Overwriting) -> str:
    """Return the sentence for an error message about a network of this name."""

    def called(layer: str, line: str) -> str:
        return f"{layer or '(model)'} ({', '.join(filter(None, (type(modules[layer]).__name__, line)))})"

    by = "an operation"
    if write.overwritten_by is not None:
        by = f"{write.operation} in {called(write.overwritten_by, write.overwritten_at)}"
    return (
        f"{model} cannot be differentiated, with or without hookscope: {by} overwrites the tensor that "
        f"{called(write.saved_by, write.saved_at)} saved for its backward pass ({write.node}). Make it work on a copy "
        f"(inplace=False). The gradients shown assume that it does."
    )
