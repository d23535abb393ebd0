"""Inspect many pictures in a process of its own: `python -m benchmarks.children.many COUNT SIDE`."""

import json
import sys
import time

import torch

from benchmarks.children.memory import forget_peak, peak_bytes
from benchmarks.growth import noise
from benchmarks.networks import seeded
from hookscope.inspection.forward import inspect

count, side = map(int, sys.argv[1:])
torch.set_num_threads(2)
model, batch = seeded("resnet18", side=side)
inspect(model, batch, ["*"])
forget_peak()
began = time.perf_counter()
inspection = inspect(model, noise(count, side), ["*"])
seconds = time.perf_counter() - began
if len(inspection.inputs) != count:
    sys.exit(f"{len(inspection.inputs)} inputs were seen instead of {count}")
print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes()}))
