"""Run one network one way in a process of its own; print by how many bytes memory grew, and whether the work was done.

`python -m benchmarks.children.memory NETWORK WAY`: a way of `capture_ways.WAYS`, or "plain forward".
"""

import ctypes
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.capture_ways import WAYS
from benchmarks.networks import layer_rows, seeded, shapes_of, statistics_of
from benchmarks.same_work import Rows, judge


def peak_bytes() -> int:
    """Return the most memory this process has held since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> int:
    """Give back what was freed and forget the peak until here; return the memory held now. Linux only."""
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    """Run and print."""
    network, name = sys.argv[1:]
    torch.set_num_threads(2)
    model, batch = seeded(network)
    rows = layer_rows(model, batch)  # every process has run the network before, and hookscope too

    def plain() -> Rows:
        with torch.no_grad():
            model(batch)
        return {}

    way = WAYS.get(name)
    run = way.prepare(model, batch, rows) if way else plain
    before = forget_peak()
    found = run()
    growth = peak_bytes() - before
    work = None
    if way is not None:
        wanted = shapes_of(rows) if way.shapes_only else statistics_of(rows)
        work = asdict(judge(found, wanted, shapes_only=way.shapes_only))
    print(json.dumps({"growth_bytes": growth, "work": work}))


if __name__ == "__main__":
    main()
