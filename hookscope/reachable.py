"""What a network's state consists of: everything that its modules lead to and that running them may change."""

import dataclasses
import random
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hookscope.containers import contents, kind_of
from hookscope.overwriting import is_read

# Of a container with more entries than this it is not searched what these hold in turn. Our choice.
_SEARCHED_ENTRIES = 10_000

# Larger NumPy arrays are not copied. Our choice, as for tensors in plain attributes.
_ARRAY_BYTES = 2**23

# Nothing to look into.
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

_TORCHS_OWN = frozenset(each for each in vars(nn).values() if isinstance(each, type))

_constant: set[tuple[type, int]] = set()
"""Torch's own modules by class and number of attributes, where these have been seen to be constants."""

# Modules of the standard library whose classes keep what they hold in attributes.
_WITH_CONTAINERS = frozenset({"collections", "types", "weakref", "_weakrefset"})


class State(NamedTuple):
    """An object whose state is read and written as a whole.

    Attributes:
        holder: The object.
        write: Gives it such a state.
        value: The one it had.
    """

    holder: Any
    write: Callable[[Any, Any], object]
    value: Any


@dataclass(slots=True)
class Reachable:
    """What modules lead to, each object once.

    Attributes:
        modules: Those that were given, and those that only attributes lead to.
        owners: Those of them, and other objects, whose attributes may change.
        registers: What such modules keep parts and hooks in.
        containers: Other containers, with their kinds.
        parameters: By identity, of all modules.
        buffers: By identity, of those that may change.
        tensors: Others, by identity.
        states: What has a state that is read and written as a whole.
    """

    modules: list[nn.Module] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)
    registers: list[Any] = field(default_factory=list)
    containers: list[tuple[type, Any]] = field(default_factory=list)
    parameters: dict[int, Tensor] = field(default_factory=dict)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)


def reachable(modules: Sequence[nn.Module], *, closely: bool) -> Reachable:
    """Find what the modules of a network lead to.

    Looked into are attributes of modules, of objects whose class comes from the package of one of them, of dataclasses
    and optimisers; and standard containers. Other objects are not the network's own, or cannot be put back.

    Args:
        modules: All of it, each once.
        closely: Expect changes everywhere. Else there are neither hooks nor code but that of torch, torchvision and
            timm, so of torch's own modules only those change that are in train mode or keep more than constants.
    """
    found = Reachable()
    kinds = {*map(type, modules)}
    packages = {kind.__module__.partition(".")[0] for kind in kinds} - {"torch", "builtins"}
    seen = {*map(id, modules)}
    pending = [*modules]
    slotted = {kind for kind in kinds if any(vars(base).get("__slots__") for base in kind.__mro__)}
    bases = {base for kind in kinds for base in kind.__mro__ if is_read(base)}
    waiting = [each for base in bases for each in _of_class(found, base)]
    if closely:
        found.containers += [(kind, each) for each in _hooks_on_all() if (kind := kind_of(each))]
        waiting += [each for module in modules if type(module) in slotted for each in _of_slots(found, module)]
    while pending or waiting:
        waiting += _of_modules(found, pending, closely=closely)
        pending = []
        inner: list[Any] = []
        for value in [each for each in waiting if type(each) not in _LEAVES and id(each) not in seen]:
            seen.add(id(value))
            if isinstance(value, Tensor):
                if id(value) not in found.parameters and id(value) not in found.buffers:
                    found.tensors[id(value)] = value
            elif isinstance(value, nn.Module):
                pending.append(value)
            else:
                with suppress(Exception):  # an object may raise anything when it is looked at
                    inner += _of_other(found, value, packages)
        waiting = inner
    return found


def _of_modules(found: Reachable, modules: Sequence[nn.Module], *, closely: bool) -> list[Any]:
    """Note modules with their parameters and buffers; list what else they lead to."""
    parameters = [each for module in modules for each in module._parameters.values() if each is not None]
    found.parameters.update(zip(map(id, parameters), parameters, strict=True))
    found.modules += modules
    still = [*map(_keeps_still, modules)]
    if not closely:
        modules = [module for module, keeps_still in zip(modules, still, strict=True) if not keeps_still]
    found.owners += modules
    attributes = [*map(vars, modules)]
    try:
        parts = [*chain.from_iterable(map(_parts_of, attributes))]
        hooks = [*chain.from_iterable(map(_hooks_of, attributes))] if closely else []
    except KeyError:  # made without nn.Module's constructor
        parts = [held.get(name, {}) for held in attributes for name in _PARTS]
        hooks = [held[name] for held in attributes for name in _HOOKS if closely and name in held]
    if not _REGISTER_KINDS.issuperset(map(type, parts)):  # a script's
        views = [each for each in parts if type(each) not in _REGISTER_KINDS]
        found.states += [State(view, _write_items, dict(view.items())) for view in views]
        found.registers += [each for each in parts if type(each) in _REGISTER_KINDS]
        parts = [each if type(each) in _REGISTER_KINDS else dict(each.items()) for each in parts]
    else:
        found.registers += parts
    found.registers += hooks
    _, buffers, _, children = (filter(None, parts[place :: len(_PARTS)]) for place in range(len(_PARTS)))
    known = [each for each in chain.from_iterable(map(dict.values, buffers)) if each is not None]
    found.buffers.update(zip(map(id, known), known, strict=True))
    inner = [*chain.from_iterable(map(dict.values, chain(children, filter(None, hooks))))]
    for module, held in zip(modules, attributes, strict=True):
        if (type(module), len(held)) not in _constant:
            inner += _own_values(held)
    return inner


def _keeps_still(module: nn.Module) -> bool:
    """Tell whether a module is one of torch's own that changes nothing while it runs: in train mode BatchNorm does."""
    attributes = vars(module)
    key = (type(module), len(attributes))
    if key not in _constant:
        if key[0] not in _TORCHS_OWN or not all(map(_is_constant, _own_values(attributes))):
            return False
        _constant.add(key)
    return not attributes["training"]


def _own_values(attributes: dict[str, Any]) -> list[Any]:
    """List what the attributes that nn.Module does not set itself hold, if there is something to look into."""
    if [*islice(attributes, len(_EMPTY_MODULE))] == _EMPTY_MODULE:  # nearly always: its constructor was called first
        return [value for value in islice(attributes.values(), len(_EMPTY_MODULE), None) if type(value) not in _LEAVES]
    return [value for name, value in attributes.items() if type(value) not in _LEAVES and name not in _REGISTERS]


def _is_constant(value: Any) -> bool:
    return type(value) in {tuple, list} and _LEAVES.issuperset(map(type, value))


def _of_class(found: Reachable, kind: type) -> Iterable[Any]:
    """Note what a class keeps for all its instances; list it."""
    attributes = {name: value for name, value in vars(kind).items() if not name.startswith("__")}
    found.states.append(State(kind, _write_class, attributes))
    return attributes.values()


def _of_other(found: Reachable, value: Any, packages: AbstractSet[str]) -> Iterable[Any]:
    """Note an object that is neither module nor tensor; list what it leads to."""
    kind = type(value)
    if isinstance(value, tuple | frozenset):
        return value if len(value) <= _SEARCHED_ENTRIES else ()
    container_kind = kind_of(value)
    inner: list[Any] = []
    if container_kind is not None:
        found.containers.append((container_kind, value))
        inner += contents(container_kind, value) if len(value) <= _SEARCHED_ENTRIES else ()
    elif (as_a_whole := next((each for each in _WHOLE if isinstance(value, each)), None)) is not None:
        read, write = _WHOLE[as_a_whole]
        if as_a_whole is not np.ndarray or value.nbytes <= _ARRAY_BYTES:
            found.states.append(State(value, write, read(value)))
        return [*found.states[-1].value.values()] if as_a_whole is torch._C.ScriptModule else ()
    elif not (
        kind.__module__ in _WITH_CONTAINERS
        or kind.__module__.partition(".")[0] in packages
        or issubclass(kind, Optimizer | LRScheduler)
        or dataclasses.is_dataclass(kind)
    ):
        return ()
    if kind is not container_kind:
        if hasattr(value, "__dict__"):
            found.owners.append(value)
            inner += vars(value).values()
        if any(vars(base).get("__slots__") for base in kind.__mro__):
            inner += _of_slots(found, value)
    return inner


def _of_slots(found: Reachable, value: Any) -> Iterable[Any]:
    """Note what an object keeps in slots; list it."""
    slots = _read_slots(value)
    found.states.append(State(value, _write_slots, slots))
    return slots.values()


def _hooks_on_all() -> list[Any]:
    """Return what torch keeps hooks in that fire on every module."""
    return [held for name, held in vars(nn.modules.module).items() if name.startswith("_global_")]


def _write_items(view: Any, items: Mapping[str, object]) -> None:
    for name, value in items.items():
        if view[name] is not value:
            view[name] = value


def _write_class(kind: type, attributes: Mapping[str, object]) -> None:
    for name in [name for name in vars(kind) if name not in attributes and not name.startswith("__")]:
        type.__delattr__(kind, name)
    for name, value in attributes.items():
        if name not in vars(kind) or vars(kind)[name] is not value:
            type.__setattr__(kind, name, value)


def _read_slots(value: object) -> dict[str, object]:
    names: list[str] = []
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    names = [name for name in names if name not in {"__dict__", "__weakref__"} and hasattr(value, name)]
    return {name: getattr(value, name) for name in names}


def _write_slots(value: object, slots: Mapping[str, object]) -> None:
    for name in _read_slots(value).keys() - slots.keys():
        object.__delattr__(value, name)
    for name, held in slots.items():
        if not hasattr(value, name) or getattr(value, name) is not held:
            object.__setattr__(value, name, held)


def _read_script(handle: Any) -> dict[str, object]:
    """Return the attributes of a scripted module, which it keeps out of Python's sight."""
    concrete: Any = torch._C.ConcreteModuleType.from_jit_type(handle._type())
    return {name: handle.getattr(name) for name in concrete.get_attributes()}


def _write_script(handle: Any, attributes: Mapping[str, object]) -> None:
    for name, value in attributes.items():
        now = handle.getattr(name)  # lists come as copies
        if now is not value and (isinstance(value, Tensor) or now != value):
            handle.setattr(name, value)


def _write_array(array: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    if array.shape != values.shape:
        array.resize(values.shape, refcheck=False)
    if array.flags.writeable:
        array[...] = values


def _write_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_WHOLE: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    np.ndarray: (np.copy, _write_array),
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (lambda generator: generator.bit_generator.state, _write_bits),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    torch._C.ScriptModule: (_read_script, _write_script),
}
