"""Hook modules for the length of a `with` block.

The difficulties it handles: in-place layers overwrite their inputs right away, so outputs are read inside the hook;
modules are called repeatedly and from several threads, are shared or return nested containers; activation checkpointing
runs a forward twice; `torch.compile` skips hooks that are added after compiling; and every hook must be removed
afterwards, also after an exception, and from copies that the network makes of itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookscope.hooks.callers import TORCHS_LAYERS
from hookscope.hooks.calls import CallHooks, Entry, Hook
from hookscope.hooks.gradient_hooks import GradientWatch
from hookscope.hooks.interrupts import finished
from hookscope.hooks.interventions import Intervention, hook_edits, separate_edits
from hookscope.hooks.observed import GradientSite, ModuleCall
from hookscope.hooks.operations import OperationChoice, OperationMode, TensorNames
from hookscope.hooks.selection import module_index
from hookscope.hooks.tracing import eager, operators_left_to_torch

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Capture(CallHooks[T]):
    """The observations of a `with` block so far.

    Attributes:
        mode: Observes operations; None if they are not.
        traced: Operators that ran as torch traces them, so that their inside is not observed: "cond at net.py:14".
    """

    mode: OperationMode[T] | None = None
    traced: dict[str, None] = field(default_factory=dict)
    # Each of our entries in a module's registers: the register, the key, and a hook, or True for a flag of a hook.
    _attached: list[tuple[MutableMapping[Any, Any], int, object]] = field(default_factory=list)

    @property
    def gradients(self) -> list[GradientSite[T]]:
        """Every output, and every input if requested, in the order of the forward pass."""
        return [] if self.gradient_watch is None else self.gradient_watch.finished_sites()

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Remove the observing hooks for the length of a `with` block; those of edits stay."""
        try:
            self._take_off()
            yield
        finally:
            self._put_on()
            if self.mode is not None:
                self.mode.reactivate()

    def must_repeat(self, loss: Tensor) -> bool:
        """Tell, before the backward pass, whether the forward pass must be repeated first, after `restart`.

        It must if a module's output is a view whose base is modified in place later: the next forward pass returns a
        copy there. The model then computes the same, unless it relies on the copy sharing memory with the base; see
        `GradientWatch.give_up_copies`. It also must if an alias was modified in place and its original used later: the
        next pass returns a view there.

        Args:
            loss: The tensor that the backward pass will start from.
        """
        return self.gradient_watch is not None and self.gradient_watch.must_repeat(loss)

    @property
    def watch(self) -> GradientWatch[T]:
        """The watch on gradients: it can stop listening, and give up replacements that change the model's result."""
        if self.gradient_watch is None:
            raise ValueError("capture() was called without gradients")
        return self.gradient_watch

    def hook(self, layers: Mapping[str, nn.Module]) -> None:
        """Hook each module once, under its first name.

        Equivalent to registering hooks `with_kwargs`, but without handles, which would cost more than the hooks do.
        """
        watch, attached = self.gradient_watch, self._attached
        skip = None if self.mode is None else Hook(self.mode.skip)
        seen: set[int] = set()
        for name, module in layers.items():
            if id(module) in seen:
                continue
            seen.add(id(module))
            state, before = vars(module), module._forward_pre_hooks
            gives_aliases = watch is not None and watch.replaces_inputs(type(module))
            if not gives_aliases and _needs_one_hook(type(module), state):
                hook = Hook(self.leaf_forward_hook, name, bool(state.get("inplace")))
                if skip is not None and type(module) is not nn.Identity:  # nn.Identity calls nothing
                    attached.append((before, id(skip), skip))
                attached.append((module._forward_hooks_always_called, id(hook), True))
            else:
                entries: list[Entry] = []
                self._entries.append(entries)
                hook, first = Hook(self.forward_hook, entries), Hook(self.forward_pre_hook, name, entries)
                attached += ((before, id(first), first), (module._forward_pre_hooks_with_kwargs, id(first), True))
            attached += ((module._forward_hooks, id(hook), hook), (module._forward_hooks_with_kwargs, id(hook), True))
        self._put_on()

    def observe_operations(self) -> None:
        """Observe operations from now on, until `end`.

        The mode is off inside torch layers that run other kernels while a mode is active. Inside others it stays on,
        unless their calls are observed: hooks that only switch it off cost as much as the mode.
        """
        if self.mode is None:
            return
        network = self.mode.modules[""]
        self.names = TensorNames(self.mode.modules, (), {})
        naming, before = Hook(self._name_inputs, self.mode.modules), network._forward_pre_hooks
        self._attached += ((before, id(naming), naming), (network._forward_pre_hooks_with_kwargs, id(naming), True))
        for module in self.mode.asking():
            off, on = Hook(self.mode.deactivate), Hook(self.mode.reactivate)
            self._attached += ((module._forward_pre_hooks, id(off), off), (module._forward_hooks, id(on), on))
            self._attached.append((module._forward_hooks_always_called, id(on), True))
        self._put_on()
        torch._C._push_on_torch_function_stack(self.mode)

    def _name_inputs(
        self, modules: Mapping[str, nn.Module], _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.names = TensorNames(modules, args, kwargs)

    def _put_on(self) -> None:
        for register, key, held in self._attached:
            register[key] = held

    def _take_off(self) -> None:
        if self.mode is not None:
            self.mode.deactivate()  # no effect if it is off
        for register, key, _ in self._attached:
            register.pop(key, None)

    def end(self, handles: Iterable[RemovableHandle] = ()) -> None:
        """Remove all hooks, and those behind the handles."""
        self._take_off()
        for handle in handles:
            handle.remove()
        self._attached.clear()
        if self.gradient_watch is not None:
            self.gradient_watch.close()


@contextmanager
def capture(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    observe: Callable[[ModuleCall, str, Tensor], T],
    *,
    gradients: Callable[[GradientSite[T], Tensor], T] | None = None,
    with_inputs: bool = False,
    track: bool = False,
    edits: Mapping[str, Sequence[Intervention]] | None = None,
    operations: OperationChoice | None = None,
) -> Iterator[Capture[T]]:
    """Observe the outputs of `layers`, and their gradients, while the block runs the model.

    Without edits the model's results are unchanged. The hooks run after the model's own hooks, and see the outputs that
    these return. Recomputation by activation checkpointing is not observed a second time.

    The gradient of an output is taken at the moment when the output is returned, and sums over all later uses. If a
    module returns several tensors, or its input, only the uses outside the module count.

    Args:
        model: The network that contains the layers; its compiled parts run eagerly in the block, so that hooks fire.
        layers: Modules by name. A module with two names is hooked once, under the first name.
        observe: Called with the call, the slot and the output, under `no_grad` and without autocast, as soon as the
            module returns, because later code may overwrite the values. Clone what must outlive the call.
        gradients: Called in the same way with a site and its gradient, when a backward pass in the block computes it.
            None watches no gradients, which costs less.
        with_inputs: Also watch the gradients of inputs, along the path through the module alone. Gradients of
            parameters may then differ in the last bits, because terms are summed in a different order.
        track: Make floating outputs that autograd does not track require a gradient, for networks without trainable
            parameters.
        edits: Changes by name of a module or, for "parameter grad", of a parameter. Observers see the edited values.
        operations: The operations of the model's own forward code to observe, as if they were modules, and to edit.

    Yields:
        The capture; read `observations` and `gradients` after the passes, or call `restart()` between them. For correct
        gradients, check `must_repeat(loss)` before each backward pass.
    """
    lock = RLock()
    watch = None if gradients is None else GradientWatch(gradients, with_inputs, track, lock)
    captured = Capture(observe, watch, lock)
    if operations is not None:
        captured.mode = mode = OperationMode(captured, operations, operations.modules or module_index(model)[0])
        captured.resume = mode.resume
    handles: list[RemovableHandle] = []
    with eager(captured.traced):
        try:
            captured.observe_operations()
            if edits:
                hook_edits(model, edits, handles)
            captured.hook(layers)
            if edits:
                separate_edits(model, edits, handles)
            yield captured
        finally:
            finished(partial(captured.end, handles))


@contextmanager
def observed(
    layers: Mapping[str, nn.Module], observe: Callable[[ModuleCall, str, Tensor], T], is_counted: Callable[[], bool]
) -> Iterator[Capture[T]]:
    """Observe the outputs of `layers`, as `capture` does, in a training that goes on as it would without.

    Compiled parts stay compiled, where hooks do not fire: what ran as written would draw other random numbers.

    Args:
        layers: As in `capture`.
        observe: As in `capture`.
        is_counted: Asked where a module is called; a call for which it returns False is not observed.
    """
    captured = Capture(observe, None, RLock(), is_counted=is_counted)
    try:
        with operators_left_to_torch(captured.traced):
            captured.hook(layers)
            yield captured
    finally:
        finished(captured.end)


def _needs_one_hook(kind: type[nn.Module], state: Mapping[str, Any]) -> bool:
    """Tell whether a module is one of torch's own that calls no modules and overwrites its input always or never.

    No other hook can run during such a call: a single forward hook is enough, which makes capturing cheaper.
    """
    return (
        kind in TORCHS_LAYERS
        and not (state["_modules"] or state["_forward_hooks"] or state["_forward_pre_hooks"] or "forward" in state)
        and not (state.get("inplace") and kind.__module__ != "torch.nn.modules.activation")  # Dropout: in train mode
    )
