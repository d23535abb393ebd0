"""List a checkpoint and print the seconds it took and the bytes by which memory peaked above what the imports hold."""

import sys
import time
from pathlib import Path

import timm  # noqa: F401 - what the listing compares names with, imported beforehand
import torchvision  # noqa: F401 - likewise

from hookscope.models.listing import list_contents


def status_bytes(field: str) -> int:
    """Return a figure of this process's memory from Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
before = status_bytes("VmRSS")
began = time.perf_counter()
list_contents(Path(sys.argv[1]))
seconds = time.perf_counter() - began
print(seconds, status_bytes("VmHWM") - before)
