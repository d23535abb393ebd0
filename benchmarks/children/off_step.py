"""A training script for `hookscope watch`: steps with and without its hooks, in turns; prints both in milliseconds."""

import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

_WARM_UP = 250  # the ring of the watch is full then
_BATCH = 16


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        parts = [[nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)] for _ in range(2)]
        self.parts = nn.Sequential(*parts[0], nn.ReLU(), *parts[1])

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(images + self.parts(images))


def _mlp() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(11) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(_BATCH, 64)


def _resnet() -> tuple[nn.Module, Tensor]:
    blocks = [_Block(8) for _ in range(13)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, *head), torch.randn(_BATCH, 3, 8, 8)


_NETWORKS = {"mlp": _mlp, "resnet": _resnet}


class _Hooks:
    """What the watch has put on torch and an optimiser, to be taken off and put back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._tables: list[Any] = [
            table
            for when in ("pre", "post")
            for table in (
                getattr(torch_optimizer, f"_global_optimizer_{when}_hooks"),
                getattr(optimizer, f"_optimizer_step_{when}_hooks"),
            )
        ]
        self._kept = [dict(table) for table in self._tables]
        self._observed: Any = torch.autograd.backward
        self._plain: Any = self._observed
        while hasattr(self._plain, "__wrapped__"):
            self._plain = self._plain.__wrapped__

    def switch(self, *, on: bool) -> None:
        for table, kept in zip(self._tables, self._kept, strict=True):
            table.clear()
            table.update(kept if on else {})
        torch.autograd.backward = self._observed if on else self._plain


def main() -> None:
    """Train; `sys.argv` has the network and how many times to take turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network, inputs = _NETWORKS[sys.argv[1]]()
    labels = torch.randint(0, 10, (_BATCH,))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)

    def step() -> float:
        begin = time.thread_time()
        loss = nn.functional.cross_entropy(network(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return (time.thread_time() - begin) * 1e3

    for _ in range(_WARM_UP):
        step()
    hooks = _Hooks(optimizer)
    plain, added = [], []
    for _ in range(int(sys.argv[2])):
        times = []
        for on in (False, True, True, False):
            hooks.switch(on=on)
            times.append(step())
        plain.append((times[0] + times[3]) / 2)
        added.append((times[1] + times[2]) / 2 - plain[-1])
    hooks.switch(on=True)
    count = len([*network.parameters()])
    print(json.dumps({"tensors": count, "plain": statistics.median(plain), "added": statistics.median(added)}))


if __name__ == "__main__":
    main()
