"""Run one network one way in a process of its own; print by how many bytes memory grew, and whether the work was done.

`python -m benchmarks.children.memory PASS NETWORK WAY`: a way of `capture_ways.WAYS` or "plain" for the pass "forward",
of `gradients.WAYS` or "plain" for "backward".
"""

import ctypes
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import cast

import torch

from benchmarks import gradients
from benchmarks.capture_ways import WAYS
from benchmarks.networks import layer_rows, seeded, shapes_of, statistics_of
from benchmarks.same_work import Found, Rows, judge
from benchmarks.timing import Run


def peak_bytes() -> int:
    """Return the most memory this process has held since `forget_peak`."""
    return _status("VmHWM")


# From mallopt(3); and from which size on a block is mapped by itself.
_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES = -3, 2**16


def map_blocks() -> None:
    """Let every larger block go back to the system as soon as it is freed.

    Otherwise holes that are left in the heap count as memory held: for vgg16's gradients as much as 70 MB more in one
    process than in the next.
    """
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)


def forget_peak() -> int:
    """Give back what was freed and forget the peak until here; return the memory held now. Linux only."""
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


Prepared = tuple[Run, Callable[[], Rows] | None, bool]
"""What runs; what it should find, None for nothing; whether that is shapes alone."""


def forward(network: str, name: str) -> Prepared:
    """Prepare a way to see what modules return. Every process has run the network before, and hookscope too."""
    model, batch = seeded(network)
    rows = layer_rows(model, batch)

    def plain() -> None:
        with torch.no_grad():
            model(batch)

    if name == "plain":
        return plain, None, False
    way = WAYS[name]
    wanted = partial(shapes_of if way.shapes_only else statistics_of, rows)
    return way.prepare(model, batch, rows), wanted, way.shapes_only


def backward(network: str, name: str) -> Prepared:
    """Prepare a way to see gradients, likewise."""
    model, batch = seeded(network)
    weights = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1))
    rows = gradients.gradient_rows(model, batch, weights)

    def plain() -> None:
        (model(batch) * weights).sum().backward()
        model.zero_grad()

    if name == "plain":
        return plain, None, False
    prepare, _ = gradients.WAYS[name]
    return prepare(model, batch, weights, rows), partial(gradients.statistics_of, rows), False


def main() -> None:
    """Run and print."""
    which, network, name = sys.argv[1:]
    torch.set_num_threads(2)
    map_blocks()
    run, wanted, shapes_only = (forward if which == "forward" else backward)(network, name)
    before = forget_peak()
    found = run()
    growth = peak_bytes() - before
    work = asdict(judge(cast("Found", found), wanted(), shapes_only=shapes_only)) if wanted else None
    print(json.dumps({"growth_bytes": growth, "work": work}))


if __name__ == "__main__":
    main()
