"""Open the files that a user names or has lying about: only regular files, read up to a limit.

Opening a named pipe waits for a writer, and a device may never end. Every file that hookscope has not written itself is
opened here.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)  # Windows has neither flag
_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)

_KINDS = {stat.S_IFIFO: "a named pipe (FIFO)", stat.S_IFSOCK: "a socket"}


class NotRegularError(OSError):
    """Not a regular file. `strerror` is the kind: "a named pipe (FIFO), not a regular file"."""


def open_regular(path: Path, *, follow_links: bool = True) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        IsADirectoryError: For a folder.
        NotRegularError: For a pipe, a socket or a device.
        OSError: If the system refuses, for a link without `follow_links`, and for a text that cannot be a path.
    """
    try:
        _check_regular(path.stat(follow_symlinks=follow_links), path)  # to open a device can do things of its own
    except ValueError as error:  # a null byte, or a lone surrogate
        raise OSError(errno.EINVAL, "not a path", str(path)) from error
    flags = _NONBLOCK | (0 if follow_links else _NOFOLLOW)
    file = open(path, "rb", opener=lambda name, requested: os.open(name, requested | flags))  # noqa: SIM115 - returned
    try:
        _check_regular(os.fstat(file.fileno()), path)  # somebody may just have put a FIFO there
    except OSError:
        file.close()
        raise
    return file


def read_bounded(path: Path, limit: int, *, follow_links: bool = True) -> bytes:
    """Return the content of a regular file, cut off after `limit` + 1 bytes. Raises as `open_regular`."""
    with open_regular(path, follow_links=follow_links) as file:
        return file.read(limit + 1)


def _check_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = "a link" if stat.S_ISLNK(status.st_mode) else _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
    raise NotRegularError(errno.EINVAL, f"{kind}, not a regular file", str(path))
