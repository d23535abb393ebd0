"""List a checkpoint of 2 GiB: `hookscope checkpoint FILE` beside scripts that load it."""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.findings import Measurement, Section, Work
from benchmarks.processes import ROOT, run
from benchmarks.timing import spread

_ROUNDS = 3
_AT_MOST_SECONDS, _AT_MOST_MEGABYTES = 1.5, 100.0

_NOTE = """\
Whole processes, from start to end, with the file in the system's cache: names, shapes and counts of NaN and Inf of 128
tensors. `hookscope checkpoint` also prints each tensor's mean, std, minimum, maximum and share of zeros, and looks for
the network that the weights fit. It vets the file in a process with limits, without torch. The others are scripts that
import torch, load the file and count. Memory is the largest process's peak, with imports; a mapped file counts as far
as it is read."""

# By suffix: how the file is written, and what reads it.
_FILES: dict[str, tuple[Callable[[dict[str, Tensor], Path], object], Sequence[str]]] = {
    ".pt": (torch.save, ("torch.load, mmap", "torch.load")),
    ".safetensors": (save_file, ("safetensors",)),
}
Listing = list[tuple[str, tuple[int, ...], int, int]]
"""Name, shape, and counts of NaN and Inf of each tensor."""


def measure() -> Section:
    """Write a large file of each kind and list it."""
    state = {f"layer{index}.weight": torch.zeros(1024, 4096) for index in range(128)}
    state["layer5.weight"][0, :3] = torch.nan
    state["layer7.weight"][1, :2] = torch.inf
    counts = {"layer5.weight": (3, 0), "layer7.weight": (0, 2)}
    expected: Listing = [(name, (1024, 4096), *counts.get(name, (0, 0))) for name in state]
    actual: list[Measurement] = []
    for suffix, (save, peers) in _FILES.items():
        with tempfile.TemporaryDirectory(dir=ROOT) as folder:  # a temporary file system may be memory
            path = Path(folder, f"large{suffix}")
            save(state, path)
            commands = {"hookscope": ["hookscope", "checkpoint", str(path), "--json"]}
            commands |= {peer: ["benchmarks.children.reading", str(path), peer] for peer in peers}
            actual += _measure_file(f"2 GiB {suffix}", commands, expected)
    return Section("hookscope checkpoint, of a large file", _NOTE, tuple(actual))


def _measure_file(subject: str, commands: dict[str, list[str]], expected: Listing) -> list[Measurement]:
    times: list[Measurement] = []
    peaks: list[Measurement] = []
    for way, command in commands.items():
        measured = [sys.executable, "-m", "benchmarks.children.peak", *command]
        runs = [json.loads(run(measured)) for _ in range(_ROUNDS)]
        wrong = sum(mine != theirs for mine, theirs in zip(_listed(runs[0]["tensors"]), sorted(expected), strict=True))
        work = Work("differs" if wrong else "same", len(expected), wrong)
        seconds, memory = (
            spread([run["seconds"] for run in runs]),
            spread([run["bytes"] for run in runs], "MB", 1e-6),
        )
        limits = (_AT_MOST_SECONDS, _AT_MOST_MEGABYTES) if way == "hookscope" else (None, None)
        times.append(Measurement(subject, way, seconds.median, "s", seconds, work, limits[0]))
        peaks.append(Measurement(f"{subject}, peak memory", way, memory.median, "MB", memory, work, limits[1]))
    return times + peaks


def _listed(tensors: Sequence[Mapping[str, Any]]) -> Listing:
    return sorted(
        (tensor["key"], tuple(tensor["shape"]), tensor["nan_count"], tensor["inf_count"]) for tensor in tensors
    )
