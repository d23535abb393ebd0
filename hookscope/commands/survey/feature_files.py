"""Features of all inputs as safetensors, in one file or one for each chunk, and a sidecar with the inputs, last.

They are copied piece by piece from the chunks: memory does not grow with the inputs.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from hookscope.commands.survey.chunk_files import ChunkFiles, Sidecar, read_sidecar
from hookscope.commands.survey.features import FeatureDtype, Pool, read_part
from hookscope.commands.survey.parquet import ParquetPart, write_parquet
from hookscope.errors import OutputError, UsageError
from hookscope.parameters import arg
from hookscope.regular_files import open_regular
from hookscope.results.runs.atomic import check_writable, reason_of, whole_file
from hookscope.results.runs.tensors import header_of
from hookscope.results.survey import FeatureFiles
from hookscope.text import printable, safe_text, shape_text

SCHEMA_VERSION = 1

_COPIED_BYTES = 2**20
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
        """What names the inputs, written last."""
        return self.path.with_suffix(".json") if self.is_one_file else self.path / "features.json"

    def check(self) -> None:
        """Raise OutputError for a place that nothing could be written to; change nothing.

        Raises:
            UsageError: If a package is missing for it, or it is a number.
        """
        if str(self.path).isdecimal():
            raise UsageError(
                f"{arg('features')} takes a path, not a number ({self.path}): such as features.safetensors or "
                "features/."
            )
        if self.is_parquet and find_spec("pyarrow") is None:
            raise UsageError(f"{arg('features')} FILE.parquet needs one more package: pip install 'hookscope[parquet]'")
        for path in (self.path,) if self.is_one_file else ():
            check_writable(path, arg("features"))
        check_writable(self.sidecar, arg("features"))


@dataclass(slots=True)
class FeatureParts:
    """The features of the chunks that were merged so far."""

    target: FeatureTarget
    files: list[ChunkFiles] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, files: ChunkFiles, sidecar: Sidecar, offset: int) -> None:
        """Take in those of the next chunk, whose first input has the number `offset`.

        Raises:
            UsageError: If its outputs are not those of the chunks before, or have other shapes.
        """
        if not sidecar.inputs:
            return
        if self.files and {*sidecar.feature_shapes} != {*self.shapes}:
            raise UsageError(
                f"{arg('features')}: different inputs pass through different layers. Name layers that all pass."
            )
        for label, shape in sidecar.feature_shapes.items():
            earlier = self.shapes.get(label, (0, *shape[1:]))
            if earlier[1:] != shape[1:]:
                shapes = f"{shape_text(earlier[1:])} and {shape_text(shape[1:])}"
                raise UsageError(
                    f"{arg('features')}: {printable(label)} is {shapes} for different inputs. Give {arg('pool')} avg."
                )
            self.shapes[label] = (earlier[0] + shape[0], *shape[1:])
        self.files.append(files)
        self.offsets.append(offset)

    def write(self, model: str, classes: Sequence[str]) -> FeatureFiles:
        """Write the features, then the sidecar.

        Args:
            model: Name of the network.
            classes: Their names by their numbers; empty without classes.

        Raises:
            OutputError: If something cannot be written.
        """
        target = self.target
        try:
            written = [*(self._one_file(classes) if target.is_one_file else self._file_for_each_chunk())]
            with whole_file(target.sidecar) as file:
                file.writelines(line.encode() for line in self._sidecar(model, classes, written))
        except OSError as error:
            where = safe_text(str(target.path))
            raise OutputError(
                f"Cannot write features to '{where}': {reason_of(error)}. Name another place with "
                f"{arg('features')}; {arg('resume')} goes on with the finished chunks."
            ) from error
        names = tuple(str(path) for path in (*written, target.sidecar))
        return FeatureFiles(names, dict(self.shapes), target.pool, target.dtype)

    def _one_file(self, classes: Sequence[str]) -> Iterator[Path]:
        path = self.target.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.target.is_parquet:
            with whole_file(path) as file:
                write_parquet(file, self._parquet_parts(classes), self.shapes, self.target.dtype)
            yield path
            return
        header, order = header_of({label: (self.target.dtype, shape) for label, shape in self.shapes.items()})
        with whole_file(path) as file:
            file.write(header)
            for label in order:
                for part in self.files:
                    begin, end = read_part(part.features).offsets[label]
                    _copy(part.features, begin, end, file)
        yield path

    def _parquet_parts(self, classes: Sequence[str]) -> Iterator[ParquetPart]:
        for part, offset in zip(self.files, self.offsets, strict=True):
            sidecar = read_sidecar(part)
            inputs = () if sidecar is None else sidecar.inputs
            named = [classes[record.label] for record in inputs if record.label is not None]
            yield ParquetPart(read_part(part.features), [record.name_in(offset) for record in inputs], named)

    def _file_for_each_chunk(self) -> Iterator[Path]:
        self.target.path.mkdir(parents=True, exist_ok=True)
        for part in self.files:
            path = self.target.path / f"features-{part.index:06d}.safetensors"
            with whole_file(path) as file:
                _copy(part.features, 0, part.features.stat().st_size, file)
            yield path

    def _sidecar(self, model: str, classes: Sequence[str], written: Sequence[Path]) -> Iterator[str]:
        """Return the text of the sidecar, an input a line, in the order of the rows."""
        target = self.target
        header: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "tool": "hookscope",
            "model": model,
            "pool": target.pool,
            "dtype": target.dtype,
            "shapes": self.shapes,
            "files": [path.name for path in written],
        }
        yield "{\n" + "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in header.items())
        yield '  "inputs": ['
        separator = "\n"
        for place, (part, offset) in enumerate(zip(self.files, self.offsets, strict=True)):
            sidecar = read_sidecar(part)
            for record in () if sidecar is None else sidecar.inputs:
                line = {
                    "input": record.name_in(offset),
                    "sha256": record.sha256,
                    "file": 0 if target.is_one_file else place,
                }
                line |= {} if record.label is None else {"class": classes[record.label]}
                yield f"{separator}    {json.dumps(line)}"
                separator = ",\n"
        yield "\n  ]\n}\n"


def _copy(source: Path, begin: int, end: int, file: BinaryIO) -> None:
    with open_regular(source, follow_links=False) as origin:
        origin.seek(begin)
        while begin < end:
            content = origin.read(min(_COPIED_BYTES, end - begin))
            if not content:
                raise OSError(f"{source.name} is cut short")
            file.write(content)
            begin += len(content)
