"""Objects whose state is read and written as a whole: classes, slots, arrays, random generators, scripted modules."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

# Larger NumPy arrays are not copied. Our choice.
_ARRAY_BYTES = 2**23


class _Access(NamedTuple):
    """How the state of an object is read, and how it is given one."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


@dataclass(frozen=True, slots=True)
class State:
    """An object with the state that it had.

    Attributes:
        holder: The object.
        value: Its state: attributes by name, or what is its state.
    """

    holder: Any
    value: Any
    _access: _Access

    def changed(self) -> bool:
        """Tell whether the object has another state."""
        return not _alike(self._access.read(self.holder), self.value)

    def put_back(self) -> None:
        """Give the object the state that it had."""
        if self.changed():
            self._access.write(self.holder, self.value)


def state_of_view(view: Any) -> State:
    """Keep what is in a mapping that shows the parts of a scripted module."""
    return _state(view, _Access(lambda each: dict(each.items()), _write_items))


def state_of_class(kind: type) -> State:
    """Keep the attributes of a class, except those that Python keeps there."""
    return _state(kind, _Access(_read_class, _write_class))


def state_of_slots(value: object) -> State:
    """Keep what an object has in slots."""
    return _state(value, _Access(_read_slots, _write_slots))


def state_as_a_whole(value: object) -> State | None:
    """Keep the state of a NumPy array, a random generator or a script's handle; None of anything else."""
    access = next((access for kind, access in _WHOLE.items() if isinstance(value, kind)), None)
    if access is None or (isinstance(value, np.ndarray) and value.nbytes > _ARRAY_BYTES):
        return None
    return _state(value, access)


def _state(holder: Any, access: _Access) -> State:
    return State(holder, access.read(holder), access)


def _alike(first: Any, second: Any) -> bool:
    """Tell whether two states are the same: the same objects, or plain values and arrays that are equal."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_alike(value, second[name]) for name, value in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_alike, first, second))
    if isinstance(first, np.ndarray):
        return (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())
    return isinstance(first, int | float | str | bytes | complex) and bool(first == second)


def _write_items(view: Any, items: Mapping[str, object]) -> None:
    for name, value in items.items():
        if view[name] is not value:
            view[name] = value


def _read_class(kind: type) -> dict[str, object]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("__")}


def _write_class(kind: type, attributes: Mapping[str, object]) -> None:
    for name in _read_class(kind).keys() - attributes.keys():
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
    """Return the attributes of a scripted module, which it keeps out of Python's sight, but not its packed weights."""
    concrete: Any = torch._C.ConcreteModuleType.from_jit_type(handle._type())
    attributes = {name: handle.getattr(name) for name in concrete.get_attributes()}
    return {name: value for name, value in attributes.items() if not isinstance(value, torch._C.ScriptObject)}


def _write_script(handle: Any, attributes: Mapping[str, object]) -> None:
    for name, value in attributes.items():
        if not _alike(handle.getattr(name), value):
            handle.setattr(name, value)


def _write_array(array: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    if array.shape != values.shape:
        array.resize(values.shape, refcheck=False)
    array[...] = values


def _write_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_WHOLE: dict[type, _Access] = {
    np.ndarray: _Access(np.copy, _write_array),
    torch.Generator: _Access(
        lambda generator: generator.get_state().tolist(),
        lambda generator, state: generator.set_state(torch.tensor(state, dtype=torch.uint8)),
    ),
    random.Random: _Access(random.Random.getstate, random.Random.setstate),
    np.random.Generator: _Access(lambda generator: generator.bit_generator.state, _write_bits),
    np.random.RandomState: _Access(np.random.RandomState.get_state, np.random.RandomState.set_state),
    torch._C.ScriptModule: _Access(_read_script, _write_script),
}
