"""The state of a network at one moment, to compare with later and to go back to.

It has everything that is reachable from the modules and that running them may change.
"""

import dataclasses
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, islice
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hookscope.hooks.autograd import history_is_lost, is_leaf
from hookscope.hooks.callers import TORCHS_LAYERS
from hookscope.hooks.memory import missing_memory
from hookscope.inspection.state.held_values import HeldValues
from hookscope.inspection.state.object_states import (
    CLASS,
    SLOTS,
    VIEW,
    Contents,
    Problem,
    State,
    attempt,
    contents,
    identical,
    kind_of,
    state_as_a_whole,
)
from hookscope.inspection.state.own_code import has_own_code, is_read, overwritten

# Parameters of networks with their own code, and tensors in plain attributes, are copied up to this many bytes in all;
# beyond that only those that code is seen to write to. Copying and comparing this much takes some two
# milliseconds.
_COPIED_BYTES = 2**23

# The entries of containers with more than this many are not searched further.
_SEARCHED_ENTRIES = 10_000

# Types that hold nothing to search.
_LEAVES: frozenset[type] = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type, range, slice),
        *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    }
)

# What nn.Module keeps its parts and its hooks in.
_PARTS = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_REGISTERS = frozenset({*_PARTS, *_HOOKS})
_REGISTER_KINDS = frozenset({dict, OrderedDict, set})
_parts_of: Callable[[Any], tuple[Any, ...]] = itemgetter(*_PARTS)
_hooks_of: Callable[[Any], tuple[Any, ...]] = itemgetter(*_HOOKS)

_EMPTY_MODULE = [*vars(nn.Module())]

# What a class may define that does nothing while its modules run.
_INERT = frozenset(
    {"__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__parameters__"}
    | {"__static_attributes__", "__firstlineno__"}  # from Python 3.13 on
)

# Modules of torch's own code by class and number of attributes, where these have been seen to be constants.
_constant: set[tuple[type, int]] = set()

# Modules of the standard library whose classes keep what they hold in attributes.
_WITH_CONTAINERS = frozenset({"collections", "types", "weakref", "_weakrefset"})


class Snapshot:
    """The references and values of a network at one moment.

    Attributes:
        owners: Its modules, and objects reachable by their attributes.
        tensors: Those that may be written to, each once.
        leaves: Parameters, and other tensors that may have a gradient.
        histories: The tensors that have a graph, each with the graph's last node and a copy that has this graph, too.
        values: The values of the tensors.
    """

    def __init__(self, modules: Sequence[nn.Module], *, differentiates: bool = True) -> None:
        """Take a snapshot of a network.

        Args:
            modules: All of it, each once.
            differentiates: Whether a backward pass may run before the network is compared with the snapshot.
        """
        own_code = has_own_code(modules)
        self._reached = reached = _reachable(modules, closely=own_code)
        written = overwritten(reached.modules, own_code=own_code)
        stepped = [group for owner in reached.owners if isinstance(owner, Optimizer) for group in owner.param_groups]
        expected = written.tensors | {id(parameter) for group in stepped for parameter in group["params"]}
        # torch's own layers write to no parameters but the expected ones; code of the network's own may write to any.
        parameters = [parameter for parameter in reached.parameters.values() if own_code or id(parameter) in expected]
        self.tensors = tensors = [*reached.buffers.values(), *reached.tensors.values(), *parameters]
        self.owners: list[Any] = reached.owners + tensors if own_code else reached.owners
        with torch._C.DisableTorchFunction():
            self.leaves = [tensor for tensor in reached.tensors.values() if tensor.requires_grad and is_leaf(tensor)]
            # What is noted of leaves is changed by a backward pass or by code of the network's own.
            self.leaves += reached.parameters.values() if own_code or differentiates else ()
            self._attributes = [vars(owner) for owner in self.owners]
            self.histories = [*_histories(tensors)]
            self.note()
            copied = {*reached.buffers, *expected}
            # A module that casts itself in its forward pass, and back, casts its gradients too: they are held as well.
            gradients = {id(gradient): gradient for gradient in self._gradients if own_code and gradient is not None}
            if written.gradients:
                copied |= gradients.keys()
            tensors = [*({id(tensor): tensor for tensor in tensors} | gradients).values()]
            copied |= _affordable([tensor for tensor in tensors if id(tensor) not in copied])
        self.values = HeldValues(tensors, copied, gradients.keys() - copied if differentiates else frozenset())

    def note(self) -> None:
        """Take the present references into the snapshot; the values of tensors stay those of its beginning."""
        self._kinds = [*map(type, self.owners)]
        self._filled = [*filter(None, self._reached.registers)]
        alike: defaultdict[type, list[Any]] = defaultdict(list)
        alike[dict] += self._attributes
        for register in self._filled:
            alike[type(register)].append(register)
        for kind, container in self._reached.containers:
            alike[kind].append(container)
        with torch._C.DisableTorchFunction():
            self._required = [*map(attrgetter("requires_grad"), chain(self.tensors, self.leaves))]
            self._gradients = [*map(attrgetter("grad"), self.leaves)]
            self._functions = [*map(attrgetter("_backward_hooks"), self.leaves)]
            for hooks in filter(None, self._functions):
                alike[type(hooks)].append(hooks)
        self._contents = [Contents(kind, containers).note() for kind, containers in alike.items()]

    def changed(self) -> bool:
        """Tell whether anything has changed."""
        return (
            self._refers_to_others()
            or any(state.changed() for state in self._reached.states)
            or self._changed_leaves()
            or self.values.changed()
        )

    def put_back(self) -> list[Problem]:
        """Restore everything; return the failures."""
        problems: list[Problem] = []
        if self._refers_to_others():
            problems += self._put_back_references()
        for state in self._reached.states:
            problems += state.put_back()
        problems += self.values.put_back()
        problems += self._put_back_leaves() if self._changed_leaves() else ()
        return problems

    def _refers_to_others(self) -> bool:
        return (
            [*map(type, self.owners)] != self._kinds
            or not identical([*map(vars, self.owners)], self._attributes)
            or not identical([*filter(None, self._reached.registers)], self._filled)
            or any(content.changed() for content in self._contents)
        )

    def _put_back_references(self) -> list[Problem]:
        problems: list[Problem] = []
        ids = {*self._reached.parameters, *map(id, self.leaves)}
        for owner, kind, attributes in zip(self.owners, self._kinds, self._attributes, strict=True):
            if isinstance(owner, nn.Module):  # it may have registered parameters, which have got gradients
                for parameter in owner._parameters.values():
                    if parameter is not None and id(parameter) not in ids:
                        parameter.grad = None
            if type(owner) is not kind:
                problems += attempt(owner, partial(object.__setattr__, owner, "__class__", kind))
            if vars(owner) is not attributes:
                problems += attempt(owner, partial(object.__setattr__, owner, "__dict__", attributes))
        filled = {*map(id, self._filled)}
        for register in filter(None, self._reached.registers):
            if id(register) not in filled:
                register.clear()
        for content in self._contents:
            problems += content.put_back()
        return problems

    def _changed_leaves(self) -> bool:
        with torch._C.DisableTorchFunction():
            return (
                [*map(attrgetter("requires_grad"), chain(self.tensors, self.leaves))] != self._required
                or not identical([*map(attrgetter("grad"), self.leaves)], self._gradients)
                or not identical([*map(attrgetter("_backward_hooks"), self.leaves)], self._functions)
                or any(history_is_lost(tensor) or tensor.grad_fn is not node for tensor, node, _ in self.histories)
            )

    def _put_back_leaves(self) -> Iterator[Problem]:
        with torch._C.DisableTorchFunction():
            for tensor, required in zip(chain(self.tensors, self.leaves), self._required, strict=True):
                if tensor.requires_grad != required:
                    yield from _require(tensor, required)
            for leaf, gradient, functions in zip(self.leaves, self._gradients, self._functions, strict=True):
                if leaf.grad is not gradient:
                    yield from _set_gradient(leaf, gradient)
                if leaf._backward_hooks is not functions:
                    yield from attempt(leaf, partial(setattr, leaf, "_backward_hooks", functions))
            for index, (tensor, node, copied) in enumerate(self.histories):
                if history_is_lost(tensor) or tensor.grad_fn is not node:
                    yield from _become(tensor, copied)
                    self.histories[index : index + 1] = _histories([tensor])  # `copied` is used up


def _require(tensor: Tensor, required: bool) -> list[Problem]:
    if is_leaf(tensor):
        return attempt(tensor, partial(tensor.requires_grad_, required))
    if tensor._base is None:  # it was written to with values that require a gradient
        return attempt(tensor, tensor.detach_)
    # A view cannot be detached.
    return attempt(tensor, tensor._base.detach_) or _become(tensor, tensor.data)


def _set_gradient(leaf: Tensor, gradient: Tensor | None) -> list[Problem]:
    problems = attempt(leaf, partial(setattr, leaf, "grad", gradient))
    if not problems or gradient is None:
        return problems
    # Autograd gives sparse parameters dense gradients, an assignment does not.
    return attempt(leaf, partial(setattr, leaf, "grad", None)) or attempt(
        leaf, partial(torch.autograd.backward, leaf, gradient)
    )


def _become(tensor: Tensor, other: Tensor) -> list[Problem]:
    """Give a tensor the graph of another tensor, or none; it keeps its memory."""
    return attempt(tensor, partial(setattr, other, "data", tensor.data)) or attempt(
        tensor, partial(torch.utils.swap_tensors, tensor, other)
    )


def _histories(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Any, Tensor]]:
    tensors = [tensor for tensor in tensors if tensor.requires_grad]  # what has a graph requires a gradient
    with torch.inference_mode(False), torch.enable_grad():
        for tensor in tensors:
            if not is_leaf(tensor) and not missing_memory(tensor):
                with suppress(Exception):  # a subclass may raise anything
                    yield tensor, tensor.grad_fn, tensor.clone()


def _affordable(tensors: Sequence[Tensor]) -> set[int]:
    """Return the ids of the tensors to copy although no code is seen to write to them.

    These are all tensors if they fit; else no parameters, and of the other tensors as many as fit, the smallest first.
    """
    if sum(map(_byte_count, tensors)) > _COPIED_BYTES:
        tensors = sorted((tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)), key=_byte_count)
    totals = accumulate(map(_byte_count, tensors))
    return {id(tensor) for tensor, total in zip(tensors, totals, strict=True) if total <= _COPIED_BYTES}


def _byte_count(tensor: Tensor) -> int:
    try:
        return tensor.nbytes
    except Exception:  # noqa: BLE001 - of nested tensors and some subclasses it is not known
        return 0


@dataclass(slots=True)
class _Reachable:
    """The objects reachable from modules, each once; tensors by identity."""

    modules: list[nn.Module] = field(default_factory=list)  # given, or led to by attributes alone
    owners: list[Any] = field(default_factory=list)  # modules and other objects whose attributes may change
    registers: list[Any] = field(default_factory=list)  # what such modules keep parts and hooks in
    containers: list[tuple[type, Any]] = field(default_factory=list)  # others, with their kinds
    parameters: dict[int, Tensor] = field(default_factory=dict)  # parameters of all modules
    buffers: dict[int, Tensor] = field(default_factory=dict)  # buffers of modules that may change
    tensors: dict[int, Tensor] = field(default_factory=dict)  # others
    states: list[State] = field(default_factory=list)


def _reachable(modules: Sequence[nn.Module], *, closely: bool) -> _Reachable:
    """Find the objects reachable from the modules of a network.

    The search enters attributes of modules, of objects whose class comes from the package of a module, of dataclasses
    and optimisers; and standard containers. Other objects are not the network's own, or cannot be put back.

    Unless `closely`, the network has no hooks, and no code but that of torch, torchvision and timm. Modules of torch's
    own are then left out if they are in eval mode and hold only constants.
    """
    reached = _Reachable()
    kinds = {*map(type, modules)}
    packages = {kind.__module__.partition(".")[0] for kind in kinds} - {"torch", "builtins"}
    seen = {*map(id, modules)}
    pending = [*modules]
    slotted = {kind for kind in kinds if any(vars(base).get("__slots__") for base in kind.__mro__)}
    bases = {base for kind in kinds for base in kind.__mro__ if is_read(base)}
    reached.states += [State(CLASS, base) for base in bases]
    reached.states += [State(SLOTS, module) for module in modules if type(module) in slotted]
    waiting = [attribute for state in reached.states for attribute in state.value.values()]
    if closely:
        on_all = [held for name, held in vars(nn.modules.module).items() if name.startswith("_global_")]  # hooks
        reached.containers += [(kind, registry) for registry in on_all if (kind := kind_of(registry))]
    while pending or waiting:
        waiting += _add_modules(reached, pending, closely=closely)
        pending = []
        inner: list[Any] = []
        for value in [
            candidate for candidate in waiting if type(candidate) not in _LEAVES and id(candidate) not in seen
        ]:
            if type(value) is tuple and len(value) <= _SEARCHED_ENTRIES:  # nearly always holds constants
                inner += value
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                if id(value) not in reached.parameters and id(value) not in reached.buffers:
                    reached.tensors[id(value)] = value
            elif isinstance(value, nn.Module) and "_modules" in vars(value):  # made by its constructor
                pending.append(value)
            else:
                with suppress(Exception):  # an object may raise anything when it is looked at
                    inner += _add_object(reached, value, packages)
        waiting = inner
    return reached


def _add_modules(reached: _Reachable, modules: Sequence[nn.Module], *, closely: bool) -> list[Any]:
    """Add modules, with their parameters and buffers; return other objects that they hold."""
    parameters = [parameter for module in modules for parameter in module._parameters.values() if parameter is not None]
    reached.parameters.update(zip(map(id, parameters), parameters, strict=True))
    reached.modules += modules
    if not closely:
        modules = [module for module in modules if not _keeps_still(module)]
    reached.owners += modules
    attributes = [*map(vars, modules)]
    parts = [*chain.from_iterable(map(_parts_of, attributes))]
    hooks = [*chain.from_iterable(map(_hooks_of, attributes))] if closely else []
    if not _REGISTER_KINDS.issuperset(map(type, parts)):  # a script's
        reached.states += [State(VIEW, part) for part in parts if type(part) not in _REGISTER_KINDS]
        reached.registers += [part for part in parts if type(part) in _REGISTER_KINDS]
        parts = [part if type(part) in _REGISTER_KINDS else dict(part.items()) for part in parts]
    else:
        reached.registers += parts
    reached.registers += hooks
    _, buffers, _, children = (filter(None, parts[place :: len(_PARTS)]) for place in range(len(_PARTS)))
    tensors = [buffer for buffer in chain.from_iterable(map(dict.values, buffers)) if buffer is not None]
    reached.buffers.update(zip(map(id, tensors), tensors, strict=True))
    inner = [*chain.from_iterable(map(dict.values, chain(children, filter(None, hooks))))]
    for held in attributes:
        inner += _own_values(held)
    return inner


def _keeps_still(module: nn.Module) -> bool:
    """Tell whether a module of torch's changes nothing while it runs, unlike BatchNorm in train mode."""
    attributes = vars(module)
    key = (type(module), len(attributes))
    if key not in _constant:
        if not _runs_torchs_code(key[0]) or not all(
            type(value) in {tuple, list} and _LEAVES.issuperset(map(type, value)) for value in _own_values(attributes)
        ):
            return False
        _constant.add(key)
    return not attributes["training"]


def _runs_torchs_code(kind: type) -> bool:
    """Tell whether a class is one of torch's own, or derives from them and adds nothing but a constructor."""
    return kind in TORCHS_LAYERS or (_INERT.issuperset(vars(kind)) and all(map(_runs_torchs_code, kind.__bases__)))


def _own_values(attributes: dict[str, Any]) -> list[Any]:
    """List values that may hold objects, from the attributes that nn.Module does not set itself."""
    if [*islice(attributes, len(_EMPTY_MODULE))] == _EMPTY_MODULE:  # nearly always: its constructor was called first
        return [value for value in islice(attributes.values(), len(_EMPTY_MODULE), None) if type(value) not in _LEAVES]
    return [value for name, value in attributes.items() if type(value) not in _LEAVES and name not in _REGISTERS]


def _add_object(reached: _Reachable, value: Any, packages: AbstractSet[str]) -> Iterable[Any]:
    """Add an object that is neither module nor tensor; return the objects that it holds."""
    kind = type(value)
    if isinstance(value, tuple | frozenset):
        return value if len(value) <= _SEARCHED_ENTRIES else ()
    container_kind = kind_of(value)
    inner: list[Any] = []
    if container_kind is not None:
        reached.containers.append((container_kind, value))
        inner += contents(container_kind, value) if len(value) <= _SEARCHED_ENTRIES else ()
    elif (state := state_as_a_whole(value)) is not None:
        reached.states.append(state)
        return state.value.values() if isinstance(value, torch._C.ScriptModule) else ()
    elif not (
        kind.__module__ in _WITH_CONTAINERS
        or kind.__module__.partition(".")[0] in packages
        or issubclass(kind, Optimizer | LRScheduler)
        or dataclasses.is_dataclass(kind)
    ):
        return ()
    if kind is not container_kind:
        if kind.__dictoffset__:  # `hasattr` would ask the object's own `__getattr__`
            reached.owners.append(value)
            inner += vars(value).values()
        if any(vars(base).get("__slots__") for base in kind.__mro__):
            reached.states.append(State(SLOTS, value))
            inner += reached.states[-1].value.values()
    return inner
