"""Compare the members of a zip archive with their checksums, several at a time."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import RawIOBase
from threading import Lock
from typing import BinaryIO

from hookscope.checkpoints.fileformat import open_archive
from hookscope.errors import CheckpointError
from hookscope.text import printable

_THREADS = 2  # two sum faster than most disks read


def check_checksums(file: BinaryIO, name: str) -> None:
    """Compare the content of every member with its checksum, if that is not 0; CheckpointError if one differs."""
    compare = partial(_compare, file, Lock(), name)
    with ThreadPoolExecutor(_THREADS) as pool:  # summing lets go of the interpreter
        list(pool.map(compare, range(_THREADS)))


class SharedReader(RawIOBase):
    """Reads a file that several threads read, each from its own position.

    Threads cannot share a `ZipFile`: since Python 3.12 it skips parts of headers by seeking from the position of the
    file, which another thread may just have moved.
    """

    def __init__(self, file: BinaryIO, lock: Lock) -> None:
        """Begin at the start of the file; `lock` is for all its readers."""
        self._file, self._lock, self._position = file, lock, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move this reader's position, and return it."""
        with self._lock:
            begin = self._file.seek(0, 2) if whence == 2 else self._position if whence == 1 else 0
        self._position = begin + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, all that are left by default."""
        with self._lock:
            self._file.seek(self._position)
            content = self._file.read(size)
        self._position += len(content)
        return content


def _compare(file: BinaryIO, lock: Lock, name: str, first: int) -> None:
    """Compare every member whose place in the directory is `first`, or so many times `_THREADS` after it."""
    archive = open_archive(SharedReader(file, lock), name)  # type: ignore[arg-type]  # zipfile asks for no more
    member = None
    try:
        for member in [info for info in archive.infolist() if info.CRC][first::_THREADS]:
            with archive.open(member) as content:
                while content.read(2**20):  # zipfile compares at the end
                    pass
    except MemoryError:
        raise
    except Exception as error:  # what the decompressors raise has no class in common
        if isinstance(error, OSError) and error.errno is not None:  # the disk's, not bzip2's
            raise
        where = printable(member.filename, 80) if member else ""
        raise CheckpointError(
            f"{name} is damaged or truncated: its member {where} is not intact; download it again."
        ) from error
