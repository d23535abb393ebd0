"""A training script for `hookscope watch`: prints the CPU time until its first step has ended, and that of the step."""

import json
import time

import torch
from torchvision.models import resnet18


def main() -> None:
    """Take one step, at which the watch finds what is trained."""
    torch.set_num_threads(1)
    network = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    network(torch.randn(2, 3, 32, 32)).square().mean().backward()
    begin = time.process_time()
    optimizer.step()
    end = time.process_time()
    print(json.dumps({"until": end, "step": end - begin}))


if __name__ == "__main__":
    main()
