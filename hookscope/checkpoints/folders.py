"""The files that a folder or a glob stands for."""

import glob
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from hookscope.errors import NothingMatchedError
from hookscope.regular_files import read_bounded
from hookscope.text import printable

PICTURE_SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff"),
        *(".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),  # JPEG 2000
    }
)
HEIF_SUFFIXES = frozenset({".heic", ".heif", ".hif"})

# How the run.json of a run directory begins, and the plan.json of the chunks of an unfinished survey.
_START = re.compile(rb'\{\s*"(schema_version": \d+,\s*"tool": "hookscope"|format": \d+,\s*"signature": \{"hookscope")')


def files_of(
    source: str,
    suffixes: Iterable[str],
    also: Callable[[Path], bool] | None = None,
    whole: Callable[[Path], bool] | None = None,
) -> list[Path] | None:
    """List the files that a folder or a glob (`*`, `?`, `[…]`, `**`) stands for, each once, in natural order.

    Returns None for a file, a missing file and an impossible name. A pattern is a glob only if no file has exactly this
    name. A matched folder stands for the files below it, as in `files_below`; a matched file may have any suffix.
    Raises NothingMatchedError if a glob matches nothing.
    """
    path = Path(source)
    try:
        if source and path.is_dir():  # Path("") is the current folder
            return files_below(path, suffixes, also, whole)
        if path.exists() or path.is_symlink() or not any(character in source for character in "*?["):
            return None
    except (OSError, ValueError):  # e.g. a name longer than the file system allows
        return None
    matches = [Path(match) for match in glob.glob(source, recursive=True)]  # noqa: PTH207 takes absolute patterns too
    folders = {match for match in matches if match.is_dir()}
    wholes = {match for match in folders if whole is not None and whole(match)}
    files = wholes | {match for match in matches if match not in folders and wholes.isdisjoint(match.parents)}
    if not re.search(r"(^|[/\\])\*\*([/\\]\*)?$", source):  # not "**", which lists the files itself
        outermost = (folder for folder in folders if folders.isdisjoint(folder.parents))
        files.update(file for folder in outermost for file in files_below(folder, suffixes, also, whole))
    if not files:
        raise NothingMatchedError(
            f"No file matches '{printable(source)}'. Check the pattern and the folder it starts from."
        )
    return sorted(files, key=natural_order)


def files_below(
    folder: Path,
    suffixes: Iterable[str],
    also: Callable[[Path], bool] | None = None,
    whole: Callable[[Path], bool] | None = None,
) -> list[Path]:
    """List the files in and below a folder that have one of the suffixes, in natural order: "2.pt" before "10.pt".

    Suffixes are in lower case, with their dot; either case matches. Files that `also` accepts are added. Names that
    begin with a dot are left out, and so are hookscope's run directories below the folder. A folder that is `whole` is
    listed itself, instead of its files. A folder that cannot be read is listed like a missing file, so that it cannot
    pass unnoticed.
    """
    endings = tuple(suffixes)
    unreadable: list[Path] = []
    matches: list[Path] = []
    for root, folders, files in os.walk(folder, onerror=lambda error: unreadable.append(Path(error.filename))):
        if whole is not None and whole(Path(root)):
            matches.append(Path(root))
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and not _is_run(Path(root, name))]
        paths = [Path(root, name) for name in files if not name.startswith(".")]
        matches += [path for path in paths if path.name.lower().endswith(endings) or (also is not None and also(path))]
    return sorted(matches + unreadable, key=natural_order)


def _is_run(folder: Path) -> bool:
    for name in ("run.json", "plan.json"):
        with suppress(OSError):
            if _START.match(read_bounded(folder / name, 100, follow_links=False)):
                return True
    return False


def natural_order(path: Path) -> tuple[str, str]:
    """Return the key that sorts paths in natural order: "2.pt" before "10.pt".

    The key is one string, because a survey sorts millions. Text ends with NUL, which no file name contains; a number is
    the character 2, its count of digits, and the digits; the character 1 separates the parts of the path.
    """
    parts = ("".join(map(_piece, re.split(r"(\d+)", part))) for part in path.parts)
    return "\1".join(parts), str(path)


def _piece(piece: str) -> str:
    if not piece.isdecimal():
        return piece.casefold() + "\0"
    digits = str(int(piece))
    return f"\2{chr(len(digits))}{digits}"
