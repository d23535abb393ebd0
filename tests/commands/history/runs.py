"""Small networks that train for a few steps between the files they leave, and faults to plant in those."""

from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
Fault = Callable[[State], None]

FILES = 12


class Convolutions(nn.Module):
    """Convolutions, BatchNorm and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.first = nn.Conv2d(16, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        return self.head(self.second(torch.relu(self.first(x))).relu().mean((2, 3)))


class Residual(nn.Module):
    """Two blocks with a way around each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, stride=2, padding=1)
        self.first = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.first(x)
        return self.head((x + self.second(x)).mean((2, 3)))


class Perceptron(nn.Module):
    """Linear layers with BatchNorm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 64, 48)
        self.norm = nn.BatchNorm1d(48)
        self.second, self.third = nn.Linear(48, 48), nn.Linear(48, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.flatten(1))).relu()
        return self.head(self.third(self.second(x).relu()).relu())


class Tokens(nn.Module):
    """Two layers of a transformer over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 2, stride=2)
        self.norm = nn.BatchNorm2d(32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.patches(x)).flatten(2).mT
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


# Of each network: a weight whose filters die, two weights of one shape, and a BatchNorm.
NETWORKS: dict[str, tuple[type[nn.Module], str, tuple[str, str], str]] = {
    "convolutions": (Convolutions, "second.weight", ("first.weight", "second.weight"), "norm"),
    "residual": (Residual, "first.0.weight", ("first.0.weight", "second.0.weight"), "second.1"),
    "perceptron": (Perceptron, "third.weight", ("second.weight", "third.weight"), "norm"),
    "tokens": (Tokens, "layers.0.linear1.weight", ("layers.0.linear1.weight", "layers.1.linear1.weight"), "norm"),
}


@cache
def trained(name: str, optimiser: str = "sgd") -> tuple[State, ...]:
    """Train a network on random pictures; return its state after each of twelve epochs of a few steps."""
    torch.manual_seed(0)
    network = NETWORKS[name][0]()
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(64, 3, 8, 8, generator=generator)
    labels = torch.arange(64) % 10
    steps = _OPTIMISERS[optimiser](network.parameters())
    states = []
    for _ in range(FILES):
        for _ in range(_STEPS):
            batch = torch.randint(0, 64, (16,), generator=generator)
            steps.zero_grad()
            nn.functional.cross_entropy(network(pictures[batch]), labels[batch]).backward()
            steps.step()
        states.append({name: tensor.clone() for name, tensor in network.state_dict().items()})
    return tuple(states)


_STEPS = 6
_OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "fast sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=3e-3),
    "adamw, decaying": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.3),
}


def write_run(
    folder: Path, name: str, *, fault: Fault | None = None, at: Collection[int] = (), optimiser: str = "sgd"
) -> str:
    """Write the files of a run, with a fault in some of them; return their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    for epoch, expected in enumerate(trained(name, optimiser), 1):
        state = {each: tensor.clone() for each, tensor in expected.items()}
        if fault is not None and epoch in at:
            fault(state)
        torch.save({"epoch": epoch, "model": state}, folder / f"epoch_{epoch}.pt")
    return str(folder / "epoch_*.pt")
