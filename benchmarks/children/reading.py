"""List or load a checkpoint in a process of its own; print seconds, memory beyond the imports', and what was found.

`python -m benchmarks.children.reading PATH WAY`, a way of `WAYS`.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.children.memory import forget_peak, peak_bytes
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.contents import list_contents

Found = Iterable[tuple[object, ...]]


def hookscope_list(path: Path) -> Found:
    """Name, shape and non-finite values of each tensor, by hookscope."""
    return [(each.key, each.shape, each.nan_count, each.inf_count) for each in list_contents(path).tensors]


def counted(state: Mapping[str, Tensor]) -> Found:
    """The same of a state dict, by torch."""
    return [
        (name, tuple(value.shape), value.isnan().sum().item(), value.isinf().sum().item())
        for name, value in state.items()
    ]


def ends(state: Mapping[str, Tensor]) -> Found:
    """Name, shape, and the first and last value of each tensor: what loading must give."""
    return [
        (name, tuple(value.shape), value.flatten()[0].item(), value.flatten()[-1].item())
        for name, value in state.items()
    ]


def torch_load(path: Path) -> dict[str, Tensor]:
    """Load with torch, values and all."""
    loaded: dict[str, Tensor] = torch.load(path, weights_only=True)
    return loaded


def torch_map(path: Path) -> dict[str, Tensor]:
    """Load with torch, values when they are read."""
    loaded: dict[str, Tensor] = torch.load(path, weights_only=True, mmap=True)
    return loaded


WAYS: dict[str, Callable[[Path], Found]] = {
    "list: hookscope": hookscope_list,
    "list: torch.load": lambda path: counted(torch_load(path)),
    "list: torch.load, mmap": lambda path: counted(torch_map(path)),
    "list: safetensors": lambda path: counted(load_file(path)),
    "load: hookscope": lambda path: ends(read_checkpoint(path).state),
    "load: torch.load": lambda path: ends(torch_load(path)),
    "load: torch.load, mmap": lambda path: ends(torch_map(path)),
    "load: safetensors": lambda path: ends(load_file(path)),
}


def main() -> None:
    """Read and print."""
    path, way = Path(sys.argv[1]), WAYS[sys.argv[2]]
    torch.set_num_threads(2)
    if sys.argv[2] == "list: hookscope":
        for package in ("timm", "torchvision"):  # what it compares names with
            import_module(package)
    before = forget_peak()
    began = time.perf_counter()
    found = way(path)
    seconds = time.perf_counter() - began
    rows = sorted(map(repr, found))
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    print(json.dumps({"seconds": seconds, "bytes": peak_bytes() - before, "rows": len(rows), "digest": digest}))


if __name__ == "__main__":
    main()
