"""NaN and Inf are blamed on what made them: operations of the loss, a layer, broken weights, or the batch."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookscope
from hookscope.commands.watch.training_log import read_training
from hookscope.results.training import TrainingFinding
from tests.commands.watch.conftest import Forked
from tests.commands.watch.test_script import ENVIRONMENT
from tests.fork_server import ForkServer

AT = 8


class Root(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs + 2).sqrt()


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


class Frozen(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight.detach(), self.bias)


class Checkpointed(nn.Sequential):
    """Runs again in the backward pass, and whenever something reads what it would have saved."""

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(super().forward, inputs, use_reentrant=False)  # type: ignore[no-any-return]


GOT_NAN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "linear": (lambda: nn.Linear(3, 4), (8, 3), "0"),
    "series": (lambda: nn.Linear(3, 4), (8, 2, 3), "0"),
    "convolution": (lambda: nn.Conv1d(3, 4, 2), (8, 3, 5), "0"),
    "after a frozen layer": (lambda: nn.Linear(3, 4).requires_grad_(requires_grad=False), (8, 3), "2"),
    "after a frozen weight": (lambda: Frozen(3, 4), (8, 3), ""),
    "checkpointed": (lambda: Checkpointed(nn.Linear(3, 4)), (8, 3), ""),
    "made inside": (lambda: nn.Sequential(nn.Linear(3, 4), Root()), (8, 3), ""),
}


@pytest.mark.parametrize("kind", GOT_NAN)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_layer_that_got_nan_is_named_with_its_index(kind: str, autocast: bool) -> None:
    make, shape, layer = GOT_NAN[kind]
    torch.manual_seed(0)
    first = make()
    with torch.no_grad():
        network = nn.Sequential(first, nn.Flatten(), nn.Linear(first(torch.ones(shape)).flatten(1).shape[1], 1))
    calls = []
    [*first.modules()][-1].register_forward_pre_hook(lambda *_: calls.append(1))

    def loss_of(network: nn.Sequential, _inputs: Tensor, step: int) -> Tensor:
        inputs = torch.rand(shape)
        if step == AT:
            inputs[5] = -1e4 if kind == "made inside" else math.nan
        with torch.autocast("cpu", enabled=autocast):
            return network(inputs).float().square().mean()

    verdict = next(verdict for verdict in trained(loss_of, network) if verdict.rule == "non-finite-loss")
    named = f"but the input of '{layer}' held NaN at index 5 of 8." if layer else "so the NaN came from the batch"
    assert verdict.step == AT
    assert f"Weights were finite, {named}" in verdict.message
    assert len(calls) == AT * (2 if kind == "checkpointed" else 1)


def test_a_weight_whose_square_overflows_float32_is_not_said_to_be_broken() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    nn.init.constant_(network[0].weight, 3e19)

    def loss_of(network: nn.Sequential, inputs: Tensor, step: int) -> Tensor:
        return mean_loss(network, inputs + (math.nan if step == AT else 0), step)

    verdict = next(verdict for verdict in trained(loss_of, network) if verdict.rule.startswith("non-finite"))
    assert (verdict.rule, verdict.step) == ("non-finite-loss", AT)
    assert "Weights were finite, but the input of '0' held NaN" in verdict.message


def test_the_input_of_another_training_is_not_blamed() -> None:
    other = built()

    def loss_of(network: nn.Sequential, inputs: Tensor, step: int) -> Tensor:
        if step == AT:
            other(torch.full((8, 3), torch.nan)).sum().backward()
        return network(inputs).sum() * (torch.nan if step == AT else 0.1)

    verdict = next(verdict for verdict in trained(loss_of) if verdict.rule == "non-finite-loss")
    assert "the NaN came from the batch or the forward pass" in verdict.message


def test_weights_that_a_script_breaks_after_backward_are_not_blamed_for_the_loss() -> None:
    """Sharpness-aware minimization (SAM) moves the weights along the gradient and back before the step."""
    network = built()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    with hookscope.watch(network, optimizer, every=100, on_line=lambda _: None) as watch:
        for step in range(1, AT + 1):
            inputs = torch.randn(8, 3)
            inputs[2] = inputs[2] if step < AT else math.nan
            loss = mean_loss(network, inputs, step)
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                moves = [0.1 * weight.grad for weight in network.parameters() if weight.grad is not None]
                for weight, move in zip(network.parameters(), moves, strict=True):
                    weight.add_(move)
            optimizer.zero_grad()
            mean_loss(network, inputs, step).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for weight, move in zip(network.parameters(), moves, strict=True):
                    weight.sub_(move)
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
    (verdict,) = watch.verdicts
    assert (verdict.rule, verdict.step) == ("non-finite-loss", AT)
    assert "Weights were finite, but the input of '0' held NaN at index 2 of 8." in verdict.message


def test_nan_in_a_batch_is_named_in_a_step_whose_forward_pass_came_early(tmp_path: Path, forked: Forked) -> None:
    """The first optimiser steps twice in a row, so its second step ends the first one, after the backward pass."""
    (tmp_path / "train.py").write_text(TWO_OPTIMIZERS)
    forked("-m", "hookscope", "watch", "train.py", "--out", "run", cwd=tmp_path, environment=ENVIRONMENT)
    first = read_training(tmp_path / "run").verdicts[0]
    assert (first.rule, first.step) == ("non-finite-loss", 2)
    assert "Weights were finite, but the input of 'Sequential[0].0' held NaN at index 3 of 8." in first.message


def test_a_batch_that_the_script_skips_is_not_blamed_for_a_later_step() -> None:
    network = built()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    with hookscope.watch(network, optimizer, every=100, on_line=lambda _: None) as watch:
        for step in range(1, AT + 2):
            inputs = torch.randn(8, 3)
            inputs[2] = inputs[2] if step != AT else math.nan
            loss = mean_loss(network, inputs, step) * (math.nan if step > AT else 1)
            loss.backward()  # type: ignore[no-untyped-call]
            if step != AT:
                optimizer.step()
                watch.step(loss)
            optimizer.zero_grad()
    (verdict,) = watch.verdicts
    assert verdict.rule == "non-finite-loss"
    assert "held NaN" not in verdict.message
    assert "the NaN came from the batch or the forward pass" in verdict.message


def test_code_without_a_file_name_may_call_backward(tmp_path: Path, forked: Forked) -> None:
    source = "import torch\nexec(compile('torch.zeros(2, requires_grad=True).sum().backward()', '', 'exec'))\n"
    (tmp_path / "train.py").write_text(source)
    ended = forked("-m", "hookscope", "watch", "train.py", cwd=tmp_path, environment=ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr


TWO_OPTIMIZERS = """
import torch
from torch import nn

networks = [nn.Sequential(nn.Linear(4, 2)) for _ in range(2)]
optimizers = [torch.optim.SGD(network.parameters(), lr=0.01) for network in networks]
for step, turn in enumerate((0, 0, 1), start=1):
    inputs = torch.ones(8, 4)
    inputs[3] = torch.nan if step == 2 else 1
    networks[turn](inputs).square().mean().backward()
    optimizers[turn].step()
    optimizers[turn].zero_grad()
"""


@pytest.mark.parametrize("is_steep", [False, True])
def test_clipping_that_spreads_nan_hides_the_layer_that_made_it(is_steep: bool) -> None:
    network = built()
    network[0].weight.register_hook(lambda gradient: gradient * (math.nan if len(losses) == AT else 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    losses: list[Tensor] = []
    with hookscope.watch(network, optimizer, every=100, on_line=lambda _: None) as watch:
        for step in range(1, AT + 1):
            loss = mean_loss(network, torch.randn(8, 3), step)
            losses.append(loss.sqrt() if is_steep else loss)
            losses[-1].backward()  # type: ignore[no-untyped-call]
            assert [
                weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in network.parameters()
            ] == [step < AT, True, True, True]
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            watch.step(losses[-1])
    (verdict,) = watch.verdicts
    assert (verdict.rule, verdict.where, verdict.step) == ("non-finite-gradient", "", AT)
    suspects = ": suspect sqrt, or a layer." if is_steep else "."
    spread = "Clipping by the norm may have spread NaN from one of them to all, so its layer is not known"
    assert f"{spread}{suspects}" in verdict.message
    assert f"look at the batch of step {AT}" in verdict.message


@pytest.mark.exhaustive
def test_a_script_that_reads_nan_is_told_its_index(tmp_path: Path, fork_server: ForkServer) -> None:
    (tmp_path / "train.py").write_text(NAN_IN_A_BATCH)
    fork_server.run("-m", "hookscope", "watch", "train.py", "--out", "run", cwd=tmp_path, environment=ENVIRONMENT)
    first = read_training(tmp_path / "run").verdicts[0]
    assert (first.rule, first.step) == ("non-finite-loss", 4)
    assert "Weights were finite, but the input of '0' held NaN at indices 1, 3 of 16." in first.message


NAN_IN_A_BATCH = """
import torch
from torch import nn

network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
for step in range(1, 6):
    inputs = torch.randn(16, 4)
    if step == 4:
        inputs[1:4:2, 2] = torch.nan
    network(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


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
    blamed = "and no step was watched before it" if at == 1 else "but the update before it"
    assert f"its batch is not the cause, {blamed}" in verdicts[0].message
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
