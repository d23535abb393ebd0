"""Run one network in a process of its own and print its peak memory: `python -m benchmarks.memory NETWORK plain`."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torchvision.models import get_model

import hookscope

network, way = sys.argv[1:]
torch.set_num_threads(2)
torch.manual_seed(0)
model = get_model(network).eval()
batch = torch.randn(1, 3, 224, 224)
hookscope.inspect(torch.nn.ReLU(), torch.zeros(1, 1))  # both ways pay for the imports
with torch.no_grad():
    model(batch)  # and for the kernels' work space
with suppress(OSError):
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of building the network, on Linux
if way == "plain":
    with torch.no_grad():
        model(batch)
else:
    hookscope.inspect(model, batch, ["*"])
status = Path("/proc/self/status")
peaks = (
    [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM")] if status.exists() else []
)
print(int(peaks[0]) * 1024 if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
