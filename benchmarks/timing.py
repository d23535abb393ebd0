"""Time ways of doing the same thing in turns, so that a machine whose speed drifts slows all of them alike."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from benchmarks.findings import Spread

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


CLOCKS = {"cpu": wall_clock, "cuda": cuda_clock}


def interleaved(
    ways: Mapping[str, Run],
    rounds: int | Mapping[str, int],
    clock: Callable[[Run], float] = wall_clock,
    settle: Run | None = None,
    *,
    warm: bool = False,
    around: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
) -> dict[str, list[float]]:
    """Time the ways in turns.

    Args:
        ways: By name, in the order of each turn.
        rounds: How often each is timed; those of fewer rounds sit out turns, evenly.
        clock: Times one run.
        settle: Run untimed before each turn, so that its first way does not pay for what the last way left behind.
        warm: Each has run before; otherwise it does, untimed.
        around: Entered before a way's runs and left afterwards, untimed, by name; for those that need it.

    Returns:
        Seconds per round for each.
    """
    counts = dict.fromkeys(ways, rounds) if isinstance(rounds, int) else rounds
    turns = max(counts[name] for name in ways)
    surroundings = around or {}
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
