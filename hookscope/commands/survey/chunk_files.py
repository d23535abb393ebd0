"""A finished chunk on the disk: arrays as safetensors first, then a JSON sidecar, each written atomically.

The sidecar has the chunk without its arrays, its signature, and the digests of its files. A chunk is measured again if
it was cut short or damaged, or made from another model, other inputs or other settings.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from hookscope.commands.survey.channel_totals import ChannelTotals
from hookscope.commands.survey.judged_inputs import GRID, LOOKS, JudgedInputs
from hookscope.commands.survey.measure_chunk import MeasuredChunk, MeasuredInput
from hookscope.commands.survey.signature import differing
from hookscope.inputs.clips import digest_of
from hookscope.parameters import arg
from hookscope.regular_files import read_bounded
from hookscope.results.json_form import array_forms, json_form
from hookscope.results.runs.atomic import reported, whole_file
from hookscope.results.runs.store import checked, parse_json
from hookscope.results.runs.tensors import DTYPES
from hookscope.text import some_of, strict_json

FORMAT = 8
"""Version of the chunk files, raised when their content changes its meaning."""

# A chunk of a million inputs has a smaller sidecar, and a million channels have smaller arrays.
_MOST_SIDECAR_BYTES, _MOST_ARRAY_BYTES = 2**29, 2**34

# Key of the sidecar's digest, which covers all other entries.
_DIGEST = "sha256"

_UNREADABLE = (OSError, SafetensorError, ValueError, RecursionError)


@dataclass(frozen=True, slots=True)
class ChunkFiles:
    """The files of one chunk in a folder."""

    folder: Path
    index: int

    @property
    def arrays(self) -> Path:
        """The file of the arrays."""
        return self.folder / f"{self.index:06d}.safetensors"

    @property
    def features(self) -> Path:
        """The file of the features."""
        return self.folder / f"{self.index:06d}.features.safetensors"

    @property
    def sidecar(self) -> Path:
        """The JSON file, written last."""
        return self.folder / f"{self.index:06d}.json"


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The part of a sidecar that is read without the arrays.

    Attributes:
        signature: What the chunk depends on, by name: see `hookscope.commands.survey.signature`.
        arrays_sha256: Digest of the arrays.
        features_sha256: Digest of the features; "" without them.
        feature_shapes: Shapes of the features, by label.
        files: Digests of the chunk's inputs by name of the file; "" for unreadable files.
    """

    format: int
    index: int
    signature: Mapping[str, str]
    arrays_sha256: str
    features_sha256: str
    feature_shapes: Mapping[str, tuple[int, ...]]
    inputs: tuple[MeasuredInput, ...]
    files: Mapping[str, str]

    def stale(self, files: ChunkFiles, signature: Mapping[str, str]) -> str:
        """Return why the chunk cannot be used for a survey of this signature; "" if it can."""
        if different := differing(self.signature, signature):
            return f"made with other {some_of(different, 3)}"
        digests = {files.arrays: self.arrays_sha256}
        digests |= {files.features: self.features_sha256} if self.features_sha256 else {}
        for path, digest in digests.items():
            try:
                if digest_of(path) != digest:
                    return f"{path.name} is cut short or damaged"
            except OSError:
                return f"{path.name} is missing or cannot be read"
        return ""

    def fits_features(self, files: ChunkFiles, dtype: str) -> bool:
        """Tell whether the features have the labels and shapes of the sidecar, and a row for each input."""
        count, shapes = len(self.inputs), self.feature_shapes
        wanted = {label: (DTYPES[dtype], [*shape]) for label, shape in shapes.items() if shape[:1] == (count,)}
        with suppress(*_UNREADABLE), safe_open(files.features, "np") as file:
            parts = {label: file.get_slice(label) for label in file.keys()}  # noqa: SIM118
            return {label: (part.get_dtype(), part.get_shape()) for label, part in parts.items()} == wanted
        return False


def write_chunk(
    files: ChunkFiles, chunk: MeasuredChunk, signature: Mapping[str, str], digests: Mapping[str, str]
) -> None:
    """Write a chunk; remove the sidecar of an older chunk with its number first.

    Raises:
        OutputError: If it cannot be written.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    document = json_form(chunk, arrays)
    content = save({name: np.ascontiguousarray(values) for name, values in arrays.items()})
    features, shapes = "", {}
    with reported(files.folder, kind="folder", remedy=f"Finished chunks stay; go on with {arg('resume')}"):
        files.sidecar.unlink(missing_ok=True)
        with whole_file(files.arrays) as file:
            file.write(content)
        if chunk.features is not None:
            shapes = chunk.features.write(files.features, [part.row.label for part in chunk.rows])
            features = digest_of(files.features)
        digest = hashlib.sha256(content).hexdigest()
        sidecar = Sidecar(FORMAT, files.index, signature, digest, features, shapes, tuple(chunk.inputs), digests)
        document = json_form(sidecar) | document
        with whole_file(files.sidecar) as file:
            file.write(strict_json({**document, _DIGEST: _digest(document)}).encode())


def _document(files: ChunkFiles) -> Mapping[str, Any]:
    """Return the content of a sidecar; raise ValueError if it is not JSON, or was changed after it was written."""
    document = parse_json(read_bounded(files.sidecar, _MOST_SIDECAR_BYTES, follow_links=False)) or {}
    if document.pop(_DIGEST, "") != _digest(document):
        raise ValueError("damaged")
    return document


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(strict_json(document).encode()).hexdigest()


def read_sidecar(files: ChunkFiles) -> Sidecar | None:
    """Return the sidecar of a chunk; None if there is none, or it is damaged."""
    try:
        sidecar: Sidecar = checked(Sidecar, _document(files))
    except _UNREADABLE:
        return None
    return sidecar if (sidecar.format, sidecar.index) == (FORMAT, files.index) else None


def inputs_of(files: ChunkFiles) -> tuple[MeasuredInput, ...]:
    """Return the inputs of a chunk; () if its sidecar cannot be read."""
    sidecar = read_sidecar(files)
    return () if sidecar is None else sidecar.inputs


def read_chunk(files: ChunkFiles, class_count: int) -> MeasuredChunk | None:
    """Return a chunk without its features; None if it cannot be read. `Sidecar.stale` has compared digests."""
    try:
        content = read_bounded(files.arrays, _MOST_ARRAY_BYTES, follow_links=False)
        arrays = {name: np.array(values) for name, values in load(content).items()}  # copies, which merging writes to
        chunk: MeasuredChunk = checked(MeasuredChunk, _document(files), arrays)
        return chunk if _fits(chunk, class_count) else None
    except _UNREADABLE:
        return None


def _of_zeros(chunk: MeasuredChunk) -> MeasuredChunk:
    """Return a chunk of zeros, without inputs, in the dtypes and shapes that the chunk's arrays should have."""
    rows = []
    for row in chunk.rows:
        nonzero, totals = row.reduction.channel_nonzero, row.totals
        nonzero = None if nonzero is None else np.zeros(nonzero.size)
        if totals is not None:
            _, channels, length = totals.top.inputs.shape
            sums = {label: np.zeros((2, channels)) for label in totals.by_class}
            means = [np.zeros((*part.shape[:1], channels), np.float32) for part in totals.sample]
            totals = replace(ChannelTotals.empty(channels, length), by_class=sums, sample=means)
        rows.append(replace(row, reduction=row.reduction._replace(channel_nonzero=nonzero), totals=totals))
    count, judged = len(chunk.inputs), chunk.judged
    if judged is not None:
        looks, layouts = np.zeros((count, len(LOOKS))), np.zeros((count, GRID * GRID), np.float32)
        numbers, shares, truths = np.zeros(count, np.int64), np.zeros((count, 2)), np.zeros(count, np.bool_)
        judged = JudgedInputs(numbers, shares, truths, looks, layouts)
    used = {name: np.zeros(rows.size, np.bool_) for name, rows in chunk.rows_used.items()}
    return replace(chunk, inputs=[], rows=rows, judged=judged, rows_used=used)


def _fits(chunk: MeasuredChunk, class_count: int) -> bool:
    """Tell whether the parts of a chunk agree with each other and the class count: the files are not trusted."""
    labels, judged = {sample.label for sample in chunk.inputs}, chunk.judged
    reductions = [row.reduction for row in chunk.rows]
    return bool(
        array_forms(replace(chunk, inputs=[])) == array_forms(_of_zeros(chunk))
        and labels <= ({*range(class_count)} or {None})
        and (judged is None or (class_count and (judged.taken_for < judged.class_count).all()))
        and all(values.distribution is None or values.distribution.is_of(values.finite_count) for values in reductions)
    )
