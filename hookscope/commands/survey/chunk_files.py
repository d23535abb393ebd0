"""A finished chunk on the disk: arrays as safetensors first, a sidecar in JSON last, each written whole.

The sidecar has what made the chunk, its signature, and the digests of its files. A chunk that was cut short, damaged,
or made by another model, of other inputs or with other settings is told by that, and is measured again.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from hookscope.commands.survey.channel_totals import ChannelTotals, Moments, TopLists
from hookscope.commands.survey.judged_inputs import JudgedInputs
from hookscope.commands.survey.measure_chunk import ChunkRow, MeasuredChunk, MeasuredInput
from hookscope.errors import OutputError
from hookscope.parameters import arg
from hookscope.regular_files import NotRegularError, open_regular, read_bounded
from hookscope.results.activations import LayerRow, UncalledLayer, Verification
from hookscope.results.distribution import Distribution
from hookscope.results.runs.atomic import new_token, reason_of, sync, whole_file
from hookscope.results.runs.store import checked
from hookscope.results.statistics import TensorStatistics
from hookscope.results.survey import Unusable
from hookscope.statistics.reduction import Reduction
from hookscope.text import safe_text

FORMAT = 2
"""Of chunks: it changes when what is in them changes its meaning."""

# A sidecar of a chunk of a million inputs, and the arrays of one of a million channels, are smaller.
_MOST_SIDECAR_BYTES, _MOST_ARRAY_BYTES = 2**29, 2**34

_NUMBERS = ("mean", "squared_deviations", "min", "max", "abs_sum", "square_sum")
_COUNTS = ("element_count", "finite_count", "nan_count", "nonzero_count", "exponent")
_MOMENTS = ("count", "mean", "deviations")
_OF_JUDGED = ("taken_for", "probabilities", "is_right", "looks", "layouts")


@dataclass(frozen=True, slots=True)
class ChunkFiles:
    """The files of one chunk in a folder."""

    folder: Path
    index: int

    @property
    def arrays(self) -> Path:
        """The numbers."""
        return self.folder / f"{self.index:06d}.safetensors"

    @property
    def features(self) -> Path:
        """The features of its inputs."""
        return self.folder / f"{self.index:06d}.features.safetensors"

    @property
    def sidecar(self) -> Path:
        """What is written last."""
        return self.folder / f"{self.index:06d}.json"


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The contents of a chunk's sidecar.

    Attributes:
        format: See `FORMAT`.
        index: Of the chunk.
        signature: What made it, by name: see `hookscope.commands.survey.signature`.
        arrays_sha256: Digest of the arrays.
        features_sha256: Digest of the features; "" without them.
        rows: Without statistics, in the order of the arrays.
        axes: Axis of the channels of each row, -1 without one.
        has_channels: Whether each row has totals of its channels.
        class_count: As of `JudgedInputs`, as is `mapping`; 0 without judged inputs.
        tables: Names of the embeddings and codebooks whose rows used are among the arrays, in order.
    """

    format: int
    index: int
    signature: Mapping[str, str]
    arrays_sha256: str
    features_sha256: str
    inputs: tuple[MeasuredInput, ...]
    place_count: int
    rows: tuple[LayerRow, ...]
    axes: tuple[int | None, ...]
    has_channels: tuple[bool, ...]
    unusable: tuple[Unusable, ...]
    uncalled: tuple[UncalledLayer, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    verification: Verification | None
    seconds: float
    feature_shapes: Mapping[str, tuple[int, ...]]
    class_count: int = 0
    mapping: str = ""
    tables: tuple[str, ...] = ()


def write_chunk(files: ChunkFiles, chunk: MeasuredChunk, signature: Mapping[str, str]) -> None:
    """Write a chunk: what lies there of the same number is no chunk from the first moment on.

    Raises:
        OutputError: If it cannot be written.
    """
    try:
        with suppress(FileNotFoundError):
            files.sidecar.unlink()
        tables = {f"table.{at}": rows.astype(np.uint8) for at, rows in enumerate(chunk.rows_used.values())}
        content = save({**dict(_arrays_of(chunk.rows)), **_judged_arrays(chunk.judged), **tables})
        with whole_file(files.arrays) as file:
            file.write(content)
        digest = ""
        if chunk.features is not None:
            partial = files.features.with_name(f".partial-{new_token()}")
            try:
                chunk.features.write(partial, [row.row.label for row in chunk.rows])
                sync(partial)
                digest = digest_of(partial)
                partial.replace(files.features)
            finally:
                partial.unlink(missing_ok=True)
        sidecar = _sidecar_of(files.index, chunk, signature, hashlib.sha256(content).hexdigest(), digest)
        with whole_file(files.sidecar) as file:
            file.write(json.dumps(sidecar, allow_nan=False).encode())
    except OSError as error:
        where = safe_text(str(files.folder))
        raise OutputError(
            f"Cannot write a chunk to '{where}': {reason_of(error)}. Finished chunks stay; go on with {arg('resume')}."
        ) from error


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a regular file; OSError if it cannot be read."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sidecar_of(
    index: int, chunk: MeasuredChunk, signature: Mapping[str, str], arrays: str, features: str
) -> dict[str, Any]:
    nothing = asdict(TensorStatistics((), "", 0))
    rows = []
    for layer in chunk.rows:
        row = {entry.name: getattr(layer.row, entry.name) for entry in fields(LayerRow) if entry.name != "activation"}
        facts = {
            "shape": layer.reduction.shape,
            "dtype": layer.reduction.dtype,
            "unmeasured": layer.reduction.unmeasured,
        }
        rows.append({**row, "activation": {**nothing, **facts}})
    shapes = {} if chunk.features is None else chunk.features.shapes
    return {
        "format": FORMAT,
        "index": index,
        "signature": dict(signature),
        "arrays_sha256": arrays,
        "features_sha256": features,
        "inputs": [asdict(measured_input) for measured_input in chunk.inputs],
        "place_count": chunk.place_count,
        "rows": rows,
        "axes": [chunk_row.reduction.channel_axis for chunk_row in chunk.rows],
        "has_channels": [chunk_row.totals is not None for chunk_row in chunk.rows],
        "unusable": [asdict(unusable) for unusable in chunk.unusable],
        "uncalled": [asdict(uncalled) for uncalled in chunk.uncalled],
        "warnings": chunk.warnings,
        "notes": chunk.notes,
        "verification": None if chunk.verification is None else asdict(chunk.verification),
        "seconds": chunk.seconds,
        "class_count": 0 if chunk.judged is None else chunk.judged.class_count,
        "mapping": "" if chunk.judged is None else chunk.judged.mapping,
        "tables": [*chunk.rows_used],
        "feature_shapes": {
            chunk_row.row.label: shapes[chunk_row.row.label]
            for chunk_row in chunk.rows
            if chunk_row.row.label in shapes
        },
    }


def read_sidecar(files: ChunkFiles) -> Sidecar | None:
    """Return the sidecar of a chunk; None if there is none, or it is damaged."""
    try:
        content = read_bounded(files.sidecar, _MOST_SIDECAR_BYTES, follow_links=False)
        document = json.loads(content)
        sidecar: Sidecar = checked(Sidecar, document if isinstance(document, dict) else {})
    except (OSError, NotRegularError, ValueError, RecursionError):
        return None
    return sidecar if (sidecar.format, sidecar.index) == (FORMAT, files.index) else None


def damage(files: ChunkFiles, sidecar: Sidecar) -> str:
    """Return what is wrong with the files of a chunk: "cut short or damaged", "missing"; "" if nothing is."""
    wanted = {files.arrays: sidecar.arrays_sha256}
    if sidecar.features_sha256:
        wanted[files.features] = sidecar.features_sha256
    for path, digest in wanted.items():
        try:
            if digest_of(path) != digest:
                return f"{path.name} is cut short or damaged"
        except OSError:
            return f"{path.name} is missing or cannot be read"
    return ""


def read_chunk(files: ChunkFiles, sidecar: Sidecar) -> MeasuredChunk | None:
    """Return a chunk without its features; None if its arrays are not those that the sidecar is of."""
    try:
        content = read_bounded(files.arrays, _MOST_ARRAY_BYTES, follow_links=False)
        if hashlib.sha256(content).hexdigest() != sidecar.arrays_sha256:
            return None
        arrays = load(content)
        rows, judged = _rows_from(arrays, sidecar), _judged_from(arrays, sidecar)
        rows_used = {name: arrays[f"table.{at}"] > 0 for at, name in enumerate(sidecar.tables)}
    except (OSError, NotRegularError, SafetensorError, KeyError, IndexError, ValueError):
        return None
    return MeasuredChunk(
        inputs=list(sidecar.inputs),
        place_count=sidecar.place_count,
        rows=rows,
        unusable=list(sidecar.unusable),
        uncalled=sidecar.uncalled,
        warnings=sidecar.warnings,
        notes=sidecar.notes,
        verification=sidecar.verification,
        seconds=sidecar.seconds,
        judged=judged,
        rows_used=rows_used,
    )


def read_judged(files: ChunkFiles, sidecar: Sidecar) -> JudgedInputs | None:
    """Return how the inputs of a chunk are classified, without reading the rest; None if that is not known."""
    if not sidecar.class_count:
        return None
    with safe_open(files.arrays, "np") as file:
        return _judged_from({name: file.get_tensor(name) for name in map(_judged_name, _OF_JUDGED)}, sidecar)


def _judged_name(name: str) -> str:
    return f"judged.{name}"


def _judged_arrays(judged: JudgedInputs | None) -> dict[str, NDArray[Any]]:
    if judged is None:
        return {}
    return {_judged_name(name): np.ascontiguousarray(getattr(judged, name)) for name in _OF_JUDGED}


def _judged_from(arrays: Mapping[str, NDArray[Any]], sidecar: Sidecar) -> JudgedInputs | None:
    if not sidecar.class_count:
        return None
    judged = {name: arrays[_judged_name(name)] for name in _OF_JUDGED}
    return JudgedInputs(**judged, class_count=sidecar.class_count, mapping=sidecar.mapping)


def _arrays_of(rows: list[ChunkRow]) -> Iterator[tuple[str, NDArray[Any]]]:
    reductions = [row.reduction for row in rows]
    yield "numbers", np.array([[getattr(reduction, name) for name in _NUMBERS] for reduction in reductions], np.float64)
    yield "counts", np.array([[getattr(reduction, name) for name in _COUNTS] for reduction in reductions], np.int64)
    for place, row in enumerate(rows):
        spread = row.reduction.distribution
        if spread is not None:
            keys, counts = spread.binned()
            yield f"{place}.bins", np.ascontiguousarray(keys)
            yield f"{place}.bin_counts", np.ascontiguousarray(counts)
        if row.reduction.channel_nonzero is not None:
            yield f"{place}.nonzero", np.ascontiguousarray(row.reduction.channel_nonzero)
        if row.totals is not None:
            for name, array in _channel_arrays(row.totals):
                yield f"{place}.{name}", np.ascontiguousarray(array)


def _channel_arrays(totals: ChannelTotals) -> Iterator[tuple[str, NDArray[Any]]]:
    for name in ("values", "pooled"):
        yield name, np.stack([getattr(getattr(totals, name), moment) for moment in _MOMENTS])
    yield "extremes", np.stack([totals.high, totals.low])
    yield "seen", np.stack([totals.total, totals.firing])
    yield "top_values", totals.top.values
    yield "top_inputs", totals.top.inputs
    yield "top_positions", totals.top.positions
    yield "by_input", np.array([totals.is_by_input])
    labels = sorted(totals.by_class)
    yield "classes", np.array(labels, np.int64)
    sums = [totals.by_class[label] for label in labels]
    yield "class_sums", np.stack(sums) if sums else np.zeros((0, 1 + totals.high.size))
    yield "sample", np.concatenate([np.zeros((0, totals.high.size), np.float32), *totals.sample])


def _rows_from(arrays: Mapping[str, NDArray[Any]], sidecar: Sidecar) -> list[ChunkRow]:
    rows = []
    described = zip(sidecar.rows, sidecar.axes, sidecar.has_channels, strict=True)
    for place, (row, axis, has_channels) in enumerate(described):
        numbers = dict(zip(_NUMBERS, arrays["numbers"][place].tolist(), strict=True))
        counts = dict(zip(_COUNTS, arrays["counts"][place].tolist(), strict=True))
        spread = None
        if f"{place}.bins" in arrays:
            keys, bin_counts = arrays[f"{place}.bins"], arrays[f"{place}.bin_counts"]
            spread = Distribution(numbers["min"], numbers["max"], int(bin_counts.sum()), None, keys, bin_counts)
        reduction = Reduction(
            shape=row.activation.shape,
            dtype=row.activation.dtype,
            channel_axis=axis,
            channel_nonzero=arrays.get(f"{place}.nonzero"),
            distribution=spread,
            unmeasured=row.activation.unmeasured,
            **numbers,
            **counts,
        )
        totals = _totals_from({name: arrays[f"{place}.{name}"] for name in _CHANNEL_ARRAYS}) if has_channels else None
        rows.append(ChunkRow(replace(row, activation=TensorStatistics((), "", 0)), reduction, totals))
    return rows


_CHANNEL_ARRAYS = (
    *("values", "pooled", "extremes", "seen", "top_values", "top_inputs", "top_positions", "by_input"),
    *("classes", "class_sums", "sample"),
)


def _totals_from(arrays: Mapping[str, NDArray[Any]]) -> ChannelTotals:
    high, low = arrays["extremes"]
    total, firing = arrays["seen"]
    return ChannelTotals(
        Moments(*arrays["values"]),
        high,
        low,
        total,
        firing,
        Moments(*arrays["pooled"]),
        # Copies, because merging writes into the lists.
        TopLists(*(np.array(arrays[f"top_{name}"]) for name in ("values", "inputs", "positions"))),
        dict(zip(arrays["classes"].tolist(), arrays["class_sums"], strict=True)),
        [arrays["sample"]],
        bool(arrays["by_input"][0]),
    )
