"""How much memory a process may take, on top of what it has."""

import ctypes
import sys
from pathlib import Path

CAN_LIMIT_MEMORY = sys.platform == "linux"  # relative to what is mapped, which /proc tells

# Freed memory is looked for in pieces of so many bytes, down to where taking one, which writes to a page of it, would
# cost more than a quarter of it. Our choice.
_LARGEST_PIECE, _SMALLEST_PIECE = 2**44, 2**14


def limit_memory(memory_bytes: int | None) -> None:
    """Let this process, and what it forks, take so much memory on top of what it has; only on Linux.

    The system counts what is mapped, not what is used: as address space, and as memory to write to, which leaves out
    what libraries have only reserved. What was freed before but is still mapped would come on top of the limit: in a
    process that has worked for long, gigabytes. So all of it is allocated first, and never used. Only pieces below
    16 KiB and Python's own pools, of objects up to 512 bytes, are left.

    Args:
        memory_bytes: How much; None for as much as the system allows.
    """
    import resource  # noqa: PLC0415 (Windows has none)

    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if memory_bytes is None:
        for kind in kinds:
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (hard, hard))
        return
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    mapped = [int(pages[field]) * resource.getpagesize() for field in (0, 5)]  # as the two kinds count it

    def allow(more: int) -> None:
        for kind, taken in zip(kinds, mapped, strict=True):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(
                kind, (taken + more if hard == resource.RLIM_INFINITY else min(taken + more, hard), hard)
            )

    allow(0)
    try:
        _take_what_was_freed()
    finally:
        allow(memory_bytes)


def _take_what_was_freed() -> None:
    """Allocate until there is nothing left, where no more may be mapped."""
    allocate = ctypes.CDLL(None).malloc
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    size = _LARGEST_PIECE
    while size >= _SMALLEST_PIECE:
        while allocate(size):
            pass
        size //= 2


def is_lack_of_memory(error: BaseException) -> bool:
    """Tell a MemoryError, and what torch raises in its place."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error)
