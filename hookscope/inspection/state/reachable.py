"""What a network's state consists of: everything that its modules lead to and that running them may change."""

import dataclasses
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hookscope.inspection.state.object_states import CLASS, SLOTS, VIEW, State, contents, kind_of, state_as_a_whole
from hookscope.inspection.state.own_code import is_read

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

_TORCHS_OWN = frozenset(member for member in vars(nn).values() if isinstance(member, type))

# What a class may define that does nothing while its modules run.
_INERT = frozenset(
    {"__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__parameters__"}
    | {"__static_attributes__", "__firstlineno__"}  # from Python 3.13 on
)

# Modules of torch's own code by class and number of attributes, where these have been seen to be constants.
_constant: set[tuple[type, int]] = set()

# Modules of the standard library whose classes keep what they hold in attributes.
_WITH_CONTAINERS = frozenset({"collections", "types", "weakref", "_weakrefset"})


@dataclass(slots=True)
class Reachable:
    """What modules lead to, each object once; tensors by identity."""

    modules: list[nn.Module] = field(default_factory=list)  # given, or led to by attributes alone
    owners: list[Any] = field(default_factory=list)  # modules and other objects whose attributes may change
    registers: list[Any] = field(default_factory=list)  # what such modules keep parts and hooks in
    containers: list[tuple[type, Any]] = field(default_factory=list)  # others, with their kinds
    parameters: dict[int, Tensor] = field(default_factory=dict)  # of all modules
    buffers: dict[int, Tensor] = field(default_factory=dict)  # of modules that may change
    tensors: dict[int, Tensor] = field(default_factory=dict)  # others
    states: list[State] = field(default_factory=list)


def reachable(modules: Sequence[nn.Module], *, closely: bool) -> Reachable:
    """Find what the modules of a network lead to.

    Looked into are attributes of modules, of objects whose class comes from the package of one of them, of dataclasses
    and optimisers; and standard containers. Other objects are not the network's own, or cannot be put back. Not
    `closely`, there are neither hooks nor code but that of torch, torchvision and timm, so of torch's own modules only
    those change that are in train mode or keep more than constants.
    """
    reached = Reachable()
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
        waiting += _of_modules(reached, pending, closely=closely)
        pending = []
        inner: list[Any] = []
        for value in [
            candidate for candidate in waiting if type(candidate) not in _LEAVES and id(candidate) not in seen
        ]:
            if type(value) is tuple and len(value) <= _SEARCHED_ENTRIES:  # of constants, nearly always
                inner += value
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                if id(value) not in reached.parameters and id(value) not in reached.buffers:
                    reached.tensors[id(value)] = value
            elif isinstance(value, nn.Module):
                pending.append(value)
            else:
                with suppress(Exception):  # an object may raise anything when it is looked at
                    inner += _of_other(reached, value, packages)
        waiting = inner
    return reached


def _of_modules(reached: Reachable, modules: Sequence[nn.Module], *, closely: bool) -> list[Any]:
    """Note modules with their parameters and buffers; list what else they lead to."""
    parameters = [parameter for module in modules for parameter in module._parameters.values() if parameter is not None]
    reached.parameters.update(zip(map(id, parameters), parameters, strict=True))
    reached.modules += modules
    if not closely:
        modules = [module for module in modules if not _keeps_still(module)]
    reached.owners += modules
    attributes = [*map(vars, modules)]
    try:
        parts = [*chain.from_iterable(map(_parts_of, attributes))]
        hooks = [*chain.from_iterable(map(_hooks_of, attributes))] if closely else []
    except KeyError:  # made without nn.Module's constructor
        parts = [held.get(name, {}) for held in attributes for name in _PARTS]
        hooks = [held[name] for held in attributes for name in _HOOKS if closely and name in held]
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
    """Tell whether a module is one of torch's own that changes nothing while it runs: in train mode BatchNorm does."""
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
    return kind in _TORCHS_OWN or (_INERT.issuperset(vars(kind)) and all(map(_runs_torchs_code, kind.__bases__)))


def _own_values(attributes: dict[str, Any]) -> list[Any]:
    """List what the attributes that nn.Module does not set itself hold, if there is something to look into."""
    if [*islice(attributes, len(_EMPTY_MODULE))] == _EMPTY_MODULE:  # nearly always: its constructor was called first
        return [value for value in islice(attributes.values(), len(_EMPTY_MODULE), None) if type(value) not in _LEAVES]
    return [value for name, value in attributes.items() if type(value) not in _LEAVES and name not in _REGISTERS]


def _of_other(reached: Reachable, value: Any, packages: AbstractSet[str]) -> Iterable[Any]:
    """Note an object that is neither module nor tensor; list what it leads to."""
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
