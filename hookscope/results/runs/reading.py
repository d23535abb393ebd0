"""Read a run directory back. It may be hostile: everything in it is checked before use.

No file outside the folder is read, whatever `run.json` names; links are not followed.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookscope.errors import InputError, nearest
from hookscope.regular_files import NotRegularError, read_bounded
from hookscope.results.activations import Activations
from hookscope.results.attention import Attention, AttentionMap, PatchWeights
from hookscope.results.attributions import AttributionMap, Attributions
from hookscope.results.differences import Differences
from hookscope.results.gradients import Gradients
from hookscope.results.history import History
from hookscope.results.inputs import PICTURE_AXES, Region
from hookscope.results.json_form import SCHEMA_VERSION, array_forms
from hookscope.results.runs.directory import RUNS
from hookscope.results.runs.record import RunRecord
from hookscope.results.runs.store import ARRAYS, RESULT, checked, parse_json
from hookscope.results.survey import ChannelArrays, Survey
from hookscope.text import safe_text

# Larger files were not written by hookscope: JSON of a hundred thousand rows fits, and a grid of 64 million pixels.
_MAX_JSON_BYTES = 256 * 2**20
_MAX_ARRAY_BYTES = 2**32
MAX_PICTURE_BYTES = 128 * 2**20

_MOST_SHOWN = 200  # characters of a name in a message
_LONGEST_SIDE = 2**16  # cells of a map over a picture; the sides of JPEG files are shorter


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run that was read from its folder."""

    folder: Path
    record: RunRecord
    result: Any

    def read_picture(self, path: str) -> bytes:
        """Return the bytes of a picture that `run.json` lists; raises as `read_inside`."""
        return read_inside(self.folder, path, MAX_PICTURE_BYTES)


def is_run(folder: Path) -> bool:
    """Tell whether a folder looks like a run of hookscope, without reading it."""
    try:
        return (folder / "run.json").is_file()
    except (OSError, ValueError):  # too long a name, or with a null byte
        return False


def read_record(folder: Path) -> dict[str, Any]:
    """Return the contents of a run's `run.json`, whose "verb" is the command that made it.

    Raises:
        InputError: If the folder is no run, was cut short, or is of a different version.
    """
    if not folder.is_dir():
        reason = "it is not a folder" if os.path.lexists(folder) else "there is no such folder"
        raise refusal(folder, reason, _nearest_runs(folder) or f"Give the folder of a run{_example(RUNS)}.")
    if not os.path.lexists(folder / "run.json"):
        reason = "without run.json it is not a hookscope run, or an unfinished one"
        raise refusal(folder, reason, f"Give the folder of a finished run{_example(folder)}.")
    document = _read_json(folder, "run.json")
    if document.get("tool") != "hookscope":
        raise refusal(folder, "its run.json was not written by hookscope", "Give the folder of a run.")
    if document.get("verb") == "check":
        remedy = "`hookscope check CHECKPOINT --report FILE` makes the page of a check."
        raise refusal(folder, "it is the evidence of a check, not a run", remedy)
    _check_version(folder, "run.json", document)
    return document


def _nearest_runs(folder: Path) -> str:
    """Return a sentence with runs of similar names, next to the folder or in `RUNS`; "" if there are none."""
    for place in (folder.parent, RUNS):
        try:
            names = ("run.json", "watch.jsonl")
            runs = [str(file.parent) for name in names for file in sorted(place.glob(f"*/{name}"))]
        except (OSError, ValueError):  # a name with a null byte
            continue
        if hint := nearest(str(place / folder.name), runs, prefix=f"{place}/"):
            return f"Give the folder of a run.{hint}"
    return ""


def _example(folder: Path) -> str:
    try:
        runs = {path.parent: path.stat().st_mtime for path in folder.glob("*/run.json")}
    except OSError:
        return ""
    return f", such as '{max(runs, key=runs.__getitem__)}'" if runs else ""


def read_run(folder: Path) -> StoredRun:
    """Read the run that a command wrote.

    Raises:
        InputError: If it is no run, was cut short, is of a different version, or its files do not match its record.
    """
    entries = read_record(folder)
    document = _read_json(folder, RESULT)
    _check_version(folder, RESULT, document)
    if (verb := str(entries.get("verb"))) not in RESULT_KINDS:
        raise refusal(folder, "its run.json names no command of hookscope")
    kind, checks = RESULT_KINDS[verb]
    try:
        name = "run.json"
        record: RunRecord = checked(RunRecord, entries)
        name = RESULT
        result = checked(kind, document, _read_arrays(folder))
    except ValueError as error:
        place, reason = error.args
        problem = f"its {name} is not as hookscope writes it: {place[:80]}: {reason[:100]}"
        raise refusal(folder, problem) from error
    if wrong := next((fault for check in checks for fault in check(record, result)), ""):
        raise refusal(folder, wrong)
    if isinstance(result, Survey):
        result = _with_names(result)
    return StoredRun(folder, record, result)


def _read_arrays(folder: Path) -> Mapping[str, NDArray[Any]]:
    from safetensors import SafetensorError  # noqa: PLC0415 - for this alone
    from safetensors.numpy import load  # noqa: PLC0415

    if not os.path.lexists(folder / ARRAYS):
        return {}
    try:
        return load(read_inside(folder, ARRAYS, _MAX_ARRAY_BYTES))
    except (SafetensorError, KeyError, ValueError) as error:
        raise refusal(folder, f"its {ARRAYS} is cut short or damaged") from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        document = parse_json(read_inside(folder, name, _MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise refusal(folder, f"its {name} is cut short or damaged") from error
    if document is None:
        raise refusal(folder, f"its {name} is not hookscope's")
    return document


def _check_version(folder: Path, name: str, document: dict[str, Any]) -> None:
    if (version := document.get("schema_version")) == SCHEMA_VERSION:
        return
    earlier = isinstance(version, int) and 0 < version < SCHEMA_VERSION
    remedy = (
        "Make the run again with this hookscope." if earlier else "Make the run and its report with the same hookscope."
    )
    reason = f"its {name} has schema version {json.dumps(version)[:20]}, and this hookscope reads {SCHEMA_VERSION}"
    raise refusal(folder, reason, remedy)


def read_inside(folder: Path, name: str, limit: int) -> bytes:
    """Return the contents of a plain file inside `folder`; InputError if it is missing, linked or too large."""
    shown = f"its file '{name[:_MOST_SHOWN]}'"
    parts = PurePosixPath(name).parts
    if "\0" in name or "\\" in name or not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        raise refusal(folder, f"{shown} is not inside the folder")
    try:
        inside = folder.resolve()
        if (inside / name).resolve() != inside / name:
            raise refusal(folder, f"{shown} is a link, or behind one")
        content = read_bounded(inside / name, limit, follow_links=False)
    except FileNotFoundError as error:
        raise refusal(folder, f"{shown} is missing") from error
    except (NotRegularError, IsADirectoryError) as error:
        raise refusal(folder, f"{shown} is not a regular file, or too large") from error
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "no file can have such a name"
        raise refusal(folder, f"{shown}: {reason.lower()}") from error
    if len(content) > limit:
        raise refusal(folder, f"{shown} is not a regular file, or too large")
    return content


def refusal(folder: Path, reason: str, remedy: str = "Run the command that made it again.") -> InputError:
    """Return the error for a run that cannot be read."""
    return InputError(safe_text(f"Cannot read the run '{folder}': {reason}. {remedy}"))


# Checks of a run beyond its types: each yields a message for every inconsistency.


def _wrong_arrays(_: RunRecord, result: Any) -> Iterator[str]:
    """Check that kept values have two axes, that bins hold all finite values, and that quantiles are finite."""
    tables = {name: getattr(result, name, ()) for name in ("rows", "gradients", "parameters")}
    for name, rows in tables.items():
        for row in rows:
            statistics = row.statistics
            kept, spread = statistics.kept_values, statistics.distribution
            finite_count = statistics.element_count - (statistics.nan_count or 0) - (statistics.inf_count or 0)
            if (kept is not None and kept.ndim != 2) or (spread is not None and not spread.is_of(finite_count)):
                yield f"its {ARRAYS} does not fit '{row.label[:_MOST_SHOWN]}' of its {name}"
            if not all(map(math.isfinite, statistics.quantiles or ())):  # quantiles are of finite values
                yield f"quantiles of '{row.label[:_MOST_SHOWN]}' of its {name} cannot be"


def _wrong_parts(_: RunRecord, result: Activations | Survey) -> Iterator[str]:
    cost, accuracy = getattr(result, "cost", None), getattr(result, "accuracy", None)
    if (cost is not None and not cost.modules) or (accuracy is not None and not accuracy.classes):
        yield f"a cost without modules, or an accuracy without labels, in its {RESULT} cannot be"


def _wrong_pictures_of_rows(record: RunRecord, result: Activations | Gradients | Differences) -> Iterator[str]:
    rows = result.gradients if isinstance(result, Gradients) else result.rows
    indices, input_count = {row.index for row in rows}, len(result.inputs)
    for grid in record.grids:
        if grid.input_index >= input_count or grid.row not in indices:
            yield f"'{grid.path[:_MOST_SHOWN]}' is of no row"
    for token_map in result.token_maps if isinstance(result, Activations) else ():
        fits = len(token_map.norms) == len(token_map.prefix) + math.prod(token_map.grid)
        if token_map.input_index >= input_count or token_map.row not in indices or not fits or not all(token_map.grid):
            yield f"norms of tokens of '{token_map.label[:_MOST_SHOWN]}' are of no row"
    if len(record.thumbnails) > input_count:
        yield "it has more thumbnails than inputs"


def _wrong_predictions(_: RunRecord, result: Any) -> Iterator[str]:
    pairs = [output.predictions for output in getattr(result, "outputs", ())]
    listed = [*getattr(result, "predictions", ()), *chain(*chain(*pairs))]
    of_all_inputs = all(best.input_index < len(result.inputs) for best in listed)
    comparison = getattr(result, "comparison", None)
    listed += [] if comparison is None else chain(*comparison.predictions)
    listed += chain(*(file.predictions for file in getattr(result, "files", ())))
    are_whole = all(
        len(best.class_indices) == len(best.probabilities) == len(best.class_names or best.class_indices)
        for best in listed
    )
    if not (of_all_inputs and are_whole and all(len(one) == len(other) for one, other in pairs)):
        yield f"best classes in its {RESULT} cannot be"


def _wrong_first_gradient(_: RunRecord, result: Differences) -> Iterator[str]:
    if result.first_gradient_difference not in {"", *(row.label for row in result.gradients)}:
        yield f"the first gradient that differs is none that its {RESULT} lists"


def _wrong_maps(record: RunRecord, result: Attributions | Attention) -> Iterator[str]:
    patches = result.patches if isinstance(result, Attention) else ()
    of_inputs = max((drawn.input_index for drawn in (*result.maps, *patches)), default=-1) < len(result.inputs)
    if len(record.pictures) != len(result.inputs) or not of_inputs:
        yield "its pictures are not those of its inputs"
    if len(record.overlays) != len(result.maps):
        yield "its overlays are not those of its maps"
    regions = [
        *(picture.region for picture in record.pictures),
        *(seen.region for seen in result.inputs if seen.region),
    ]
    if not all(map(_is_part, regions)):
        yield "the part of a picture that an input covers cannot be"
    maps = [(attribution_map.values.ndim, attribution_map) for attribution_map in result.maps]
    for axes, heat_map in (*maps, *((patch.values.ndim - 1, patch) for patch in patches)):
        sides = [*zip(heat_map.extent[:axes], heat_map.extent[axes:], strict=False)]
        is_area = len(heat_map.extent) == 2 * axes and all(_reaches_into(begin, end, 1) for begin, end in sides)
        fits = 1 <= axes <= 3 and heat_map.values.dtype == np.float32 and heat_map.values.size
        fits = fits and (axes != PICTURE_AXES or max(heat_map.values.shape[-axes:]) <= _LONGEST_SIDE)
        if not (is_area and fits and _fits_itself(heat_map)):
            yield f"a map in its {ARRAYS} is not the one listed in {RESULT}"


def _is_part(region: Region) -> bool:
    sides = ((region.top, region.bottom, region.height), (region.left, region.right, region.width))
    return all(_reaches_into(*side) for side in sides)


def _reaches_into(begin: float, end: float, size: int) -> bool:
    """Tell whether an interval overlaps 0 to `size`, and can be divided into cells in floating point."""
    return 1e-9 * size < end - begin < 1e9 * size and begin < size and end > 0


def _fits_itself(heat_map: AttributionMap | AttentionMap | PatchWeights) -> bool:
    """Tell whether a map's values fit the size of its input, or its grid of queries."""
    if isinstance(heat_map, PatchWeights):
        return heat_map.values.ndim == 3 and len(heat_map.values) == math.prod(heat_map.query_grid)
    if isinstance(heat_map, AttentionMap):
        return heat_map.values.ndim == 2
    return len(heat_map.size) in (0, heat_map.values.ndim) and 0 not in heat_map.size


def _wrong_files(_: RunRecord, result: History) -> Iterator[str]:
    count = len(result.files)
    named = [*(row.file for row in result.rows), *(activation.file for activation in result.activations)]
    named += [at for verdict in result.verdicts for at in (verdict.first, verdict.before or 0, *verdict.files)]
    named += [file.compared_with or 0 for file in result.files]
    if [file.index for file in result.files] != [*range(count)] or any(at >= count for at in named):
        yield f"its {RESULT} names files that it does not list"
    for row in result.rows:
        if (row.dead_filter_count is None) != (row.filter_count is None):
            yield f"its {RESULT} counts either filters or dead ones of '{row.name[:_MOST_SHOWN]}'"


def _wrong_channels(record: RunRecord, result: Survey) -> Iterator[str]:
    if [row.index for row in result.rows] != [*range(len(result.rows))]:
        yield f"its {RESULT} does not list its rows in order"
    for row in result.rows:
        arrays = row.channels.arrays
        if arrays is not None and not _are_channels(arrays):
            yield f"its {ARRAYS} is cut short or damaged, or of other rows"
    for sheet in record.crops:
        channels: Sequence[object] = result.rows[sheet.row].channels if sheet.row < len(result.rows) else ()
        if any(channel >= len(channels) for channel in sheet.channels):
            yield f"its crops '{sheet.path[:_MOST_SHOWN]}' are of no channels that it lists"
    failed = () if result.failures is None else result.failures.inputs
    for strip in record.wrong:
        if strip.index >= len(failed):
            yield f"its picture '{strip.path[:_MOST_SHOWN]}' is of no wrong input that it lists"


def _are_channels(arrays: ChannelArrays) -> bool:
    count, length = arrays.mean.size, arrays.top_values.shape[-1] if arrays.top_values.ndim else 0
    lists = (2, count, length)
    shapes = {"top_values": lists, "top_inputs": lists, "top_positions": (*lists, 3)}
    are_shaped = all(
        shape == shapes.get(name, (count,)) and dtype.kind in "if"
        for name, (dtype, shape) in array_forms(arrays).items()
    )
    return are_shaped and np.array_equal(arrays.duplicate_of >= 0, ~np.isnan(arrays.correlation))


def _with_names(survey: Survey) -> Survey:
    names, classes = survey.names, tuple(survey.classes)
    rows = (replace(row, channels=replace(row.channels, names=names, classes=classes)) for row in survey.rows)
    return replace(survey, rows=tuple(rows))


RESULT_KINDS: Mapping[str, tuple[type, Sequence[Callable[[RunRecord, Any], Iterator[str]]]]] = {
    "activations": (Activations, (_wrong_arrays, _wrong_parts, _wrong_pictures_of_rows, _wrong_predictions)),
    "grads": (Gradients, (_wrong_arrays, _wrong_pictures_of_rows, _wrong_predictions)),
    "attribute": (Attributions, (_wrong_maps,)),
    "attention": (Attention, (_wrong_maps,)),
    "diff": (Differences, (_wrong_pictures_of_rows, _wrong_predictions, _wrong_first_gradient)),
    "history": (History, (_wrong_files, _wrong_predictions)),
    "survey": (Survey, (_wrong_arrays, _wrong_parts, _wrong_channels)),
}
