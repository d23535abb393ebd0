"""Find the files that folders and globs stand for."""

from collections.abc import Sequence
from pathlib import Path

from hookscope.errors import NothingMatchedError
from hookscope.folders import files_below, files_matching

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
TENSOR_SUFFIXES = frozenset({".npy", ".pt", ".pth", ".safetensors"})
_SUFFIXES = IMAGE_SUFFIXES | TENSOR_SUFFIXES


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
        found = files_below(path, _SUFFIXES)
        if not found:
            suffixes = ", ".join(sorted(_SUFFIXES))
            raise NothingMatchedError(f"No image or tensor in folder {source!r}. Looked for {suffixes}.")
        return found
    if exists or not any(character in source for character in "*?["):
        return [path]
    files = files_matching(source, _SUFFIXES)
    if not files:
        raise NothingMatchedError(f"No file matches {source!r}. Check the pattern and the folder it starts from.")
    return files
