"""Find the files that folders and globs stand for."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from hookscope.errors import NothingMatchedError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
TENSOR_SUFFIXES = frozenset({".npy", ".pt", ".pth", ".safetensors"})


def find_inputs(sources: Sequence[str]) -> list[Path]:
    """Expand files, folders and globs into the files to read.

    A folder stands for the image and tensor files in it and below it, in natural order ("2.jpg" before "10.jpg");
    names that begin with a dot are left out. A glob (`*`, `?`, `[…]`, `**`) is expanded only if nothing has that very
    name, and its folders likewise. A name that does not exist is kept, so that reading it fails and the others are
    finished.

    Args:
        sources: What the user named, in order.

    Returns:
        Paths in the order of `sources`.

    Raises:
        NothingMatchedError: If a folder holds no image or tensor, or a glob matches nothing.
    """
    return [path for source in sources for path in _expand(source)]


def _expand(source: str) -> list[Path]:
    path = Path(source)
    try:
        is_folder, exists = path.is_dir(), path.exists() or path.is_symlink()
    except OSError:  # e.g. a name longer than the file system allows; reading it will say so
        is_folder, exists = False, True
    if is_folder:
        found = _files_below(path)
        if not found:
            suffixes = ", ".join(sorted(IMAGE_SUFFIXES | TENSOR_SUFFIXES))
            raise NothingMatchedError(f"No image or tensor in folder {source!r}. Looked for {suffixes}.")
        return found
    if exists or not any(character in source for character in "*?["):
        return [path]
    matches = [Path(match) for match in glob.glob(source, recursive=True)]  # noqa: PTH207 takes absolute patterns too
    files = [match for match in matches if not match.is_dir()]
    if "**" not in source:  # with ** the files below a matched folder are matches themselves
        files += [file for match in matches if match.is_dir() for file in _files_below(match)]
    if not files:
        raise NothingMatchedError(f"No file matches {source!r}. Check the pattern and the folder it starts from.")
    return sorted(set(files), key=_natural_order)


def _files_below(folder: Path) -> list[Path]:
    # An unreadable subfolder is kept in the list, like a missing file, so that it cannot pass unnoticed.
    unreadable: list[Path] = []
    found = []
    for root, folders, files in os.walk(folder, onerror=lambda error: unreadable.append(Path(error.filename))):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(root, name)
            for name in files
            if not name.startswith(".") and Path(name).suffix.lower() in IMAGE_SUFFIXES | TENSOR_SUFFIXES
        ]
    return sorted(found + unreadable, key=_natural_order)


def _natural_order(path: Path) -> tuple[list[list[str | int]], str]:
    parts: list[list[str | int]] = [
        [int(piece) if piece.isdecimal() else piece.casefold() for piece in re.split(r"(\d+)", part)]
        for part in path.parts
    ]
    return parts, str(path)
