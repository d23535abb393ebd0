"""A verdict ends by values that were measured and are sound: not by NaN, nothing, or a fault that is usual by now."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hookscope


def one_weight(
    gradients: list[float],
    losses: list[float | None] | None = None,
    *,
    before: Callable[[int, nn.Linear], None] = lambda _step, _layer: None,
) -> list[tuple[str, int, str]]:
    """Train a weight that is never changed, with these gradients; return rule, step and state of each verdict."""
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with hookscope.watch(layer, optimizer, every=1_000, on_line=lambda _: None) as watch:
        for step, gradient in enumerate(gradients, start=1):
            nn.init.ones_(layer.weight)
            before(step, layer)
            optimizer.zero_grad(set_to_none=False)
            layer(torch.full((1, 1), gradient)).sum().backward()
            optimizer.step()
            watch.step(losses[step - 1] if losses else 1.0)
    return [(verdict.rule, verdict.step, verdict.state) for verdict in watch.verdicts]


UNSOUND = {"NaN": math.nan, "Inf": math.inf, "not told": None}


@pytest.mark.parametrize("value", UNSOUND.values(), ids=UNSOUND)
def test_no_verdict_on_the_loss_ends_while_the_loss_is_not_a_number(value: float | None) -> None:
    usual = [1.0 + 0.01 * (step % 3) for step in range(30)]
    verdicts = one_weight([1.0] * 100, [*usual, 1e6, *[value] * 69])
    began = {rule for rule, step, state in verdicts if state == "began" and step == 31}
    assert began == {"loss-jump", "loss-diverges"}
    assert not any(state == "ended" for _, _, state in verdicts)
    # Twenty sound losses in a row end them, however many unsound ones lie between.
    verdicts = one_weight([1.0] * 70, [*usual, 1e6, *[1.0] * 10, *[value] * 19, *[1.0] * 10])
    ended = {rule for rule, step, state in verdicts if state == "ended" and step == 70}
    assert ended == {"loss-jump", "loss-diverges"}


def test_a_jump_to_a_new_level_does_not_end_when_the_level_has_become_usual() -> None:
    usual = [1.0 + 0.01 * (step % 3) for step in range(40)]
    losses = [*usual, *[100.0 + each for each in usual * 7], *usual]
    verdicts = one_weight(losses, [*losses])
    for rule in ("loss-jump", "gradient-jump"):
        assert [(step, state) for name, step, state in verdicts if name == rule] == [(41, "began"), (340, "ended")]


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_no_verdict_on_the_gradient_ends_while_it_is_nothing_or_not_finite(value: float) -> None:
    usual = [1.0 + 0.01 * (step % 3) for step in range(40)]
    verdicts = one_weight([*usual, 1e6, *[value] * 50])
    assert ("gradient-jump", 41, "began") in verdicts
    assert not any(state == "ended" for _, _, state in verdicts)
    verdicts = one_weight([*usual, 1e6, *[1.0] * 20])
    assert ("gradient-jump", 61, "ended") in verdicts


def test_a_gradient_of_zero_that_becomes_nan_has_not_passed() -> None:
    verdicts = one_weight([0.0] * 25 + [math.nan] * 30)
    assert ("dead-gradient", 20, "began") in verdicts
    assert not any(state == "ended" for _, _, state in verdicts)
    assert ("dead-gradient", 45, "ended") in one_weight([0.0] * 25 + [1.0] * 20)


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_weight_that_is_nan_passes_only_when_it_is_finite(is_mended: bool) -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    with hookscope.watch(network, optimizer, every=1_000, on_line=lambda _: None) as watch:
        for step in range(1, 51):
            if step == 5:
                network[0].weight.data.fill_(math.nan)
            if step == 6:  # all of them hold NaN after that step
                for each in network.parameters() if is_mended else network[1].parameters():
                    each.data.fill_(1.0)
                network[0].requires_grad_(False)
            inputs = torch.ones(4, 2)
            loss = (network[1](inputs) if step > 5 else network(inputs)).square().mean()  # it is not used any more
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    ended = [
        verdict.step for verdict in watch.verdicts if verdict.state == "ended" and verdict.rule == "non-finite-weight"
    ]
    assert ended == ([25] if is_mended else [])


class Part(nn.Module):
    """A module whose output can be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.change: Callable[[Tensor], Tensor] = lambda inputs: inputs

    def forward(self, inputs: Tensor) -> Tensor:
        return self.change(inputs)


def watched_steps(breaks: Callable[[nn.Sequential], None], mends: Callable[[nn.Sequential], None]) -> hookscope.Watch:
    torch.manual_seed(0)
    network = nn.Sequential(Part(), nn.Linear(3, 16), nn.ReLU(), Part(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    with hookscope.watch(network, optimizer, every=1, on_line=lambda _: None) as watch:
        for step in range(1, 13):
            if step == 4:
                nn.init.constant_(network[1].bias, -1000.0)
            if step == 6:
                breaks(network)
            if step == 9:
                mends(network)
            optimizer.zero_grad()
            loss = network(torch.randn(64, 3)).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    return watch


def test_a_verdict_on_a_layer_does_not_end_while_nan_hides_it() -> None:
    def breaks(network: nn.Sequential) -> None:
        network[0].change = lambda inputs: inputs * math.nan

    def mends(network: nn.Sequential) -> None:
        network[0].change = lambda inputs: inputs

    watch = watched_steps(breaks, mends)
    dead = [(verdict.step, verdict.state) for verdict in watch.verdicts if verdict.rule == "dead-layer"]
    assert dead == [(4, "began")]  # it is dead to the end


def test_a_verdict_on_a_layer_does_not_end_while_the_layer_does_not_run() -> None:
    def breaks(network: nn.Sequential) -> None:
        network.forward = lambda inputs: network[4](inputs[:, :1].repeat(1, 16))  # type: ignore[method-assign]

    watch = watched_steps(breaks, lambda _network: None)
    assert [(verdict.step, verdict.state) for verdict in watch.verdicts if verdict.rule == "dead-layer"] == [
        (4, "began")
    ]


def test_a_verdict_on_a_layer_ends_when_it_runs_and_passes() -> None:
    watch = watched_steps(lambda network: nn.init.zeros_(network[1].bias), lambda _network: None)
    dead = [(verdict.step, verdict.state) for verdict in watch.verdicts if verdict.rule == "dead-layer"]
    assert dead == [(4, "began"), (7, "ended")]
