"""What containers hold, kept so that it can be put back: the very objects, in their order."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any, NamedTuple


class _Kind(NamedTuple):
    """How containers of a kind are read and filled, whatever a subclass makes of it. Sets and lists have no keys."""

    keys: Callable[[Any], Iterable[Any]] | None
    values: Callable[[Any], Iterable[Any]]
    clear: Callable[[Any], None]
    fill: Callable[[Any, Any], None]


# The first that fits is the one.
_KINDS: dict[type, _Kind] = {
    OrderedDict: _Kind(OrderedDict.__iter__, OrderedDict.values, OrderedDict.clear, OrderedDict.update),
    dict: _Kind(dict.__iter__, dict.values, dict.clear, dict.update),
    list: _Kind(None, list.__iter__, list.clear, list.extend),
    set: _Kind(None, set.__iter__, set.clear, set.update),
    deque: _Kind(None, deque.__iter__, deque.clear, deque.extend),
    bytearray: _Kind(None, bytearray.__iter__, bytearray.clear, bytearray.extend),
}


def kind_of(value: object) -> type | None:
    """Return which of the kinds that `Contents` can keep a container is of; None if it is of none."""
    if type(value) in _KINDS:
        return type(value)
    return next((kind for kind in _KINDS if isinstance(value, kind)), None)


def contents(kind: type, container: Any) -> list[Any]:
    """Return what a container of that kind holds, keys included."""
    keys = _KINDS[kind].keys
    return [*(keys(container) if keys else ()), *_KINDS[kind].values(container)]


def identical(first: Sequence[object], second: Sequence[object]) -> bool:
    """Tell whether two sequences are of the same objects."""
    return len(first) == len(second) and all(map(is_, first, second))


@dataclass(slots=True)
class Contents:
    """Containers of one kind with what they held, in a row: to compare all of them takes one pass.

    Attributes:
        kind: One that `kind_of` returns.
        containers: Each once.
    """

    kind: type
    containers: list[Any]
    _counts: list[int] = field(default_factory=list)
    _keys: list[Any] = field(default_factory=list)
    _values: list[Any] = field(default_factory=list)

    def note(self) -> "Contents":
        """Keep what they hold now."""
        self._counts = self._counts_now()
        self._keys, self._values = self._keys_now(), self._values_now()
        return self

    def changed(self) -> bool:
        """Tell whether one of them holds other objects, or in another order."""
        try:
            if self._counts_now() != self._counts or self._keys_now() != self._keys:
                return True
        except Exception:  # noqa: BLE001 - to compare keys may raise anything
            return True
        return not all(map(is_, chain.from_iterable(map(_KINDS[self.kind].values, self.containers)), self._values))

    def put_back(self) -> Iterator[tuple[object, str]]:
        """Fill them as they were; return those with which that fails, and the reason."""
        start = 0
        kind = _KINDS[self.kind]
        for container, count in zip(self.containers, self._counts, strict=True):
            part = slice(start, start + count)
            start += count
            before = Contents(self.kind, [container], [count], self._keys[part], self._values[part])
            if before.changed():
                try:
                    kind.clear(container)
                    kind.fill(
                        container, [*zip(before._keys, before._values, strict=True)] if kind.keys else before._values
                    )
                except Exception as error:  # noqa: BLE001 - subclasses and keys may raise anything
                    yield container, str(error)

    def _counts_now(self) -> list[int]:
        return [*map(self.kind.__len__, self.containers)]  # type: ignore[attr-defined] # all of `_KINDS` have it

    def _keys_now(self) -> list[Any]:
        keys = _KINDS[self.kind].keys
        return [*chain.from_iterable(map(keys, self.containers))] if keys else []

    def _values_now(self) -> list[Any]:
        return [*chain.from_iterable(map(_KINDS[self.kind].values, self.containers))]
