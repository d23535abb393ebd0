"""Results as JSON documents that have all of their entries, and back: what `diff` and `history` write."""

import math
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hookscope.results.comparison import Prediction
from hookscope.results.differences import Measures
from hookscope.results.runs.serialize import as_json, prediction_fields

# Numbers that JSON does not have.
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_document(value: Any, left_out: Collection[str]) -> Any:
    """Return a value of a result as dicts, lists, text and numbers, without the fields that are `left_out`.

    Numbers that JSON does not have become "NaN", "Infinity" and "-Infinity", but probabilities null; measures have
    `sqnr_db` too.
    """
    if isinstance(value, Prediction):
        value = as_json(value)
        for each in value["classes"]:
            each["probability"] = None if math.isnan(each["probability"]) else each["probability"]
    elif is_dataclass(value):
        named = {each.name: getattr(value, each.name) for each in fields(value) if each.name not in left_out}
        value = named | ({"sqnr_db": value.sqnr_db} if isinstance(value, Measures) else {})
    if isinstance(value, Mapping):
        return {name: to_document(each, left_out) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [to_document(each, left_out) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def from_document(value: Any, left_out: Collection[str], numeric: Collection[str], name: str = "") -> Any:
    """Return a document with the numbers and predictions that results have, for `checked`.

    Args:
        value: What JSON has.
        left_out: As for `to_document`: entries that are taken from no file.
        numeric: Entries that are numbers.
        name: Of the entry that has the value.
    """
    if isinstance(value, dict):
        kept = {each: entry for each, entry in value.items() if each not in left_out}
        restored = {each: from_document(entry, left_out, numeric, each) for each, entry in kept.items()}
        return restored | prediction_fields(value["classes"]) if "classes" in value else restored
    if isinstance(value, list):
        return [from_document(each, left_out, numeric, name) for each in value]
    return _NUMBERS.get(value, value) if isinstance(value, str) and name in numeric else value
