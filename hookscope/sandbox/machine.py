"""What this machine has to share out among workers."""

import os
from contextlib import suppress
from pathlib import Path


def machine_memory_bytes() -> int | None:
    """Return the memory of this machine, or the container's limit if that is lower; None where it cannot be told."""
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
