"""Make many frozen dataclasses at once, for results that come by the thousand."""

import dataclasses
from collections.abc import Iterable
from functools import cache
from itertools import starmap
from typing import Any, TypeVar

T = TypeVar("T")


def make_all(kind: type[T], arguments: Iterable[tuple[Any, ...]]) -> list[T]:
    """Make objects of a frozen dataclass with slots from the values of their fields, in order.

    Its constructor sets each field through a call of `object.__setattr__`. Here the objects are first made of a class
    with the same slots that is not frozen; the type checker sees the frozen class alone. Measured with CPython 3.11:
    0.3 µs instead of 2.0 for `TensorStatistics`, of which efficientnet_b0 has 230 in a pass of 30 ms.

    Raises:
        TypeError: If there are too few values for a class, or too many.
    """
    settable = _settable(kind)  # type: ignore[arg-type] # mypy takes no class for hashable
    made: list[Any] = [*starmap(settable, arguments)]
    for each in made:
        each.__class__ = kind
    return made


@cache
def _settable(kind: type) -> type:
    return dataclasses.make_dataclass(
        kind.__name__,
        [(each.name, Any, _defaults(each)) for each in dataclasses.fields(kind)],
        bases=kind.__bases__,
        repr=False,
        eq=False,
        slots=True,
    )


def _defaults(each: "dataclasses.Field[Any]") -> Any:
    return dataclasses.field(default=each.default, default_factory=each.default_factory)
