"""Attributions as dicts, and read back from a run directory, checked before anything in it is used."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookscope.results.attributions import AttributionMap, Attributions, Extent, Target
from hookscope.results.concentration import concentration
from hookscope.results.inputs import Region
from hookscope.results.runs.arrays import read_array
from hookscope.results.runs.reading import MAX_PICTURE_BYTES, misfit, read_document, read_inside, read_record, refusal
from hookscope.results.runs.serialize import RunRecord, as_json, checked, record_from_dict

SCHEMA_VERSION = 2  # in version 1, maps had padding below and at the right instead of an extent

FILE = "attribution.json"

_ENTRIES = ("model", "inputs", "method", "layers")
_FURTHER = ("sanity", "unchanged", "warnings", "notes", "seed", "device", "dtype", "timings")


@dataclass(frozen=True, slots=True)
class StoredMap:
    """A map in `attribution.json`: what it is of, and its files.

    Attributes:
        shape: (h, w) of a picture, (l,) of a signal, (d, h, w) of a volume.
        values: Path of the map inside the run, float32 of that shape as NumPy writes it.
        pixels: Path of the map's values for each channel, (C, *size), of a method that looks at the input; else None.
        overlay: Path of the map drawn over the photograph, the signal or slices of the volume.
        size: As `AttributionMap.size`.
    """

    input_index: int
    target: Target
    layer: str
    extent: Extent
    shape: tuple[int, ...]
    values: str
    overlay: str
    pixels: str | None = None
    size: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """An input in `run.json`, as a picture.

    Attributes:
        photograph: Path inside the run: upright, at most 1,600 pixels a side.
        overview: Path inside the run.
        region: The part of the photograph that the network's input covers, in pixels of its full size.
        remark: Why it is not the photograph itself, or "".
    """

    photograph: str
    overview: str
    region: Region
    remark: str = ""


@dataclass(frozen=True, slots=True)
class _Files:
    maps: tuple[StoredMap, ...]
    pictures: tuple[StoredPicture, ...]


@dataclass(frozen=True, slots=True)
class StoredAttributions:
    """A run of `attribute` as it lies on the disk; the maps of the `result` lack `pixels`."""

    folder: Path
    record: RunRecord
    result: Attributions
    maps: tuple[StoredMap, ...]
    pictures: tuple[StoredPicture, ...]

    def read_picture(self, path: str) -> bytes:
        """Return the bytes of a picture of the run; raises as `read_inside`."""
        return read_inside(self.folder, path, MAX_PICTURE_BYTES)


def attributions_to_dict(result: Attributions) -> dict[str, Any]:
    """Return all of `result` but the maps' values as dicts, lists, text and numbers.

    Of each map there are, besides its fields, its `shape`, the least and the greatest value that is finite, `low`
    and `high`, and `half`: the smallest box that holds half of what is above zero, as a share of the network's input
    and in pixels of the upright picture or positions of a signal or volume, or null.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        **_named(result, _ENTRIES),
        "maps": [map_to_dict(each, result) for each in result.maps],
        **_named(result, _FURTHER),
    }


def map_to_dict(each: AttributionMap, result: Attributions) -> dict[str, Any]:
    """Return one map as `attributions_to_dict` does."""
    finite = each.values[np.isfinite(each.values)]
    box = concentration(each, result.inputs[each.input_index])
    return {
        "input_index": each.input_index,
        "target": as_json(each.target),
        "layer": each.layer,
        "extent": list(each.extent),
        "shape": list(each.values.shape),
        "size": list(each.size),
        "low": float(finite.min()) if finite.size else None,
        "high": float(finite.max()) if finite.size else None,
        "half": box and {"share": box.share, "where": box.words, **as_json(box.region)},
    }


def read_attributions(folder: Path) -> StoredAttributions:
    """Read what `hookscope attribute` wrote.

    Raises:
        InputError: If it is no such run, was cut short, is of another version, or its files do not match its record.
    """
    record = read_record(folder)
    document = read_document(folder, FILE, SCHEMA_VERSION)
    try:
        files: _Files = checked(_Files, {"maps": _with_nan(document.get("maps")), "pictures": record.get("pictures")})
    except ValueError as error:
        raise misfit(folder, error, FILE, {"pictures": "run.json"}) from error
    try:
        fields = {name: record.get(name) for name in (*_ENTRIES, *_FURTHER)}
        for check in fields["sanity"] if isinstance(fields["sanity"], list) else ():
            if isinstance(check, dict) and check.get("value") is None:
                check["value"] = math.nan
        result: Attributions = checked(Attributions, {**fields, "maps": []})
        told = record_from_dict(record)
    except ValueError as error:
        raise misfit(folder, error, "run.json") from error
    if len(files.pictures) != len(result.inputs) or any(each.input_index >= len(result.inputs) for each in files.maps):
        raise refusal(folder, "its pictures are not those of its inputs")
    maps = tuple(
        AttributionMap(
            each.input_index, each.target, each.layer, _read_values(folder, each), each.extent, None, each.size
        )
        for each in files.maps
    )
    return StoredAttributions(folder, told, replace(result, maps=maps), files.maps, files.pictures)


def _read_values(folder: Path, stored: StoredMap) -> NDArray[np.float32]:
    """Return a map's values; InputError for a file that is not the array that it should be."""
    try:
        values = read_array(folder, stored.values, stored.shape)
        axes = values.ndim
        sides = [*zip(stored.extent[:axes], stored.extent[axes:], strict=True)]
        is_area = all(map(math.isfinite, stored.extent)) and all(
            begin < min(end, 1) and end > 0 for begin, end in sides
        )
        fits = 1 <= axes <= 3 and len(stored.size) in (0, axes) and 0 not in stored.size
        if not is_area or not fits or not values.size:
            raise ValueError("no map")  # noqa: TRY301 - told like any other fault
    except ValueError as error:
        raise refusal(folder, f"its file '{stored.values[:200]}' is not the map listed in {FILE}") from error
    return values


def _with_nan(maps: object) -> object:
    """Put NaN where JSON has null for a score."""
    for each in maps if isinstance(maps, list) else ():
        target = each.get("target") if isinstance(each, dict) else None
        if isinstance(target, dict) and target.get("score") is None:
            target["score"] = math.nan
    return maps


def _named(result: Attributions, names: tuple[str, ...]) -> dict[str, Any]:
    values: Mapping[str, Any] = {name: getattr(result, name) for name in names}
    return {name: [*map(as_json, each)] if isinstance(each, tuple) else as_json(each) for name, each in values.items()}
