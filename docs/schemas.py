"""JSON schemas of what commands print, of `run.json` and of a line of `watch.jsonl`, made from the types of results.

`pytest tests/docs/test_schemas.py --update-golden` writes them to docs/schemas. Where a key goes or changes its
meaning, the document's `schema_version` must change with it.
"""

import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin

from hookscope.cli.doctor import Fact
from hookscope.render.contents import SCHEMA_VERSION as CONTENTS_VERSION
from hookscope.results.accuracy import Accuracy
from hookscope.results.activations import Activations
from hookscope.results.attention import Attention, AttentionMap
from hookscope.results.attributions import AttributionMap, Attributions
from hookscope.results.check import CheckReport, RuleOutcome
from hookscope.results.comparison import Prediction, Reading
from hookscope.results.concentration import Box
from hookscope.results.contents import CheckpointContents, StoredPart, StoredTensor
from hookscope.results.cost import NetworkCost
from hookscope.results.differences import (
    DifferenceRow,
    Differences,
    Exceeded,
    FirstDifference,
    Measures,
    OutputDifference,
    WeightDifference,
)
from hookscope.results.distribution import Histogram
from hookscope.results.findings import Finding
from hookscope.results.gradients import Gradients, InputGradients, LossRecord
from hookscope.results.history import ActivationPoint, History, OptimiserPoint, WeightPoint
from hookscope.results.inputs import Provenance, Region
from hookscope.results.network import ModelInfo, ModuleRow
from hookscope.results.runs.attention import SCHEMA_VERSION as ATTENTION_VERSION
from hookscope.results.runs.attributions import SCHEMA_VERSION as ATTRIBUTIONS_VERSION
from hookscope.results.runs.attributions import StoredPicture
from hookscope.results.runs.differences import SCHEMA_VERSION as DIFFERENCES_VERSION
from hookscope.results.runs.directory import SCHEMA_VERSION as RUN_VERSION
from hookscope.results.runs.history import SCHEMA_VERSION as HISTORY_VERSION
from hookscope.results.runs.serialize import _NOT_IN_JSON, QUANTILE_NAMES, SCHEMA_VERSION, RunRecord
from hookscope.results.runs.survey import LEFT_OUT as SURVEY_LEFT_OUT
from hookscope.results.runs.survey import SCHEMA_VERSION as SURVEY_VERSION
from hookscope.results.runs.training_log import SCHEMA_VERSION as TRAINING_VERSION
from hookscope.results.statistics import TensorStatistics
from hookscope.results.survey import CropSheet, Survey, SurveyRow, WrongStrip
from hookscope.results.table_rows import TableRows
from hookscope.results.training import (
    TrainingEnd,
    TrainingStart,
    TrainingStep,
    TrainingVerdict,
    WatchedLayer,
    WatchedParameter,
    WatchedStep,
)

Schema = dict[str, Any]

_NUMBER: Schema = {"type": ["number", "null"]}  # NaN and infinite numbers are null
_EXTENDED: Schema = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
_IN_TRAINING: Schema = {"anyOf": [{"type": ["number", "null"]}, {"enum": ["nan", "inf", "-inf"]}]}
_TEXT: Schema = {"type": "string"}
_POSITION: Schema = {"type": "integer", "minimum": 0, "description": 'Of a text, among the "names" before.'}
_PLAIN: Mapping[object, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: _NUMBER,
    str: _TEXT,
    type(None): {"type": "null"},
    Any: {},
}
_DIFF = (
    "a",
    "b",
    "way",
    "inputs_b",
    "first_differences",
    "outputs",
    "exceeded",
    "reference",
)  # what `run.json` has of a result of `diff`
_COUNTS_OF_SURVEY = {"input_count": int, "classes": Mapping[str, int], "batch_size": int} | dict.fromkeys(
    ("chunk_size", "chunk_count", "resumed_count"), int
)
_ATTENTION = ("census", "blocks", "unseen")  # the same of `attention`
_DESCRIBED = re.compile(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", re.MULTILINE | re.DOTALL)


def documents() -> dict[str, Schema]:
    """Return a schema for each command that prints JSON, for `run.json` and a line of `watch.jsonl`, by name."""
    run = {"run": {"type": ["string", "null"], "description": "The run directory; null if nothing was written."}}
    activations, gradients, attributions = map(_result, (Activations, Gradients, Attributions))
    differences = _properties(Differences, "provenance", "maps")
    attention = {"census": _TEXT} | _properties(Attention, *_NOT_IN_JSON, "head_maps", "patches")
    alone = {"inputs_alone": _array(_of(InputGradients))}
    contents = _properties(CheckpointContents) | {
        "parts": _array(_object(_properties(StoredPart) | {"tensors": _of(int), "nonfinite_count": _of(int)})),
        "tensors": _array(_object({"part": _TEXT} | _properties(StoredTensor))),
        "nonfinite_count": _of(int),
    }
    layers = {"modules": _array(_of(ModuleRow)), "cost": _of(NetworkCost | None)}
    return {
        "activations": _document("hookscope activations --json", SCHEMA_VERSION, activations | run),
        "grads": _document("hookscope grads --json", SCHEMA_VERSION, gradients | alone | run),
        "attribute": _document("hookscope attribute --json", ATTRIBUTIONS_VERSION, attributions | run),
        "attention": _document("hookscope attention --json", ATTENTION_VERSION, attention | run),
        "diff": _document("hookscope diff --json", DIFFERENCES_VERSION, differences | run),
        "history": _document(
            "hookscope history --json",
            HISTORY_VERSION,
            {"exit_code": _of(int), **_properties(History, "provenance"), **run},
        ),
        "survey": _document("hookscope survey --json", SURVEY_VERSION, _survey() | run),
        "check": _document("hookscope check --format json", SCHEMA_VERSION, _checks()),
        "checkpoint": _document("hookscope checkpoint --json", CONTENTS_VERSION, contents),
        "layers": _document("hookscope layers --json", SCHEMA_VERSION, layers),
        "doctor": _document("hookscope doctor --json", 1, {"facts": _array(_of(Fact))}),
        "run": _run_record(
            {name: differences[name] for name in _DIFF}
            | {name: attention[name] for name in _ATTENTION}
            | activations
            | gradients
            | attributions
        ),
        "watch": _watch_line(),
    }


def _document(title: str, version: int, properties: Mapping[str, Schema]) -> Schema:
    """Return the schema of a whole document, with the types that it uses."""
    versioned = {"schema_version": {"const": version}, **properties}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **_object(versioned)}
    return schema | {"$defs": dict(sorted(_definitions(schema).items()))}


def _definitions(schema: object) -> dict[str, Schema]:
    """Return the types that a schema refers to, and those that these refer to."""
    found: dict[str, Schema] = {}
    waiting = [*_references(schema)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _TYPES[name]
            waiting += _references(found[name])
    return found


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


_TYPES: dict[str, Schema] = {}


def _of(kind: Any) -> Schema:
    """Return the schema of a value of a type as `hookscope.results.runs.serialize` writes it."""
    if kind in _PLAIN or is_dataclass(kind):
        return dict(_PLAIN[kind]) if kind in _PLAIN else _reference(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(each) for each in arguments]}
    if origin in (tuple, Sequence, list):
        if (len(arguments) == 2 and arguments[1] is Ellipsis) or origin is not tuple:
            return _array(_of(arguments[0]))
        return {"type": "array", "prefixItems": [_of(each) for each in arguments], "items": False}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of(arguments[1])}
    raise TypeError(f"No schema for {kind!r}: say in docs/schemas.py how it is written as JSON.")


def _reference(kind: Any) -> Schema:
    if kind.__name__ not in _TYPES:
        _TYPES[kind.__name__] = {}  # a type that holds itself refers to what is being made
        _TYPES[kind.__name__] = _object(_SPECIAL[kind]() if kind in _SPECIAL else _properties(kind))
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _properties(kind: Any, *without: str) -> dict[str, Schema]:
    """Return the fields of a dataclass with what its docstring says of them."""
    hints = typing.get_type_hints(kind)
    described = _descriptions(kind)
    return {
        each.name: _of(hints[each.name]) | ({"description": described[each.name]} if each.name in described else {})
        for each in fields(kind)
        if each.name not in without
    }


def _descriptions(kind: Any) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say of their attributes."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, attributes = (base.__doc__ or "").partition("Attributes:\n")
        section = re.split(r"\n\s*\n", re.sub(r"^    ", "", attributes, flags=re.MULTILINE))[0]
        found |= {name: " ".join(text.split()) for name, text in _DESCRIBED.findall(section)}
    return found


def _object(properties: Mapping[str, Schema], *optional: str) -> Schema:
    """Return an object that has at least these keys: new ones may come in any version."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _result(kind: Any) -> dict[str, Schema]:
    return _properties(kind, *_NOT_IN_JSON)


def _statistics() -> dict[str, Schema]:
    quantiles = _object(dict.fromkeys(QUANTILE_NAMES, _NUMBER))
    return _properties(TensorStatistics, "distribution", "kept_values", "channel_nonzero") | {
        "quantiles": {"anyOf": [quantiles, _PLAIN[type(None)]]},
        "dead_channel_fraction": _NUMBER,
        "histogram": _of(Histogram | None),
    }


def _prediction() -> dict[str, Schema]:
    classes = {"index": _of(int), "name": _of(str | None), "probability": _NUMBER}
    return {"input_index": _of(int), "classes": _array(_object(classes)), "reading": _of(Reading)}


def _loss() -> dict[str, Schema]:
    value = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
    return _properties(LossRecord) | {"value": value}


def _map() -> dict[str, Schema]:
    halves = [_object({"share": _NUMBER, "where": _TEXT} | _properties(kind)) for kind in (Region, Box)]
    half = {"anyOf": [*halves, {"type": "null"}]}
    further = {"shape": _array(_of(int)), "low": _NUMBER, "high": _NUMBER, "half": half}
    return _properties(AttributionMap, "values", "pixels") | further


def _attention_map() -> dict[str, Schema]:
    further = {"shape": _array(_of(int)), "low": _NUMBER, "high": _NUMBER}
    return _properties(AttentionMap, "values") | further


def _accuracy() -> dict[str, Schema]:
    pair = {"type": "array", "prefixItems": [_NUMBER, _NUMBER], "items": False}
    counts = {"share": _NUMBER, "interval": pair, "macro_f1": _NUMBER}
    return _properties(Accuracy) | counts


def _extended(kind: Any) -> dict[str, Schema]:
    """Return the fields of a part of `Differences`, whose numbers may be infinite or none."""
    return {name: _with_extended_numbers(schema) for name, schema in _properties(kind).items()}


def _with_extended_numbers(schema: Any, numbers: Schema = _EXTENDED) -> Any:
    if isinstance(schema, list):
        return [_with_extended_numbers(each, numbers) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == _NUMBER["type"]:
        return numbers | {name: value for name, value in schema.items() if name != "type"}
    return {name: _with_extended_numbers(value, numbers) for name, value in schema.items()}


def _measures() -> dict[str, Schema]:
    return _extended(Measures) | _with_extended_numbers({"sqnr_db": _NUMBER})


def _survey() -> dict[str, Schema]:
    derived = {"exit_code": _of(int), "dead_bound": {"type": "number"}}
    return derived | _properties(Survey, *SURVEY_LEFT_OUT)


def _survey_row() -> dict[str, Schema]:
    twin = _object({"channel": _of(int), "of": _of(int), "correlation": _NUMBER})
    return _properties(SurveyRow, *SURVEY_LEFT_OUT) | {"dead_channels": _array(_of(int)), "duplicates": _array(twin)}


def _model() -> dict[str, Schema]:
    return _properties(ModelInfo, "categories")


_SPECIAL: Mapping[Any, Callable[[], dict[str, Schema]]] = {
    Accuracy: _accuracy,
    AttentionMap: _attention_map,
    AttributionMap: _map,
    **{
        each: partial(_extended, each)
        for each in (
            *(DifferenceRow, Exceeded, FirstDifference, OutputDifference, WeightDifference),
            *(ActivationPoint, OptimiserPoint, WeightPoint),
        )
    },
    LossRecord: _loss,
    Measures: _measures,
    ModelInfo: _model,
    Prediction: _prediction,
    SurveyRow: _survey_row,
    TensorStatistics: _statistics,
}


def _checks() -> dict[str, Schema]:
    outcome = _properties(RuleOutcome) | {"findings": _array(_object(_properties(Finding, "rule")))}
    report = {
        name: value for name, value in _properties(CheckReport, "overview_parts").items() if name != "outcomes"
    } | {
        "passed": _of(bool),
        "exit_code": _of(int),
        "rules": _array(_object(outcome)),
    }
    return {"exit_code": _of(int), "checkpoints": _array(_object(report))}


def _run_record(results: Mapping[str, Schema]) -> Schema:
    """Return the schema of `run.json`: what every run has is required."""
    provenance = _properties(Provenance, "pictures", "photographs", "settings")
    record = _properties(RunRecord) | provenance | {"pictures": _array(_of(StoredPicture)), "tool": _TEXT}
    record |= {"checkpoints": _array(_TEXT)}  # of `history`
    record |= {"crops": _array(_of(CropSheet)), "wrong": _array(_of(WrongStrip))}  # of `survey`
    record |= {name: _of(kind) for name, kind in _COUNTS_OF_SURVEY.items()}
    common = ("verb", "command", "versions", "inputs", "seed", "files")
    networks = {"anyOf": [{"required": each} for each in (["model", "device"], ["a", "b"], ["checkpoints"])]}
    properties = {**results, **record, "platform": _TEXT}
    optional = [name for name in properties if name not in common]
    schema = _document("run.json", RUN_VERSION, properties)
    required = ["schema_version", *(name for name in properties if name not in optional)]
    return schema | {"required": required} | networks


def _watch_line() -> Schema:
    """Return the schema of a line of `watch.jsonl`, which is told apart by its "type"."""
    marks = {"tool": {"const": "hookscope"}, "schema_version": {"const": TRAINING_VERSION}}
    largest = {"type": "array", "prefixItems": [_POSITION, _IN_TRAINING], "items": False}
    edits = {"type": "array", "prefixItems": [_POSITION, _of(int)], "items": False}
    columns = {
        "parameters": _columns(WatchedParameter),
        "layers": _columns(WatchedLayer),
        "tables": _columns(TableRows),
    }
    lines = [
        _line("start", marks | _properties(TrainingStart)),
        _line("names", {"names": _array(_TEXT)}),
        _line(
            "step",
            _properties(TrainingStep) | {"largest": _array(largest), "losses": _array(largest), "edits": _array(edits)},
            "skipped",
            "losses",
            "edits",
        ),
        _line("watched", _properties(WatchedStep) | columns, "layers", "tables"),
        _line("verdict", _properties(TrainingVerdict)),
        _line("end", _properties(TrainingEnd)),
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of watch.jsonl, as hookscope.watch writes it",
        "anyOf": lines,
    }


def _line(kind: str, properties: Mapping[str, Schema], *optional: str) -> Schema:
    numbered = _with_extended_numbers(dict(properties), _IN_TRAINING)
    return _object({"type": {"const": kind}, **numbered}, *optional)


def _columns(kind: Any) -> Schema:
    """Return rows as columns: texts as positions, and columns without any value left out."""
    columns = {
        name: _array(_POSITION if hint is str or get_origin(hint) is Literal else _of(hint))
        for name, hint in typing.get_type_hints(kind).items()
    }
    texts = [name for name, column in columns.items() if column["items"] is _POSITION]
    return _object(columns, *(name for name in columns if name not in texts))
