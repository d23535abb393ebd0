"""Run one network one way in a process of its own; print by how many bytes memory grew, and whether the work was done.

`python -m benchmarks.children.memory FUNCTION NETWORK WAY`: "plain", or a way of the section of that public function.
"""

import ctypes
import gc
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import nn

import hookscope
from benchmarks import difference
from benchmarks.activations import ACTIVATIONS
from benchmarks.findings import Work
from benchmarks.gradients import GRADIENTS
from benchmarks.networks import seeded
from benchmarks.same_work import TOLERANCES
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


def drop_gradients() -> None:
    """Free the gradients that the run before left at parameters, so that every way pays for its own."""
    for thing in gc.get_objects():
        if type(thing) is nn.Parameter:
            thing.grad = None


def forget_peak() -> int:
    """Give back what was freed and forget the peak until here; return the memory held now. Linux only."""
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def prepared(function: str, network: str, name: str) -> tuple[Run, Work | None]:
    """Prepare a way, and run it once to judge it; `name` is a number of pictures for the function "pictures"."""
    if function == "pictures":
        run: Run = partial(hookscope.activations, *seeded(network, count=int(name)))
        run()
        return run, None
    if function == "diff":
        return difference.prepared(network, name)
    layerwise = {"activations": ACTIVATIONS, "grads": GRADIENTS}[function]
    model, batch = seeded(network)
    rows = layerwise.rows(model, batch)
    if name == "plain":
        return partial(layerwise.plain, model, batch), None
    expected = layerwise.expected(name, model, batch, rows)
    return layerwise.ways[name].judged(model, batch, rows, expected, TOLERANCES["cpu"])


def main() -> None:
    """Run and print."""
    torch.set_num_threads(2)
    map_blocks()
    run, work = prepared(*sys.argv[1:])
    run()
    drop_gradients()
    gc.collect()
    before = forget_peak()
    run()
    growth = peak_bytes() - before
    print(json.dumps({"growth_bytes": growth, "work": asdict(work) if work else None}))


if __name__ == "__main__":
    main()
