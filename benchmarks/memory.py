"""Run one network in a process of its own and print its peak memory: `python -m benchmarks.memory NETWORK plain`."""

import resource
import sys

import torch
from torchvision.models import get_model

import hookscope

network, way = sys.argv[1:]
torch.set_num_threads(2)
torch.manual_seed(0)
model = get_model(network).eval()
batch = torch.randn(1, 3, 224, 224)
hookscope.inspect(torch.nn.ReLU(), torch.zeros(1, 1))  # both ways pay for the imports
if way == "plain":
    with torch.no_grad():
        model(batch)
else:
    hookscope.inspect(model, batch, ["*"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
