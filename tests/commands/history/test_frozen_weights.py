"""A weight that is frozen in two files and moved between them is named, with what may have moved it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookscope
from hookscope.commands.history.describe import headline
from hookscope.results.history import History

FROZEN_AT = 3
Make = Callable[[nn.Module], torch.optim.Optimizer]
Saved = Callable[[nn.Module, torch.optim.Optimizer], Any]


def sgd(**settings: float) -> Make:
    return lambda network: torch.optim.SGD(network.parameters(), 0.05, **settings)


def with_flags(network: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return {"model": network.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}


def network_of_three() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def freeze_first(network: nn.Module) -> None:
    network.get_submodule("0").requires_grad_(False)


def nothing(_: nn.Module) -> None:
    return


def trained(
    folder: Path,
    make: Make,
    *,
    saved: Saved = with_flags,
    set_to_none: bool = False,
    freeze: Callable[[nn.Module], None] = freeze_first,
    after: Callable[[nn.Module], None] = nothing,
    network: nn.Module | None = None,
) -> History:
    """Train for five epochs, frozen after the third is saved or as `freeze` does; `after` runs at the end of each."""
    network = network_of_three() if network is None else network
    optimizer = make(network)
    for epoch in range(1, 6):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            nn.functional.cross_entropy(network(torch.randn(16, 8)), torch.randint(3, (16,))).backward()
            optimizer.step()
        after(network)
        if epoch == FROZEN_AT:
            freeze(network)
        torch.save(saved(network, optimizer), folder / f"e{epoch}.pt")
    return hookscope.history(str(folder))


def found(history: History) -> list[tuple[str, tuple[str, ...]]]:
    return [(verdict.rule, verdict.places) for verdict in history.verdicts if verdict.rule == "frozen-weight-moves"]


MOVED = "'0.weight' is frozen in e3.pt and e4.pt, yet moved between them: "
WRITTEN = "such as an average (EMA) or a merged adapter."
REMEDY = "; set .grad to None, or take it out of the optimizer."
UNKNOWN = (
    "either its .grad is 0, not None, so that an optimizer with momentum or weight decay still moves it, or something "
    f"else wrote to it, {WRITTEN}"
)
CAUSES: dict[str, tuple[Make, str]] = {
    "momentum and decay": (
        sgd(momentum=0.9, weight_decay=0.1),
        "its .grad is probably 0, not None, so the optimizer still moves it, by momentum and weight decay" + REMEDY,
    ),
    "decay": (
        sgd(weight_decay=0.1),
        "its .grad is probably 0, not None, so the optimizer still moves it, by weight decay" + REMEDY,
    ),
    "moments": (
        lambda network: torch.optim.Adam(network.parameters(), 0.01),
        "its .grad is probably 0, not None, so the optimizer still moves it, by momentum" + REMEDY,
    ),
    "groups that differ": (
        lambda network: torch.optim.SGD(
            [
                {"params": [*network.parameters()][:2], "weight_decay": 0.1},
                {"params": [*network.parameters()][2:]},
            ],
            0.05,
            momentum=0.9,
        ),
        UNKNOWN,
    ),
}


@pytest.mark.sample("momentum and decay", "groups that differ")
@pytest.mark.parametrize("cause", CAUSES)
def test_frozen_in_mid_training_with_a_gradient_of_zero(tmp_path: Path, cause: str) -> None:
    make, words = CAUSES[cause]
    history = trained(tmp_path, make)
    assert found(history) == [("frozen-weight-moves", ("0.weight", "0.bias"))]
    (verdict,) = history.verdicts
    assert (verdict.level, verdict.message) == ("warn", MOVED + words)
    assert (history.files[verdict.first].label, verdict.files, verdict.lasts) == ("e4.pt", (3, 4), True)
    assert headline(history) == "0.weight, 0.bias are frozen, yet move from e4.pt on."
    assert history.exit_code == 0


def the_module(network: nn.Module, _: torch.optim.Optimizer) -> Any:
    return network


def the_module_and_optimizer(network: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return {"model": network, "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("saved", [the_module, the_module_and_optimizer])
def test_pickled_modules_store_the_flag(tmp_path: Path, saved: Saved) -> None:
    history = trained(tmp_path, sgd(weight_decay=0.1), saved=saved)
    assert found(history) == [("frozen-weight-moves", ("0.weight", "0.bias"))]
    assert ("by weight decay;" in history.verdicts[0].message) == (saved is the_module_and_optimizer)


def add_to_first(network: nn.Module) -> None:
    first = network.get_parameter("0.weight")
    if not first.requires_grad:
        first.data += 0.01


def test_an_optimizer_without_it_did_not_move_it(tmp_path: Path) -> None:
    def make(network: nn.Module) -> torch.optim.Optimizer:
        freeze_first(network)
        return torch.optim.SGD(
            [parameter for parameter in network.parameters() if parameter.requires_grad], 0.05, momentum=0.9
        )

    history = trained(tmp_path, make, after=add_to_first)
    assert found(history) == [("frozen-weight-moves", ("0.weight",))]
    assert history.verdicts[0].message == (
        "'0.weight' is frozen in e1.pt and e2.pt, yet moved between them: the optimizer in the file does not have "
        f"it, so something else wrote to it, {WRITTEN}"
    )


def test_an_optimizer_without_momentum_moves_nothing_by_a_gradient_of_zero(tmp_path: Path) -> None:
    history = trained(tmp_path, sgd(), after=add_to_first)
    assert found(history) == [("frozen-weight-moves", ("0.weight",))]
    assert history.verdicts[0].message == MOVED + (
        "either its .grad still holds the gradient of an earlier step, with which the optimizer still moves it, or "
        f"something else wrote to it, {WRITTEN}"
    )


def without_flags(network: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return {"model": network.state_dict(), "optimizer": optimizer.state_dict()}


def freeze_all(network: nn.Module) -> None:
    network.requires_grad_(False)


def average(network: nn.Module, _: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(network).requires_grad_(False).state_dict(keep_vars=True)


HEALTHY: dict[str, dict[str, Any]] = {
    "frozen with .grad None": {"set_to_none": True},
    "no flags": {"saved": without_flags},
    "all frozen": {"saved": average},
    "not frozen": {"freeze": nothing},
}


@pytest.mark.parametrize("case", HEALTHY)
def test_healthy_trainings_have_no_verdict(tmp_path: Path, case: str) -> None:
    history = trained(tmp_path, sgd(momentum=0.9, weight_decay=0.1), **HEALTHY[case])
    assert found(history) == []


def test_a_weight_that_is_trained_again_may_move(tmp_path: Path) -> None:
    def toggled(network: nn.Module) -> None:
        first = network.get_submodule("0")
        first.requires_grad_(not first.get_parameter("weight").requires_grad)

    history = trained(tmp_path, sgd(momentum=0.9), freeze=nothing, after=toggled)
    assert found(history) == []


class Followed(nn.Module):
    """A network, and a copy that follows it as a momentum encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.query = network_of_three()
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x)

    def follow(self) -> None:
        for mine, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
            mine.data.lerp_(other.data, 0.1)


def follow(network: nn.Module) -> None:
    assert isinstance(network, Followed)
    network.follow()


def both_modules(network: nn.Module, _: torch.optim.Optimizer) -> Any:
    return nn.ModuleDict({"query": network.get_submodule("query"), "key": network.get_submodule("key")})


@pytest.mark.parametrize("saved", [with_flags, both_modules])
def test_a_copy_that_follows_a_trained_weight_may_move(tmp_path: Path, saved: Saved) -> None:
    history = trained(tmp_path, sgd(momentum=0.9), saved=saved, freeze=nothing, after=follow, network=Followed())
    moved = [row.drift for row in history["key.0.weight"][1:]]
    assert all(moved)
    assert found(history) == []


class Tied(nn.Module):
    """Two layers with one weight, which one of them has as a frozen parameter of its own over the same memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.second.weight = nn.Parameter(self.first.weight.data, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).relu()))


def test_a_frozen_name_of_a_trained_weight_moves_with_it(tmp_path: Path) -> None:
    history = trained(tmp_path, sgd(momentum=0.9), freeze=nothing, network=Tied())
    assert found(history) == []


def test_a_tied_weight_is_named_once(tmp_path: Path) -> None:
    network = Tied()
    network.second.weight = network.first.weight

    def freeze(network: nn.Module) -> None:
        network.get_parameter("first.weight").requires_grad_(False)

    history = trained(tmp_path, sgd(weight_decay=0.1), freeze=freeze, network=network)
    assert found(history) == [("frozen-weight-moves", ("first.weight",))]
    assert "by weight decay" in history.verdicts[0].message


def test_weights_that_rest_sooner_than_others_are_in_one_verdict(tmp_path: Path) -> None:
    def freeze(network: nn.Module) -> None:
        network.get_submodule("0").requires_grad_(False)
        network.get_submodule("3").requires_grad_(False)

    history = trained(tmp_path, sgd(momentum=0.01), freeze=freeze, after=add_to_first)
    (verdict,) = (verdict for verdict in history.verdicts if verdict.rule == "frozen-weight-moves")
    assert (verdict.places, verdict.files, verdict.lasts) == (("0.weight", "3.weight", "3.bias"), (3, 4), True)
    drifts = {name: [row.drift for row in history[name][4:]] for name in verdict.places}
    assert all(drift > 0.001 for drift in drifts["0.weight"] if drift is not None)
    assert all(drift < 1e-7 for drift in drifts["3.weight"] if drift is not None)
