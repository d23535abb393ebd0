"""The hooks that run at every call of every module: they observe outputs and, if requested, watch gradients.

This code is hot: it makes as few Python calls as possible.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from threading import RLock
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from hookscope.hooks.autograd import observed_plainly, plain_arithmetic
from hookscope.hooks.gradient_hooks import GradientWatch
from hookscope.hooks.observed import ModuleCall, Observation, Operation, RowKey, physical
from hookscope.hooks.pytree import tensors_given, tensors_in
from hookscope.hooks.recognition import Identities

T = TypeVar("T")


class Hook(partial[object]):
    """A hook that is not copied with its module: networks may copy or pickle themselves while they run."""

    def __reduce__(self) -> Any:
        """Copy and pickle as a hook that removes itself from the copied module, and notes that the copy is called."""
        observer: Any = getattr(self.func, "__self__", None)
        name = next(iter(self.args), "")
        is_named = isinstance(observer, CallHooks) and isinstance(name, str)
        return _CopiedHook, (_remove_copied_hook, *((observer.number, name) if is_named else (0, "")))


class _CopiedHook(partial[None]):
    """The stand-in for a hook in a copied module: it removes itself, and notes that the copy was called."""


def _remove_copied_hook(_number: int, _name: str, module: nn.Module, *_called_with: object) -> None:
    for hooks, *flags in (
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if type(hook) is _CopiedHook]:
            copied: Any = hooks[key]
            number, name = copied.args
            observer = _observers.get(number)
            if observer is not None:
                observer.copies[name] = None
            for flag in (hooks, *flags):
                flag.pop(key, None)  # type: ignore[attr-defined]


# By number, which a pickled hook can keep.
_observers: "WeakValueDictionary[int, CallHooks[Any]]" = WeakValueDictionary()
_observer_numbers = count(1)


class Entry(NamedTuple):
    """A call in progress.

    Attributes:
        frame: `id` of the frame that runs the call's hooks. The arguments cannot identify a call: torch replaces them
            for full backward hooks, after all pre-hooks.
        sources: As in `Observation`.
    """

    frame: int
    call: ModuleCall
    versions: list[int]
    args: tuple[Any, ...]
    sources: tuple[RowKey | str, ...]


@dataclass(slots=True, weakref_slot=True, eq=False)
class CallHooks(Generic[T]):
    """The hooks of one capture, shared by all modules, and their observations in the latest forward pass.

    Attributes:
        resume: Activates the mode that observes operations again, after a layer that skips it; None without one.
        names: Names of tensors that no call returns, by `id`, for `Observation.sources`.
        observations: Since the latest `restart`, in the order in which modules finished.
        counts: How often each layer was called.
        is_counted: Asked at every call; a call for which it returns False is not observed.
        copies: Layers that the network copied while it ran, and whose copy it called.
    """

    observe: Callable[[ModuleCall, str, Tensor], T]
    gradient_watch: GradientWatch[T] | None
    lock: RLock
    resume: Callable[[], None] | None = None
    names: dict[int, str] = field(default_factory=dict)
    observations: list[Observation[T]] = field(default_factory=list)
    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    is_counted: Callable[[], bool] | None = None
    copies: dict[str, None] = field(default_factory=dict)
    number: int = field(default_factory=_observer_numbers.__next__)
    _identities: Identities = field(default_factory=Identities)
    _called_before: set[str] = field(default_factory=set)
    _entries: list[list[Entry]] = field(default_factory=list)  # of each module

    def __post_init__(self) -> None:
        """Register for the hooks of copied modules."""
        _observers[self.number] = self

    @property
    def called(self) -> set[str]:
        """Names of the layers that were called."""
        return self._called_before | self.counts.keys()

    def restart(self) -> list[Observation[T]]:
        """Return the observations and start over, counting calls from 0: call it once per forward pass."""
        self._called_before |= self.counts.keys()
        finished, self.observations = self.observations, []
        self.counts.clear()
        self._identities.by_id.clear()
        for entries in self._entries:  # calls that raised stay there, and hold their inputs
            entries.clear()
        if self.gradient_watch is not None:
            self.gradient_watch.restart()
        return finished

    def leaf_forward_hook(
        self,
        layer: str,
        overwrites: bool,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: object,
    ) -> object:
        """Forward hook of modules that call no others, and overwrite their input always or never.

        It is also called, with None as the output, if the module raises: the call counts, as for any module.
        """
        if self.resume is not None:
            self.resume()
        inputs, outputs = tensors_given(args, kwargs), tensors_in(output)
        with self.lock, _without_overrides():
            index = self._count(layer, inputs)
            if index is None or (output is None and inputs):
                return None
            sources = self._identities.sources(inputs, self.names, overwritten=overwrites) if self.resume else ()
            call = ModuleCall(layer, module, index, inputs)
            return self._finish(call, inputs, sources, output, outputs, in_place=overwrites)

    def forward_pre_hook(
        self, layer: str, entries: list[Entry], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        """Forward pre-hook of other modules; `entries` is the module's list of calls in progress."""
        inputs = tensors_given(args, kwargs)
        watch, replaced = self.gradient_watch, None
        with self.lock, _without_overrides():
            index = self._count(layer, inputs)
            if index is None:
                if watch is None or _graph_task() == _NONE:
                    return None
                return watch.inputs(ModuleCall(layer, module, 0, inputs), args, kwargs, is_replay=True)
            call = ModuleCall(layer, module, index, inputs)
            if watch is not None and watch.replaces_inputs(type(module)):
                args, kwargs = replaced = watch.inputs(call, args, kwargs)
                before, inputs = inputs, tensors_given(args, kwargs)
                self._identities.replaced(before, inputs)
                call = call._replace(inputs=inputs)
            sources = self._identities.sources(inputs, self.names) if self.resume is not None else ()
            entries.append(Entry(id(sys._getframe(1)), call, _versions(inputs), args, sources))
        return replaced

    def forward_hook(
        self, entries: list[Entry], _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> object:
        """Forward hook of other modules."""
        if self.gradient_watch is None and _graph_task() != _NONE:
            return None
        entry = _pop_entry(entries, id(sys._getframe(1)))
        if entry is None:  # a replay of a call that was observed when it first ran
            return None
        inputs, outputs = entry.call.inputs, tensors_in(output)
        if entry.args is not args:  # torch, or a later hook, has replaced the inputs
            inputs = [*inputs, *tensors_given(args, kwargs)]
        with self.lock, _without_overrides():
            in_place = entry.versions != _versions(entry.call.inputs)
            return self._finish(entry.call, inputs, entry.sources, output, outputs, in_place=in_place)

    def operation_begins(self, inputs: Sequence[tuple[str, Tensor]]) -> tuple[list[int], tuple[RowKey | str, ...]]:
        """Record the versions and the sources of an operation's inputs, before it may overwrite them."""
        with self.lock, _without_overrides():
            return _versions(inputs), self._identities.sources(inputs, self.names)

    def operation_ends(
        self,
        layer: str,
        module: nn.Module,
        operation: Operation,
        inputs: Sequence[tuple[str, Tensor]],
        begun: tuple[list[int], tuple[RowKey | str, ...]],
        output: object,
        outputs: Sequence[tuple[str, Tensor]],
    ) -> object:
        """Observe the output of an operation; return the value that the network continues with.

        Args:
            layer: The label of the operation, without the number of the call.
            module: The module whose forward called it.
            operation: The operation.
            inputs: Its input tensors.
            begun: The result of `operation_begins`.
            output: Its return value.
            outputs: The tensors in it; for an operation that returns nothing, the tensors it wrote to.
        """
        with self.lock, _without_overrides():
            index = self._count(layer, inputs)
            if index is None:
                return output
            versions, sources = begun
            in_place = versions != _versions(inputs)
            call = ModuleCall(layer, module, index, inputs, operation)
            ours = self._finish(call, inputs, sources, output, outputs, in_place=in_place)
            return output if ours is None else ours

    def _count(self, layer: str, inputs: Sequence[tuple[str, Tensor]]) -> int | None:
        """Return the number of the layer's call.

        None for a call that is not to be observed: it replays one that was observed already (and watched, if
        requested), or torch records what runs as a graph, on tensors without values.
        """
        watch = self.gradient_watch
        if _dispatch_modes() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
            return None
        if self.is_counted is not None and not self.is_counted():
            return None
        if _graph_task() != _NONE:
            index = None if watch is None else watch.replays.call_of(layer, inputs)
            if index is None:
                return None
        else:
            index = self.counts[layer]
            self.counts[layer] = index + 1
            if watch is not None and not torch.is_grad_enabled():
                watch.replays.note(layer, index, inputs)
        if watch is not None:
            watch.note_inputs(inputs)
        return index

    def _finish(
        self,
        call: ModuleCall,
        inputs: Sequence[tuple[str, Tensor]],
        sources: tuple[RowKey | str, ...],
        output: object,
        outputs: Sequence[tuple[str, Tensor]],
        *,
        in_place: bool,
    ) -> object:
        """Observe the output of a call, under the lock; return its replacement, or None to keep it."""
        if _graph_task() == _NONE:
            if not outputs:
                place = (call.layer, call.call, "")
                self.observations.append(Observation(place, None, False, in_place, None, call.operation, sources))
            observed = call if len(outputs) < 2 else call._replace(slots=[slot for slot, _ in outputs])
            for slot, tensor in outputs:
                place = (call.layer, call.call, slot)
                passed_through, first = self._identities.show(place, tensor, inputs, in_place=in_place)
                vmapped = 0
                if _transform_level() is not None:  # inside vmap, jvp or another transform
                    value, vmapped = _observe_physical(self.observe, observed, slot, tensor)
                else:
                    value = observed_plainly(self.observe, observed, slot, tensor)
                seen = Observation(place, value, passed_through, in_place, first, call.operation, sources, vmapped)
                self.observations.append(seen)
        if self.gradient_watch is None:
            return None
        result = self.gradient_watch.outputs(call, output, outputs, [] if in_place else inputs)
        if result is not None:  # the network continues with another output
            self._identities.replaced(outputs, tensors_in(result))
        return result


def _versions(inputs: Sequence[tuple[str, Tensor]]) -> list[int]:
    try:
        return [tensor._version for _, tensor in inputs]  # nearly always
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for _, tensor in inputs]


# Modes, and overrides of tensor subclasses, which may raise.
_without_overrides = torch._C.DisableTorchFunction
# Of the backward pass that is running, in which activation checkpointing recomputes forward passes.
_graph_task, _NONE = torch._C._current_graph_task_id, -1
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform_level = torch._C._functorch.maybe_current_level


def _pop_entry(entries: list[Entry], frame: int) -> Entry | None:
    """Pop the call whose hooks run in a frame; None if its start was not recorded.

    Calls of other threads, and calls whose error the model caught, may lie above it.
    """
    for at in range(len(entries) - 1, -1, -1):
        if entries[at].frame == frame:
            return entries.pop(at)
    return None


def _observe_physical(
    observe: Callable[[ModuleCall, str, Tensor], T], call: ModuleCall, slot: str, tensor: Tensor
) -> tuple[T, int]:
    """Observe a tensor inside a `torch.func` transform; also return how many of its axes are those of `vmap`."""
    held, axes = physical(tensor)
    with temporarily_clear_interpreter_stack(), plain_arithmetic():
        values = held.movedim(axes, [*range(len(axes))]) if axes else held
        return observe(call._replace(vmapped=len(axes)), slot, values), len(axes)
