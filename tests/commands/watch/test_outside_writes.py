"""Weights that something other than the optimiser changes between two steps; habits of a training are no fault."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookscope
from hookscope.commands.watch.outside_writes import OutsideChange
from hookscope.commands.watch.rules import outside_changes

STEPS = 60


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def train(
    trained: nn.Sequential,
    *,
    every: int,
    before: Callable[[int], object] = lambda _: None,
    after: Callable[[int], object] = lambda _: None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> hookscope.Watch:
    """Train, calling `before` ahead of the forward pass of each step, and `after` behind the optimiser's step."""
    stepped = optimizer(trained.parameters(), lr=0.05 if optimizer is torch.optim.SGD else 0.01)
    with hookscope.watch(trained, stepped, every=every, on_line=lambda _: None) as watch:
        for step in range(1, STEPS + 1):
            with torch.no_grad():
                before(step)
            labels = torch.randint(0, 4, (64,))
            loss = F.cross_entropy(trained(0.3 * torch.randn(64, 16) + F.one_hot(labels, 16)), labels)
            loss.backward()
            stepped.step()
            with torch.no_grad():
                after(step)
            stepped.zero_grad()
            watch.step(loss)
    return watch


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "zeroed": lambda trained: trained[2].weight.zero_(),
    "zeroed by data": lambda trained: trained[2].weight.data.zero_(),
    "replaced by data": lambda trained: setattr(trained[2].weight, "data", torch.zeros(64, 64)),
    "drawn again": lambda trained: trained[2].reset_parameters(),
    "drawn again by data": lambda trained: trained[2].weight.data.copy_(network(seed=1)[2].weight),
    "loaded": lambda trained: trained[2].load_state_dict(network(seed=1)[2].state_dict()),
    "times ten": lambda trained: trained[2].weight.mul_(10),
}
UNMEASURED = ["zeroed", "drawn again", "loaded"]


def changed(trained: nn.Sequential, change: str, at: int) -> Callable[[int], object]:
    return lambda step: CHANGES[change](trained) if step == at else None


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.sample("zeroed by data", "drawn again")
def test_a_weight_that_is_changed_before_a_measured_step_is_named(change: str) -> None:
    trained = network()
    watch = train(trained, every=10, before=changed(trained, change, 40))
    verdict = next(verdict for verdict in watch.verdicts if verdict.rule == "large-update")
    assert (verdict.step, verdict.where) == (40, "2.weight")
    assert verdict.message.startswith("Something other than the optimizer")
    assert "between steps 39 and 40" in verdict.message
    assert ("set '2.weight' to 0" in verdict.message) == ("zeroed" in change or "replaced" in change)
    assert not any("learning rate" in verdict.message for verdict in watch.verdicts)


def test_no_change_is_said_to_be_a_share_of_a_norm_of_zero() -> None:
    of = partial(OutsideChange, "w", since=7, is_written=True, change=2.0, norm=2.0)
    fresh = [of(is_fresh=True, before=before, now=2.0 - before) for before in (0.0, 2.0)]
    messages = [verdict.message for verdict in outside_changes([*fresh, of(is_fresh=False, before=2.0, now=0.0)], 9)]
    assert [message.partition(" 'w' ")[2] for message in messages] == [
        "between steps 8 and 9, and was 0 where compared (limit 1).",
        "between steps 8 and 9, and is 0 where compared (limit 1).",
        "between steps 8 and 9: it differs from step 7 and is 0 where compared (limit 1).",
    ]


@pytest.mark.parametrize("change", UNMEASURED)
@pytest.mark.sample("zeroed")
def test_a_weight_that_is_written_to_before_any_step_is_named(change: str) -> None:
    trained = network()
    watch = train(trained, every=100, before=changed(trained, change, 35))
    verdict = watch.verdicts[0]
    assert verdict.step == 35
    assert "omething other than the optimizer" in verdict.message
    assert "'2.weight'" in verdict.message
    assert "between steps 34 and 35" in verdict.message
    assert not any("learning rate" in verdict.message for verdict in watch.verdicts)


def test_a_large_update_of_a_weight_that_has_become_small_is_no_fault_of_the_learning_rate() -> None:
    """Nothing counts a write through `.data`; step 36 is measured, because gradients became 0 at step 35."""
    trained = network()
    factors = {35: 0.0, 36: 0.001}
    watch = train(trained, every=100, before=lambda step: trained[2].weight.data.mul_(factors.get(step, 1.0)))
    (verdict,) = (verdict for verdict in watch.verdicts if verdict.rule == "large-update")
    assert (verdict.step, verdict.where) == (36, "2.weight")
    assert "of its value at step 1; what made it small is at fault, not the learning rate." in verdict.message


@pytest.mark.parametrize("at", [10, 40])  # before and after there are steps enough to call a norm a jump
def test_a_large_update_by_a_gradient_that_has_jumped_is_no_fault_of_the_learning_rate(at: int) -> None:
    trained = network()
    factors = [1.0]
    trained[2].weight.register_hook(lambda gradient: factors[-1] * gradient)
    watch = train(trained, every=10, before=lambda step: factors.append(10_000.0 if step == at else 1.0))
    verdict = next(verdict for verdict in watch.verdicts if verdict.rule == "large-update")
    assert (verdict.step, verdict.where) == (at, "2.weight")
    assert verdict.message.endswith("(limit 1): its gradient has jumped.")


def _clip(weights: list[Tensor], bound: float) -> None:
    for weight in weights:
        weight.clamp_(-bound, bound)


def _swap(weights: list[Tensor], averaged: list[Tensor]) -> None:
    """Put averaged weights in their place, as for a validation, and the weights back."""
    kept = [weight.clone() for weight in weights]
    for source in (averaged, kept):
        for weight, other in zip(weights, source, strict=True):
            weight.copy_(other)


HABITS: dict[str, Callable[[list[Tensor], list[Tensor], int], object]] = {
    "clipped": lambda weights, *_: _clip(weights, 0.02),
    "clipped by data": lambda weights, *_: _clip([weight.data for weight in weights], 0.02),
    "of norm 1": lambda weights, *_: [weight.div_(weight.norm(dim=-1, keepdim=True)) for weight in weights],
    "of a norm at most": lambda weights, *_: [weight.renorm_(2, 0, 0.1) for weight in weights if weight.dim() > 1],
    "averaged every 5 steps": lambda weights, slow, step: (
        step % 5 or [(fast.lerp_(each, 0.5), each.copy_(fast)) for fast, each in zip(weights, slow, strict=True)]
    ),
    "swapped every 7 steps": lambda weights, averaged, step: step % 7 or _swap(weights, averaged),
    "pruned": lambda weights, *_: [weight.mul_(weight.abs() > 0.02) for weight in weights],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_a_training_are_silent(habit: str) -> None:
    every, optimizer = (1, torch.optim.SGD) if "by data" in habit or "every" in habit else (10, torch.optim.Adam)
    trained = network()
    weights, others = list(trained.parameters()), list(copy.deepcopy(trained).parameters())
    watch = train(trained, every=every, after=lambda step: HABITS[habit](weights, others, step), optimizer=optimizer)
    assert [verdict for verdict in watch.verdicts if verdict.rule == "large-update"] == []


def test_an_edit_of_the_watch_and_a_second_optimizer_are_no_outsiders() -> None:
    trained = network()
    first, second = (torch.optim.SGD(trained.parameters(), lr=0.05) for _ in range(2))
    with hookscope.watch(trained, [first, second], every=10, on_line=lambda _: None) as watch:
        for step in range(1, 31):
            if step == 20:
                watch.edits = ["param:2.weight:value:scale(0)"]
            if step == 25:
                watch.edits = []
            labels = torch.randint(0, 4, (64,))
            loss = F.cross_entropy(trained(torch.randn(64, 16)), labels)
            loss.backward()
            first.step()
            second.step()
            trained.zero_grad()
            watch.step(loss)
    assert not any("other than the optimizer" in verdict.message for verdict in watch.verdicts)
