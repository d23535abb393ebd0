"""Hook modules for the length of a `with` block.

What it hides: in-place layers overwrite their inputs a moment later, so outputs are looked at inside the hook; modules
are called repeatedly and by several threads, share an object or return nested containers; activation checkpointing runs
a forward twice; `torch.compile` skips hooks that come after compiling; and every hook must be gone afterwards, whatever
happened, also from copies that the network makes of itself.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils.hooks import RemovableHandle

from hookscope.hooks.gradient_hooks import GradientSite, GradientWatch, plain_arithmetic
from hookscope.hooks.identities import Identities
from hookscope.hooks.interventions import Intervention, hook_edits, separate_edits
from hookscope.hooks.pytree import tensors_given, tensors_in

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
        repeats: Where the tensor was observed first, (layer, call, slot), if it is passed through and was observed
            before in this forward pass, and nothing has written to it since; else None.
    """

    layer: str
    call: int
    slot: str
    value: T | None
    passed_through: bool
    in_place: bool
    repeats: tuple[str, int, str] | None


@dataclass(slots=True)
class Capture(Generic[T]):
    """What the block has shown so far.

    Attributes:
        observations: In the order in which modules finished.
    """

    observations: list[Observation[T]] = field(default_factory=list)
    _calls: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _called_before: set[str] = field(default_factory=set)
    _identities: Identities = field(default_factory=Identities)
    _watch: GradientWatch[T] | None = None
    _key: Any = field(default_factory=object)
    _attached: list[MutableMapping[Any, Any]] = field(default_factory=list)
    _lock: AbstractContextManager[object] = field(default_factory=RLock)

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
        self._identities = Identities()
        if self._watch is not None:
            self._watch.restart()
        return finished

    def listen(self, *, on: bool) -> None:
        """Observe gradients that arrive, as at the beginning, or do not: for what differentiates before the end."""
        if self._watch is not None:
            self._watch.listening = on

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Take off the hooks that observe for the length of a `with` block; those of edits stay."""
        held = [(hooks, hooks.pop(self._key)) for hooks in self._attached if self._key in hooks]
        try:
            yield
        finally:
            for hooks, hook in held:
                hooks[self._key] = hook

    def must_repeat(self, loss: Tensor) -> bool:
        """Tell, before the backward pass, whether the forward pass has to be run again first, after `restart`.

        It has to where a module's output is a view whose base is modified in place later: the next forward pass returns
        a copy there. The model then computes the same, unless it counts on the copy sharing memory with the base; see
        `give_up_copies`. It also has to where an alias was modified in place and its original used later: the next
        pass returns a view there.

        Args:
            loss: What the backward pass will begin with.
        """
        return self._watch is not None and self._watch.must_repeat(loss)

    def give_up_copies(self) -> None:
        """Return no more copies. Of their gradients it is said that they are not seen."""
        if self._watch is not None:
            self._watch.give_up_copies()

    @property
    def gave_aliases(self) -> bool:
        """Whether any tensor of the latest forward pass was replaced by an alias, to tell its uses apart.

        A model that asks whether two tensors are one object may then compute something else; see `give_up_aliases`.
        """
        return self._watch is not None and self._watch.gave_aliases

    @property
    def aliases_meet(self) -> bool:
        """Whether a module was called with such an alias and with the tensor itself, or with two aliases of it."""
        return self._watch is not None and self._watch.aliases_meet

    def give_up_aliases(self) -> None:
        """Replace no more tensors by aliases.

        The gradient of an output that is an input is then that of all uses of the tensor. Those of inputs are not seen.
        """
        if self._watch is not None:
            self._watch.give_up_aliases()


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

    A gradient is that of the loss with respect to the output at the moment it was returned, over all its uses after
    that. Of a module that returns several tensors, or its input, only the uses outside the module count.

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
        gradients, ask `must_repeat(loss)` before each backward pass.
    """
    captured: Capture[T] = Capture()
    if gradients is not None:
        captured._watch = GradientWatch(gradients, with_inputs, track, captured._lock)
    handles: list[RemovableHandle] = []
    with _eager():
        try:
            if edits:
                hook_edits(model, edits, handles)
            _hook(layers, captured, observe)
            if edits:
                separate_edits(model, edits, handles)
            yield captured
        finally:
            for handle in handles:
                handle.remove()
            for hooks in captured._attached:
                hooks.pop(captured._key, None)
            if captured._watch is not None:
                captured._watch.close()


class _Entry(NamedTuple):
    """A call that has begun.

    Attributes:
        frame: Identity of the frame that runs the call's hooks. Arguments would not do: torch replaces them for full
            backward hooks, after all pre-hooks.
        call: The call.
        versions: Of its inputs.
        args: What it was called with.
    """

    frame: int
    call: ModuleCall
    versions: list[int]
    args: tuple[Any, ...]


class _Hook(partial[object]):
    """A hook that a copy of its module does not keep: networks may copy or pickle themselves as they run."""

    def __reduce__(self) -> Any:
        """Copy and pickle as a hook that takes itself off the copied module."""
        return _copied_hook, ()


def _copied_hook() -> Callable[..., None]:
    return _remove_copied_hook


def _remove_copied_hook(module: nn.Module, *_called_with: object) -> None:
    for hooks, flags in (
        (module._forward_hooks, module._forward_hooks_with_kwargs),
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if hook is _remove_copied_hook]:
            del hooks[key]
            flags.pop(key, None)


def _hook(
    layers: Mapping[str, nn.Module],
    captured: Capture[T],
    observe: Callable[[ModuleCall, str, Tensor], T],
) -> None:
    """Hook each module once."""
    watch, key, attached = captured._watch, captured._key, captured._attached
    hooks: _Hooks = _OutputHooks(captured, observe) if watch is None else _WatchedHooks(captured, observe, watch)
    only, before, after = hooks.only, hooks.before, hooks.after
    gives_aliases = watch is not None and watch.with_inputs
    hooked: set[int] = set()
    for name, module in layers.items():
        if id(module) in hooked:
            continue
        hooked.add(id(module))
        if _only_returns(module) and not gives_aliases:
            _attach(module, key, None, _Hook(only, name, bool(vars(module).get("inplace"))), attached)
        else:
            entries: list[_Entry] = []
            _attach(module, key, _Hook(before, name, entries), _Hook(after, entries), attached)


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
            inputs, outputs = tensors_given(args, kwargs), tensors_in(output)
            with self.captured._lock, _without_overrides(inputs, outputs):
                index = self.captured._calls[layer]
                self.captured._calls[layer] = index + 1
                call = _new(ModuleCall, (layer, module, index, inputs))
                _observe(self.captured, self.observe, call, inputs, outputs, in_place=overwrites)

    def before(
        self, layer: str, entries: list[_Entry], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch._C._current_graph_task_id() == -1:
            inputs = tensors_given(args, kwargs)
            with self.captured._lock:
                index = self.captured._calls[layer]
                self.captured._calls[layer] = index + 1
            call = _new(ModuleCall, (layer, module, index, inputs))
            entries.append(_new(_Entry, (id(sys._getframe(1)), call, _versions(inputs), args)))

    def after(
        self, entries: list[_Entry], _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        if torch._C._current_graph_task_id() == -1:
            entry = _ended(entries, id(sys._getframe(1)))
            if entry is not None:
                in_place = entry.versions != _versions(entry.call.inputs)
                given, outputs = _given(entry, args, kwargs), tensors_in(output)
                with self.captured._lock, _without_overrides(given, outputs):
                    _observe(self.captured, self.observe, entry.call, given, outputs, in_place=in_place)


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
        inputs, outputs = tensors_given(args, kwargs), tensors_in(output)
        with self.captured._lock, _without_overrides(inputs, outputs):
            index = self._begin(layer, inputs, replayed=replayed)
            if index is None:
                return None
            self.watch.note_inputs(inputs)
            if not replayed:
                call = _new(ModuleCall, (layer, module, index, inputs))
                _observe(self.captured, self.observe, call, inputs, outputs, in_place=overwrites)
            result = self.watch.outputs(module, layer, index, output, outputs, [] if overwrites else inputs)
            if result is not None:
                self.captured._identities.replaced(outputs, tensors_in(result))
            return result

    def before(
        self, layer: str, entries: list[_Entry], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        inputs = tensors_given(args, kwargs)
        with self.captured._lock, _without_overrides(inputs, ()):
            index = self._begin(layer, inputs, replayed=torch._C._current_graph_task_id() != -1)
            if index is None:
                return None
            self.watch.note_inputs(inputs)
            given: object = None
            if self.watch.with_inputs:
                args, kwargs = given = self.watch.inputs(module, layer, index, args, kwargs)
                before, inputs = inputs, tensors_given(args, kwargs)
                self.captured._identities.replaced(before, inputs)
        call = _new(ModuleCall, (layer, module, index, inputs))
        entries.append(_new(_Entry, (id(sys._getframe(1)), call, _versions(inputs), args)))
        return given

    def after(
        self, entries: list[_Entry], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> object:
        entry = _ended(entries, id(sys._getframe(1)))
        if entry is None:  # a replay of what was seen when it first ran
            return None
        in_place = entry.versions != _versions(entry.call.inputs)
        given = _given(entry, args, kwargs)
        outputs = tensors_in(output)
        with self.captured._lock, _without_overrides(given, outputs):
            if torch._C._current_graph_task_id() == -1:
                _observe(self.captured, self.observe, entry.call, given, outputs, in_place=in_place)
            layer, index, sources = entry.call.layer, entry.call.call, [] if in_place else given
            result = self.watch.outputs(module, layer, index, output, outputs, sources)
            if result is not None:
                self.captured._identities.replaced(outputs, tensors_in(result))
            return result

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
    with _without_overrides(inputs, ()):
        return [0 if tensor.is_inference() else tensor._version for _, tensor in inputs]


_NOTHING = nullcontext()


def _without_overrides(
    inputs: Sequence[tuple[str, Tensor]], outputs: Sequence[tuple[str, Tensor]]
) -> AbstractContextManager[object]:
    """Read tensor subclasses as the tensors they are: what they override, they may refuse."""
    for _, tensor in inputs:
        if type(tensor) not in _PLAIN_TYPES:
            return torch._C.DisableTorchFunctionSubclass()
    for _, tensor in outputs:
        if type(tensor) not in _PLAIN_TYPES:
            return torch._C.DisableTorchFunctionSubclass()
    return _NOTHING


_PLAIN_TYPES = frozenset({Tensor, nn.Parameter})


def _ended(entries: list[_Entry], frame: int) -> _Entry | None:
    """Take out the call whose hooks a frame runs; None if its beginning was not noted.

    Above it may lie calls of other threads, and calls that raised where the model went on.
    """
    for at in range(len(entries) - 1, -1, -1):
        if entries[at].frame == frame:
            return entries.pop(at)
    return None


def _given(entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[tuple[str, Tensor]]:
    """List the tensors that forward was given: also those that torch, or a later hook, put in place of the inputs."""
    inputs = entry.call.inputs
    return inputs if entry.args is args else [*inputs, *tensors_given(args, kwargs)]


def _observe(
    captured: Capture[T],
    observe: Callable[[ModuleCall, str, Tensor], T],
    call: ModuleCall,
    given: Sequence[tuple[str, Tensor]],
    outputs: Sequence[tuple[str, Tensor]],
    *,
    in_place: bool,
) -> None:
    """Look at what a call returned."""
    if not outputs:
        captured.observations.append(Observation(call.layer, call.call, "", None, False, in_place, None))
    show = captured._identities.show
    for slot, tensor in outputs:
        passed_through, repeats = show((call.layer, call.call, slot), tensor, given, in_place=in_place)
        if torch._C._functorch.maybe_current_level() is not None:  # inside vmap, jvp and the like
            value = _observe_physical(observe, call, slot, tensor)
        elif torch._C._is_any_autocast_enabled():
            with plain_arithmetic():
                value = observe(call, slot, tensor)
        elif torch.is_grad_enabled():  # by hand: a context is several calls more
            torch._C._set_grad_enabled(False)
            try:
                value = observe(call, slot, tensor)
            finally:
                torch._C._set_grad_enabled(True)
        else:
            value = observe(call, slot, tensor)
        seen = _new(Observation, (call.layer, call.call, slot, value, passed_through, in_place, repeats))
        captured.observations.append(seen)


def _observe_physical(
    observe: Callable[[ModuleCall, str, Tensor], T], call: ModuleCall, slot: str, tensor: Tensor
) -> T:
    """Look at all the values that a tensor inside a `torch.func` transform stands for, batched axes included."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    with temporarily_clear_interpreter_stack(), plain_arithmetic():
        return observe(call, slot, tensor)


@contextmanager
def _eager() -> Iterator[None]:
    """Run compiled modules and functions as written: torch skips hooks that are added after compiling."""
    if "torch._dynamo" in sys.modules:  # if not, nothing is compiled, and the import would cost a second
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
