"""What `checkpoint` does, for the command line and for Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hookscope import options

if TYPE_CHECKING:
    from hookscope.results.contents import CheckpointContents


def checkpoint(file: str | Path, *, option: options.Checkpoint) -> CheckpointContents:
    """List the contents of a weights file without building a network or running code from the file.

    Args:
        file: A weights file, the index of a sharded one, or the folder of a distributed one.

    Returns:
        The sets of weights with their tensors, the other entries of the file, and its metadata.

    Raises:
        CheckpointError: If the file is missing, damaged, or not a weights file.
        NothingMatchedError: If there is nothing at `key`.
    """
    from hookscope.models.contents import list_contents

    return list_contents(Path(options.of_kind("file", options.File, file)), option.key)
