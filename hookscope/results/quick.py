"""Make frozen dataclasses in less than half of the time, for results that come by the thousand."""

import dataclasses
from collections.abc import Iterable
from itertools import starmap
from typing import Any, TypeVar

T = TypeVar("T")

# Of each quick class, the one that is not frozen.
_settable: dict[type, type] = {}


def quick(frozen: type[T]) -> type[T]:
    """Give a frozen dataclass with slots a faster constructor; for positional arguments, and no subclasses.

    The one from `dataclasses` sets each field through a call of `object.__setattr__`. Here the new object is for a
    moment one of a class with the same slots that is not frozen, whose constructor assigns. The type checker sees the
    frozen class alone; `tests/results/test_quick.py` compares both.

    Measured with CPython 3.11: 1.5 µs instead of 3.7 for `TensorStatistics`, 1.5 instead of 3.1 for `LayerRow`. A
    thousand rows of each take 3 ms instead of 7; a pass of densenet121, with 430 module calls, some 40. A class that is
    not frozen would take 0.5 µs, and let a caller change a result.
    """
    fields = dataclasses.fields(frozen)  # type: ignore[arg-type]
    settable = dataclasses.make_dataclass(
        frozen.__name__,
        [(each.name, Any, _defaults(each)) for each in fields],
        bases=frozen.__bases__,
        repr=False,
        eq=False,
        slots=True,
    )
    _settable[frozen] = settable
    become, fill = object.__setattr__, vars(settable)["__init__"]

    def construct(self: T, *args: Any, **kwargs: Any) -> None:
        become(self, "__class__", settable)
        fill(self, *args, **kwargs)
        self.__class__ = frozen

    vars(construct)["__wrapped__"] = vars(frozen)["__init__"]  # the signature
    setattr(frozen, "__init__", construct)  # noqa: B010 - mypy lets no one assign it
    return frozen


def make_all(kind: type[T], arguments: Iterable[tuple[Any, ...]]) -> list[T]:
    """Make objects of a quick class from positional arguments, in half of the time that its constructor takes."""
    made: list[Any] = [*starmap(_settable[kind], arguments)]
    for each in made:
        each.__class__ = kind
    return made


def _defaults(each: "dataclasses.Field[Any]") -> Any:
    return dataclasses.field(default=each.default, default_factory=each.default_factory)
