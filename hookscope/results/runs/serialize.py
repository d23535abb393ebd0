"""Results as dicts and JSON, and back. What is read may come from a stranger: it is checked against the results' types.

Names in JSON are those of the results, with four differences: a prediction is one entry a class, quantiles are named by
level ("q05"), a distribution is a histogram, and a loss that is NaN or infinite is text, as JSON has no number for it.
"""

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from hookscope.errors import most_severe
from hookscope.results.accuracy import Accuracy
from hookscope.results.activations import Activations
from hookscope.results.check import CheckReport
from hookscope.results.comparison import Comparison, Prediction
from hookscope.results.cost import NetworkCost
from hookscope.results.distribution import histogram
from hookscope.results.gradients import Gradients, LossRecord
from hookscope.results.grids import Grid
from hookscope.results.inputs import Provenance
from hookscope.results.network import ModuleRow
from hookscope.results.statistics import QUANTILE_LEVELS, TensorStatistics
from hookscope.results.token_norms import TokenMap
from hookscope.text import plain, strict_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA_VERSION = 1

QUANTILE_NAMES = tuple(f"q{round(level * 100):02d}" for level in QUANTILE_LEVELS)

# Entries of a result in their order in JSON; rows have files besides.
_ENTRIES = (
    *("model", "inputs", "seed", "device", "dtype", "timings", "verification"),
    *("warnings", "notes", "failure", "predictions", "verdicts"),
)
_GRADIENTS = ("gradients", "parameters", "over_time")
_ROWS = ("rows", "uncalled")
_ARRAYS = ("distribution", "histogram", "kept_values", "channel_nonzero")
_STATISTICS = [each.name for each in fields(TensorStatistics) if each.name not in _ARRAYS]

# Fields of results that no file of JSON has.
_NOT_IN_JSON = (
    *("feature_maps", "map_summaries", "token_maps", "gradient_maps", "comparison", "inputs_alone", "tensors"),
    *("provenance", "unlisted", "repeated", "given"),
)

_SHAPES = ("shape", "shape_b")

# A longer whole number is infinite as a float; JSON and Python have no limit.
_MOST_DIGITS = 300


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The entries of `run.json` besides the result.

    Of its fields, `threads` are torch's, `patterns` as given with `--layer`, `unusable_inputs` one sentence each,
    `overview` a path inside the run, "" in runs of earlier versions, and `thumbnails` for the first inputs a picture of
    what the network saw, as a path inside the run, or None.
    """

    verb: Literal["activations", "grads", "attribute", "attention", "check", "diff", "history", "survey"]
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    platform: str = ""
    threads: int | None = None
    patterns: tuple[str, ...] = ()
    unusable_inputs: tuple[str, ...] = ()
    overview: str = ""
    grids: tuple[Grid, ...] = ()
    thumbnails: tuple[str | None, ...] = ()
    edits: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    token_maps: tuple[TokenMap, ...] = ()


def inspection_to_dict(result: Activations | Gradients) -> dict[str, Any]:
    """Return all of `result` but feature maps and the list of categories as dicts, lists, text and numbers."""
    document = {"schema_version": SCHEMA_VERSION, **_entries(result, *_ENTRIES)}
    if isinstance(result, Gradients):
        document |= _entries(result, "mode", "loss", *_GRADIENTS)
    else:
        document["cost"] = cost_to_dict(result.cost)
    return document | _entries(result, *_ROWS)


def rows_to_json(result: Activations | Gradients) -> str:
    """Return the layer rows and the layers that never ran as strict JSON, one row a line."""
    return strict_json({"schema_version": SCHEMA_VERSION, **_entries(result, *_ROWS)})


def gradients_to_json(result: Gradients) -> str:
    """Return the gradients of layers and of parameters as strict JSON, one row a line."""
    return strict_json({"schema_version": SCHEMA_VERSION, **_entries(result, *_GRADIENTS)})


def modules_to_dict(rows: Sequence[ModuleRow], cost: NetworkCost | None = None) -> dict[str, Any]:
    """Return the modules of a network as dicts, lists, text and numbers; names are those of `ModuleRow`."""
    return {"schema_version": SCHEMA_VERSION, "modules": [*map(as_json, rows)], "cost": cost_to_dict(cost)}


def cost_to_dict(cost: NetworkCost | None) -> dict[str, Any] | None:
    """Return a cost as dicts, lists, text and numbers; names are those of `NetworkCost`."""
    return None if cost is None else asdict(cost)


def checks_to_json(reports: Sequence[CheckReport]) -> str:
    """Return `reports` as strict JSON, one checkpoint a line: see `checks_to_dict`."""
    return strict_json(checks_to_dict(reports))


def checks_to_dict(reports: Sequence[CheckReport]) -> dict[str, Any]:
    """Return `reports` as dicts, lists, text and numbers, in their order.

    At the top: `schema_version` (it changes when a key goes or changes its meaning), `exit_code` of the command, and
    `checkpoints`, a list of objects:

    - `checkpoint`: what was checked; `passed`: true or false; `exit_code`: 0 passed, 1 a rule failed, else the error's.
    - `error`: why it could not be checked to the end, or ""; `error_code`: its exit code, or 0.
    - `model`: `name`, `kind`, `weights`, `random`, `sha256`, `parameter_count`, `arguments`; null if it could not be
      loaded.
    - `inputs`: a list of `name`, `sha256`, `size` (width, height), `shape` (without the batch axis), `steps`, `region`:
      what the input covers of the upright picture, `top`, `left`, `bottom`, `right`, `height` and `width`, or null;
      `sampling_rate` of a recording in Hz, or null.
    - `rules`: a list in the order of judgement, of `rule`: its identifier; `status`: "pass", "warn", "fail", "off" or
      "skipped"; `reason`: why it was skipped, or ""; `findings`: a list of `level` ("fail" or "warn"), `where` (label
      of a layer's output, name of a parameter or an input, "" for the whole), `message`, and `followed_by`: a list of
      what else the rule objects to for the same cause, named as by `where`.
    - `warnings`: sentences; `seconds`: by phase, and "total"; `evidence`: a folder, or "".
    - `accuracy`: on labelled pictures, or null: `source`, `mapping` of labels to classes, `class_count` of the network,
      `multi_label`, `count`, `right`, `share`, `interval` (95%: low, high), `macro_f1` (null without `--multi-label`),
      `classes` as in `ClassAccuracy`, `worst` as in `WrongPicture`, the surest first.

    Names are exact, even hostile ones.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "exit_code": most_severe(report.exit_code for report in reports),
        "checkpoints": [_checkpoint(report) for report in reports],
    }


def comparison_to_dict(comparison: Comparison) -> dict[str, Any]:
    """Return what edits changed as dicts, lists, text and numbers; names are those of `Comparison`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "edits": list(comparison.edits),
        "losses": None if comparison.losses is None else list(map(_json_number, comparison.losses)),
        "row_count": comparison.row_count,
        "changes": [as_json(change) | {"l2_ratio": change.l2_ratio} for change in comparison.changes],
    }


def provenance_to_dict(provenance: Provenance) -> dict[str, Any]:
    """Return the provenance in `run.json`, without pictures and further options."""
    return {
        "versions": dict(provenance.versions),
        "platform": platform.platform(),
        "threads": provenance.threads,
        "patterns": list(provenance.patterns),
        "preprocessing": asdict(provenance.preprocessing),
        "named_inputs": dict(provenance.named_inputs),
        "unusable_inputs": list(provenance.unusable_inputs),
    }


def statistics_to_dict(statistics: TensorStatistics) -> dict[str, Any]:
    """Return statistics as numbers, quantiles by name, and a histogram in place of the distribution."""
    counted = statistics.histogram or histogram(statistics.distribution)
    return _named(statistics, *_STATISTICS) | {
        "quantiles": statistics.quantiles and dict(zip(QUANTILE_NAMES, statistics.quantiles, strict=True)),
        "dead_channel_fraction": statistics.dead_channel_fraction,
        "histogram": counted and asdict(counted),
    }


def parse_json(text: bytes) -> dict[str, Any] | None:
    """Return a JSON object without NaN, infinities and lone surrogates; None for JSON that is not an object.

    Raises ValueError if it is not JSON, RecursionError if it nests too deeply.
    """
    document = json.loads(text, parse_int=_whole_number)
    return plain(document) if isinstance(document, dict) else None


def inspection_from_dict(document: Mapping[str, Any], *, backward: bool) -> Activations | Gradients:
    """Return the result that `inspection_to_dict` made a document of, as `parse_json` returns it.

    Entries of other names are left out. A number that is None is unknown.

    Raises:
        ValueError: With a place ("rows.0.index") and what is wrong there, if it does not fit the type or a number
            that counts something is negative.
    """
    document = {name: value for name, value in document.items() if name not in _NOT_IN_JSON}
    rows = [(row, "activation") for row in _dicts(document.get("rows"))]
    rows += [(row, "gradient") for name in ("gradients", "parameters") for row in _dicts(document.get(name))]
    for row, name in rows:
        for statistics in _dicts([row.get(name)]):
            statistics["quantiles"] = quantiles_field(statistics.get("quantiles"))
    for prediction in _dicts(document.get("predictions")):
        prediction.update(prediction_fields(prediction.get("classes")))
    for loss in _dicts([document.get("loss")]):
        loss["value"] = float(loss["value"]) if loss.get("value") in ("nan", "inf", "-inf") else loss.get("value")
    result: Activations | Gradients = checked(Gradients if backward else Activations, document)
    return result


def record_from_dict(document: Mapping[str, Any]) -> RunRecord:
    """Return the entries of `run.json` besides the result; raises as `inspection_from_dict`."""
    record: RunRecord = checked(RunRecord, document)
    return record


@lru_cache
def _adapter(kind: type) -> "TypeAdapter[tuple[object]]":
    from pydantic import ConfigDict, TypeAdapter  # noqa: PLC0415 - for reading alone

    # In a tuple, because a dataclass itself takes no configuration from outside.
    return TypeAdapter(tuple[kind], config=ConfigDict(strict=True, arbitrary_types_allowed=True))  # type: ignore[arg-type, valid-type]


def checked(kind: type, document: Mapping[str, Any]) -> Any:
    """Return a document as a dataclass of this kind, entries of other names left out.

    Raises:
        ValueError: As `inspection_from_dict`.
    """
    from pydantic import ValidationError  # noqa: PLC0415 - for reading alone

    try:
        # As JSON, where a list is the strict form of a tuple, and a dict that of a dataclass.
        (result,) = _adapter(kind).validate_json(json.dumps([document]))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(".".join(map(str, first["loc"][1:])), first["msg"]) from error
    for place in _negative(result):
        raise ValueError(place.removeprefix("."), "Input should be greater than or equal to 0")
    return result


def _negative(value: object) -> Iterator[str]:
    """Yield the places of whole numbers below zero: all of them count something, but for the seed.

    In a shape -1 is the size of an axis along which the parts of a nested tensor differ.
    """
    if isinstance(value, int):
        yield from ("",) * (value < 0)
    elif isinstance(value, tuple):
        yield from (f".{number}{place}" for number, each in enumerate(value) for place in _negative(each))
    elif is_dataclass(value):
        named = ((each.name, getattr(value, each.name)) for each in fields(value) if each.name != "seed")
        named = ((name, _with_ragged_axes(each) if name in _SHAPES else each) for name, each in named)
        yield from (f".{name}{place}" for name, each in named for place in _negative(each))


def _with_ragged_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if size == -1 else size for size in shape)


def _dicts(entries: object) -> list[dict[str, Any]]:
    """Return the dicts in a list; what else there is, the check of the types refuses."""
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def quantiles_field(named: object) -> object:
    """Return quantiles by name as the field of statistics; what they cannot be is refused where types are checked."""
    if not isinstance(named, dict):
        return named if named is None else str(named)  # which is refused
    values = [named.get(name) for name in QUANTILE_NAMES]
    return None if None in values else values


def prediction_fields(classes: object) -> dict[str, Any]:
    """Return the fields of a prediction that its classes in JSON stand for."""
    entries = _dicts(classes)
    names = [entry.get("name") for entry in entries]
    shares = [entry.get("probability") for entry in entries]
    return {
        "class_indices": [entry.get("index") for entry in entries],
        "class_names": [] if None in names else names,
        "probabilities": [math.nan if share is None else share for share in shares],
    }


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError("too long a number")
    return int(digits)


def _entries(result: Activations | Gradients, *names: str) -> dict[str, Any]:
    values = ((name, getattr(result, name)) for name in names)
    return {name: [*map(as_json, value)] if isinstance(value, tuple) else as_json(value) for name, value in values}


def as_json(value: Any) -> Any:
    """Return a part of a result as dicts, lists, text and numbers."""
    if isinstance(value, TensorStatistics):
        return statistics_to_dict(value)
    if isinstance(value, Prediction):
        return {"input_index": value.input_index, "classes": _classes(value), "reading": value.reading}
    if is_dataclass(value):
        named = {each.name: as_json(getattr(value, each.name)) for each in fields(value) if each.name != "categories"}
        return named | ({"value": _json_number(value.value)} if isinstance(value, LossRecord) else {})
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return [*map(as_json, value)]
    return dict(value) if isinstance(value, Mapping) else value


def _checkpoint(report: CheckReport) -> dict[str, Any]:
    return {
        **_named(report, "checkpoint", "passed", "exit_code", "error", "error_code"),
        "model": as_json(report.model),
        "inputs": [*map(as_json, report.inputs)],
        "rules": [
            _named(outcome, "rule", "status", "reason")
            | {"findings": [_named(each, "level", "where", "message", "followed_by") for each in outcome.findings]}
            for outcome in report.outcomes
        ],
        **_named(report, "warnings", "seconds", "evidence"),
        "accuracy": None if report.accuracy is None else accuracy_to_dict(report.accuracy),
    }


def accuracy_to_dict(accuracy: Accuracy) -> dict[str, Any]:
    """Return an accuracy with its interval, as dicts, lists, text and numbers."""
    told = _named(accuracy, "source", "mapping", "class_count", "multi_label", "count", "right", "share")
    return {
        **told,
        "interval": [*accuracy.interval],
        "macro_f1": accuracy.macro_f1 if accuracy.multi_label else None,
        "classes": [as_json(each) for each in accuracy.classes],
        "worst": [as_json(each) for each in accuracy.worst],
    }


def _named(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _classes(prediction: Prediction) -> list[dict[str, Any]]:
    names = prediction.class_names or (None,) * len(prediction.class_indices)
    return [
        {"index": index, "name": name, "probability": probability}
        for index, name, probability in zip(prediction.class_indices, names, prediction.probabilities, strict=True)
    ]


def _json_number(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))
