"""Features of all inputs as safetensors or Parquet, in one file or one for each chunk, then a sidecar with the inputs.

Chunks are copied one after another, and batches are written as they come: memory does not grow.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfileobj
from typing import Any, BinaryIO

import numpy as np
from safetensors import safe_open
from torch import Tensor

from hookscope.commands.survey.chunk_files import ChunkFiles, Sidecar, inputs_of
from hookscope.commands.survey.features import FeatureDtype, FeatureSpool, Pool, different_layers, different_shapes
from hookscope.errors import UsageError
from hookscope.inputs.batches import Batch, length_of, to_device
from hookscope.inspection.device import placement
from hookscope.inspection.forward import ForwardOptions, inspect
from hookscope.models.construction import LoadedModel
from hookscope.parameters import arg
from hookscope.regular_files import open_regular, read_bounded
from hookscope.results.inputs import InputRecord
from hookscope.results.runs.atomic import check_writable, refusal, reported, whole_file
from hookscope.results.runs.tensors import header_of
from hookscope.results.survey import FeatureFiles
from hookscope.text import plain, safe_text

SCHEMA_VERSION = 1

# How every sidecar begins.
_MARK = b'{\n  "schema_version": 1,\n  "tool": "hookscope"'

_ONE_FILE, _PARQUET = ".safetensors", ".parquet"


@dataclass(frozen=True, slots=True)
class FeatureTarget:
    """Where features go, and what they are: a .safetensors or .parquet file, or a folder of one file a chunk."""

    path: Path
    pool: Pool = "avg"
    dtype: FeatureDtype = "float32"

    @property
    def is_one_file(self) -> bool:
        """Whether all features go into one file."""
        return self.path.suffix.lower() in (_ONE_FILE, _PARQUET)

    @property
    def is_parquet(self) -> bool:
        """Whether they go into a Parquet file."""
        return self.path.suffix.lower() == _PARQUET

    @property
    def sidecar(self) -> Path:
        """The JSON file that lists the inputs, written last."""
        if self.is_parquet:  # x.safetensors has x.json
            return self.path.with_name(f"{self.path.name}.json")
        return self.path.with_suffix(".json") if self.is_one_file else self.path / "features.json"

    def check(self, option: str) -> None:
        """Raise OutputError if the path of an option cannot be written or holds other files.

        Raises:
            UsageError: If the path is a number, or a package for its format is missing.
        """
        if str(self.path).isdecimal():
            raise UsageError(
                f"{option} takes a path, not a number ({self.path}): such as features.safetensors or features/."
            )
        if self.is_parquet and find_spec("pyarrow") is None:
            raise UsageError(f"{option} FILE.parquet needs one more package: pip install 'hookscope[parquet]'")
        files = [self.path] if self.is_one_file else self.path.glob("features-[0-9]*.safetensors")
        for path in [*files, self.sidecar]:
            check_writable(path, option)
            if path.exists() and not self._is_ours():
                raise refusal(path, "it exists and is no file of features", option)

    def _is_ours(self) -> bool:
        with suppress(OSError):
            return read_bounded(self.sidecar, len(_MARK)).startswith(_MARK)
        return False

    def write_sidecar(
        self, model: str, shapes: Mapping[str, tuple[int, ...]], files: Sequence[Path], inputs: Iterable[dict[str, Any]]
    ) -> FeatureFiles:
        """Write the sidecar, one input per line in the order of the rows; return what was written."""
        header = {"schema_version": SCHEMA_VERSION, "tool": "hookscope", "model": model, "pool": self.pool}
        header = plain(header | {"dtype": self.dtype, "shapes": shapes, "files": [path.name for path in files]})
        with whole_file(self.sidecar) as file:
            file.write(b"{\n")
            file.writelines(f"  {json.dumps(name)}: {json.dumps(value)},\n".encode() for name, value in header.items())
            file.write(b'  "inputs": [')
            for place, entry in enumerate(inputs):
                file.write(f"{',' if place else ''}\n    {json.dumps(plain(entry))}".encode())
            file.write(b"\n  ]\n}\n")
        return FeatureFiles((*map(str, files), str(self.sidecar)), dict(shapes), self.pool, self.dtype)


@dataclass(slots=True)
class FeatureParts:
    """The features of the chunks that were merged so far, each with the number of its first input."""

    target: FeatureTarget
    chunks: list[tuple[int, ChunkFiles]] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, files: ChunkFiles, sidecar: Sidecar, offset: int) -> None:
        """Add the features of the next chunk, whose first input has the number `offset`.

        Raises:
            UsageError: If it has other outputs than the chunks before, or other shapes.
        """
        if not sidecar.inputs:
            return
        if self.chunks and {*sidecar.feature_shapes} != {*self.shapes}:
            raise different_layers()
        for label, shape in sidecar.feature_shapes.items():
            earlier = self.shapes.get(label, (0, *shape[1:]))
            if earlier[1:] != shape[1:]:
                raise different_shapes(label, earlier, shape)
            self.shapes[label] = (earlier[0] + shape[0], *shape[1:])
        self.chunks.append((offset, files))

    def write(self, model: str, classes: Sequence[str]) -> FeatureFiles:
        """Write the features, then the sidecar; `model` and `classes` are names.

        Raises:
            OutputError: If something cannot be written.
        """
        remedy = f"Name another place with {arg('features')}; {arg('resume')} goes on with the finished chunks"
        with reported(self.target.path, remedy=remedy):
            written = [*(self._one_file(classes) if self.target.is_one_file else self._file_for_each_chunk())]
            return self.target.write_sidecar(model, self.shapes, written, self._inputs(classes))

    def _one_file(self, classes: Sequence[str]) -> Iterator[Path]:
        with whole_file(self.target.path) as file:
            if self.target.is_parquet:
                self._write_parquet(file, classes)
            else:
                shapes = {label: (self.target.dtype, shape) for label, shape in self.shapes.items()}
                header, order = header_of(shapes)
                file.write(header)
                for label in order:
                    for _, part in self.chunks:
                        with safe_open(part.features, "np") as source:
                            file.write(source.get_tensor(label).tobytes())
        yield self.target.path

    def _write_parquet(self, file: BinaryIO, classes: Sequence[str]) -> None:
        """Write the columns "input" and, with classes, "class", and a column of equal-length lists for each output."""
        import pyarrow as pa  # noqa: PLC0415 - an optional package
        import pyarrow.parquet as pq  # noqa: PLC0415

        with ExitStack() as opened:
            writer: pq.ParquetWriter | None = None
            for offset, part in self.chunks:
                inputs = inputs_of(part)
                named = [classes[record.label] for record in inputs if record.label is not None]
                columns = {"input": pa.array([record.name_in(offset) for record in inputs], pa.string())}
                columns |= {"class": pa.array(named, pa.string())} if named else {}
                with safe_open(part.features, "np") as source:
                    for label in sorted(self.shapes):
                        values = source.get_tensor(label)
                        size = math.prod(values.shape[1:])
                        name = f"{label} (layer)" if label in ("input", "class") else label
                        columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), size)
                table = pa.table(columns)
                writer = writer or opened.enter_context(pq.ParquetWriter(file, table.schema))
                writer.write_table(table)

    def _file_for_each_chunk(self) -> Iterator[Path]:
        for _, part in self.chunks:
            path = self.target.path / f"features-{part.index:06d}.safetensors"
            with whole_file(path) as file, open_regular(part.features, follow_links=False) as source:
                copyfileobj(source, file)
            yield path

    def _inputs(self, classes: Sequence[str]) -> Iterator[dict[str, Any]]:
        for place, (offset, part) in enumerate(self.chunks):
            for record in inputs_of(part):
                name, number = record.name_in(offset), 0 if self.target.is_one_file else place
                label = {} if record.label is None else {"class": classes[record.label]}
                yield {"input": name, "sha256": record.sha256, "file": number, **label}


def batch_features(
    loaded: LoadedModel, batches: Iterable[Any], target: FeatureTarget, layers: Sequence[str], seed: int
) -> FeatureFiles:
    """Do as `features` in run.py.

    Raises:
        UsageError: If a batch is something else, or an output lacks a row for each input.
    """
    if not target.is_one_file or target.is_parquet:
        raise UsageError(
            f"Features of batches go into one file: '{safe_text(str(target.path))}' must end in .safetensors."
        )
    target.check(arg("out"))
    spool = FeatureSpool(target.pool, target.dtype)
    labels: list[Any] = []
    place = placement(loaded.module)
    made = (to_device(batch, *place) for batch in _batches(batches, labels))
    run = inspect(
        loaded,
        made,
        ForwardOptions(layers=layers, seed=seed),
        on_tensor=spool.see,
        on_output=lambda batch, _output: spool.keep(len(batch.indices)),
    )
    if not labels:
        raise UsageError("There are no batches: give at least one tensor (N, ...).")
    with reported(target.path, arg("out")):
        shapes = spool.write(target.path, [row.label for row in run.rows])
        return target.write_sidecar(run.model.name, shapes, [target.path], _inputs(labels))


def _batches(batches: Iterable[Any], labels: list[Any]) -> Iterator[Batch]:
    """Yield batches numbered from 0, and note their labels; None for an input without one."""
    begin = 0
    for item in [batches] if isinstance(batches, Tensor) else batches:
        values, *others = item if isinstance(item, list | tuple) and item else (item,)
        if not isinstance(values, Tensor) or not values.dim():
            kind = type(values).__name__
            raise UsageError(f"A batch is {kind}: give tensors (N, ...), or tuples of such a tensor and labels.")
        count = length_of(values)
        targets = others[0] if others else None
        listed = targets.tolist() if isinstance(targets, Tensor | np.ndarray) and targets.ndim == 1 else targets
        is_text = isinstance(listed, str | bytes)
        labels += listed if isinstance(listed, Sequence) and not is_text and len(listed) == count else [None] * count
        record = InputRecord("tensor", None, None, tuple(values.shape[1:]), ())
        yield Batch((values,), tuple(range(begin, begin + count)), (record,) * count)
        begin += count


def _inputs(labels: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for at, label in enumerate(labels):
        yield {"input": f"input {at}", "sha256": None, "file": 0, **({} if label is None else {"class": str(label)})}
