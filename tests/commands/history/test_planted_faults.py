"""A fault in the files from the seventh on: that file is named, and files without a fault have no verdict."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hookscope
from tests.commands.history.runs import FILES, NETWORKS, Fault, State, write_run


def _dead(name: str) -> tuple[Fault, str, str]:
    def fault(state: State) -> None:
        state[name][[1, 4, 9]] = 0

    return fault, "dead-filters-appear", name


def _exploded(name: str) -> tuple[Fault, str, str]:
    def fault(state: State) -> None:
        state[name] *= 50

    return fault, "norm-jump", name


def _nan(name: str) -> tuple[Fault, str, str]:
    def fault(state: State) -> None:
        state[name].reshape(-1)[3] = torch.nan

    return fault, "non-finite-parameter", name


def _swapped(first: str, second: str) -> tuple[Fault, str, str]:
    def fault(state: State) -> None:
        state[first], state[second] = state[second], state[first]

    return fault, "weights-traded", first


def _replaced(name: str) -> tuple[Fault, str, str]:
    change: dict[str, torch.Tensor] = {}

    def fault(state: State) -> None:
        change.setdefault(name, torch.randn(state[name].shape) * state[name].std() - state[name])
        state[name] += change[name]

    return fault, "weight-jump", name


def _dead_scale(norm: str) -> tuple[Fault, str, str]:
    def fault(state: State) -> None:
        state[f"{norm}.weight"][[1, 4, 9]] = 0

    return fault, "dead-filters-appear", f"{norm}.weight"


def _exploded_vector(name: str) -> tuple[Fault, str, str]:
    def fault(state: State) -> None:
        state[name][::2] = -100

    return fault, "norm-jump", name


def _replaced_scale(norm: str) -> tuple[Fault, str, str]:
    def fault(state: State) -> None:
        state[f"{norm}.weight"] *= torch.tensor([1.0, -1.0]).repeat(len(state[f"{norm}.weight"]) // 2)

    return fault, "weight-jump", f"{norm}.weight"


def _stopped(name: str) -> tuple[Fault, str, str]:
    held: dict[str, torch.Tensor] = {}

    def fault(state: State) -> None:
        state[name] = held.setdefault(name, state[name].clone())

    return fault, "weight-stops", name


def _reset(norm: str) -> tuple[Fault, str, str]:
    def fault(state: State) -> None:
        state[f"{norm}.running_mean"].zero_()
        state[f"{norm}.running_var"].fill_(1)
        state[f"{norm}.num_batches_tracked"].zero_()

    return fault, "statistics-reset", norm


FAULTS: dict[str, Callable[[str, tuple[str, str], str], tuple[Fault, str, str]]] = {
    "dead filters": lambda weight, _pair, _norm: _dead(weight),
    "exploded norm": lambda weight, _pair, _norm: _exploded(weight),
    "NaN": lambda weight, _pair, _norm: _nan(weight),
    "swapped weights": lambda _weight, pair, _norm: _swapped(*pair),
    "replaced weights": lambda weight, _pair, _norm: _replaced(weight),
    "statistics reset": lambda _weight, _pair, norm: _reset(norm),
    "dead channels of a scale": lambda _weight, _pair, norm: _dead_scale(norm),
    "biases far below zero": lambda _weight, _pair, norm: _exploded_vector(f"{norm}.bias"),
    "replaced scale": lambda _weight, _pair, norm: _replaced_scale(norm),
}
# Each fault once in the middle, and one where little is before it, one where nothing is after it.
PLANTED = [
    *(("dead filters", "residual", 7), ("exploded norm", "tokens", 7), ("NaN", "perceptron", 7)),
    *(("swapped weights", "residual", 7), ("replaced weights", "convolutions", 7), ("statistics reset", "tokens", 7)),
    *(("dead channels of a scale", "residual", 7), ("biases far below zero", "convolutions", 7)),
    ("replaced scale", "perceptron", 7),
    *(("swapped weights", "residual", 2), ("replaced weights", "residual", 12)),
]
RULES = ("dead filters", "swapped weights", "replaced weights")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("fault", "network", "at"), PLANTED)
def test_the_file_of_a_planted_fault_is_named(network: str, fault: str, at: int, tmp_path: Path) -> None:
    plant, rule, place = FAULTS[fault](*NETWORKS[network][1:])
    history = hookscope.history(write_run(tmp_path, network, fault=plant, at=range(at, FILES + 1)))
    actual = [verdict for verdict in history.verdicts if verdict.rule == rule]
    assert [(history.files[each.first].label, each.before) for each in actual] == [(f"epoch_{at}.pt", at - 2)]
    assert place in actual[0].places
    others = {verdict.rule: history.files[verdict.first].label for verdict in history.verdicts}
    assert set(others.values()) == {f"epoch_{at}.pt"}, others
    assert f"epoch_{at}.pt" in str(history).partition("Files are in the order")[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", RULES)
def test_a_fault_in_a_single_file_begins_and_ends_there(fault: str, tmp_path: Path) -> None:
    plant, rule, _ = FAULTS[fault](*NETWORKS["convolutions"][1:])
    history = hookscope.history(write_run(tmp_path, "convolutions", fault=plant, at=[7]))
    files = [verdict for verdict in history.verdicts if verdict.rule == rule]
    assert files[0].first == 6
    assert not files[0].lasts
    assert {verdict.first for verdict in history.verdicts} <= {6, 7}  # it is undone in the eighth


@pytest.mark.exhaustive
def test_the_file_since_which_a_weight_no_longer_moves_is_named(tmp_path: Path) -> None:
    network = "tokens"
    plant, rule, place = _stopped(NETWORKS[network][1])
    history = hookscope.history(write_run(tmp_path, network, fault=plant, at=range(6, FILES + 1)))
    (actual,) = history.verdicts
    assert (actual.rule, history.files[actual.first].label, actual.places) == (rule, "epoch_7.pt", (place,))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("network", "optimiser"),
    [
        *(("convolutions", "fast sgd"), ("residual", "sgd"), ("perceptron", "adamw, decaying")),
        ("tokens", "adam"),
    ],
)
def test_files_of_a_healthy_run_have_no_verdict(network: str, optimiser: str, tmp_path: Path) -> None:
    history = hookscope.history(write_run(tmp_path, network, optimiser=optimiser))
    assert not history.verdicts
    assert len(history.read) == FILES
    assert str(history).startswith(f"No problems in any of {FILES} files.")
    assert "note:" in str(history)  # a long path stands on the next line
