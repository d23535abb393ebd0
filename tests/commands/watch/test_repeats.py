"""An optimiser that steps again with the same gradients is told, and such a step is not counted as one more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

import hookscope
from hookscope.commands.watch.training_log import read_training
from tests.commands.watch.test_script import ENVIRONMENT, said
from tests.fork_server import ForkServer

Done = Callable[[Tensor], None]


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def loss_of(network: nn.Module) -> Tensor:
    return network(torch.randn(8, 3)).square().mean()


@contextmanager
def watched(network: Any, optimizer: Any) -> Iterator[hookscope.Watch]:
    with hookscope.watch(network, optimizer, every=2, on_line=lambda _: None) as watch:
        yield watch


def repeated(watch: hookscope.Watch) -> list[str]:
    return [verdict.message for verdict in watch.verdicts if verdict.rule == "repeated-step"]


Turn = Callable[[nn.Module, Optimizer], None]


def twice(_network: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.step()


def clipped_between(network: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()
    nn.utils.clip_grad_norm_(network.parameters(), 0.01)
    optimizer.step()


@pytest.mark.parametrize("turn", [twice, clipped_between])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "nesterov": True, "foreach": True}], ids=str)
@pytest.mark.parametrize("is_called", [True, False])
def test_a_second_step_without_a_backward_pass_is_told_and_belongs_to_the_first(
    turn: Turn, options: dict[str, Any], is_called: bool
) -> None:
    network = built()
    optimizer = SGD(network.parameters(), lr=1e-3, **options)
    with watched(network, optimizer) as watch:
        for step in range(1, 7):
            loss = loss_of(network)
            loss.backward()
            (turn if step == 4 else lambda _network, inputs: inputs.step())(network, optimizer)
            optimizer.zero_grad()
            if is_called:
                watch.step(loss)
    assert [step.step for step in watch.log.steps] == [*range(1, 7)]
    assert not is_called or all(watched_step.layers for watched_step in watch.log.watched)
    (verdict,) = watch.verdicts
    assert (verdict.rule, verdict.step) == ("repeated-step", 4)
    assert verdict.message.startswith("SGD stepped again with the gradients of step 4, without a backward pass between")


ORDERS: dict[str, Callable[[Any, Any], None]] = {
    "after": lambda scaler, optimizer: [scaler.step(optimizer), scaler.update(), optimizer.step()],  # type: ignore[dict-item,return-value]
    "before": lambda scaler, optimizer: [optimizer.step(), scaler.step(optimizer), scaler.update()],  # type: ignore[dict-item,return-value]
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_beside_that_of_the_scaler_is_told(order: Callable[[Any, Any], None], fused: bool) -> None:
    network = built()
    optimizer = SGD(network.parameters(), lr=1e-6, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with watched(network, optimizer) as watch:
        for step in range(1, 7):
            loss = loss_of(network)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if step == 4:
                order(scaler, optimizer)
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            watch.step(loss)
    assert [step.step for step in watch.log.steps] == [*range(1, 7)]
    assert [(verdict.rule, verdict.step) for verdict in watch.verdicts] == [("repeated-step", 4)]


SCALED = """
import torch
from torch import nn
torch.manual_seed(0)
network = nn.Linear(4, 2)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(1, 7):
    loss = network(torch.randn(8, 4)).square().mean()
    if step == 5:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step == 5:
        optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_steps_though_the_scaler_has_skipped_is_told_what_it_did(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    (tmp_path / "train.py").write_text(SCALED)
    arguments = ["-m", "hookscope", "watch", "train.py", "--every", "2", "--out", "run"]
    done = fork_server.run(*arguments, cwd=tmp_path, environment=ENVIRONMENT)
    log = read_training(tmp_path / "run")
    assert [step.step for step in log.steps] == [*range(1, 7)]
    first = log.verdicts[0]
    assert (first.rule, first.step) == ("repeated-step", 5)
    assert first.message.startswith("GradScaler skipped step 5, because its gradients hold NaN or Inf, but then SGD")
    assert not any("No forward pass" in line for line in said(done))


def test_it_ends_when_twenty_steps_in_a_row_have_gradients_of_their_own() -> None:
    network = built()
    optimizer = SGD(network.parameters(), lr=1e-3)
    with watched(network, optimizer) as watch:
        for step in range(1, 40):
            loss_of(network).backward()
            optimizer.step()
            if step in (3, 10):
                optimizer.step()
            optimizer.zero_grad()
            watch.step()
    assert [(verdict.step, verdict.state) for verdict in watch.verdicts] == [(3, "began"), (29, "ended")]


Training = Callable[[Callable[[Any, Any], Done]], None]


def several_optimisers_after_one_backward_pass(watching: Callable[[Any, Any], Done]) -> None:
    network = built()
    first, last = SGD(network[0].parameters(), lr=0.01), Adam(network[2].parameters())
    done = watching(network, [first, last])
    for _ in range(6):
        loss = loss_of(network)
        loss.backward()
        for step in (first, last):
            step.step()
            step.zero_grad()
        done(loss)


def the_same_batch_at_a_learning_rate_of_zero(watching: Callable[[Any, Any], Done]) -> None:
    network, inputs = built(), torch.ones(8, 3)
    optimizer = SGD(network.parameters(), lr=0.0)
    done = watching(network, optimizer)
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = network(inputs).square().mean()
        loss.backward()
        optimizer.step()
        done(loss)


def gradients_by_hand(watching: Callable[[Any, Any], Done]) -> None:
    network = built()
    optimizer = SGD(network.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True)
    done = watching(network, optimizer)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(6):
        loss = loss_of(network)
        for weight, gradient in zip(
            network.parameters(), torch.autograd.grad(loss, [*network.parameters()]), strict=True
        ):
            weight.grad.data.copy_(gradient)  # type: ignore[union-attr]  # without a trace in the version
        optimizer.step()
        done(loss)


def experts_of_which_one_rests(watching: Callable[[Any, Any], Done]) -> None:
    experts = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    optimizer = SGD(experts.parameters(), lr=0.01)
    done = watching(experts, optimizer)
    for step in range(6):
        expert = experts[0] if step else experts[1]  # the gradient of the second, which stands for all, stays
        expert.zero_grad()
        loss = loss_of(expert)
        loss.backward()
        optimizer.step()
        done(loss)


def steps_without_gradients(watching: Callable[[Any, Any], Done]) -> None:
    network = built()
    optimizer = Adam(network.parameters())
    done = watching(network, optimizer)
    for step in range(6):
        loss = loss_of(network)
        if step % 2:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done(loss)


def a_closure_called_often(watching: Callable[[Any, Any], Done]) -> None:
    network = built()
    optimizer = LBFGS(network.parameters(), lr=0.1, max_iter=3)
    done = watching(network, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(network)
        loss.backward()
        return loss

    for _ in range(6):
        done(optimizer.step(closure))  # type: ignore[arg-type]


def a_norm_logged_after_the_step(watching: Callable[[Any, Any], Done]) -> None:
    network = built()
    optimizer = SGD(network.parameters(), lr=0.01)
    done = watching(network, optimizer)
    for _ in range(6):
        loss = loss_of(network)
        loss.backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(network.parameters(), float("inf"))
        optimizer.zero_grad()
        done(loss)


def skipped_steps_of_a_scaler(watching: Callable[[Any, Any], Done]) -> None:
    network = built()
    optimizer = SGD(network.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    done = watching(network, optimizer)
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(network) * (torch.inf if step == 3 else 1.0)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        done(loss)


HEALTHY: list[Training] = [
    several_optimisers_after_one_backward_pass,
    the_same_batch_at_a_learning_rate_of_zero,
    gradients_by_hand,
    experts_of_which_one_rests,
    steps_without_gradients,
    a_closure_called_often,
    a_norm_logged_after_the_step,
    skipped_steps_of_a_scaler,
]


@pytest.mark.parametrize("training", HEALTHY)
@pytest.mark.parametrize("is_called", [True, False])
def test_steps_with_gradients_of_their_own_are_no_fault(training: Training, is_called: bool) -> None:
    watches: list[hookscope.Watch] = []

    def watching(network: Any, optimizer: Any) -> Done:
        watches.append(hookscope.watch(network, optimizer, every=2, on_line=lambda _: None))
        return watches[0].step if is_called else lambda _loss: None

    training(watching)
    watches[0].close()
    assert not repeated(watches[0])
    assert [step.step for step in watches[0].log.steps] == [*range(1, 7)]
