"""Find the checkpoints that CHECKPOINT arguments stand for, without loading torch."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hookscope.checkpoints.fileformat import (
    WEIGHTS_SUFFIXES,
    is_distributed,
    is_hugging_face,
    open_regular,
    read_weight_map,
)
from hookscope.checkpoints.folders import files_below, files_matching
from hookscope.errors import CheckpointError, NothingMatchedError
from hookscope.parameters import arg
from hookscope.text import printable

_PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")

_INDEX_SUFFIX = ".index.json"

# How DeepSpeed names the files of an optimiser's state, one for each process, beside those of the weights.
_STATES_OF_OPTIMISERS = re.compile(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")


def find_checkpoints(sources: Sequence[str]) -> list[str]:
    """Expand folders and globs into the checkpoints to check, values for MODEL, each once and in order.

    A folder stands for the weights files in it and below it, in natural order ("2.pt" before "10.pt"). Names that begin
    with a dot and DeepSpeed's states of optimisers are left out; a folder that is a checkpoint, a distributed one or
    transformers', counts once. A glob (`*`, `?`, `[…]`, `**`) is expanded only if nothing has that very name, and
    folders it matches are expanded as well. The shards of a split checkpoint count once, as the index that lists them.
    Everything else is kept as it is: a file, a missing one included, or another form of MODEL. Raises
    NothingMatchedError if a folder holds no weights file, or a glob matches nothing.
    """
    names = [name for source in sources for name in _expand(source)]
    indices: dict[Path, dict[str, str]] = {}
    return list(dict.fromkeys(_whole(name, indices) for name in names))


def _expand(source: str) -> list[str]:
    path = Path(source)
    try:
        is_folder, exists = path.is_dir(), path.exists() or path.is_symlink()
    except (OSError, ValueError):  # what cannot be a name; loading it raises
        return [source]
    if is_folder:
        paths = files_below(path, WEIGHTS_SUFFIXES, whole=_is_whole)
        if not paths:
            suffixes = ", ".join(WEIGHTS_SUFFIXES)
            pictures = files_below(path, _PICTURE_SUFFIXES)
            remedy = (
                f"Pictures are given with {arg('images')} {printable(source)}."
                if pictures
                else f"Looked for {suffixes}."
            )
            raise NothingMatchedError(f"No weights file in folder '{printable(source)}'. {remedy}")
        return [str(file) for file in _with_weights(paths)]
    if exists or not any(character in source for character in "*?["):
        return [source]
    files = files_matching(source, WEIGHTS_SUFFIXES, whole=_is_whole)
    if not files:
        raise NothingMatchedError(
            f"No checkpoint matches '{printable(source)}'. Check the pattern and the folder it starts from."
        )
    return [str(file) for file in _with_weights(files)]


def _is_whole(folder: Path) -> bool:
    return is_distributed(folder) or is_hugging_face(folder)


def _with_weights(files: Sequence[Path]) -> list[Path]:
    """Leave out states of optimisers by their names, unless there is nothing else."""
    return [file for file in files if not _STATES_OF_OPTIMISERS.fullmatch(file.name)] or [*files]


def _whole(name: str, indices: dict[Path, dict[str, str]]) -> str:
    """Return the index beside a file that lists it as a shard, else the name; `indices` keeps those of folders."""
    path = Path(name)
    if not name.lower().endswith(WEIGHTS_SUFFIXES) or not os.path.lexists(path):
        return name
    if path.parent not in indices:
        indices[path.parent] = _shards_in(path.parent)
    return indices[path.parent].get(path.name, name)


def _shards_in(folder: Path) -> dict[str, str]:
    """Return the index that lists it for every shard in a folder; an index that cannot be read lists none."""
    listed: dict[str, str] = {}
    with suppress(OSError):
        for index in sorted(path for path in folder.iterdir() if path.name.lower().endswith(_INDEX_SUFFIX)):
            with suppress(CheckpointError), open_regular(index) as file:
                shards = read_weight_map(file, printable(str(index))).values()
                listed.update({shard: str(index) for shard in shards if isinstance(shard, str)})
    return listed
