"""JSON schemas of what commands print, of `run.json` and of a line of `watch.jsonl`, made from the types of results.

`result.json` of a run has the schema of its command. `pytest tests/docs/test_schemas.py --update-golden` writes the
schemas to docs/schemas. Where a key goes or changes its meaning, `SCHEMA_VERSION` must change with it.
"""

import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

from hookscope.cli.doctor import Fact
from hookscope.results.check import CheckReport
from hookscope.results.contents import CheckpointContents
from hookscope.results.json_form import SCHEMA_VERSION, derived, is_stored
from hookscope.results.network import ModuleTable
from hookscope.results.runs.reading import RESULT_KINDS
from hookscope.results.runs.record import RunRecord
from hookscope.results.table_rows import TableRows
from hookscope.results.training import (
    TrainingEnd,
    TrainingFinding,
    TrainingStart,
    TrainingStep,
    WatchedLayer,
    WatchedParameter,
    WatchedStep,
)

Schema = dict[str, Any]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEXT: Schema = {"type": "string"}
_POSITION: Schema = {"type": "integer", "minimum": 0, "description": 'Of a text, among the "names" before.'}
_NUMBER: Schema = {"$ref": "#/$defs/number"}
_PLAIN: Mapping[object, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: _NUMBER,
    str: _TEXT,
    type(None): {"type": "null"},
    Any: {},
    np.ndarray: {"$ref": "#/$defs/array"},
}
_TYPES: dict[str, Schema] = {
    "number": {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]},
    "array": _TEXT | {"description": "Its name in arrays.safetensors of the run; missing where no run was written."},
}
_DESCRIBED = re.compile(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", re.MULTILINE | re.DOTALL)


def documents() -> dict[str, Schema]:
    """Return a schema for each command that prints JSON, for `run.json` and a line of `watch.jsonl`, by name."""
    run = {"run": {"type": ["string", "null"], "description": "The run directory; null if nothing was written."}}
    results = {name: _properties(kind) | run for name, (kind, _) in RESULT_KINDS.items()}
    checks = {"exit_code": _of(int), "checkpoints": _array(_of(CheckReport))}
    return {
        **{name: _document(f"hookscope {name} --json, result.json", of, "run") for name, of in results.items()},
        "check": _document("hookscope check --format json", checks),
        "checkpoint": _document("hookscope checkpoint --json", _properties(CheckpointContents)),
        "layers": _document("hookscope layers --json", _properties(ModuleTable)),
        "doctor": _document("hookscope doctor --json", {"facts": _array(_of(Fact))}),
        "run": _document("run.json", {"tool": {"const": "hookscope"}} | _properties(RunRecord)),
        "watch": _watch_line(),
    }


def _document(title: str, properties: Mapping[str, Schema], *optional: str) -> Schema:
    """Return the schema of a whole document, with the types that it uses."""
    versioned = {"schema_version": {"const": SCHEMA_VERSION}, **properties}
    schema = {"$schema": _DIALECT, "title": title, **_object(versioned, *optional)}
    return schema | {"$defs": dict(sorted(_definitions(schema).items()))}


def _definitions(schema: object) -> dict[str, Schema]:
    """Return the types that a schema refers to, and those that these refer to."""
    actual: dict[str, Schema] = {}
    waiting = [*_references(schema)]
    while waiting:
        name = waiting.pop()
        if name not in actual:
            actual[name] = _TYPES[name]
            waiting += _references(actual[name])
    return actual


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        for name, value in schema.items():
            if name == "$ref":
                yield value.rpartition("/")[2]
            else:
                yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _of(kind: Any) -> Schema:
    """Return the schema of a value of a type as `hookscope.results.json_form` writes it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if (origin or kind) in _PLAIN:
        return dict(_PLAIN[origin or kind])
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return _reference(kind)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(argument) for argument in arguments]}
    if origin in (tuple, Sequence, list):
        is_array = origin is not tuple or arguments[-1] is Ellipsis
        items = [_of(argument) for argument in arguments if argument is not Ellipsis]
        return _array(items[0]) if is_array else {"type": "array", "prefixItems": items, "items": False}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of(arguments[1])}
    raise TypeError(f"No schema for {kind!r}: say in docs/schemas.py how it is written as JSON.")


def _reference(kind: Any) -> Schema:
    if kind.__name__ not in _TYPES:
        _TYPES[kind.__name__] = {}  # a type that holds itself refers to what is being made
        properties = _properties(kind)
        arrays = [name for name, schema in properties.items() if "array" in _references(schema)]
        _TYPES[kind.__name__] = _object(properties, *arrays)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _properties(kind: Any) -> dict[str, Schema]:
    """Return what JSON has of a type, with what the docstrings say of it."""
    hints, described = typing.get_type_hints(kind), _descriptions(kind)
    names = [field.name for field in fields(kind) if is_stored(field)] if is_dataclass(kind) else kind._fields
    getters = derived(kind)
    for name, getter in getters.items():
        hints[name] = typing.get_type_hints(getter.fget)["return"]
        described[name] = re.split(r"(?<=\.)\s", getter.__doc__ or "")[0]
    return {
        name: _of(hints[name]) | ({"description": described[name]} if name in described else {})
        for name in (*names, *getters)
    }


def _descriptions(kind: Any) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say of their attributes."""
    actual: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, attributes = (base.__doc__ or "").partition("Attributes:\n")
        section = re.split(r"\n\s*\n", re.sub(r"^    ", "", attributes, flags=re.MULTILINE))[0]
        actual |= {name: " ".join(text.split()) for name, text in _DESCRIBED.findall(section)}
    return actual


def _object(properties: Mapping[str, Schema], *optional: str) -> Schema:
    """Return an object that has at least these keys: new ones may come in any version."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _watch_line() -> Schema:
    """Return the schema of a line of `watch.jsonl`, which is told apart by its "type"."""
    marks: dict[str, Schema] = {"tool": {"const": "hookscope"}, "schema_version": {"const": SCHEMA_VERSION}}
    largest = {"type": "array", "prefixItems": [_POSITION, _NUMBER], "items": False}
    edits = {"type": "array", "prefixItems": [_POSITION, _of(int)], "items": False}
    tables = {"parameters": WatchedParameter, "layers": WatchedLayer, "tables": TableRows}
    columns = {name: _columns(kind) for name, kind in tables.items()}
    lines = [
        _line("start", marks | _properties(TrainingStart), "notes"),
        _line("names", {"names": _array(_TEXT)}),
        _line(
            "step",
            _properties(TrainingStep) | {"largest": _array(largest), "losses": _array(largest), "edits": _array(edits)},
            "skipped",
            "losses",
            "edits",
        ),
        _line("watched", _properties(WatchedStep) | columns, "layers", "tables"),
        _line("verdict", _properties(TrainingFinding)),
        _line("end", _properties(TrainingEnd)),
    ]
    schema = {"$schema": _DIALECT, "title": "A line of watch.jsonl, as hookscope.watch writes it", "anyOf": lines}
    return schema | {"$defs": dict(sorted(_definitions(schema).items()))}


def _line(kind: str, properties: Mapping[str, Schema], *optional: str) -> Schema:
    return _object({"type": {"const": kind}, **properties}, *optional)


def _columns(kind: Any) -> Schema:
    """Return rows as columns: texts as positions, and columns without any value left out."""
    columns = {
        name: _array(_POSITION if hint is str or get_origin(hint) is Literal else _of(hint))
        for name, hint in typing.get_type_hints(kind).items()
    }
    texts = [name for name, column in columns.items() if column["items"] is _POSITION]
    return _object(columns, *(name for name in columns if name not in texts))
