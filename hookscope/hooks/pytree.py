"""Find and replace tensors nested in the inputs and outputs of modules, at any depth.

This runs at every call of every module, on arbitrary objects. So it reads an object's `__dict__` and slots directly,
and calls none of its code: no property, no `__getattr__`, no iterator. The exception is the `items` of mappings.
"""

import argparse
import copy
import enum
import sys
import types
from collections import OrderedDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

# Limits for values reached through attributes, which may lead to a configuration or a whole program: to search this
# many objects, or this many members in all, takes about a millisecond.
_OBJECTS_LIMIT = 1000
_MEMBERS_LIMIT = 20_000

# Types that hold no tensors: most values.
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type(...), type, torch.Size}
    | {torch.dtype, torch.device, torch.layout, types.FunctionType, types.MethodType, types.BuiltinFunctionType}
)
_CONSTANTS = (int, float, complex, str, slice, np.generic)
_DICTS: tuple[dict[Any, Any], ...] = ({}, OrderedDict())
_SEQUENCES = frozenset({list, tuple})
_VIEWS = {type(view) for mapping in _DICTS for view in (mapping.keys(), mapping.values(), mapping.items())}
# Classes of the standard library that are containers for user data.
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace, UserList)

_Child = tuple[str, Any, object]
"""A child of a value: its path suffix, its index, key or attribute name, and the child."""


class _Kind(NamedTuple):
    """How values of one type are read and rebuilt."""

    read: Callable[[Any], list[_Child]]  # returns the children that may hold tensors
    rebuild: Callable[[Any, Mapping[Any, object]], object]  # a copy with some children replaced
    attributes: "_Attributes | None" = None  # for objects: where attributes are kept
    is_replaceable: bool = True  # whether a module can be given a copy


@dataclass(slots=True)
class _Walk:
    into_objects: bool  # follow the attributes of objects as far as they lead, and enter sets and deques
    objects: dict[int, object] = field(default_factory=dict)  # objects whose attributes have been read, by id
    members_left: int = _MEMBERS_LIMIT

    def children(self, value: object, *, inside: bool) -> tuple[_Kind, list[_Child]] | None:
        """Return a value's kind and children; None if it is not entered. `inside`: it was reached by an attribute."""
        kind = _kind(type(value))  # type: ignore[arg-type]  # mypy takes classes for unhashable
        if kind is None or not (self.into_objects or kind.is_replaceable):
            return None
        if kind.attributes is not None:
            if id(value) in self.objects or len(self.objects) >= _OBJECTS_LIMIT:
                return None
            self.objects[id(value)] = value
        try:
            if inside and kind.attributes is None:
                size = len(value)  # type: ignore[arg-type]  # containers have one
                if size > self.members_left:
                    return None
                self.members_left -= size
            children = kind.read(value)
        except Exception:  # noqa: BLE001 - a custom mapping may raise anything, which is not the model's error
            return None
        if kind.attributes is not None and not (self.into_objects or is_dataclass(type(value))):
            children = [child for child in children if issubclass(type(child[2]), Tensor)]
        return kind, children


def tensors_in(value: object) -> list[tuple[str, Tensor]]:
    """List the tensors of a nested value with the path to each.

    Walks mappings (Hugging Face outputs are mappings), named tuples, lists, tuples, deques, sets, views of dicts, and
    the attributes of other objects, dataclasses and slotted ones among them, as far as they lead. Modules, classes,
    iterators and the standard library's own objects are not entered. An object's attributes are read once, where it is
    met first; beyond the first 1,000 objects, and 20,000 members of what they hold, none is read.

    Args:
        value: An input or output of a module.

    Returns:
        (path, tensor) in order: ("", t) for a bare tensor, ("[0]", t), ("['out']", t), (".boxes", t). A set's members
        ("{0}", t) are ordered by type, dtype and shape, and by their values where these are equal.
    """
    if issubclass(type(value), Tensor):  # isinstance() would read the object's __class__
        return [("", value)]  # type: ignore[list-item]
    return _nested_tensors(value, into_objects=True)


def tensors_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """List the tensors in the arguments of a call, as in `tensors_in`: ("[0]", t), ("['mask']", t)."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # nearly always
        return [("[0]", args[0])]
    arguments = [(f"[{at}]", argument) for at, argument in enumerate(args) if type(argument) not in _PLAIN]
    arguments += [(f"[{key!r}]", argument) for key, argument in kwargs.items() if type(argument) not in _PLAIN]
    if len(arguments) == 1 and type(arguments[0][1]) in _SEQUENCES:  # as torch.cat takes them
        (path, several), *_ = arguments
        arguments = [(f"{path}[{at}]", member) for at, member in enumerate(several)]
    for _, value in arguments:
        if not issubclass(type(value), Tensor):
            return tensors_in(args) + (tensors_in(kwargs) if kwargs else [])
    return arguments  # nothing to walk through


def constants_given(args: Sequence[object], kwargs: Mapping[str, object]) -> list[tuple[str, object]]:
    """List the numbers, texts and slices in the arguments of a call, also in tuples and lists: ("[1]", 0.5)."""
    constants: list[tuple[str, object]] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, _CONSTANTS):
            constants.append((f"[{key!r}]", value))
        elif type(value) in (tuple, list, torch.Size):
            constants += [(f"[{key!r}]{inner}", constant) for inner, constant in constants_given(value, {})]  # type: ignore[arg-type]
    return constants


def replaceable_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """List the tensors of `tensors_given` that can be replaced in a module's arguments.

    Tensors in sets and deques, and those more than one attribute deep, are left out: a module may modify such an
    object, such as a key-value cache, and would then modify a copy.
    """
    return _nested_tensors(args, into_objects=False) + (_nested_tensors(kwargs, into_objects=False) if kwargs else [])


def with_tensors(value: object, replacements: Mapping[str, Tensor]) -> object:
    """Return a nested value with the tensors at some paths replaced.

    Containers and objects on the way to a replaced tensor are copied shallowly, without calling their constructors;
    others are kept. An object that occurs twice is copied once.

    Args:
        value: The value that was passed to `tensors_in`.
        replacements: Tensors by path.

    Raises:
        TypeError: If a container on the way cannot be copied or does not take the tensor.
    """
    if isinstance(value, Tensor):
        return replacements.get("", value)
    nodes: list[_Node] = []
    _nested_tensors(value, into_objects=True, nodes=nodes)
    to_copy: set[int] = set()
    waiting = [at for at, node in enumerate(nodes) if any(path in replacements for _, path, _ in node.tensors)]
    while waiting:  # a container is copied with each member that is copied
        if (at := waiting.pop()) not in to_copy:
            to_copy.add(at)
            waiting += nodes[at].holders
    try:
        return _copies(nodes, to_copy, replacements).get(0, value)
    except (TypeError, AttributeError, ValueError, KeyError, RuntimeError) as error:
        raise TypeError(f"no tensor of a {type(value).__name__} can be replaced: {error}") from error


def _copies(nodes: Sequence["_Node"], to_copy: set[int], replacements: Mapping[str, Tensor]) -> dict[int, object]:
    """Copy some of the nodes, with the replacements in place; return the copies by node."""
    copies: dict[int, object] = {}

    def changed(node: _Node) -> dict[Any, object]:
        inner = {key: copies[at] for key, at in node.nodes if at in copies}
        return inner | {key: replacements.get(path, old) for key, path, old in node.tensors}

    objects = {at: attributes for at in to_copy if (attributes := nodes[at].kind.attributes) is not None}
    for at, attributes in objects.items():  # before their children, which may refer back
        copies[at] = attributes.copy(nodes[at].value)
    for at in sorted(to_copy - objects.keys(), reverse=True):  # a container precedes its children
        copies[at] = nodes[at].kind.rebuild(nodes[at].value, changed(nodes[at]))
    for at, attributes in objects.items():
        attributes.assign(copies[at], changed(nodes[at]))
    return copies


@dataclass(slots=True)
class _Node:
    """A value on the way to tensors."""

    value: object
    kind: _Kind
    holders: list[int]  # nodes that contain it
    tensors: list[tuple[Any, str, object]] = field(default_factory=list)  # (key, path, tensor) of each
    nodes: list[tuple[Any, int]] = field(default_factory=list)  # (key, node) of each


def _nested_tensors(value: object, *, into_objects: bool, nodes: list[_Node] | None = None) -> list[tuple[str, Tensor]]:
    """List the tensors nested in a value; collect the nodes that lead to them in `nodes`, the value first."""
    tensors: list[tuple[str, Tensor]] = []
    walk = _Walk(into_objects)
    entered = walk.children(value, inside=False)
    if entered is None:
        return tensors
    if nodes is not None:
        nodes.append(_Node(value, entered[0], []))
    parents, count = {id(value)}, 1
    met: dict[int, int] = {id(value): 0}  # node of each object, by id
    # Per value on the path: remaining children, path, value, node, and whether it was reached through an object.
    way: list[tuple[Iterator[_Child], str, object, int, bool]] = [
        (iter(entered[1]), "", value, 0, entered[0].attributes is not None)
    ]
    while way:
        children, path, holder, at, inside = way[-1]
        for step, key, child in children:
            if issubclass(type(child), Tensor):
                tensors.append((path + step, child))  # type: ignore[arg-type]
                if nodes is not None:
                    nodes[at].tensors.append((key, path + step, child))
            elif id(child) not in parents and (entered := walk.children(child, inside=inside)) is not None:
                kind, inner = entered
                if nodes is not None:
                    nodes[at].nodes.append((key, count))
                    nodes.append(_Node(child, kind, [at]))
                    met[id(child)] = count
                parents.add(id(child))
                way.append((iter(inner), path + step, child, count, inside or kind.attributes is not None))
                count += 1
                break
            elif nodes is not None and id(child) in walk.objects:  # met before
                nodes[at].nodes.append((key, met[id(child)]))
                nodes[met[id(child)]].holders.append(at)
        else:
            parents.discard(id(holder))
            way.pop()
    return tensors


@lru_cache(maxsize=4096)
def _kind(type_: type) -> _Kind | None:
    """Return how to read values of a type; None for those that are not entered."""
    if type_ in _PLAIN or issubclass(type_, str | bytes | int | float | complex | type | enum.Enum | nn.Module):
        return None
    if issubclass(type_, dict):
        kind: _Kind | None = _Kind(partial(_items, dict.items), _with_elements)
    elif issubclass(type_, Mapping) or all(callable(getattr(type_, name, None)) for name in ("keys", "items")):
        kind = _Kind(partial(_items, lambda value: value.items()), _with_elements)
    elif issubclass(type_, tuple):
        fields = getattr(type_, "_fields", None)
        read = partial(_fields, fields) if isinstance(fields, tuple) else partial(_members, tuple.__iter__)
        kind = _Kind(read, _with_members)
    elif issubclass(type_, list):
        kind = _Kind(partial(_members, list.__iter__), _with_elements)
    elif issubclass(type_, deque):
        kind = _Kind(partial(_members, deque.__iter__), _with_elements, is_replaceable=False)
    elif issubclass(type_, set | frozenset):
        kind = _Kind(_members_of_set, _as_set, is_replaceable=False)
    elif type_ in _VIEWS:
        kind = _Kind(partial(_members, lambda value: iter([*value])), _no_copy, is_replaceable=False)
    elif issubclass(type_, _NAMESPACES) or not (
        isinstance(name := type_.__module__, str) and name.partition(".")[0] in sys.stdlib_module_names
    ):
        kind = _kind_of_object(type_)
    else:
        kind = None
    return kind


def _kind_of_object(type_: type) -> _Kind | None:
    """Return how to read objects of a class; None if they have no attributes."""
    slots = [
        member
        for base in reversed(type_.__mro__)
        if "__slots__" in vars(base)
        for member in vars(base).values()
        if isinstance(member, types.MemberDescriptorType)
    ]
    held = next((vars(base)["__dict__"] for base in type_.__mro__ if "__dict__" in vars(base)), None)
    if not isinstance(held, types.GetSetDescriptorType | types.MemberDescriptorType):  # the class redefines it
        held = None
    if not slots and held is None:
        return None
    attributes = _Attributes(held, slots)
    return _Kind(attributes.children, _no_copy, attributes)


@dataclass(frozen=True, slots=True)
class _Attributes:
    """Where objects of a class keep their attributes, read and written without running the class's code."""

    held: Any  # the descriptor of their `__dict__`; None if they have none
    slots: Sequence[Any]  # the descriptors of their slots

    def by_name(self, value: object) -> dict[str, object]:
        attributes: dict[str, object] = {}
        for slot in self.slots:
            with suppress(AttributeError):  # never assigned
                attributes[slot.__name__] = slot.__get__(value)
        if self.held is not None:
            attributes |= self.held.__get__(value)
        return attributes

    def children(self, value: object) -> list[_Child]:
        """Return the attributes that may hold tensors."""
        named = self.by_name(value) if self.slots else self.held.__get__(value)
        return [(f".{name}", name, child) for name, child in [*named.items()] if type(child) not in _PLAIN]

    def copy(self, value: object) -> object:
        blank = types.SimpleNamespace if issubclass(type(value), types.SimpleNamespace) else object
        copied = blank.__new__(type(value))
        self.assign(copied, self.by_name(value))
        return copied

    def assign(self, value: object, named: Mapping[str, object]) -> None:
        remaining = dict(named)
        for slot in self.slots:
            if slot.__name__ in remaining:
                slot.__set__(value, remaining.pop(slot.__name__))
        if self.held is not None:
            self.held.__get__(value).update(remaining)


def _members(iterate: Callable[[Any], Iterator[object]], value: object) -> list[_Child]:
    return [(f"[{at}]", at, child) for at, child in enumerate(iterate(value)) if type(child) not in _PLAIN]


def _fields(names: tuple[str, ...], value: tuple[object, ...]) -> list[_Child]:
    pairs = zip(names, tuple.__iter__(value), strict=False)
    return [(f".{name}", at, child) for at, (name, child) in enumerate(pairs) if type(child) not in _PLAIN]


def _items(items: Callable[[Any], Iterable[tuple[object, object]]], value: object) -> list[_Child]:
    return [(f"[{key!r}]", key, child) for key, child in [*items(value)] if type(child) not in _PLAIN]


def _members_of_set(value: set[object] | frozenset[object]) -> list[_Child]:
    members = [item for item in [*value] if type(item) not in _PLAIN]
    if len(members) > 1:  # the iteration order of a set differs from run to run
        ranks = [_rank(member, with_values=False) for member in members]
        if len({*ranks}) < len(ranks):
            ranks = [_rank(member, with_values=True) for member in members]
        members = [members[at] for at in sorted(range(len(members)), key=ranks.__getitem__)]
    return [(f"{{{at}}}", id(member), member) for at, member in enumerate(members)]


def _rank(member: object, *, with_values: bool) -> tuple[str, tuple[tuple[str, str, tuple[int, ...], bytes], ...]]:
    tensors = [
        (path, str(tensor.dtype), tuple(tensor.shape), _bytes(tensor) if with_values else b"")
        for path, tensor in tensors_in(member)
    ]
    return type(member).__qualname__, tuple(tensors)


def _bytes(tensor: Tensor) -> bytes:
    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return np.from_dlpack(plain.view(-1).view(torch.uint8)).tobytes()  # `.numpy()` would fix its size
    except (RuntimeError, TypeError, ValueError):  # no readable memory: the order is arbitrary
        return b""


def _with_members(value: tuple[object, ...], changed: Mapping[int, object]) -> object:
    make = getattr(type(value), "_make", type(value))
    return make([changed.get(at, member) for at, member in enumerate(tuple.__iter__(value))])


def _with_elements(value: Any, changed: Mapping[int, object]) -> object:
    copied = copy.copy(value)
    for at, new in changed.items():
        copied[at] = new
    return copied


def _as_set(value: Any, changed: Mapping[int, object]) -> object:
    members = [changed.get(id(member), member) for member in value]
    if isinstance(value, frozenset):
        return type(value)(members)
    copied = copy.copy(value)
    set.clear(copied)
    set.update(copied, members)
    return copied


def _no_copy(value: object, _changed: Mapping[Any, object]) -> object:
    raise TypeError(f"a {type(value).__name__} cannot be made anew")
