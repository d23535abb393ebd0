"""NaN and Inf are blamed on what made them: operations of the loss, a layer, broken weights, or the batch."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.commands.watch.training_log import read_training
from hookscope.results.training import TrainingFinding
from tests.commands.watch.test_script import ENVIRONMENT
from tests.fork_server import ForkServer

AT = 8

Loss = Callable[[nn.Sequential, Tensor, int], Tensor]


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1))


def trained(loss_of: Loss, network: nn.Sequential | None = None, *, tells_loss: bool = True) -> list[TrainingFinding]:
    network = network or built()
    optimizer = torch.optim.SGD((parameter for parameter in network.parameters() if parameter.requires_grad), lr=0.01)
    with hookscope.watch(network, optimizer, every=100, on_line=lambda _: None) as watch:
        for step in range(1, AT + 1):
            loss = loss_of(network, torch.randn(8, 3), step)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss if tells_loss else loss.item())
    return list(watch.verdicts)


def penalised(network: nn.Sequential, inputs: Tensor, step: int) -> Tensor:
    inputs.requires_grad_()
    output = network(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    length = (slope * (step != AT)).square().sum(1).sqrt()
    return output.square().mean() + (length - 1).square().mean()


def distance(network: nn.Sequential, inputs: Tensor, step: int) -> Tensor:
    output = network(inputs)
    wanted = output.detach() if step == AT else torch.ones_like(output)
    return (output - wanted).square().sum().sqrt()


def logarithm_that_is_hidden(network: nn.Sequential, inputs: Tensor, step: int) -> Tensor:
    output = network(inputs).square() * (step != AT)
    return torch.where(output > 0, output.log(), 0).mean() + output.mean()


def root_of_a_bias(network: nn.Sequential, inputs: Tensor, step: int) -> Tensor:
    if step == AT:
        nn.init.zeros_(network[0].bias)
    return network(inputs).square().mean() + network[0].bias.square().sum().sqrt()


def spread(network: nn.Sequential, inputs: Tensor, step: int) -> Tensor:
    return (network(inputs) * (step != AT)).square().sum().pow(0.5)


@pytest.mark.parametrize(
    ("loss_of", "operation"),
    [
        (penalised, "sqrt"),
        (distance, "sqrt"),
        (logarithm_that_is_hidden, "log"),
        (root_of_a_bias, "sqrt"),
        (spread, "pow"),
    ],
)
def test_a_loss_whose_derivative_is_infinite_is_suspected_by_the_name_of_its_operation(
    loss_of: Loss, operation: str
) -> None:
    verdict = trained(loss_of)[0]
    assert (verdict.rule, verdict.step) == ("non-finite-gradient", AT)
    suspected = verdict.message.partition("suspect ")[2].partition(".")[0]
    assert operation in suspected.replace(" and ", ", ").split(", ")
    assert "batch" not in verdict.message


def test_operations_that_cannot_make_nan_are_not_suspected() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(_context: object, inputs: Tensor) -> Tensor:
            return inputs.clone()

        @staticmethod
        def backward(_context: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * math.nan

    def loss_of(network: nn.Sequential, inputs: Tensor, step: int) -> Tensor:
        output = network(inputs) / 2
        return ((Broken.apply(output) if step == AT else output) - 1).square().mean()  # type: ignore[no-untyped-call]

    verdict = trained(loss_of)[0]
    assert (verdict.rule, verdict.step) == ("non-finite-gradient", AT)
    assert "suspect" not in verdict.message
    assert "the loss itself made them" in verdict.message
    assert "batch" not in verdict.message


def test_a_loss_that_is_only_known_as_a_number_is_not_read() -> None:
    verdict = trained(distance, tells_loss=False)[0]
    assert (verdict.rule, verdict.step) == ("non-finite-gradient", AT)
    assert "The last of them in the network is '2.bias'" in verdict.message


def test_a_layer_whose_derivative_is_infinite_is_blamed_and_not_the_loss() -> None:
    class Root(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return (inputs * 0).sqrt()

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), Root(), nn.Linear(4, 1))
    verdict = trained(lambda network, inputs, _step: network(inputs).square().mean(), network)[0]
    assert verdict.rule == "non-finite-gradient"
    assert "The last of them in the network is '0.bias'" in verdict.message
    assert "loss itself" not in verdict.message
    assert "batch" not in verdict.message


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1))
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
for step in range(1, 9):
    output = network(torch.randn(8, 3))
    loss = output.square().mean()
    if step == 8:
        loss = loss + (output - output.detach()).square().sum().sqrt()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.exhaustive
def test_a_script_is_told_the_line_of_the_loss(tmp_path: Path, fork_server: ForkServer) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    fork_server.run("-m", "hookscope", "watch", "train.py", "--out", "run", cwd=tmp_path, environment=ENVIRONMENT)
    (verdict,) = read_training(tmp_path / "run").verdicts
    assert (verdict.rule, verdict.step) == ("non-finite-gradient", AT)
    assert "suspect sqrt at train.py:12" in verdict.message
    assert "batch" not in verdict.message


def mean_loss(network: nn.Sequential, inputs: Tensor, _step: int) -> Tensor:
    return (network(inputs) - inputs.sum(1, keepdim=True)).square().mean()


@pytest.mark.parametrize("place", ["0.weight", "2.bias"])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("at", [AT, 1])
def test_a_weight_that_was_broken_before_the_step_is_blamed_and_not_the_batch(
    place: str, is_frozen: bool, at: int
) -> None:
    network = built()
    weight = dict(network.named_parameters())[place]
    weight.requires_grad_(not is_frozen)

    def loss_of(network: nn.Sequential, inputs: Tensor, step: int) -> Tensor:
        if step == at:
            weight.data.view(-1)[0] = math.nan
        return mean_loss(network, inputs, step)

    verdicts = [step for step in trained(loss_of, network) if step.step == at]
    assert [(verdict.rule, verdict.where) for verdict in verdicts] == [
        ("non-finite-weight", place),
        ("non-finite-loss", ""),
    ]
    assert "its batch is not the cause" in verdicts[0].message
    assert "its batch is not the cause" in verdicts[1].message
    assert not any("look at" in verdict.message for verdict in verdicts)


def test_a_broken_weight_is_blamed_though_a_scaler_skips_the_step() -> None:
    network = built()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with hookscope.watch(network, optimizer, every=100, on_line=lambda _: None) as watch:
        for step in range(1, AT + 1):
            if step == AT:
                network[0].weight.data[0, 0] = math.nan
            loss = mean_loss(network, torch.randn(8, 3), step)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.step(loss)
    assert [(verdict.rule, verdict.where, verdict.step) for verdict in watch.verdicts] == [
        ("non-finite-weight", "0.weight", AT),
        ("non-finite-loss", "", AT),
    ]
    assert not any("look at" in verdict.message for verdict in watch.verdicts)
