"""The networks of `test_rules.py`, as a user's `net.py` holds them: each has one place where a rule can be broken."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Part(nn.Module):
    """A function of itself and its input; modules, parameters and buffers are given by name."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def classifier(middle: nn.Module, width: int = 10) -> nn.Module:
    """Return a convolution, whatever `middle` is, the mean over all positions, and a linear head of five classes."""
    return Part(
        lambda net, x: net.head(net.middle(net.first(x)).mean((2, 3))),
        first=nn.Conv2d(3, width, 3),
        middle=middle,
        head=nn.Linear(width, 5),
    )


def told(function: Callable[[Tensor, Tensor], Tensor], value: Tensor) -> nn.Module:
    """Return a module that does what a number or a tensor in the checkpoint, the second argument, says."""
    return Part(lambda net, x: function(x, net.value), value=value)


def scaled(branch: nn.Module) -> nn.Module:
    """Return a residual block with LayerScale."""
    scale = nn.Parameter(torch.ones(10, 1, 1))
    return Part(lambda net, x: x + net.scale * net.branch(x), branch=branch, scale=scale)


def _root_of_positive(x: Tensor, value: Tensor) -> Tensor:
    """Return the square root of what is positive, with the gradient of a naive formula: NaN for everything else."""
    shifted = x + value
    return (shifted * (shifted > 0)).sqrt()


def pooled() -> nn.Module:
    """Leave the first channel to nobody: huge values in it reach no output."""
    return Part(
        lambda net, x: net.head(net.first(x)[:, 1:].mean((2, 3))), first=nn.Conv2d(3, 10, 3), head=nn.Linear(9, 5)
    )


def entered() -> nn.Module:
    """Learn from the picture beside its scaled first convolution, as a network that was extended does."""
    return Part(
        lambda net, x: net.head(net.second(x.repeat(1, 4, 1, 1)[:, :10] + net.scale * net.first(x)).mean((2, 3))),
        first=nn.Conv2d(3, 10, 1),
        scale=nn.Parameter(torch.ones(10, 1, 1)),
        second=nn.Conv2d(10, 10, 3),
        head=nn.Linear(10, 5),
    )


def amplified() -> nn.Module:
    """Apply three convolutions to values made small, and make them larger again."""
    return Part(
        lambda net, x: net.head(net.gain(net.convolutions(net.enter(x))).mean((2, 3))),
        enter=told(torch.mul, torch.ones(())),
        convolutions=nn.Sequential(*(nn.Conv2d(3, 3, 3, bias=False) for _ in range(3))),
        gain=told(torch.div, torch.ones(())),
        head=nn.Linear(3, 5),
    )


def weighed() -> nn.Module:
    """Return probabilities of classes, times what each class is worth."""
    return Part(
        lambda net, x: net.worth(net.probabilities(net.classifier(x))),
        classifier=classifier(nn.Identity()),
        probabilities=nn.Softmax(1),
        worth=told(torch.mul, torch.ones(5)),
    )


def with_auxiliary() -> nn.Module:
    """Use a second head as far as the checkpoint says."""

    def forward(net: Any, x: Tensor) -> Tensor:
        features = net.first(x).mean((2, 3))
        return net.head(features) + (net.share * net.auxiliary(features) if net.share else 0)

    return Part(
        forward, first=nn.Conv2d(3, 10, 3), head=nn.Linear(10, 5), auxiliary=nn.Linear(10, 5), share=torch.ones(())
    )


def remembering() -> nn.Module:
    """Read the rows of a picture from top to bottom, and classify by what is remembered at the end."""
    return Part(
        lambda net, x: net.head(net.memory(x.mean(1))[0][:, -1]),
        memory=nn.RNN(16, 10, batch_first=True),
        head=nn.Linear(10, 5),
    )


def _as_tokens(x: Tensor, value: Tensor) -> Tensor:
    """Add a value to the positions of a map as tokens, (N, T, D)."""
    tokens = x.flatten(2).transpose(1, 2) + value
    return tokens.transpose(1, 2).unflatten(2, x.shape[2:])


def with_positive_part() -> nn.Module:
    """Add to the features what of them is positive, once they are shifted as the checkpoint says."""
    return Part(lambda net, x: x + net.relu(x + net.shift), relu=nn.ReLU(), shift=torch.zeros(10, 1, 1))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: classifier(nn.Identity()),
    "residual": lambda: classifier(scaled(nn.Conv2d(10, 10, 3, padding=1))),
    "wide": lambda: classifier(nn.Identity(), width=20),
    "deep": lambda: classifier(nn.Sequential(*(nn.Conv2d(16, 16, 3) for _ in range(4))), width=16),
    "normalised": lambda: classifier(nn.BatchNorm2d(10)),
    "often_normalised": lambda: classifier(nn.Sequential(*(nn.BatchNorm2d(10) for _ in range(5)))),
    "rectified_beside": lambda: classifier(with_positive_part()),
    "rectified": lambda: classifier(nn.ReLU()),
    "wide_rectified": lambda: classifier(nn.ReLU(), width=20),
    "smooth": lambda: classifier(nn.GELU()),
    "gated": lambda: classifier(nn.Sigmoid()),
    "calibrated": lambda: classifier(told(lambda x, _: x, torch.zeros(4))),
    "reordered": lambda: classifier(told(lambda x, order: x.index_select(1, order), torch.arange(10))),
    "root_of_square": lambda: classifier(told(lambda x, value: (x * x + value).sqrt(), torch.ones(()))),
    "root_of_positive": lambda: classifier(told(_root_of_positive, torch.full((), 99.0))),
    "gain": lambda: classifier(nn.Sequential(nn.Conv2d(10, 10, 3), told(torch.mul, torch.ones(())))),
    "some_classes": lambda: nn.Sequential(
        classifier(nn.Identity()), told(lambda x, count: x[:, : int(count)], torch.tensor(5))
    ),
    "widened": lambda: nn.Sequential(
        classifier(nn.Identity()), told(lambda x, wide: x.double() if wide else x, torch.tensor(0))
    ),
    # As a network does whose sampling was left on, and as BatchNorm does without running statistics.
    "jittering": lambda: classifier(told(lambda x, value: x + value * torch.randn_like(x), torch.zeros(()))),
    "mixing": lambda: classifier(told(lambda x, value: x + value * x.mean(0, keepdim=True), torch.zeros(()))),
    "clipped": lambda: classifier(scaled(nn.Sequential(nn.Conv2d(10, 10, 3, padding=1), nn.Hardtanh()))),
    "tokens": lambda: classifier(told(_as_tokens, torch.zeros(14 * 14, 10))),
    "twins": lambda: classifier(nn.Sequential(nn.Conv2d(10, 10, 3), nn.Conv2d(10, 10, 3))),
}
globals().update(BUILDERS)  # so that net.py:plain names the first


def log_of_sum(output: Tensor) -> Tensor:
    return output.sum().log()
