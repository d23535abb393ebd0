"""List a checkpoint as a script does: `python -m benchmarks.children.reading PATH WAY`, a way of `WAYS`."""

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor


def _safetensors(path: str) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file  # noqa: PLC0415 - the others do without it

    return load_file(path)


WAYS: dict[str, Callable[[str], Mapping[str, Tensor]]] = {
    "torch.load": partial(torch.load, weights_only=True),
    "torch.load, mmap": partial(torch.load, weights_only=True, mmap=True),
    "safetensors": _safetensors,
}

if __name__ == "__main__":
    torch.set_num_threads(2)
    tensors = [
        {
            "key": name,
            "shape": value.shape,
            "nan_count": int(value.isnan().sum()),
            "inf_count": int(value.isinf().sum()),
        }
        for name, value in WAYS[sys.argv[2]](sys.argv[1]).items()
    ]
    print(json.dumps({"tensors": tensors}))
