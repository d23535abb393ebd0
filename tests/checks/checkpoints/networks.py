"""The networks of `pairs.py`, as a user's `net.py` holds them: each has one place where a rule can be broken."""

import os
import signal
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """Convolution, whatever `middle` is, mean over all positions, linear head."""

    def __init__(self, middle: nn.Module, width: int = 10, classes: int = 5) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3)
        self.middle = middle
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.first(x)).mean((2, 3)))


class Buffered(nn.Module):
    """A module that does what a number or a tensor in the checkpoint says."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)


class Unused(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Reorder(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.value)


class RootOfSquare(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        return (x * x + self.value).sqrt()


class RootOfPositive(Buffered):
    """The square root of what is positive, with the gradient of a naive formula: NaN for everything else."""

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + self.value
        return (shifted * (shifted > 0)).sqrt()


class Gain(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.value


class Quotient(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        return x / self.value


class Keep(Buffered):
    """Returns as many classes as the checkpoint says."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : int(self.value)]


class Widen(Buffered):
    """Returns float64 if the checkpoint says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.double() if self.value else x


class Jitter(Buffered):
    """Adds noise, as a network does whose sampling was left on."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value * torch.randn_like(x)


class MixInput(Buffered):
    """Adds a share of the batch's mean, as BatchNorm without running statistics does."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value * x.mean(0, keepdim=True)


class Scaled(nn.Module):
    """A residual block with LayerScale: x + scale · branch(x)."""

    def __init__(self, branch: nn.Module, width: int = 10) -> None:
        super().__init__()
        self.branch = branch
        self.scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.branch(x)


class Pooled(nn.Module):
    """Leaves the first channel to nobody: huge values in it reach no output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 10, 3)
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x)[:, 1:].mean((2, 3)))


class Entered(nn.Module):
    """Learns from the picture beside its scaled first convolution, as a network that was extended does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 10, 1)
        self.scale = nn.Parameter(torch.ones(10, 1, 1))
        self.second = nn.Conv2d(10, 10, 3)
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        beside = x.repeat(1, 4, 1, 1)[:, :10]
        return self.head(self.second(beside + self.scale * self.first(x)).mean((2, 3)))


class Amplified(nn.Module):
    """Three convolutions on values made small, and then made larger again."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = Gain(torch.ones(()))
        self.convolutions = nn.Sequential(*(nn.Conv2d(3, 3, 3, bias=False) for _ in range(3)))
        self.gain = Quotient(torch.ones(()))
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gain(self.convolutions(self.enter(x))).mean((2, 3)))


class Weighed(nn.Module):
    """Probabilities of classes, times what each class is worth."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = Classifier(nn.Identity())
        self.probabilities = nn.Softmax(1)
        self.worth = Gain(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.worth(self.probabilities(self.classifier(x)))


class WithAuxiliary(nn.Module):
    """Uses a second head as far as the checkpoint says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 10, 3)
        self.head = nn.Linear(10, 5)
        self.auxiliary = nn.Linear(10, 5)
        self.register_buffer("share", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        features = self.first(x).mean((2, 3))
        return self.head(features) + (self.share * self.auxiliary(features) if self.share else 0)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Classifier(nn.Identity()),
    "residual": lambda: Classifier(Scaled(nn.Conv2d(10, 10, 3, padding=1))),
    "wide": lambda: Classifier(nn.Identity(), width=20),
    "normalised": lambda: Classifier(nn.BatchNorm2d(10)),
    "rectified": lambda: Classifier(nn.ReLU()),
    "wide_rectified": lambda: Classifier(nn.ReLU(), width=20),
    "smooth": lambda: Classifier(nn.GELU()),
    "gated": lambda: Classifier(nn.Sigmoid()),
    "calibrated": lambda: Classifier(Unused(torch.zeros(4))),
    "reordered": lambda: Classifier(Reorder(torch.arange(10))),
    "root_of_square": lambda: Classifier(RootOfSquare(torch.ones(()))),
    "root_of_positive": lambda: Classifier(RootOfPositive(torch.full((), 99.0))),
    "gain": lambda: Classifier(nn.Sequential(nn.Conv2d(10, 10, 3), Gain(torch.ones(())))),
    "some_classes": lambda: nn.Sequential(Classifier(nn.Identity()), Keep(torch.tensor(5))),
    "widened": lambda: nn.Sequential(Classifier(nn.Identity()), Widen(torch.tensor(0))),
    "jittering": lambda: Classifier(Jitter(torch.zeros(()))),
    "mixing": lambda: Classifier(MixInput(torch.zeros(()))),
    "clipped": lambda: Classifier(Scaled(nn.Sequential(nn.Conv2d(10, 10, 3, padding=1), nn.Hardtanh()))),
    "twins": lambda: Classifier(nn.Sequential(nn.Conv2d(10, 10, 3), nn.Conv2d(10, 10, 3))),
}
globals().update(BUILDERS)  # so that net.py:plain names the first


def log_of_sum(output: Tensor) -> Tensor:
    return output.sum().log()


class Fragile(Buffered):
    """Runs, raises, kills its process, takes memory or never ends, as the checkpoint says."""

    def forward(self, x: Tensor) -> Tensor:
        match int(self.value):
            case 1:
                raise RuntimeError("no such luck")
            case 2:
                os.kill(os.getpid(), signal.SIGSEGV)
            case 3:
                torch.zeros(2**28)  # 1 GiB
            case 4:
                time.sleep(600)
        return x


def fragile() -> nn.Module:
    return Classifier(Fragile(torch.zeros(())))
