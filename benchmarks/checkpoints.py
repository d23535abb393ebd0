"""Read a checkpoint of 2 GiB, and recognise the network of one."""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torchvision.models import get_model

from benchmarks.findings import Measurement, Section, Work
from benchmarks.processes import ROOT, run
from benchmarks.timing import interleaved, spread
from hookscope.models.architecture import recognise
from hookscope.models.weight_sets import state_shapes

_ROUNDS = {"hookscope": 3}
_OTHER_ROUNDS = 2
_LISTING_SECONDS = 1.0
_LISTING_MEGABYTES = 100.0
_RECOGNITION_SECONDS = 3.0

_NOTE = """\
Processes of their own, after imports, with the file in the system's cache. Listing gives names, shapes and counts of
NaN and Inf; loading gives a state dict. hookscope vets the file in a process with limits first, and takes its digest
when it loads. Checked beforehand: the same rows. Mapped files count as memory as far as they are read."""

# By suffix: how the file is written, and the ways to read it; hookscope's first.
_FILES: dict[str, tuple[Callable[[dict[str, Tensor], Path], object], Sequence[str]]] = {
    ".pt": (torch.save, ("hookscope", "torch.load, mmap", "torch.load")),
    ".safetensors": (save_file, ("hookscope", "safetensors")),
}


def measure() -> Section:
    """Write a large file of each kind, read it, and recognise networks by shapes."""
    found: list[Measurement] = []
    for suffix, (save, ways) in _FILES.items():
        with tempfile.TemporaryDirectory(dir=ROOT) as folder:  # a temporary file system may be memory
            path = Path(folder, f"large{suffix}")
            save(_large(), path)
            for purpose in ("list", "load"):
                found += _measure_file(path, purpose, ways)
    return Section("Checkpoints", _NOTE, (*found, _recognition()))


def _large() -> dict[str, Tensor]:
    """Return 128 tensors, 2 GiB, with some values that are not finite."""
    state = {f"layer{index}.weight": torch.zeros(1024, 4096) for index in range(128)}
    state["layer5.weight"][0, :3] = torch.nan
    state["layer7.weight"][1, :2] = torch.inf
    return state


def _measure_file(path: Path, purpose: str, ways: Sequence[str]) -> list[Measurement]:
    command = [sys.executable, "-m", "benchmarks.children.reading", str(path)]
    printed: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for turn in range(max(_ROUNDS.values())):
        for way in ways:
            if turn < _ROUNDS.get(way, _OTHER_ROUNDS):
                printed[way].append(json.loads(run([*command, f"{purpose}: {way}"])))
    expected = printed[ways[-1]][0]
    times: list[Measurement] = []
    peaks: list[Measurement] = []
    for way, each in printed.items():
        same = all(one["digest"] == expected["digest"] for one in each)
        work = Work("same" if same else "differs", expected["rows"], 0 if same else expected["rows"])
        seconds = spread([one["seconds"] for one in each])
        memory = spread([one["bytes"] for one in each], "MB", 1e-6)
        budgeted = way == "hookscope" and purpose == "list"
        what = f"{purpose} a 2 GiB {path.suffix} file"
        most = (_LISTING_SECONDS, _LISTING_MEGABYTES) if budgeted else (None, None)
        times.append(Measurement(what, way, seconds.median, "s", seconds, work, most[0]))
        peaks.append(Measurement(f"{what}, peak memory", way, memory.median, "MB", memory, work, most[1]))
    return times + peaks


def _recognition() -> Measurement:
    """Find the network of a state dict by its shapes, after imports: the slowest of a few of torchvision's."""
    slowest: dict[str, list[float]] = {}
    for name in ("resnet18", "vit_b_16", "densenet121", "fasterrcnn_resnet50_fpn", "r3d_18", "deeplabv3_resnet101"):
        options = {} if name in ("resnet18", "vit_b_16", "densenet121", "r3d_18") else {"weights_backbone": None}
        with torch.device("meta"):
            shapes = state_shapes(get_model(name, **options).state_dict())
        slowest[name] = interleaved({name: partial(recognise, shapes)}, rounds=3)[name]
    name = max(slowest, key=lambda each: spread(slowest[each]).median)
    times = spread(slowest[name])
    what = f"recognise a torchvision checkpoint by its shapes, the slowest of {len(slowest)}: {name}"
    return Measurement(what, "hookscope", times.median, "s", times, None, _RECOGNITION_SECONDS)
