"""The files that weights are in: one, a folder of slices, or the shards that an index names. No torch is needed."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from hookscope.checkpoints.fileformat import (
    FileKind,
    distributed_files,
    file_kind,
    open_regular,
    read_index,
    weights_file,
)
from hookscope.errors import CheckpointError
from hookscope.text import printable

# How Hugging Face's libraries name shards.
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<suffix>safetensors|bin)")

_INDICES = ("safetensors index", "torch index")

FileVersion = tuple[int, int, int]
"""A file's inode, size in bytes and modification time in ns: rewriting it changes one of them."""


@dataclass(frozen=True, slots=True)
class WeightsFiles:
    """The files that a path of weights stands for.

    `path` is a weights file, an index, or the folder of a distributed checkpoint, and `kind` its kind. `kinds` are
    those of the files that hold the tensors: itself, or the shards. `listed` has the tensors' names by shard, in the
    order of the shards' names; {} without an index. `versions` are those of the files on disk when they were found.
    """

    path: Path
    kind: FileKind
    kinds: Mapping[Path, FileKind]
    listed: Mapping[Path, list[str]] = field(default_factory=dict)
    versions: Sequence[FileVersion] = ()

    @classmethod
    def at(cls, path: Path) -> "WeightsFiles":
        """Find the files of weights at a path: also of a folder that a `save_pretrained` of Hugging Face wrote.

        Raises CheckpointError if it is no weights file, or an index that names anything but weights files next to it.
        """
        path = weights_file(path)
        kind = file_kind(path)
        listed = read_index(path) if kind in _INDICES else {}
        files = cls(path, kind, {file: file_kind(file) for file in listed} or {path: kind}, listed)
        if inner := next((shard for shard in listed if files.kinds[shard] in _INDICES), None):
            raise CheckpointError(f"{files.name} names '{printable(inner.name)}', which is an index itself; refused.")
        return replace(files, versions=files.current_versions())

    @property
    def name(self) -> str:
        """The path, for messages."""
        return printable(str(self.path))

    @property
    def adapter_config(self) -> Path | None:
        """The `adapter_config.json` of peft next to it; None if there is none."""
        config = self.path.parent / "adapter_config.json"
        return config if os.path.isfile(config) else None  # noqa: PTH113 never raises

    def stored(self) -> list[Path]:
        """Return the files on disk that hold the tensors."""
        folders = (distributed_files(path) if kind == "distributed" else [path] for path, kind in self.kinds.items())
        return [file for files in folders for file in files]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise CheckpointError if a file has changed afterwards, or needs more memory than there is."""
        try:
            yield
        except MemoryError as error:
            raise CheckpointError(f"{self.name} needs more memory than there is.") from error
        if self.current_versions() != self.versions:
            raise CheckpointError(f"{self.name} was changed while it was read; read it again when it is complete.")

    def current_versions(self) -> list[FileVersion]:
        """Return the versions of the files on disk as they are now."""
        return [_version_of(file) for file in self.stored()]

    def sha256(self) -> str:
        """Return the SHA-256 in hex digits; of several files, of the text "DIGEST  NAME" of each, a line each."""
        files = [self.path] * bool(self.listed) + self.stored()
        digests = [_digest_of(file) for file in files]
        if len(files) == 1:
            return digests[0]
        lines = "".join(f"{digest}  {file.name}\n" for digest, file in zip(digests, files, strict=True))
        return hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()

    def shard_remark(self) -> str:
        """Return a sentence about a file that is a shard by its name, "model-00001-of-00002.bin"; else ""."""
        match = _SHARD.fullmatch(self.path.name)
        if match is None or int(match["count"]) < 2:
            return ""
        index = f"{match['stem']}.{match['suffix']}.index.json"
        there = "; give that" if self.path.with_name(index).is_file() else ", which is not next to it"
        shown, position = printable(self.path.name), f"{int(match['number'])} of {int(match['count'])}"
        return f"{shown} is file {position}, with some of the tensors; the index is {printable(index)}{there}."

    def surplus(self, held: Mapping[Path, Iterable[str]]) -> dict[Path, list[str]]:
        """Return the names of tensors that each shard holds and its index does not list.

        Raises CheckpointError if a shard lacks a tensor that the index lists, or holds a tensor that the index lists
        for another shard.
        """
        every = {name for names in self.listed.values() for name in names}
        surplus = {}
        for shard, names in self.listed.items():
            shown, wanted, there = printable(shard.name, 80), set(names), [*held[shard]]
            if missing := sorted(wanted - set(there)):
                raise CheckpointError(
                    f"{shown} lacks '{printable(missing[0], 80)}', which {self.name} lists for it"
                    f"{f' ({len(missing)} in all)' if missing[1:] else ''}; are both of the same download?"
                )
            surplus[shard] = [name for name in there if name not in wanted]
            if twice := [name for name in surplus[shard] if name in every]:
                raise CheckpointError(
                    f"'{printable(twice[0], 80)}' is in {shown} and in another file of {self.name}; they contradict "
                    "each other."
                )
        return surplus


def _digest_of(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version_of(path: Path) -> FileVersion:
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns
