"""Attention as dicts, and read back from a run directory, checked before anything in it is used."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookscope.results.attention import Attention, AttentionMap
from hookscope.results.attributions import Extent
from hookscope.results.runs.arrays import read_array
from hookscope.results.runs.attributions import StoredPicture
from hookscope.results.runs.reading import MAX_PICTURE_BYTES, misfit, read_document, read_inside, read_record, refusal
from hookscope.results.runs.serialize import RunRecord, as_json, checked, record_from_dict

SCHEMA_VERSION = 1

FILE = "attention.json"

_ENTRIES = ("model", "inputs", "blocks", "unseen", "rows")
_FURTHER = ("warnings", "notes", "seed", "device", "dtype", "timings")


@dataclass(frozen=True, slots=True)
class StoredAttentionMap:
    """A map in `attention.json`: what it is of, and its files.

    Attributes:
        shape: (h, w).
        values: Path of the map inside the run, (h, w) float32 as NumPy writes it.
        overlay: Path of the map drawn over the photograph.
    """

    input_index: int
    block: str
    head: int | None
    query: str
    extent: Extent
    elsewhere: float
    box: tuple[float, float, float, float] | None
    shape: tuple[int, int]
    values: str
    overlay: str


@dataclass(frozen=True, slots=True)
class StoredPatches:
    """The rows of every patch of a block, as `PatchWeights` has them.

    Attributes:
        shape: (patches, h, w).
        values: Path inside the run.
    """

    input_index: int
    block: str
    query_grid: tuple[int, int]
    extent: Extent
    shape: tuple[int, int, int]
    values: str


@dataclass(frozen=True, slots=True)
class _Files:
    maps: tuple[StoredAttentionMap, ...]
    patches: tuple[StoredPatches, ...]
    pictures: tuple[StoredPicture, ...]


@dataclass(frozen=True, slots=True)
class StoredAttention:
    """A run of `attention` as it lies on the disk."""

    folder: Path
    record: RunRecord
    result: Attention
    patches: tuple[StoredPatches, ...]
    pictures: tuple[StoredPicture, ...]

    def read_picture(self, path: str) -> bytes:
        """Return the bytes of a picture of the run; raises as `read_inside`."""
        return read_inside(self.folder, path, MAX_PICTURE_BYTES)

    def read_patches(self, stored: StoredPatches) -> NDArray[np.float32]:
        """Return the rows of every patch; an InputError for a file that is not the array that it should be."""
        return _read_map(self.folder, stored.values, stored.shape)


def attention_to_dict(result: Attention) -> dict[str, Any]:
    """Return all of `result` but the maps' values as dicts, lists, text and numbers.

    Of each map there are, besides its fields, `shape` (h, w), and the least and the greatest value, `low` and `high`.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "census": result.census,
        **{name: _listed(getattr(result, name)) for name in _ENTRIES},
        "maps": [map_to_dict(each) for each in result.maps],
        **{name: _listed(getattr(result, name)) for name in _FURTHER},
    }


def map_to_dict(each: AttentionMap) -> dict[str, Any]:
    """Return one map as `attention_to_dict` does."""
    finite = each.values[np.isfinite(each.values)]
    return {
        "input_index": each.input_index,
        "block": each.block,
        "head": each.head,
        "query": each.query,
        "extent": list(each.extent),
        "elsewhere": as_json(each.elsewhere),
        "box": as_json(each.box),
        "shape": list(each.values.shape),
        "low": float(finite.min()) if finite.size else None,
        "high": float(finite.max()) if finite.size else None,
    }


def read_attention(folder: Path) -> StoredAttention:
    """Read what `hookscope attention` wrote.

    Raises:
        InputError: If it is no such run, was cut short, is of another version, or its files do not match its record.
    """
    record = read_record(folder)
    document = read_document(folder, FILE, SCHEMA_VERSION)
    listed = {name: document.get(name) for name in ("maps", "patches")} | {"pictures": record.get("pictures")}
    _put_nan(listed["maps"], "elsewhere")
    fields = {name: record.get(name) for name in (*_ENTRIES, *_FURTHER)} | {"rows": document.get("rows")}
    _put_nan(fields["rows"], "entropy", "top_share")
    try:
        files: _Files = checked(_Files, listed)
        result: Attention = checked(Attention, {**fields, "maps": []})
        told = record_from_dict(record)
    except ValueError as error:
        raise misfit(folder, error, "run.json", dict.fromkeys(("maps", "patches", "rows"), FILE)) from error
    placed: list[StoredAttentionMap | StoredPatches] = [*files.maps, *files.patches]
    if len(files.pictures) != len(result.inputs) or any(each.input_index >= len(result.inputs) for each in placed):
        raise refusal(folder, "its pictures are not those of its inputs")
    for each in placed:
        if not _is_possible(each):
            raise refusal(folder, f"its file '{each.values[:200]}' is not the map listed in {FILE}")
    maps = tuple(
        AttentionMap(
            each.input_index,
            each.block,
            each.head,
            each.query,
            _read_map(folder, each.values, each.shape),
            each.extent,
            each.elsewhere,
            each.box,
        )
        for each in files.maps
    )
    return StoredAttention(folder, told, replace(result, maps=maps), files.patches, files.pictures)


def _put_nan(records: object, *names: str) -> None:
    """Put NaN where JSON has null for a number."""
    for each in records if isinstance(records, list) else ():
        for name in names:
            if isinstance(each, dict) and each.get(name) is None:
                each[name] = math.nan


def _is_possible(each: StoredAttentionMap | StoredPatches) -> bool:
    """Tell whether a map has cells, and lies on the input."""
    top, left, bottom, right = each.extent
    is_area = all(map(math.isfinite, each.extent)) and top < min(bottom, 1) and left < min(right, 1)
    if isinstance(each, StoredPatches) and each.shape[0] != each.query_grid[0] * each.query_grid[1]:
        return False
    return is_area and bottom > 0 and right > 0 and min(each.shape) > 0


def _read_map(folder: Path, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    try:
        return read_array(folder, name, shape)
    except ValueError as error:
        raise refusal(folder, f"its file '{name[:200]}' is not the map listed in {FILE}") from error


def _listed(value: Any) -> Any:
    return [*map(as_json, value)] if isinstance(value, tuple) else as_json(value)
