"""Faults that are planted in a training, and named at the right step and place; healthy trainings are silent."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookscope
from hookscope.results.training import TrainingFinding
from tests.commands.watch.loops import HEALTHY, Training

pytestmark = pytest.mark.exhaustive

STEPS = 150  # of healthy trainings


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    return nn.Sequential(*layers)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (count, 64), generator=generator)
    return [(0.3 * torch.randn(64, 16, generator=generator) + F.one_hot(label, 16), label) for label in labels]


def train(
    network: nn.Module,
    steps: int,
    before: Callable[[int, Any, Tensor], None] = lambda *_: None,
    *,
    every: int = 10,
    optimizer: torch.optim.Optimizer | None = None,
) -> hookscope.Watch:
    """Train, calling `before` with the number of the step, the optimiser and the batch; return the closed watch."""
    optimizer = optimizer or torch.optim.SGD(network.parameters(), lr=0.05)
    lines: list[str] = []
    with hookscope.watch(network, optimizer, every=every, on_line=lines.append) as watch:
        for number, (inputs, labels) in enumerate(batches(steps), start=1):
            before(number, optimizer, inputs)
            loss = F.cross_entropy(network(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
    assert len(lines) == len(watch.verdicts)
    return watch


def began(watch: hookscope.Watch, rule: str) -> TrainingFinding:
    return next(verdict for verdict in watch.verdicts if verdict.rule == rule and verdict.state == "began")


@pytest.mark.parametrize("training", HEALTHY.values(), ids=HEALTHY)
def test_healthy_trainings_are_silent(training: Training) -> None:
    watches = []

    def watching(networks: Any, optimizers: Any) -> Callable[[Tensor], None]:
        watches.append(hookscope.watch(networks, optimizers, every=10))
        return watches[0].step

    torch.manual_seed(5)
    training(STEPS, watching)
    (watch,) = watches
    watch.close()
    assert watch.verdicts == ()
    assert watch.log.steps[-1].step == STEPS
    assert watch.log.watched[-1].step == STEPS
    assert watch.log.watched[-1].layers


def test_a_learning_rate_times_a_thousand_is_seen_at_the_next_step() -> None:
    def faster(number: int, optimizer: Any, _given: Tensor) -> None:
        if number == 60:
            optimizer.param_groups[0]["lr"] *= 1000

    watch = train(mlp(), 70, faster)
    assert watch.verdicts[0].step in (60, 61)
    assert {verdict.rule for verdict in watch.verdicts if verdict.step == 61} & {"loss-jump", "gradient-jump"}
    assert watch.log.steps[59].learning_rates == (pytest.approx(50.0),)
    assert began(watch, "large-update").step == 60


def test_a_training_that_diverges_from_the_start_is_named_before_there_is_a_usual_loss() -> None:
    def far_too_fast(_number: int, optimizer: Any, _given: Tensor) -> None:
        optimizer.param_groups[0]["lr"] = 50.0

    watch = train(mlp(), 20, far_too_fast)
    first = watch.log.steps[0].loss
    assert first is not None
    at = next(step.step for step in watch.log.steps if step.loss is not None and step.loss >= 100 * first)
    assert at < 20
    assert began(watch, "loss-diverges").step == at


def test_a_relu_that_dies_is_named_one_step_later() -> None:
    network = mlp()

    def kill(number: int, _optimizer: Any, _given: Tensor) -> None:
        if number == 34:
            nn.init.constant_(network[2].bias, -1000.0)

    watch = train(network, 45, kill)
    verdict = began(watch, "dead-layer")
    assert (verdict.step, verdict.where, verdict.value) == (35, "3", 1.0)
    reasons = {watched_step.step: watched_step.reason for watched_step in watch.log.watched}
    assert reasons[35] == "zero gradient"


@pytest.mark.parametrize(
    ("grown", "named", "clip"),
    [
        (["2.weight"], ["2.weight"], None),
        (["2.weight", "2.bias"], ["2.weight", "2.bias"], nn.utils.clip_grad_norm_),
        (["0.bias"], ["0.bias"], nn.utils.clip_grad_value_),
        *(
            (["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"], [], clip)  # the loss, times 10,000
            for clip in (None, nn.utils.clip_grad_norm_)
        ),
    ],
)
def test_the_parameter_whose_gradient_jumps_is_named(grown: list[str], named: list[str], clip: Any) -> None:
    network = mlp()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    with hookscope.watch(network, optimizer, on_line=lambda _: None) as watch:
        for number, (inputs, labels) in enumerate(batches(40), start=1):
            loss = F.cross_entropy(network(inputs), labels)
            loss.backward()
            for name in grown if number == 40 else ():
                network.get_parameter(name).grad.mul_(10_000)  # type: ignore[union-attr]
            if clip is not None:
                clip(network.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
    verdict = began(watch, "gradient-jump")
    assert verdict.step == 40
    if named:
        assert {name for name, _ in network.named_parameters() if f"'{name}'" in verdict.message} == {*named}
    elif clip is None:
        assert "All of the largest gradients have grown" in verdict.message
    elif clip is nn.utils.clip_grad_norm_:
        assert "'" not in verdict.message


def test_a_batch_with_nan_is_named_with_what_was_before() -> None:
    def spoil(number: int, _optimizer: Any, inputs: Tensor) -> None:
        if number == 40:
            inputs[3, 5] = torch.nan

    watch = train(mlp(), 45, spoil)
    first = watch.verdicts[0]
    assert (first.rule, first.step, first.level) == ("non-finite-loss", 40, "fail")
    assert "Weights were finite, but the input of '0' held NaN at index 3 of 64." in first.message
    assert "look at the batch of step 40" in first.message
    assert began(watch, "non-finite-weight").step == 41
    assert "The first NaN or Inf came at step 40" in began(watch, "non-finite-weight").message


def test_the_layer_that_makes_nan_is_named_where_the_step_is_watched() -> None:
    class Root(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return (inputs + 10).sqrt()

    def negative(number: int, _optimizer: Any, inputs: Tensor) -> None:
        if number == 5:
            inputs.fill_(-1000.0)

    torch.manual_seed(0)
    watch = train(nn.Sequential(nn.Linear(16, 8), Root(), nn.Linear(8, 4)), 5, negative, every=1)
    verdict = began(watch, "non-finite-activation")
    assert (verdict.step, verdict.where) == (5, "1")
    assert {verdict.rule for verdict in watch.verdicts if verdict.step < 5} == set()


def test_a_layer_frozen_and_unfrozen_again_is_named_at_both_steps() -> None:
    network = mlp()

    def freeze(number: int, _optimizer: Any, _given: Tensor) -> None:
        if number in (25, 31):
            network[2].requires_grad_(number == 31)

    watch = train(network, 60, freeze, every=5)
    verdicts = [verdict for verdict in watch.verdicts if verdict.rule == "frozen-parameter"]
    assert [(verdict.step, verdict.state, verdict.where) for verdict in verdicts] == [
        (25, "began", "2.weight"),
        (50, "ended", "2.weight"),  # after twenty steps with a gradient
    ]
    statuses = {
        watched_step.step: {row.name: row.status for row in watched_step.parameters}
        for watched_step in watch.log.watched
    }
    assert [statuses[step]["2.weight"] for step in (20, 25, 30, 35)] == ["gradient", "frozen", "frozen", "gradient"]


def test_parameters_unfrozen_later_are_watched_and_those_that_nothing_trains_are_named() -> None:
    network = mlp().requires_grad_(False)
    network[4].requires_grad_(True)
    optimizer = torch.optim.SGD(network[4].parameters(), lr=0.05)

    def unfreeze(number: int, inputs: Any, _batch: Tensor) -> None:
        if number == 12:
            network[2].requires_grad_(True)
            inputs.add_param_group({"params": [network[2].weight], "lr": 0.01})

    watch = train(network, 30, unfreeze, every=5, optimizer=optimizer)
    statuses = {
        watched_step.step: {row.name: row.status for row in watched_step.parameters}
        for watched_step in watch.log.watched
    }
    assert [statuses[step]["2.weight"] for step in (10, 15)] == ["frozen", "gradient"]
    assert statuses[15]["2.bias"] == "gradient"  # computed, though nothing uses it
    (verdict,) = watch.verdicts
    assert (verdict.rule, verdict.where, verdict.step) == ("unoptimised-parameter", "2.bias", 15)
    assert watch.log.steps[11].learning_rates == (0.05, 0.01)


def test_a_stack_of_sigmoids_has_vanishing_gradients() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(20) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
    watch = train(nn.Sequential(*layers, nn.Linear(16, 4)), 10)
    verdict = began(watch, "vanishing-gradient")
    assert (verdict.step, verdict.where) == (10, "0.weight")


def test_a_branch_without_gradients_is_named_after_twenty_steps() -> None:
    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(16, 4)
            self.lora_a, self.lora_b = nn.Linear(16, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, inputs: Tensor) -> Tensor:
            with torch.no_grad():
                branch = self.lora_b(self.lora_a(inputs))
            return self.base(inputs) + branch

    watch = train(Branched(), 25)
    (verdict,) = watch.verdicts
    assert (verdict.rule, verdict.step, verdict.where) == ("unused-parameter", 20, "lora_a.weight")
    assert "'lora_b.weight'" in verdict.message


def test_saturated_tanh_is_named() -> None:
    network = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    nn.init.normal_(network[0].weight, std=200.0)
    verdict = began(train(network, 10), "saturated-activation")
    assert (verdict.step, verdict.where) == (10, "1")
    assert verdict.value is not None
    assert verdict.value > 0.9


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_too_high_is_named_after_ten_skipped_steps(fused: bool) -> None:
    network = mlp()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.9)
    with hookscope.watch(network, optimizer, every=5, on_line=lambda _: None) as watch:
        for inputs, labels in batches(40):
            loss = F.cross_entropy(network(inputs), labels)
            scaler.scale(1e3 * loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.step(loss)
    skipped = [step.step for step in watch.log.steps if step.skipped]
    assert skipped[:10] == [*range(1, 11)]
    verdict = watch.verdicts[0]
    assert (verdict.rule, verdict.step, verdict.value) == ("skipped-steps", 10, 10.0)
    assert {verdict.rule for verdict in watch.verdicts} == {"skipped-steps"}


def test_a_loss_of_nan_is_named_though_the_step_is_skipped_and_one_of_inf_is_not() -> None:
    network = mlp()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hookscope.watch(network, optimizer, every=10, on_line=lambda _: None) as watch:
        for number, (inputs, labels) in enumerate(batches(30), start=1):
            loss = F.cross_entropy(network(inputs), labels) * {15: math.nan, 25: math.inf}.get(number, 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.step(loss)
    assert [step.step for step in watch.log.steps if step.skipped] == [15, 25]
    assert [(verdict.rule, verdict.step) for verdict in watch.verdicts if verdict.state == "began"] == [
        ("non-finite-loss", 15)
    ]
    assert "6 of 6 gradients are not finite. GradScaler skips the step." in watch.verdicts[0].message


class Part(nn.Module):
    """A function as a module, whose output is watched."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, inputs: Tensor) -> Tensor:
        return self.compute(inputs)


def test_an_activation_whose_square_overflows_is_named() -> None:
    torch.manual_seed(0)
    bounded = [
        nn.Linear(16, 8),
        Part(lambda inputs: 1e20 * inputs),
        Part(lambda inputs: inputs / 1e20),
        nn.Linear(8, 4),
    ]
    verdict = began(train(nn.Sequential(*bounded), 10), "overflowing-activation")
    assert (verdict.step, verdict.where, verdict.limit) == (10, "1", 1.8e19)
    assert verdict.value is not None
    assert 1.8e19 < verdict.value < 1e22


@pytest.mark.parametrize("size", [20_000.0, 40_000.0])
def test_values_near_the_end_of_float16_are_named_where_that_is_what_is_computed(size: float) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(16, 8), nn.Linear(8, 4)
    in_half = [Part(lambda inputs: size * inputs.sign().half()), Part(lambda inputs: inputs.float() / size)]
    watch = train(nn.Sequential(first, Part(lambda inputs: 1e5 * inputs), *in_half, last), 10)
    if size < 65504 / 2:
        assert "fp16-headroom" not in {verdict.rule for verdict in watch.verdicts}
        return
    verdict = began(watch, "fp16-headroom")
    assert (verdict.where, verdict.limit) == ("2", 0.5)
    assert verdict.value == pytest.approx(40_000 / 65504, rel=1e-3)


def test_clipped_gradients_of_a_large_loss_are_not_called_rounding() -> None:
    network = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    with hookscope.watch(network, optimizer, every=1, on_line=lambda _: None) as watch:
        for _ in range(3):
            loss = 1e8 * network(torch.ones(1, 1)).sum().square()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
    assert not watch.verdicts


@pytest.mark.parametrize("constant", [False, True])
def test_a_loss_that_is_constant_by_construction_is_named_and_one_that_has_converged_is_not(constant: bool) -> None:
    network = mlp()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    with hookscope.watch(network, optimizer, every=10, on_line=lambda _: None) as watch:
        for number, (inputs, labels) in enumerate(batches(60), start=1):
            output = network(inputs).softmax(1)
            loss = output.sum() if constant else 100 + F.cross_entropy(output, labels) * (1e-9 if number > 20 else 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
    verdicts = [(verdict.rule, verdict.step) for verdict in watch.verdicts]
    assert verdicts == ([("zero-gradient", 10)] if constant else [])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_gradients_of_far_different_sizes_are_named_where_one_learning_rate_serves_them(kind: Any) -> None:
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(16, 16), nn.ReLU())]
    network = nn.Sequential(*layers, nn.Linear(16, 4))
    with torch.no_grad():  # the same function, while ‖g‖/‖w‖ changes by the square of the factor
        network[2].weight.mul_(40)
        network[2].bias.mul_(40)
        network[4].weight.div_(40)
    watch = train(network, 10, optimizer=kind(network.parameters(), lr=1e-9))
    if kind is torch.optim.AdamW:
        assert watch.verdicts == ()
        return
    verdict = began(watch, "gradient-imbalance")
    assert (verdict.step, verdict.where, verdict.limit) == (10, "(model)", 1e6)
    assert "'2.weight'" in verdict.message
