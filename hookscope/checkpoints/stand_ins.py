"""Put something in the place of the stand-ins in what a pickle holds."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from hookscope.checkpoints.unpickler import ABSENT, StandIn, UnreadablePickleError

# Our choice: quantised layers pack their tensors two tuples deep.
_TUPLES_LIMIT = 100


def replace_stand_ins(content: Any, replacement: Callable[[StandIn], Any]) -> Any:
    """Return content with `replacement` of each stand-in in its place; dicts and lists are changed themselves.

    What a replacement holds is gone through as well. Keys and the members of sets stay as they are. Raises what
    `replacement` does; UnreadablePickleError for tuples in tuples without end.
    """
    return _Replacer(replacement).replaced_in(content)


class _Replacer:
    """Remembers what it has seen, by id, and keeps it, so that its id stays its own."""

    def __init__(self, replacement: Callable[[StandIn], Any]) -> None:
        self._replacement = replacement
        self._replaced: dict[int, tuple[Any, Any]] = {}
        self._seen: dict[int, Any] = {}
        self._waiting: list[Any] = []

    def replaced_in(self, content: Any) -> Any:
        content = self._replaced_by(content)
        while self._waiting:
            part = self._waiting.pop()
            if isinstance(part, dict):
                for key, value in [*dict.items(part)]:
                    dict.__setitem__(part, key, self._replaced_by(value))
            else:
                part[:] = [self._replaced_by(each) for each in part]
        return content

    def _replaced_by(self, value: Any, depth: int = 0) -> Any:
        if not isinstance(value, StandIn | tuple):
            return self._noted(value)
        if id(value) not in self._replaced:
            if depth > _TUPLES_LIMIT:
                raise UnreadablePickleError("tuples in tuples without end")
            if isinstance(value, StandIn):
                new = self._noted(self._replacement(value))
            else:
                new = tuple([self._replaced_by(each, depth + 1) for each in value])
            self._replaced[id(value)] = value, new
        return self._replaced[id(value)][1]

    def _noted(self, value: Any) -> Any:
        if isinstance(value, dict | list) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._waiting.append(value)
        return value


def is_bare(call: StandIn) -> bool:
    """Say whether a call is all that a stand-in has been through: no state, entries, elements or keywords."""
    return call.state is ABSENT and not (call.entries or call.elements or call.keywords)


def is_empty_hooks(value: object) -> bool:
    """Say whether a value is what torch writes for the backward hooks of a tensor: an empty OrderedDict, or None."""
    return value is None or (type(value) is OrderedDict and not value)
