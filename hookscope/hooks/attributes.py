"""Read attributes of users' objects, whose code may raise anything, and arguments of calls."""

from collections.abc import Mapping, Sequence
from typing import Any


def attribute_of(owner: object, name: str, default: Any = None) -> Any:
    """Return an attribute; the default if there is none, or if a property or `__getattr__` raises any error."""
    try:
        return getattr(owner, name, default)
    except Exception:  # noqa: BLE001 - code of the network's own may raise anything
        return default


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call by its position or its name."""
    return args[at] if len(args) > at else kwargs.get(name, default)
