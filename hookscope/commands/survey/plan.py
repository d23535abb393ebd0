"""How a data set is cut into chunks, the plan that they share, and the folder where finished chunks wait."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from PIL.Image import Image

from hookscope.checkpoints.folders import natural_order
from hookscope.commands.survey.chunk_files import ChunkFiles
from hookscope.commands.survey.features import FeatureDtype, Pool
from hookscope.errors import InputError, UsageError
from hookscope.inputs.batches import in_batches
from hookscope.inputs.clips import Clip, Source
from hookscope.inputs.pipeline import InputPipeline
from hookscope.parameters import arg
from hookscope.regular_files import read_bounded
from hookscope.results.cost import ReceptiveField
from hookscope.results.inputs import Preprocessing
from hookscope.results.json_form import json_form
from hookscope.results.network import ModelInfo
from hookscope.results.runs.atomic import reported, whole_file
from hookscope.results.runs.store import checked, parse_json
from hookscope.text import safe_text, strict_json

PLAN = "plan.json"
FORMAT = 2

HEARTBEATS = "[0-9]*-of-[0-9]*.alive"
"""Names of the files by which processes show that they are alive."""

_CHUNKS = tuple("[0-9]" * 6 + ending for ending in (".json", ".safetensors", ".features.safetensors"))
# How every plan begins.
_MARK = re.compile(rb'{\n  "format": \d+,\n  "signature": {"hookscope"')

_MOST_PLAN_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Plan:
    """What is common to the chunks of a survey.

    Attributes:
        signature: See `hookscope.commands.survey.signature`.
        chunk_sizes: How many files, or inputs in memory, each chunk has.
        patterns: Patterns of layers.
        classes: Names of the classes by their numbers; () without classes.
        features: Where features go, "" without them; `pool` and `feature_dtype` are their form.
        fields: Receptive fields by layer and call, for crops.
        labels_source: The folder or file with the classes.
    """

    format: int
    signature: Mapping[str, str]
    model: ModelInfo
    preprocessing: Preprocessing
    chunk_sizes: tuple[int, ...]
    chunk_size: int
    batch_size: int
    patterns: tuple[str, ...]
    classes: tuple[str, ...]
    features: str
    pool: Pool
    feature_dtype: FeatureDtype
    seed: int
    device: str
    dtype: str
    versions: Mapping[str, str]
    threads: int
    fields: tuple[tuple[str, int, ReceptiveField], ...] = ()
    labels_source: str = ""
    categories: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """The chunks that a process measures: every `count`-th one from `index` on."""

    index: int = 0
    count: int = 1


def parse_share(text: str) -> Share:
    """Return the share that `--shard` means: "3/8" is the third of eight.

    Raises:
        UsageError: If it is malformed.
    """
    if (match := re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)) and 1 <= int(match[1]) <= int(match[2]):
        return Share(int(match[1]) - 1, int(match[2]))
    raise UsageError(f"{arg('shard')} {text!r} is no share: give the number of this part and of all, as 3/8.")


def in_order(files: Sequence[Source]) -> list[Source]:
    """Return pictures in memory as given, then files in natural order of their paths, each once.

    Pictures are first because they are found again by their numbers, and a file may hold several inputs.
    """
    pictures = [file for file in files if isinstance(file, Image)]
    paths: dict[Path, Source] = {}
    for file in files:
        if not isinstance(file, Image):
            paths.setdefault(file.folder if isinstance(file, Clip) else file, file)
    return [*pictures, *(paths[path] for path in sorted(paths, key=natural_order))]


def cut(inputs: InputPipeline, chunk_size: int) -> list[InputPipeline]:
    """Return the inputs of each chunk."""
    if inputs.files:
        files = inputs.files
        parts = [files[begin : begin + chunk_size] for begin in range(0, len(files), chunk_size)]
        return [replace(inputs, files=part, pictures={}) for part in parts]
    assert inputs.batch is not None  # noqa: S101 - or there are no inputs, which is refused before
    batches = (replace(part, indices=tuple(range(len(part.indices)))) for part in in_batches(inputs.batch, chunk_size))
    return [replace(inputs, batch=batch, pictures={}) for batch in batches]


@dataclass(frozen=True, slots=True)
class ChunkFolder:
    """The folder where finished chunks wait until the survey is whole."""

    path: Path

    def files(self, index: int) -> ChunkFiles:
        """Return the files of a chunk."""
        return ChunkFiles(self.path, index)

    @property
    def is_foreign(self) -> bool:
        """Whether files here have the names of a plan or of chunks, but no survey wrote them."""
        try:
            return not _MARK.match(read_bounded(self.path / PLAN, _MOST_PLAN_BYTES))
        except OSError:  # there is no plan, or it is no regular file
            return any(self._files(PLAN, *_CHUNKS))

    def _files(self, *patterns: str) -> list[Path]:
        return [path for pattern in patterns for path in self.path.glob(pattern)]

    def write_plan(self, plan: Plan) -> None:
        """Make the folder and write the plan atomically; OutputError if it cannot be written."""
        document = json_form(plan)
        with reported(self.path, kind="folder"), whole_file(self.path / PLAN) as file:
            file.write(strict_json(document).encode())

    def read_plan(self) -> Plan:
        """Return the plan.

        Raises:
            InputError: If there is none, or it is damaged.
        """
        merging = f"Cannot merge '{safe_text(str(self.path))}'"
        try:
            document = parse_json(read_bounded(self.path / PLAN, _MOST_PLAN_BYTES, follow_links=False))
            plan: Plan = checked(Plan, document or {})
        except (FileNotFoundError, NotADirectoryError) as error:
            remedy = f"Give the folder of {arg('out')} that the shards were given."
            raise InputError(f"{merging}: there is no {PLAN}. {remedy}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{merging}: its {PLAN} is damaged. Run a shard with {arg('resume')}.") from error
        if plan.format != FORMAT:
            raise InputError(f"{merging}: it is of another version of hookscope. Run the shards again.")
        return plan

    def remove(self) -> None:
        """Delete finished chunks and the plan, after the survey was written; other files stay."""
        for path in self._files(PLAN, *_CHUNKS, HEARTBEATS, ".partial-*"):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            self.path.rmdir()
