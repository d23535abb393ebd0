"""A loss with the wrong sign is named; losses that may be below 0 are not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookscope
from hookscope.results.training import TrainingFinding

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of outputs (N, 4), labels (N,) and numbers between 0 and 1 (N, 4)."""


def train(loss_of: Loss, steps: int = 15) -> list[TrainingFinding]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    with hookscope.watch(network, optimizer, on_line=lambda _: None) as watch:
        for _ in range(steps):
            labels = torch.randint(0, 4, (32,))
            loss = loss_of(network(torch.randn(32, 16) + F.one_hot(labels, 16)), labels, torch.rand(32, 4))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
    return [verdict for verdict in watch.verdicts if verdict.rule == "loss-diverges"]


WRONG: dict[str, tuple[Loss, str]] = {
    "cross entropy": (lambda out, labels, _: -F.cross_entropy(out, labels), "it is cross_entropy with its sign"),
    "by picture": (
        lambda out, labels, _: (-F.cross_entropy(out, labels, reduction="none")).mean(),
        "it is cross_entropy with its sign",
    ),
    "mean square": (lambda out, _, numbers: -F.mse_loss(out, numbers), "it is mse_loss with its sign"),
    "pixels as targets": (
        lambda out, _, numbers: F.binary_cross_entropy_with_logits(out, 255 * numbers),
        "below 0 only if its targets lie outside 0 to 1",
    ),
    "probabilities": (lambda out, labels, _: F.nll_loss(out.softmax(1), labels), "use cross_entropy"),
    "by hand": (lambda out, labels, _: out.log_softmax(1)[range(32), labels].mean(), "log_softmax without a minus"),
}


@pytest.mark.parametrize("loss", WRONG)
@pytest.mark.sample("cross entropy", "pixels as targets")
def test_a_loss_below_zero_that_cannot_be_is_named(loss: str) -> None:
    loss_of, words = WRONG[loss]
    (verdict,) = train(loss_of)
    assert 10 <= verdict.step <= 13  # the tenth step in a row below 0, and one to read the graph
    assert verdict.value is not None
    assert verdict.value < 0
    assert words in verdict.message
    assert "learning rate" not in verdict.message


RIGHT: dict[str, Loss] = {
    "cosine similarity": lambda out, _, numbers: -F.cosine_similarity(out, numbers).mean(),
    "density": lambda out, *_: -torch.distributions.Normal(out, 0.1).log_prob(out.detach() + 0.01).mean(),
    "gaussian_nll": lambda out, *_: F.gaussian_nll_loss(out, out.detach(), torch.full_like(out, 1e-3)),
    "policy gradient": lambda out, labels, numbers: (
        F.cross_entropy(out, labels, reduction="none") * (numbers[:, 0] - 2)
    ).mean(),
    "costs": lambda out, labels, numbers: (out.log_softmax(1)[range(32), labels] * numbers[:, 0]).mean(),
    "most variance": lambda out, *_: -out.var(),
    "confused domains": lambda out, labels, _: F.cross_entropy(out, labels) - 5 * F.cross_entropy(out, 3 - labels),
    "cross entropy": lambda out, labels, _: F.cross_entropy(out, labels),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", RIGHT)
def test_a_loss_that_may_be_below_zero_is_not_called_wrong(loss: str) -> None:
    assert train(RIGHT[loss], steps=40) == []


def test_a_loss_with_its_sign_changed_may_be_maximised() -> None:
    layer = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, maximize=True)
    with hookscope.watch(layer, optimizer, on_line=lambda _: None) as watch:
        for _ in range(15):
            loss = -F.cross_entropy(layer(torch.ones(2, 4)), torch.tensor([0, 1]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
    assert not watch.verdicts


def test_a_generator_that_makes_the_loss_of_its_critic_larger_is_not_called_wrong() -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 16), nn.Linear(16, 1)
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.001) for layer in (generator, critic)]
    with hookscope.watch([generator, critic], optimizers, on_line=lambda _: None) as watch:
        for _ in range(15):
            real, fake = torch.randn(32, 16), generator(torch.randn(32, 4))
            loss = F.binary_cross_entropy_with_logits(critic(fake.detach()), torch.zeros(32, 1))
            (loss + F.binary_cross_entropy_with_logits(critic(real), torch.ones(32, 1))).backward()
            optimizers[1].step()
            fooled = -F.binary_cross_entropy_with_logits(critic(fake), torch.zeros(32, 1))
            optimizers[0].zero_grad()
            fooled.backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            watch.step(fooled)
    assert all(step.loss is not None and step.loss < 0 for step in watch.log.steps)
    assert not watch.verdicts


def test_a_loss_that_crosses_zero_has_no_ratio_to_the_first() -> None:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with hookscope.watch(layer, optimizer, on_line=lambda _: None) as watch:
        for loss in (0.0005, -0.02, 0.03, -0.05, 0.08, -0.1, 0.02):  # as of a policy gradient
            layer(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
    assert not watch.verdicts
