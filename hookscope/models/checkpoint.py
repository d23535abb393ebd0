"""Read the weights out of a file without running anything that comes with it, unless it is trusted."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from hookscope.checkpoints import isolation
from hookscope.checkpoints.fileformat import WEIGHTS_SUFFIXES, FileKind, file_kind, open_regular
from hookscope.errors import CheckpointError
from hookscope.models.construction import FileOptions
from hookscope.models.locate_state_dict import weights_in
from hookscope.models.shards import check_names, read_index
from hookscope.text import printable

WAYS_ON = "save `model.state_dict()` where it was made, or give --trust if you trust its author"
"""What to do about a file that runs code, for messages."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights in a file.

    Attributes:
        name: The file's, without its folder, safe to show.
        state: Tensors by name. The file of a quantised network also holds tuples of tensors and dtypes. Carries torch's
            `_metadata` when the file does. Tensors may be the mapped file itself.
        sha256: Hex digest of the file's bytes; for an index, of the text "DIGEST  NAME" of the index and each shard, a
            line each.
        kind: What kind of file it is.
        warnings: Sentences a reader must see, such as which tensors are not used.
        module: The pickled Module whose weights these are, which only a trusted file can hold; else None.
        notes: Sentences that are no cause for alarm: where in the file the weights are, and what else it holds.
    """

    name: str
    state: "OrderedDict[str, Any]"
    sha256: str
    kind: FileKind
    warnings: tuple[str, ...] = ()
    module: nn.Module | None = None
    notes: tuple[str, ...] = ()


def looks_like_file(text: str) -> bool:
    """Say whether `text` is meant as a weights file: it has such a file's suffix, or something of that name exists."""
    return text.lower().endswith(WEIGHTS_SUFFIXES) or exists(text)


def exists(text: str) -> bool:
    """Say whether something of that name exists, if only a link to nothing; what cannot be a name does not."""
    try:
        return text != "" and (Path(text).exists() or Path(text).is_symlink())
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def read_state_dict(path: Path) -> dict[str, Any]:
    """Return the state dict in a weights file: tensors by name, on the CPU.

    Raises:
        CheckpointError: If the file cannot be read, is damaged, or holds no state dict.
        UntrustedFileError: If reading it would run code from the file.
    """
    return read_checkpoint(path).state


def read_checkpoint(path: Path, options: FileOptions = FileOptions()) -> Checkpoint:  # noqa: B008 - frozen
    """Return the weights in a file, with its digest. What the file is, its content decides.

    What could go wrong is tried in a separate process first; this one then maps the file that passed.

    Args:
        path: A weights file, or the `index.json` of a sharded one.
        options: Where the weights are in it, and whether it may run code; then a Module's own state dict is read too.

    Raises:
        CheckpointError: If the file cannot be read, is damaged, or holds no state dict.
        UntrustedFileError: If reading it would run code from the file, and it is not trusted.
        UsageError: If it holds several state dicts, and `options` names none.
        NothingMatchedError: If there is none where `options` says.
    """
    name = printable(str(path))
    kind, kinds = files_of(path)
    if path in kinds:
        content = read_vetted(kinds, name, options)[path]
        weights, digest = weights_in(content, name, options.key), _digest(path)
        return Checkpoint(printable(path.name), weights.state, digest, kind, (), weights.module, weights.notes)
    contents = read_vetted(kinds, name, replace(options, key=None))
    read = {shard: weights_in(content, printable(str(shard))).state for shard, content in contents.items()}
    joined, warnings = _joined(name, read_index(path), read)
    weights = weights_in(joined, name, options.key)
    lines = "".join(f"{_digest(file)}  {file.name}\n" for file in (path, *kinds))
    digest = hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()
    return Checkpoint(printable(path.name), weights.state, digest, kind, warnings, notes=weights.notes)


def files_of(path: Path) -> tuple[FileKind, dict[Path, FileKind]]:
    """Return what kind of file `path` is, and the kinds of the files that hold its tensors: itself, or its shards.

    Raises:
        CheckpointError: If one cannot be read, or is not what it should be.
    """
    kind = file_kind(path)
    if kind not in ("safetensors index", "torch index"):
        return kind, {path: kind}
    kinds = {shard: file_kind(shard) for shard in read_index(path)}
    for shard, each in kinds.items():
        if each in ("safetensors index", "torch index"):
            named = printable(shard.name)
            raise CheckpointError(f"{printable(str(path))} names '{named}', which is an index itself; refused.")
    return kind, kinds


def read_vetted(kinds: Mapping[Path, FileKind], name: str, options: FileOptions) -> dict[Path, object]:
    """Return what files hold, read after all have been gone through in a separate process.

    Args:
        kinds: What each file is.
        name: What to call all of them in messages.
        options: As for `read_checkpoint`.

    Raises:
        CheckpointError, UntrustedFileError, UsageError, NothingMatchedError: As for `read_checkpoint`.
    """
    trusted = _read_trusted if options.trust else None
    return isolation.read_vetted(kinds, name, _weights_check(options), ways_on=WAYS_ON, read_trusted=trusted)


def vet_apart(kinds: Mapping[Path, FileKind], name: str, options: FileOptions) -> list[bool]:
    """Go through files in a separate process; return of each whether reading it runs code, as a trusted one's may.

    Args and Raises: As for `read_vetted`.
    """
    return isolation.vet_apart(kinds, name, _weights_check(options), ways_on=WAYS_ON, trust=options.trust)


def _weights_check(options: FileOptions) -> Callable[[object, str], object]:
    return lambda content, name: weights_in(content, name, options.key)


def _read_trusted(path: Path, kind: FileKind) -> object:
    """Return what a trusted file holds, with the readers that run its code."""
    from hookscope.models import exported  # noqa: PLC0415 (only for trusted files)

    if kind == "torchscript":
        return exported.load_torchscript(path, 0).module
    if kind == "exported program":
        return exported.load_exported_program(path, 0).module
    return exported.read_pickle(path)


def _joined(
    name: str, shards: Mapping[Path, list[str]], read: Mapping[Path, Mapping[str, Any]]
) -> tuple["OrderedDict[str, Any]", tuple[str, ...]]:
    """Return the tensors of all shards that the index lists, and a sentence about the others."""
    owner = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    state: OrderedDict[str, Any] = OrderedDict()
    surplus: list[str] = []
    for shard, listed in shards.items():
        held = read[shard]
        surplus += check_names(name, shard, listed, held, owner)
        state.update((tensor, held[tensor]) for tensor in listed)
    shown = ", ".join(printable(tensor, 80) for tensor in surplus[:3]) + (", …" if surplus[3:] else "")
    note = f"{name}: {len(surplus)} tensors of its files are not in the index and not used ({shown})."
    return state, (note,) * bool(surplus)


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
