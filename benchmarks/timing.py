"""Time ways of doing the same thing in turns, so that a machine whose speed drifts slows all of them alike."""

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from benchmarks.findings import Fit, Spread

Run = Callable[[], object]


def wall_clock(run: Run) -> float:
    """Run once; return seconds."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def cuda_clock(run: Run) -> float:
    """Run once; return seconds between two events on the current CUDA stream, the work in between finished."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


# Of glibc's malloc.h, and the largest value that it takes for the second.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD = -1, -3, 32 * 2**20


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, where it is glibc's.

    Else it gives memory back to the system or not, depending on where in the heap the last block happened to lie: the
    gradients of resnet34 then cost the next run 23,000 page faults or none, a tenth of its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, -1)


CLOCKS = {"cpu": wall_clock, "cuda": cuda_clock}


def interleaved(
    ways: Mapping[str, Run],
    rounds: int | Mapping[str, int],
    clock: Callable[[Run], float] = wall_clock,
    settle: Run | None = None,
    *,
    warm: bool = False,
    keeps_memory: bool = True,
    around: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
) -> dict[str, list[float]]:
    """Time the ways in turns.

    Args:
        ways: By name, in the order of each turn.
        rounds: How often each is timed; those of fewer rounds sit out turns, evenly.
        clock: Times one run.
        settle: Run untimed before each turn, so that its first way does not pay for what the last way left behind.
        warm: Each has run before; otherwise it does, untimed.
        keeps_memory: Call `keep_freed_memory`, which holds for the process from then on.
        around: Entered before a way's runs and left afterwards, untimed, by name; for those that need it.

    Returns:
        Seconds per round for each.
    """
    counts = dict.fromkeys(ways, rounds) if isinstance(rounds, int) else rounds
    turns = max(counts[name] for name in ways)
    surroundings = around or {}
    if keeps_memory:
        keep_freed_memory()
    for run in () if warm else ways.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns):
        gc.collect()
        if settle is not None:
            settle()
        for name, run in ways.items():
            if (turn + 1) * counts[name] // turns > turn * counts[name] // turns:
                with surroundings.get(name, nullcontext)():
                    seconds[name].append(clock(run))
    return seconds


def spread(values: list[float], unit: str = "s", scale: float = 1.0) -> Spread:
    """Return median and extremes of values, each times `scale`."""
    scaled = [value * scale for value in values]
    return Spread(statistics.median(scaled), min(scaled), max(scaled), unit, len(scaled))


def fitted(subject: str, x: str, y: str, points: Mapping[float, float]) -> Fit:
    """Fit a straight line to points (x to y) by least squares."""
    xs, ys = np.array(list(points)), np.array(list(points.values()))
    (slope, intercept), *_ = np.linalg.lstsq(np.stack([xs, np.ones_like(xs)], axis=1), ys)
    unexplained = float(((ys - slope * xs - intercept) ** 2).sum())
    total = float(((ys - ys.mean()) ** 2).sum())
    r_squared = 1 - unexplained / total if total else 1.0
    return Fit(subject, x, y, float(slope), float(intercept), r_squared, tuple(points), tuple(points.values()))
