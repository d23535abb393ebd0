"""A survey as dicts, and read back from a run directory, checked before anything in it is used."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from hookscope.results.accuracy import Accuracy
from hookscope.results.distribution import Distribution
from hookscope.results.runs.reading import MAX_PICTURE_BYTES, misfit, read_document, read_inside, read_record, refusal
from hookscope.results.runs.serialize import (
    RunRecord,
    accuracy_to_dict,
    checked,
    quantiles_field,
    record_from_dict,
    statistics_to_dict,
)
from hookscope.results.statistics import TensorStatistics
from hookscope.results.survey import ChannelArrays, Channels, CropSheet, Survey, SurveyRow, WrongStrip
from hookscope.text import plain

SCHEMA_VERSION = 1

FILE = "survey.json"

ARRAYS = "channels.safetensors"

BINS = "bins.safetensors"

LEFT_OUT = ("provenance", "pictures", "supports", "categories", "channels", "names")

_MOST_ARRAY_BYTES = 2**32


@dataclass(frozen=True, slots=True)
class StoredSurvey:
    """A survey as it lies on the disk."""

    folder: Path
    record: RunRecord
    result: Survey
    sheets: tuple[CropSheet, ...]
    wrong: tuple[WrongStrip, ...] = ()

    def read_picture(self, path: str) -> bytes:
        """Return the bytes of a picture of the run; raises as `read_inside`."""
        return read_inside(self.folder, path, MAX_PICTURE_BYTES)


@dataclass(frozen=True, slots=True)
class _Sheets:
    crops: tuple[CropSheet, ...]
    wrong: tuple[WrongStrip, ...] = ()


def survey_to_dict(result: Survey) -> dict[str, Any]:
    """Return all of a survey as dicts, lists, text and numbers; names are those of `Survey`.

    `exit_code` is that of the command, `dead_bound` the share of inputs below which a dead channel fires with 95%
    confidence. Of the channels there are those that are dead, `dead_channels`, and those that follow another one,
    `duplicates`; all numbers of all channels are in `channels.csv` and `channels.safetensors` of the run, where a
    survey of a large network has millions. Quantiles are named by level, and the distribution of a row is a histogram,
    as in other results; its exact bins are in `bins.safetensors`.
    """
    plain = _plain(result)
    first = {"schema_version": SCHEMA_VERSION, "exit_code": result.exit_code, "dead_bound": result.dead_bound}
    return {**first, **plain}


def _plain(value: Any) -> Any:
    if isinstance(value, TensorStatistics | Accuracy):
        return statistics_to_dict(value) if isinstance(value, TensorStatistics) else accuracy_to_dict(value)
    if isinstance(value, SurveyRow):
        twins = [
            {"channel": each.channel, "of": each.duplicate_of, "correlation": each.correlation}
            for each in value.duplicates
        ]
        return {**_fields(value), "dead_channels": list(value.dead_channels), "duplicates": twins}
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [*map(_plain, value)]
    return value


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: _plain(getattr(value, each.name)) for each in fields(value) if each.name not in LEFT_OUT}


def channel_arrays(result: Survey) -> dict[str, NDArray[Any]]:
    """Return the channels of all rows as arrays by "ROW NAME", and the names of inputs, JSON as bytes, by "inputs"."""
    names = json.dumps({str(number): plain(name) for number, name in result.names.items()}).encode()
    arrays: dict[str, NDArray[Any]] = {"inputs": np.frombuffer(names, np.uint8)}
    for row in result.rows:
        if row.channels.arrays is not None:
            for each in fields(ChannelArrays):
                arrays[f"{row.index} {each.name}"] = np.ascontiguousarray(getattr(row.channels.arrays, each.name))
    return arrays


def read_survey(folder: Path) -> StoredSurvey:
    """Read what `hookscope survey` wrote.

    Raises:
        InputError: If it is no such run, was cut short, is of another version, or its parts do not belong together.
    """
    record = read_record(folder)
    document = read_document(folder, FILE, SCHEMA_VERSION)
    rows: Any = document.get("rows")
    for row in rows if isinstance(rows, list) else ():
        statistics = row.get("activation") if isinstance(row, dict) else None
        if isinstance(statistics, dict):
            statistics["quantiles"] = quantiles_field(statistics.get("quantiles"))
    known = {name: value for name, value in document.items() if name not in LEFT_OUT}
    try:
        result: Survey = checked(Survey, known)
        sheets: _Sheets = checked(_Sheets, {"crops": record.get("crops"), "wrong": record.get("wrong", [])})
        told = record_from_dict(record)
    except ValueError as error:
        raise misfit(folder, error, FILE, dict.fromkeys(("crops", "wrong"), "run.json")) from error
    result = _with_channels(result, folder)
    if [row.index for row in result.rows] != [*range(len(result.rows))]:
        raise refusal(folder, f"its {FILE} does not list its rows in order")
    for sheet in sheets.crops:
        channels = result.rows[sheet.row].channels if sheet.row < len(result.rows) else ()
        if any(each >= len(channels) for each in sheet.channels):
            raise refusal(folder, f"its crops '{sheet.path[:200]}' are of no channels that it lists")
    failed = () if result.failures is None else result.failures.inputs
    for strip in sheets.wrong:
        if strip.index >= len(failed):
            raise refusal(folder, f"its picture '{strip.path[:200]}' is of no wrong input that it lists")
    return StoredSurvey(folder, told, result, sheets.crops, sheets.wrong)


def _with_channels(result: Survey, folder: Path) -> Survey:
    """Return the survey with the channels of its rows; an InputError if the arrays are not those of these rows."""
    try:
        arrays = load(read_inside(folder, ARRAYS, _MOST_ARRAY_BYTES))
        names = {int(number): str(name) for number, name in json.loads(arrays["inputs"].tobytes()).items()}
        rows = tuple(_with_arrays(row, arrays, names, tuple(result.classes)) for row in result.rows)
        return replace(result, rows=rows, names=names)
    except (SafetensorError, KeyError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise refusal(folder, f"its {ARRAYS} is cut short or damaged, or of other rows") from error


def _with_arrays(
    row: SurveyRow, arrays: Mapping[str, NDArray[Any]], names: Mapping[int, str], classes: tuple[str, ...]
) -> SurveyRow:
    found = {each.name: arrays.get(f"{row.index} {each.name}") for each in fields(ChannelArrays)}
    if found["mean"] is None:
        return row
    count, length = found["mean"].size, arrays[f"{row.index} top_values"].shape[-1]
    for name, array in found.items():
        shape = (
            (2, count, length, 3) if name == "top_positions" else (2, count, length) if name[:4] == "top_" else (count,)
        )
        if array is None or array.shape != shape or array.dtype.kind not in "if":
            raise ValueError(name)
    return replace(row, channels=Channels(ChannelArrays(**found), names, classes))  # type: ignore[arg-type]


def with_bins(stored: StoredSurvey) -> Survey:
    """Return a survey whose rows have their exact distributions.

    Raises:
        InputError: If these are missing, damaged, or of other rows.
    """
    try:
        arrays = load(read_inside(stored.folder, BINS, _MOST_ARRAY_BYTES))
        rows = tuple(_with_distribution(row, arrays) for row in stored.result.rows)
    except (SafetensorError, KeyError, ValueError) as error:
        raise refusal(stored.folder, f"its {BINS} is cut short or damaged, or of other rows") from error
    return replace(stored.result, rows=rows)


def _with_distribution(row: SurveyRow, arrays: Mapping[str, NDArray[Any]]) -> SurveyRow:
    known = row.activation
    if known.min is None or known.max is None:
        return row
    keys, counts = (arrays[f"{row.label} {name}"] for name in ("keys", "counts"))
    count = known.element_count - (known.nan_count or 0) - (known.inf_count or 0)
    fits = keys.ndim == 1 and keys.shape == counts.shape and keys.dtype == np.int32 and counts.dtype == np.int64
    if not fits or (np.diff(keys) <= 0).any() or (counts < 1).any() or counts.sum() != count:
        raise ValueError(row.label)
    spread = Distribution(known.min, known.max, count, None, keys, counts)
    return replace(row, activation=replace(known, distribution=spread))
