"""Gradients that nothing resets between two steps are told; whatever resets them is seen."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

import hookscope

Reset = Callable[[Optimizer, nn.Module], None]


def nothing(_optimizer: Optimizer, _network: nn.Module) -> None:
    pass


def with_none(optimizer: Optimizer, _network: nn.Module) -> None:
    optimizer.zero_grad()


def with_zeros(optimizer: Optimizer, _network: nn.Module) -> None:
    optimizer.zero_grad(set_to_none=False)


def of_data(_optimizer: Optimizer, network: nn.Module) -> None:
    for parameter in network.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()  # without a trace in the tensor's version


def halved(_optimizer: Optimizer, network: nn.Module) -> None:
    for parameter in network.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def loss_of(network: nn.Module) -> Tensor:
    return network(torch.randn(8, 3)).square().mean()


def trained(
    reset: Reset, *, micro_batches: int = 1, clipped: bool = False, optimizer: type[Optimizer] = SGD, steps: int = 6
) -> hookscope.Watch:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    steps_with = optimizer(network.parameters(), lr=1e-3)  # type: ignore[call-arg]
    with hookscope.watch(network, steps_with, every=100, on_line=lambda _: None) as watch:
        for _ in range(steps):
            reset(steps_with, network)
            for _ in range(micro_batches):
                loss_of(network).backward()
            if clipped:
                nn.utils.clip_grad_norm_(network.parameters(), 0.01)
            steps_with.step()
            watch.step()
    assert not any(parameter._backward_hooks for parameter in network.parameters())
    return watch


def told(watch: hookscope.Watch) -> list[tuple[int, float | None]]:
    return [(verdict.step, verdict.value) for verdict in watch.verdicts if verdict.rule == "gradients-not-reset"]


@pytest.mark.parametrize("options", [{}, {"micro_batches": 4}, {"clipped": True}, {"optimizer": Adam}], ids=str)
def test_forgotten_resets_are_told_at_the_fourth_step(options: dict[str, object]) -> None:
    watch = trained(nothing, **options)  # type: ignore[arg-type]
    assert told(watch) == [(4, 3.0)]  # steps 2, 3 and 4 contain the step before
    (verdict,) = watch.verdicts
    assert "Call optimizer.zero_grad() in every step." in verdict.message


@pytest.mark.parametrize("reset", [with_none, with_zeros, of_data, halved])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_whatever_resets_gradients_is_seen(reset: Reset, micro_batches: int) -> None:
    assert not told(trained(reset, micro_batches=micro_batches))


def test_a_reset_ends_the_verdict() -> None:
    count = 0

    def late(optimizer: Optimizer, _network: nn.Module) -> None:
        nonlocal count
        count += 1
        if count > 6:
            optimizer.zero_grad()

    watch = trained(late, steps=10)
    assert [(verdict.step, verdict.state) for verdict in watch.verdicts] == [(4, "began"), (7, "ended")]


@pytest.mark.parametrize("resets", [True, False])
def test_closures_that_are_called_several_times(resets: bool) -> None:
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    optimizer = LBFGS(network.parameters(), lr=1e-3, max_iter=3)

    def closure() -> Tensor:
        if resets:
            optimizer.zero_grad()
        loss = loss_of(network)
        loss.backward()
        return loss

    with hookscope.watch(network, optimizer, every=100, on_line=lambda _: None) as watch:
        for _ in range(6):
            optimizer.step(closure)  # type: ignore[arg-type]
            watch.step()
    assert bool(told(watch)) is not resets


@pytest.mark.parametrize("resets", [True, False])
def test_a_grad_scaler(resets: bool) -> None:
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    optimizer = SGD(network.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    with hookscope.watch(network, optimizer, every=100, on_line=lambda _: None) as watch:
        for step in range(7):
            if resets:
                optimizer.zero_grad()
            scaler.scale(loss_of(network) * (torch.inf if step == 3 and resets else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            watch.step()
    assert bool(told(watch)) is not resets


def test_the_gradients_that_a_discriminator_sends_to_its_generator_are_no_fault() -> None:
    torch.manual_seed(0)
    generator, judge = nn.Linear(3, 3), nn.Linear(3, 1)
    makes, judges = SGD(generator.parameters(), lr=1e-3), SGD(judge.parameters(), lr=1e-3)
    network = nn.ModuleDict({"generator": generator, "judge": judge})
    with hookscope.watch(network, [makes, judges], every=100, on_line=lambda _: None) as watch:
        for _ in range(6):
            judges.zero_grad()
            judge(generator(torch.randn(8, 3))).square().mean().backward()  # not detached
            judges.step()
            makes.zero_grad()
            judge(generator(torch.randn(8, 3))).mean().backward()
            makes.step()
            watch.step()
    assert not told(watch)


@pytest.mark.parametrize("copies", [False, True])
def test_gradients_that_are_set_by_hand_contain_none_of_the_step_before(copies: bool) -> None:
    """As torch.autograd.grad returns them: nothing adds to `.grad`, so nothing has to reset it."""
    network = nn.Linear(3, 2)
    optimizer = SGD(network.parameters(), lr=1e-3)
    with hookscope.watch(network, optimizer, on_line=lambda _: None) as watch:
        for _ in range(6):
            for parameter, gradient in zip(
                network.parameters(), torch.autograd.grad(loss_of(network), [*network.parameters()]), strict=True
            ):
                if copies and parameter.grad is not None:
                    parameter.grad.copy_(gradient)
                else:
                    parameter.grad = gradient
            optimizer.step()
            watch.step()
    assert not watch.verdicts
