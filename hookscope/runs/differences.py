"""Differences as dicts."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hookscope.results.comparison import Prediction
from hookscope.results.differences import Differences, Measures
from hookscope.runs.serialize import as_json

SCHEMA_VERSION = 1

_LEFT_OUT = ("provenance", "categories")


def differences_to_dict(result: Differences) -> dict[str, Any]:
    """Return all of `result` as dicts, lists, text and numbers; of measures `sqnr_db` too.

    Numbers that JSON does not have are "NaN", "Infinity" and "-Infinity".
    """
    return {"schema_version": SCHEMA_VERSION, **_plain(result)}


def _plain(value: Any) -> Any:
    if isinstance(value, Prediction):
        value = as_json(value)
    elif is_dataclass(value):
        named = {each.name: getattr(value, each.name) for each in fields(value) if each.name not in _LEFT_OUT}
        value = named | ({"sqnr_db": value.sqnr_db} if isinstance(value, Measures) else {})
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [*map(_plain, value)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
