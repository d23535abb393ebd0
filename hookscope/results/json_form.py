"""Results as JSON: dicts, lists, text and numbers by the names of fields, with arrays apart."""

from collections.abc import Callable, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCHEMA_VERSION = 3
"""The version in every JSON document; it changes when a key goes or changes its meaning."""

UNSTORED: Mapping[str, Any] = MappingProxyType({"stored": False})
"""The `metadata` of a field that is not written to files, and has its default when a result is read."""

Getter = TypeVar("Getter", bound=Callable[[Any], Any])


def in_json(getter: Getter) -> Getter:
    """Mark the getter of a property that is written to JSON like a field; a result that is read computes it again."""
    getter.in_json = True  # type: ignore[attr-defined]
    return getter


def is_stored(field: Field[Any]) -> bool:
    """Tell whether a field is written to files."""
    return bool(field.metadata.get("stored", True))


@lru_cache
def derived(kind: type) -> Mapping[str, property]:
    """Return the properties of a class that are written to JSON, by name."""
    members = ((name, value) for base in reversed(kind.__mro__) for name, value in vars(base).items())
    return {name: value for name, value in members if isinstance(value, property) and hasattr(value.fget, "in_json")}


@lru_cache
def _names(kind: type) -> tuple[str, ...]:
    return (*(field.name for field in fields(kind) if is_stored(field)), *derived(kind))


def to_document(result: object, arrays: "dict[str, NDArray[Any]] | None" = None) -> dict[str, Any]:
    """Return a result as a whole JSON document, as `json_form`; NaN and infinities are floats, for `strict_json`."""
    return {"schema_version": SCHEMA_VERSION, **json_form(result, arrays)}


def array_forms(part: object) -> "dict[str, tuple[np.dtype[Any], tuple[int, ...]]]":
    """Return the dtypes and shapes of the arrays in a part of a result, by their names."""
    arrays: dict[str, NDArray[Any]] = {}
    json_form(part, arrays)
    return {name: (values.dtype, values.shape) for name, values in arrays.items()}


def json_form(value: Any, arrays: "dict[str, NDArray[Any]] | None" = None, at: str = "") -> Any:
    """Return a part of a result as dicts, lists, text and numbers.

    Args:
        value: The part.
        arrays: Filled with the part's arrays by name, "rows.3.values"; JSON has the name in the array's place. None
            leaves arrays out.
        at: Name of the part.
    """
    import numpy as np  # noqa: PLC0415 - the names of rules load no numpy

    if isinstance(value, np.ndarray):
        assert arrays is not None  # noqa: S101 - without `arrays`, the comprehension below leaves arrays out
        arrays[at] = value
        return at
    if is_dataclass(value):
        named = {name: getattr(value, name) for name in _names(type(value))}  # type: ignore[arg-type]
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        named = value._asdict()
    elif isinstance(value, Mapping):
        named = {str(name): entry for name, entry in value.items()}
    elif isinstance(value, tuple | list):
        return [json_form(entry, arrays, f"{at}.{place}") for place, entry in enumerate(value)]
    else:
        return value
    return {
        name: json_form(entry, arrays, f"{at}.{name}" if at else name)
        for name, entry in named.items()
        if arrays is not None or not isinstance(entry, np.ndarray)
    }
