"""A parameter that is frozen in the middle of a training is told, and that its optimiser still moves it if it does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hookscope

AT = 5

OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "momentum and decay": (
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1),
        "Its .grad is 0, not None, so SGD still moves it, by momentum and weight decay",
    ),
    "moments": (
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "Its .grad is 0, not None, so Adam still moves it, by momentum",
    ),
    "nothing": (
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        "Its .grad is 0, not None, so SGD still steps with it",
    ),
}


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def trained(
    network: nn.Sequential, optimizer: torch.optim.Optimizer, reset: Callable[[], object], freeze: Callable[[], object]
) -> tuple[hookscope.Watch, float]:
    """Train 30 steps; return the watch, and how far the first weight moved after it was frozen."""
    before = torch.empty(0)
    with hookscope.watch(network, optimizer, every=AT, on_line=lambda _: None) as watch:
        for step in range(1, 31):
            if step == AT:
                freeze()
                before = network[0].weight.detach().clone()
            loss = network(torch.randn(8, 3)).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss)
            reset()
    return watch, (network[0].weight.detach() - before).norm().item()


@pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_frozen_with_a_gradient_of_zero(case: tuple[Callable[[Any], torch.optim.Optimizer], str]) -> None:
    network = built()
    make, words = case
    optimizer = make(network.parameters())
    watch, moved = trained(
        network,
        optimizer,
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: network[0].requires_grad_(False),
    )
    (verdict,) = watch.verdicts
    assert (verdict.rule, verdict.step, verdict.where) == ("frozen-parameter", AT, "0.weight")
    assert words in verdict.message
    assert ("moves" in words) == (moved > 0)
    rows = {row.name: row for row in watch.log.watched[-1].parameters}
    assert (rows["0.weight"].status, rows["2.weight"].status) == ("frozen", "gradient")


def test_frozen_with_the_gradient_of_an_earlier_step() -> None:
    network = built()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

    def reset() -> None:  # of what is trained only
        for parameter in network.parameters():
            parameter.grad = None if parameter.requires_grad else parameter.grad

    def freeze() -> None:
        network(torch.randn(8, 3)).square().mean().backward()
        network[0].requires_grad_(False)

    watch, moved = trained(network, optimizer, reset, freeze)
    (verdict,) = watch.verdicts
    assert (verdict.rule, verdict.step, verdict.where) == ("frozen-parameter", AT, "0.weight")
    assert "Its .grad still holds the gradient of an earlier step, so SGD still moves it" in verdict.message
    assert moved > 0


def test_frozen_without_a_gradient_rests() -> None:
    network = built()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    watch, moved = trained(network, optimizer, optimizer.zero_grad, lambda: network[0].requires_grad_(False))
    (verdict,) = watch.verdicts
    assert (verdict.rule, verdict.step) == ("frozen-parameter", AT)
    assert ".grad" not in verdict.message
    assert moved == 0


def test_a_gradient_of_zero_of_a_parameter_that_is_trained_is_dead() -> None:
    network = built()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

    def die() -> None:
        nn.init.zeros_(network[2].weight)
        optimizer.param_groups[0]["lr"] = 0.0

    watch, _ = trained(network, optimizer, lambda: optimizer.zero_grad(set_to_none=False), die)
    assert {verdict.rule for verdict in watch.verdicts} == {"dead-gradient"}
