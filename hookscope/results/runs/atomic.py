"""Write files atomically: under a hidden name in the same folder, then renamed. For folders: `runs.directory`."""

import errno
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, Literal

from hookscope.errors import OutputError
from hookscope.regular_files import read_bounded
from hookscope.text import safe_text

Kind = Literal["file", "folder"]

# With these errors a write failed, even if they name no file.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


def new_token() -> str:
    """Return a unique token for the name of an unfinished file or folder: "4711-0a1b2c3d"."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `target` when the block ends, unless the block raises. Creates missing folders."""
    partial = target.with_name(f".partial-{new_token()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
        sync(target.parent)
    finally:
        with suppress(OSError):
            partial.unlink()


def sync(path: Path) -> None:
    """Have the operating system write a file, or the names in a folder, to the disk."""
    if sys.platform == "win32":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do this for a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str, option: str) -> None:
    """Write `text` as UTF-8: all of it, or nothing and an OutputError. Creates missing folders and follows links."""
    with reported(path, option):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # a pipe or a terminal takes what it gets
            target.write_bytes(text.encode())
            return
        with whole_file(target) as file:
            file.write(text.encode())


def append(path: Path, text: str, option: str) -> None:
    """Append `text` as UTF-8 to a file that other programs append to; OutputError if it cannot be written."""
    with reported(path, option), path.open("a", encoding="utf-8") as file:
        file.write(text)


def check_writable(path: Path, option: str = "", kind: Kind = "file", beside: Path | None = None) -> None:
    """Raise OutputError, before long work, if `path` (by way of `beside`) cannot be written; change nothing."""
    with reported(path, option, kind):
        target = Path(os.path.realpath(beside or path))
        if kind == "file" and target.is_dir():
            raise refusal(path, "it is a folder", option)
        standing = target if os.path.lexists(target) else next(parent for parent in target.parents if parent.exists())
        for name in target.relative_to(standing).parts:
            with suppress(FileNotFoundError, NotADirectoryError):
                (standing / name).lstat()  # raises for an impossible name, unlike `exists`
        if not standing.is_dir() and (standing != target or kind == "folder"):
            raise refusal(path, f"'{standing}' is not a folder", option, kind)
        if not os.access(standing, os.W_OK):
            raise refusal(path, f"no permission to write '{standing}'", option, kind)
        folder = standing.parent if standing.is_file() else standing  # a file is replaced
        if folder.is_dir():
            TemporaryFile(dir=folder).close()  # permissions are not enough: /proc grants them all


def check_text_target(path: Path, option: str, begins: str = "") -> None:
    """Raise OutputError, before long work, if a text cannot be written, or would replace one that begins otherwise."""
    check_writable(path, option)
    with reported(path, option):
        text = read_bounded(path, 4096).decode("utf-8-sig", "replace").lstrip() if path.is_file() else ""
        if "\0" in text or (text and not text.startswith(begins)):
            raise refusal(path, "it holds something else, and is not replaced", option)


def reason_of(error: OSError) -> str:
    """Return the reason of an error, for a message: "no space left on device"."""
    return safe_text(error.strerror.lower() if error.strerror else str(error))


@contextmanager
def reported(
    path: Path, option: str = "", kind: Kind = "file", remedy: str = "", within: Path | None = None
) -> Iterator[None]:
    """Turn an error of the operating system into an OutputError about a path and its option.

    With `within`, only errors about files in that folder, or about a full disk.
    """
    try:
        yield
    except OSError as error:
        if within is not None and error.errno not in _NO_ROOM and not _concerns(error, within):
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = remedy or (f"Free some space, or name another {kind}" if full else "")
        raise refusal(path, reason_of(error), option, kind, remedy) from error
    except ValueError as error:
        if within is not None or (not isinstance(error, UnicodeError) and "embedded null" not in str(error)):
            raise
        raise refusal(path, f"no {kind} can have such a name", option, kind) from error


def _concerns(error: OSError, folder: Path) -> bool:
    named = isinstance(error.filename, str | bytes | os.PathLike)
    return named and Path(os.fsdecode(error.filename)).is_relative_to(folder)


def refusal(path: Path, reason: str, option: str = "", kind: Kind = "file", remedy: str = "") -> OutputError:
    """Return an error with the reason why a path cannot be written, and a remedy."""
    remedy = remedy or f"Name another {kind}"
    by = f" with {option}" if option else ""
    return OutputError(safe_text(f"Cannot write to '{path}': {reason}. {remedy}{by}."))
