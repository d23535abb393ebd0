"""The contents and states of objects other than tensors, kept so that they can be restored.

Of containers, the objects in them are kept, in order. Classes, slots, arrays, random generators and scripted modules
have a state that is read and written as a whole.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import delitem, is_, setitem
from typing import Any, NamedTuple

import numpy as np
import torch

# Larger NumPy arrays are not copied.
_ARRAY_BYTES = 2**23

Problem = tuple[object, str]
"""Something that could not be put back, and the reason."""


def attempt(holder: object, call: Callable[[], object]) -> list[Problem]:
    """Call a function of the object, Python or torch; return its error. Bugs of hookscope's own must raise."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the model's own objects may raise anything
        return [(holder, str(error))]
    return []


# Containers are read and filled by the methods of the first of these classes that fits, whatever a subclass overrides.
_KINDS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque, bytearray)


def kind_of(value: object) -> Any:
    """Return the class that `Contents` treats a container as; None for other objects."""
    return next((kind for kind in _KINDS if isinstance(value, kind)), None)


def contents(kind: Any, container: Any) -> list[Any]:
    """Return the objects in a container of that class, with the keys."""
    return [*kind.__iter__(container), *(kind.values(container) if issubclass(kind, dict) else ())]


def identical(first: Sequence[object], second: Sequence[object]) -> bool:
    """Tell whether two sequences are of the same objects."""
    return len(first) == len(second) and all(map(is_, first, second))


@dataclass(slots=True)
class Contents:
    """Containers of one kind, each once, with their contents in one list, so that one pass compares them all."""

    kind: Any
    containers: list[Any]
    _counts: list[int] = field(default_factory=list)
    _keys: list[Any] = field(default_factory=list)
    _values: list[Any] = field(default_factory=list)

    def note(self) -> "Contents":
        """Record their present contents."""
        self._counts, self._keys, self._values = self._counts_now(), self._keys_now(), [*self._values_now()]
        return self

    def changed(self) -> bool:
        """Tell whether a container holds other objects, or in another order."""
        try:
            if self._counts_now() != self._counts or self._keys_now() != self._keys:
                return True
        except Exception:  # noqa: BLE001 - to compare keys may raise anything
            return True
        return not all(map(is_, self._values_now(), self._values))

    def put_back(self) -> Iterator[Problem]:
        """Restore the contents; return the failures."""
        start, kind = 0, self.kind
        fill = kind.update if hasattr(kind, "update") else kind.extend
        for container, count in zip(self.containers, self._counts, strict=True):
            part = slice(start, start + count)
            start += count
            before = Contents(kind, [container], [count], self._keys[part], self._values[part])
            if before.changed():
                held = [*zip(before._keys, before._values, strict=True)] if before._keys else before._values
                clear, refill = partial(kind.clear, container), partial(fill, container, held)
                yield from attempt(container, clear) or attempt(container, refill)

    def _counts_now(self) -> list[int]:
        return [*map(self.kind.__len__, self.containers)]

    def _keys_now(self) -> list[Any]:
        return [*chain.from_iterable(map(self.kind.__iter__, self.containers))] if issubclass(self.kind, dict) else []

    def _values_now(self) -> Iterator[Any]:
        values = self.kind.values if issubclass(self.kind, dict) else self.kind.__iter__
        return chain.from_iterable(map(values, self.containers))


class Access(NamedTuple):
    """How the state of an object is read and written: attribute by attribute with `delete`, else as a whole."""

    read: Callable[[Any], Any]
    write: Callable[..., object]  # called with an object and a state, or an object, a name and a value
    delete: Callable[[Any, str], object] | None = None


class State:
    """An object and its state when this was made: attributes by name, or the state as a whole."""

    def __init__(self, access: Access, holder: Any) -> None:
        """Read the state of an object."""
        self._access, self.holder, self.value = access, holder, access.read(holder)

    def changed(self) -> bool:
        """Tell whether the object has another state."""
        return not _alike(self._access.read(self.holder), self.value)

    def put_back(self) -> list[Problem]:
        """Restore the state; return the first failure."""
        (read, write, delete), holder, value = self._access, self.holder, self.value
        now = read(holder)
        if _alike(now, value):
            return []
        if delete is None:
            return attempt(holder, partial(write, holder, value))
        calls = [partial(delete, holder, name) for name in now.keys() - value.keys()]
        changed = [name for name in value if name not in now or not _alike(now[name], value[name])]
        calls += [partial(write, holder, name, value[name]) for name in changed]
        return [problem for call in calls for problem in attempt(holder, call)][:1]


def state_as_a_whole(value: object) -> State | None:
    """Return the state of a NumPy array, a random generator or a script's handle; None for other objects."""
    access = next((access for kind, access in _WHOLE.items() if isinstance(value, kind)), None)
    if access is None or (isinstance(value, np.ndarray) and value.nbytes > _ARRAY_BYTES):
        return None
    return State(access, value)


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


def _read_class(kind: type) -> dict[str, object]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("__")}


def _read_slots(value: object) -> dict[str, object]:
    names: list[str] = []
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    held = {name: _slot(value, name) for name in names if name not in {"__dict__", "__weakref__"}}
    return {name: value for name, value in held.items() if value is not _EMPTY}


def _slot(value: object, name: str) -> object:
    """Return the value of a slot, without calling the object's `__getattr__`."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _EMPTY


_EMPTY = object()


def _read_script(handle: Any) -> dict[str, object]:
    """Return the attributes of a scripted module, which Python does not see, without its packed weights."""
    concrete: Any = torch._C.ConcreteModuleType.from_jit_type(handle._type())
    attributes = {name: handle.getattr(name) for name in concrete.get_attributes()}
    return {name: value for name, value in attributes.items() if not isinstance(value, torch._C.ScriptObject)}


def _write_array(array: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    if array.shape != values.shape:
        array.resize(values.shape, refcheck=False)
    array[...] = values


VIEW = Access(lambda view: dict(view.items()), setitem, delitem)
"""Access to a mapping that shows the parts of a scripted module."""
CLASS = Access(_read_class, type.__setattr__, type.__delattr__)
"""Access to the attributes of a class, except those that Python keeps there."""
SLOTS = Access(_read_slots, object.__setattr__, object.__delattr__)

_WHOLE: dict[type, Access] = {
    np.ndarray: Access(np.copy, _write_array),
    torch.Generator: Access(
        lambda generator: generator.get_state().tolist(),
        lambda generator, state: generator.set_state(torch.tensor(state, dtype=torch.uint8, device="cpu")),
    ),
    random.Random: Access(random.Random.getstate, random.Random.setstate),
    np.random.Generator: Access(
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    np.random.RandomState: Access(np.random.RandomState.get_state, np.random.RandomState.set_state),
    torch._C.ScriptModule: Access(_read_script, torch._C.ScriptModule.setattr, delattr),
}
