"""Find the checkpoints that CHECKPOINT arguments stand for, without loading torch."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from hookscope.checkpoints.fileformat import (
    STATES_OF_OPTIMISERS,
    WEIGHTS_SUFFIXES,
    is_weights_folder,
    open_regular,
    read_weight_map,
)
from hookscope.checkpoints.folders import PICTURE_SUFFIXES, files_below, files_of
from hookscope.errors import CheckpointError, NothingMatchedError
from hookscope.parameters import arg
from hookscope.text import printable


def find_checkpoints(sources: Sequence[str]) -> list[str]:
    """Expand folders and globs into the checkpoints to check, values for MODEL, each once and in order.

    They are expanded as `files_of` does. DeepSpeed's states of optimisers are left out; a folder that is a checkpoint,
    a distributed one or transformers', counts once, and so do the shards of a split checkpoint, as the index that lists
    them. Everything else is kept as it is: a file, a missing one included, or another form of MODEL. Raises
    NothingMatchedError if a folder holds no weights file, or a glob matches nothing.
    """
    names = [name for source in sources for name in _expand(source)]
    index_by_shard = cache(_index_by_shard)
    return list(dict.fromkeys(_whole(name, index_by_shard) for name in names))


def _expand(source: str) -> list[str]:
    files = files_of(source, WEIGHTS_SUFFIXES, whole=is_weights_folder)
    if files is None:  # kept as it is; loading reports errors
        return [source]
    if not files:
        remedy = f"Looked for {', '.join(WEIGHTS_SUFFIXES)}."
        if files_below(Path(source), PICTURE_SUFFIXES):
            remedy = f"Pictures are given with {arg('images')} {printable(source)}."
        raise NothingMatchedError(f"No weights file in folder '{printable(source)}'. {remedy}")
    with_weights = [file for file in files if not STATES_OF_OPTIMISERS.fullmatch(file.name)]
    return [str(file) for file in with_weights or files]


def _whole(name: str, index_by_shard: Callable[[Path], dict[str, str]]) -> str:
    path = Path(name)
    is_file = name.lower().endswith(WEIGHTS_SUFFIXES) and os.path.lexists(path)
    return index_by_shard(path.parent).get(path.name, name) if is_file else name


def _index_by_shard(folder: Path) -> dict[str, str]:
    listed: dict[str, str] = {}
    with suppress(OSError):
        for index in sorted(path for path in folder.iterdir() if path.name.lower().endswith(".index.json")):
            with suppress(CheckpointError), open_regular(index) as file:
                shards = read_weight_map(file, printable(str(index))).values()
                listed.update({shard: str(index) for shard in shards if isinstance(shard, str)})
    return listed
