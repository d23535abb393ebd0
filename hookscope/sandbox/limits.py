"""What a process may take, and what this machine has to share out."""

import ctypes
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CAN_LIMIT_MEMORY = sys.platform == "linux"  # relative to what is mapped, which /proc says

# Freed memory is looked for in pieces of so many bytes, down to where taking one, which writes to a page of it, would
# cost more than a quarter of it. Our choice.
_LARGEST_PIECE, _SMALLEST_PIECE = 2**44, 2**14


@dataclass(frozen=True, slots=True)
class Limits:
    """What one worker may take: seconds, by the clock, memory and processor time in seconds, None for no limit.

    Memory is address space on top of what is mapped when it starts, and without effect unless `CAN_LIMIT_MEMORY`.
    """

    seconds: float
    memory_bytes: int | None = None
    processor_seconds: int | None = None

    def set(self) -> None:
        """Limit the memory and processor time of this process, and let it leave no core file; not the seconds."""
        if sys.platform == "win32":
            return
        import resource  # noqa: PLC0415 (Windows has none)

        _set_limit(resource.RLIMIT_CORE, 0)
        if self.processor_seconds is not None:
            _set_limit(resource.RLIMIT_CPU, self.processor_seconds)
        if self.memory_bytes is not None and CAN_LIMIT_MEMORY:
            with suppress(OSError):  # no /proc
                limit_memory(self.memory_bytes)


def _set_limit(kind: int, limit: int) -> None:
    """Set a soft limit, at most the hard one."""
    import resource  # noqa: PLC0415 (Windows has none)

    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def limit_memory(memory_bytes: int | None) -> None:
    """Let this process, and what it forks, take so much memory on top of what it has; only on Linux.

    None is for as much as the system allows. The system counts what is mapped, not what is used: as address space, and
    as
    memory to write to, which leaves out what libraries have only reserved. What was freed before but is still mapped
    would
    come on top of the limit: in a process that has worked for long, gigabytes. So all of it is allocated first, and
    never
    used. Only pieces below 16 KiB and Python's own pools, of objects up to 512 bytes, are left.
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
            _set_limit(kind, taken + more)

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


def machine_memory_bytes() -> int | None:
    """Return the memory of this machine, or the container's limit if that is lower; None where neither is known."""
    known = []
    with suppress(OSError, ValueError, AttributeError):
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" means no limit
            known.append(int(Path(path).read_text(encoding="ascii")))
    return min(known, default=None)


def usable_cores() -> int:
    """Return how many processor cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
