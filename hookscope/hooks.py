"""Hook modules for the length of a `with` block.

What it hides: in-place layers overwrite their inputs a moment later, so outputs are looked at inside the hook; modules
are called repeatedly, share an object or return nested containers; activation checkpointing runs a forward twice;
`torch.compile` skips hooks that come after compiling; and every hook must be gone afterwards, whatever happened.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookscope.gradient_watch import GradientSite, GradientWatch, plain_arithmetic
from hookscope.interventions import Intervention, hook_edits, separate_edits
from hookscope.nested import tensors_given, tensors_in

T = TypeVar("T")

_new = tuple.__new__  # for named tuples in hooks: to call their class is a Python call more


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
        passed_through: The output is an input, unchanged. Not known of inference tensors.
        in_place: The module overwrote one of its inputs. Of inference tensors known only for torch's own activations.
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
    """

    observations: list[Observation[T]] = field(default_factory=list)
    _calls: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _called_before: set[str] = field(default_factory=set)
    _watch: GradientWatch[T] | None = None

    @property
    def called(self) -> set[str]:
        """Names of the layers that were called. A leaf whose only call raised may be missing."""
        return self._called_before | self._calls.keys()

    @property
    def gradients(self) -> list[GradientSite[T]]:
        """Every output, and input if asked for, in the order in which the forward pass met them."""
        return [] if self._watch is None else list(self._watch.sites.values())

    def restart(self) -> list[Observation[T]]:
        """Hand out the observations and begin anew, with calls counted from 0 again: once per forward pass."""
        finished, self.observations = self.observations, []
        self._called_before |= self._calls.keys()
        self._calls.clear()
        if self._watch is not None:
            self._watch.restart()
        return finished

    def listen(self, *, on: bool) -> None:
        """Observe gradients that arrive, as at the beginning, or do not: for what differentiates before the end."""
        if self._watch is not None:
            self._watch.listening = on

    def must_repeat(self) -> bool:
        """Tell, after a forward pass, whether gradients can be seen only if it is run again, after `restart`.

        It has to where a module's output is a view that is modified in place later, and where inputs are watched that
        are modified in place: the next forward pass will hand on copies there. The model then computes the same,
        unless it counts on such a copy sharing its memory; see `give_up_copies`.
        """
        return self._watch is not None and self._watch.must_repeat()

    def give_up_copies(self) -> None:
        """Hand on no more copies, and say of their gradients that they are not seen."""
        if self._watch is not None:
            self._watch.give_up_copies()


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
) -> Iterator[Capture[T]]:
    """Observe the outputs of `layers`, and their gradients, while the block runs the model.

    Without edits the model computes what it always does. Hooks come after those the model already has, so what they
    replace is what is seen. A recomputation by activation checkpointing is not observed a second time.

    A gradient is that of the loss with respect to the output at the moment it was returned, over all its uses: also
    those inside the module, where one output is computed from another.

    Args:
        model: The network the layers belong to; compiled parts of it run eagerly inside the block, so that hooks fire.
        layers: Modules by name. An object under two names is hooked once, under the first.
        observe: Called with the call, the slot and the output, under `no_grad` and without autocast, as soon as the
            module returns: the one moment at which the values are certain. What must outlive it, it must clone.
        gradients: Called likewise with a site and its gradient, when a backward pass inside the block has it. None
            watches no gradients, which costs less.
        with_inputs: Watch the gradients of inputs too, along the way through the module alone. Gradients of parameters
            may then differ in the last bits, because parts are added in another order.
        track: Make floating outputs that autograd does not track require a gradient: for networks without a trainable
            parameter.
        edits: What to change, by name of a module or, for "parameter grad", of a parameter of the model. Edits come
            before what is observed.

    Yields:
        The capture; read `observations` and `gradients` after the passes, or `restart()` between them. To be sure of
        gradients, ask `must_repeat()` after each forward pass.
    """
    captured: Capture[T] = Capture()
    if gradients is not None:
        captured._watch = GradientWatch(gradients, with_inputs, track)
    handles: list[RemovableHandle] = []
    attached: list[MutableMapping[Any, Any]] = []
    key: Any = object()
    with _eager():
        try:
            if edits:
                hook_edits(model, edits, handles)
            _hook(layers, captured, observe, key, attached)
            if edits:
                separate_edits(model, edits, handles)
            yield captured
        finally:
            for handle in handles:
                handle.remove()
            for hooks in attached:
                hooks.pop(key, None)
            if captured._watch is not None:
                captured._watch.close()


class _Entry(NamedTuple):
    """A call that has begun: itself, the versions of its inputs, and what it was given."""

    call: ModuleCall
    versions: list[int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _hook(
    layers: Mapping[str, nn.Module],
    captured: Capture[T],
    observe: Callable[[ModuleCall, str, Tensor], T],
    key: Any,
    attached: list[MutableMapping[Any, Any]],
) -> None:
    """Hook each module once, under `key`; collect in `attached` what holds the hooks."""
    watch = captured._watch
    hooks: _Hooks = _OutputHooks(captured, observe) if watch is None else _WatchedHooks(captured, observe, watch)
    only, before, after = hooks.only, hooks.before, hooks.after
    gives_views = watch is not None and watch.with_inputs
    hooked: set[int] = set()
    for name, module in layers.items():
        if id(module) in hooked:
            continue
        hooked.add(id(module))
        if _only_returns(module) and not gives_views:
            _attach(module, key, None, partial(only, name, bool(vars(module).get("inplace"))), attached)
        else:
            entries: list[_Entry] = []
            _attach(module, key, partial(before, name, entries), partial(after, entries), attached)


def _attach(
    module: nn.Module,
    key: Any,
    before: Callable[..., Any] | None,
    after: Callable[..., Any],
    attached: list[MutableMapping[Any, Any]],
) -> None:
    """Do what registering a forward pre-hook and a forward hook `with_kwargs` does, but make no handle for each.

    Handles would cost more than the hooks themselves. What holds the hooks is added to `attached`.
    """
    if before is not None:
        attached += (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
        module._forward_pre_hooks[key] = before
        module._forward_pre_hooks_with_kwargs[key] = True
    attached += (module._forward_hooks, module._forward_hooks_with_kwargs)
    module._forward_hooks[key] = after
    module._forward_hooks_with_kwargs[key] = True


_TORCHS_OWN = frozenset(each for each in vars(nn).values() if isinstance(each, type))


def _only_returns(module: nn.Module) -> bool:
    """Tell whether the module is one of torch's own that calls no modules and overwrites its input always or never.

    Such a call is over once it has begun, as far as hooks can see: one hook does, which makes capturing cheaper.
    """
    kind, state = type(module), vars(module)
    return (
        kind in _TORCHS_OWN
        and not (state["_modules"] or state["_forward_hooks"] or state["_forward_pre_hooks"] or "forward" in state)
        and not (state.get("inplace") and kind.__module__ != "torch.nn.modules.activation")  # Dropout: when it trains
    )


class _Hooks(Protocol):
    """Hooks for outputs, given what precedes a hook's own arguments; one set serves all modules."""

    def only(self, layer: str, overwrites: bool, *called_with: Any) -> object:
        """Forward hook of modules that only return, and those that only overwrite their input."""

    def before(self, layer: str, entries: list[_Entry], *called_with: Any) -> object:
        """Forward pre-hook of other modules; `entries` is the module's own list of the calls that have begun."""

    def after(self, entries: list[_Entry], *called_with: Any) -> object:
        """Forward hook of other modules."""


@dataclass(frozen=True, slots=True)
class _OutputHooks(Generic[T]):
    """Hooks that observe outputs. They run at every call of every module, so they call as little as they can."""

    captured: Capture[T]
    observe: Callable[[ModuleCall, str, Tensor], T]

    def only(
        self,
        layer: str,
        overwrites: bool,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: object,
    ) -> None:
        if torch._C._current_graph_task_id() == -1:  # else checkpointing is recomputing a forward
            inputs = tensors_given(args, kwargs)
            index = self.captured._calls[layer]
            self.captured._calls[layer] = index + 1
            call = _new(ModuleCall, (layer, module, index, inputs))
            _observe(self.captured, self.observe, call, tensors_in(output), in_place=overwrites)

    def before(
        self, layer: str, entries: list[_Entry], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch._C._current_graph_task_id() == -1:
            inputs = tensors_given(args, kwargs)
            index = self.captured._calls[layer]
            self.captured._calls[layer] = index + 1
            call = _new(ModuleCall, (layer, module, index, inputs))
            entries.append(_Entry(call, _versions(inputs), args, kwargs))

    def after(
        self, entries: list[_Entry], _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        if torch._C._current_graph_task_id() == -1:
            call, in_place = _end(entries, args, kwargs)
            _observe(self.captured, self.observe, call, tensors_in(output), in_place=in_place)


@dataclass(frozen=True, slots=True)
class _WatchedHooks(Generic[T]):
    """Hooks that observe outputs and watch gradients; in the backward pass, what checkpointing recomputes as well."""

    captured: Capture[T]
    observe: Callable[[ModuleCall, str, Tensor], T]
    watch: GradientWatch[T]

    def only(
        self,
        layer: str,
        overwrites: bool,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: object,
    ) -> object:
        replayed = torch._C._current_graph_task_id() != -1
        inputs = tensors_given(args, kwargs)
        index = self._begin(layer, inputs, replayed=replayed)
        if index is None:
            return None
        outputs = tensors_in(output)
        if not replayed:
            call = _new(ModuleCall, (layer, module, index, inputs))
            _observe(self.captured, self.observe, call, outputs, in_place=overwrites)
        return self.watch.outputs(module, layer, index, output, outputs, [] if overwrites else inputs)

    def before(
        self, layer: str, entries: list[_Entry], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        inputs = tensors_given(args, kwargs)
        index = self._begin(layer, inputs, replayed=torch._C._current_graph_task_id() != -1)
        if index is None:
            return None
        given: object = None
        if self.watch.with_inputs:
            args, kwargs = given = self.watch.inputs(module, layer, index, args, kwargs)
            inputs = tensors_given(args, kwargs)
        entries.append(_Entry(ModuleCall(layer, module, index, inputs), _versions(inputs), args, kwargs))
        return given

    def after(
        self, entries: list[_Entry], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> object:
        replayed = torch._C._current_graph_task_id() != -1
        if replayed and not (entries and entries[-1].args is args and entries[-1].kwargs is kwargs):
            return None
        call, in_place = _end(entries, args, kwargs)
        outputs = tensors_in(output)
        if not replayed:
            _observe(self.captured, self.observe, call, outputs, in_place=in_place)
        if in_place:
            self.watch.note_in_place(call.layer, call.call)
        return self.watch.outputs(module, call.layer, call.call, output, outputs, [] if in_place else call.inputs)

    def _begin(self, layer: str, inputs: Sequence[tuple[str, Tensor]], *, replayed: bool) -> int | None:
        """Count a call; return its index, None if it replays one that was watched when it first ran."""
        if replayed:
            return self.watch.replayed_call(layer, inputs)
        index = self.captured._calls[layer]
        self.captured._calls[layer] = index + 1
        if not torch.is_grad_enabled():
            self.watch.note_without_gradients(layer, index, inputs)
        return index


def _versions(inputs: Sequence[tuple[str, Tensor]]) -> list[int]:
    """Return the in-place modification count of each tensor; inference tensors keep none."""
    return [0 if tensor.is_inference() else tensor._version for _, tensor in inputs]


def _end(entries: list[_Entry], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ModuleCall, bool]:
    """Return the call that has ended, and whether it overwrote an input."""
    entry = entries.pop()
    while entry.args is not args or entry.kwargs is not kwargs:  # a call that raised, and the model went on
        entry = entries.pop()
    return entry.call, entry.versions != _versions(entry.call.inputs)


def _observe(
    captured: Capture[T],
    observe: Callable[[ModuleCall, str, Tensor], T],
    call: ModuleCall,
    outputs: Sequence[tuple[str, Tensor]],
    *,
    in_place: bool,
) -> None:
    """Look at what a call returned."""
    if not outputs:
        captured.observations.append(Observation(call.layer, call.call, "", None, False, in_place))
    for slot, tensor in outputs:
        passed_through = False
        if not in_place:
            for _, given in call.inputs:  # not any(): this runs at every call of every module
                passed_through |= given is tensor and not tensor.is_inference()
        # Gradients by hand: this runs at every call of every module, and a context is several calls more.
        if torch._C._is_any_autocast_enabled():
            with plain_arithmetic(tensor):
                value = observe(call, slot, tensor)
        elif torch.is_grad_enabled():
            torch._C._set_grad_enabled(False)
            try:
                value = observe(call, slot, tensor)
            finally:
                torch._C._set_grad_enabled(True)
        else:
            value = observe(call, slot, tensor)
        seen = _new(Observation, (call.layer, call.call, slot, value, passed_through, in_place))
        captured.observations.append(seen)


@contextmanager
def _eager() -> Iterator[None]:
    """Run compiled modules and functions as written: torch skips hooks that are added after compiling."""
    if "torch._dynamo" in sys.modules:  # if not, nothing is compiled, and the import would cost a second
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
