"""A result in a run directory: JSON in `result.json`, arrays in `arrays.safetensors`.

Reading gives the type that was written. Files may be hostile, so all values are checked against the types of results.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hookscope.results.json_form import is_stored, to_document
from hookscope.text import plain, strict_json

if TYPE_CHECKING:
    from pydantic import ValidationInfo
    from pydantic_core import SchemaValidator

RESULT, ARRAYS = "result.json", "arrays.safetensors"

# The least whole number in a field (None for any); it is 0 in all other fields. In a shape, -1 is the size of an axis
# along which parts of a nested tensor differ. Results divide by `count`; `tile` and `columns` measure pictures.
_LEAST = {"seed": None, "exponent": None, "shape": -1, "shape_b": -1, "count": 1, "tile": 1, "columns": 1}

# Numbers that JSON does not have.
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# A longer whole number may be infinite as a float; JSON and Python have no limit.
_MOST_DIGITS = 300


def write_result(folder: Path, result: object) -> list[str]:
    """Write a result into a run; return the names of its files."""
    from safetensors.numpy import save  # noqa: PLC0415 - for this alone

    arrays: dict[str, NDArray[Any]] = {}
    (folder / RESULT).write_text(strict_json(to_document(result, arrays)), encoding="utf-8")
    if not arrays:
        return [RESULT]
    (folder / ARRAYS).write_bytes(save({name: np.ascontiguousarray(values) for name, values in arrays.items()}))
    return [RESULT, ARRAYS]


def parse_json(text: bytes) -> dict[str, Any] | None:
    """Return a JSON object without lone surrogates; None for JSON that is not an object.

    Raises ValueError if it is not JSON, RecursionError if it nests too deeply.
    """
    document = json.loads(text, parse_int=_whole_number)
    return plain(document) if isinstance(document, dict) else None


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError("too long a number")
    return int(digits)


def checked(kind: type, document: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None) -> Any:
    """Turn a document that `json_form` wrote into a dataclass of this kind; entries of other names are ignored.

    Raises:
        ValueError: With a place ("rows.0.index") and the problem, if the document does not fit the type, names an array
            that is not in `arrays`, or has a negative count.
    """
    from pydantic_core import ValidationError  # noqa: PLC0415 - for reading alone

    try:
        # As JSON, because there strict validation takes lists for tuples and dicts for dataclasses.
        (result,) = _validator(kind).validate_json(json.dumps([document]), context=arrays or {})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(".".join(map(str, first["loc"][1:])), first["msg"]) from error
    return result


@lru_cache
def _validator(kind: type) -> "SchemaValidator":
    from pydantic import ConfigDict, TypeAdapter  # noqa: PLC0415 - for reading alone
    from pydantic_core import CoreConfig, SchemaValidator  # noqa: PLC0415

    # In a tuple, because pydantic accepts no outside configuration for a dataclass.
    adapter = TypeAdapter(tuple[kind], config=ConfigDict(strict=True, arbitrary_types_allowed=True))  # type: ignore[valid-type]
    return SchemaValidator(_as_written(adapter.core_schema), CoreConfig(strict=True))


def _as_written(schema: Any, least: int | None = 0) -> Any:
    """Adapt a schema to the form that `json_form` writes: numbers may be "NaN", arrays are names.

    Whole numbers must be `least` or more, except in mappings, which hold values of other programs.
    """
    from pydantic_core import core_schema  # noqa: PLC0415 - for reading alone

    if not isinstance(schema, dict):
        return [_as_written(part, least) for part in schema] if isinstance(schema, list) else schema
    if schema.get("type") == "int":
        return core_schema.int_schema(ge=least)
    if schema.get("type") == "float":
        return core_schema.no_info_before_validator_function(_number, {"type": "float"})
    if schema.get("type") == "is-instance" and schema["cls"] is np.ndarray:
        return core_schema.with_info_plain_validator_function(_array)
    if schema.get("type") == "dataclass":
        unstored = {field.name: _default(field) for field in fields(schema["cls"]) if not is_stored(field)}
        entries = [entry | unstored.get(entry["name"], {}) for entry in schema["schema"]["fields"]]
        return {**schema, "schema": _as_written({**schema["schema"], "fields": entries})}
    if {"name", "schema"} <= {*schema}:  # a field of a dataclass or a named tuple
        least = _LEAST.get(schema["name"], 0)
    elif schema.get("type") == "dict":
        least = None
    return {name: _as_written(part, least) for name, part in schema.items()}


def _number(value: object) -> object:
    return _NUMBERS.get(value, value) if isinstance(value, str) else value


def _default(field: Field[Any]) -> dict[str, Any]:
    """Return the schema of a field that gets its default, whatever the file contains."""
    from pydantic_core import core_schema  # noqa: PLC0415 - for reading alone

    factory: Callable[[], Any] = (lambda: field.default) if field.default_factory is MISSING else field.default_factory
    ignoring = core_schema.no_info_plain_validator_function(lambda _: factory())
    return {"schema": core_schema.with_default_schema(ignoring, default_factory=factory)}


def _array(name: object, info: "ValidationInfo") -> NDArray[Any]:
    if not isinstance(name, str) or info.context is None or name not in info.context:
        raise ValueError("no such array")
    values: NDArray[Any] = info.context[name]
    return values
