"""One file of a training holds other tensors, another dtype, or an optimiser's state that was cleared: it is named."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookscope
from hookscope.commands.history.describe import headline
from hookscope.results.history import History

Content = dict[str, Any]

AT = 4
OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    "SGD without momentum": lambda parameters: torch.optim.SGD(parameters, 0.05),
}


@cache
def training(optimiser: str, *, restarts: bool = False) -> tuple[Content, ...]:
    """Train for seven epochs, and return what each saves; with a new optimiser just before the fourth is saved."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    steps = OPTIMISERS[optimiser](net.parameters())
    files = []
    for epoch in range(1, 8):
        for _ in range(3):
            steps.zero_grad()
            nn.functional.cross_entropy(net(torch.randn(16, 8)), torch.randint(3, (16,))).backward()
            steps.step()
        if restarts and epoch == AT:
            steps = OPTIMISERS[optimiser](net.parameters())
        saved = {"epoch": epoch, "model": net.state_dict(), "optimizer": steps.state_dict()}
        files.append(copy.deepcopy(saved))
    return tuple(files)


def followed(
    folder: Path, files: tuple[Content, ...], change: Callable[[Content], None], *, on: bool = False
) -> History:
    """Follow files of which the fourth, or all from it on, were changed."""
    for content in copy.deepcopy(files):
        if content["epoch"] == AT or (on and content["epoch"] > AT):
            change(content)
        torch.save(content, folder / f"epoch_{content['epoch']}.pt")
    return hookscope.history(str(folder))


def found(history: History) -> list[tuple[str, str, str, tuple[str, ...]]]:
    return [
        (verdict.rule, verdict.level, history.files[verdict.first].label, verdict.places)
        for verdict in history.verdicts
    ]


def _nothing(_: Content) -> None:
    return


def _emptied(content: Content) -> None:
    content["optimizer"]["state"] = {}


def _zeroed(content: Content) -> None:
    for state in content["optimizer"]["state"].values():
        for name, value in state.items():
            if name != "step":
                value.zero_()


def _left_out(content: Content) -> None:
    del content["optimizer"]


CLEARED = {
    "emptied": (_emptied, "was cleared in epoch_4.pt: it is empty; in epoch_3.pt {} tensors held other values."),
    "zeroed": (_zeroed, "was cleared in epoch_4.pt: only zeros are left; in epoch_3.pt {} tensors held other values."),
    "left out": (_left_out, "is in epoch_3.pt and not in epoch_4.pt."),
}


@pytest.mark.parametrize(
    ("optimiser", "count", "fault"), [("SGD", 4, "emptied"), ("AdamW", 8, "zeroed"), ("SGD", 4, "left out")]
)
def test_the_file_in_which_an_optimisers_state_was_cleared_is_named(
    tmp_path: Path, optimiser: str, count: int, fault: str
) -> None:
    change, words = CLEARED[fault]
    history = followed(tmp_path, training(optimiser), change)
    assert found(history) == [("optimizer-reset", "warn", "epoch_4.pt", ("optimizer",))]
    message = f"The state of 'optimizer' {words.format(count)}"
    assert history.verdicts[0].message == message
    assert headline(history) == message


def test_a_training_that_went_on_with_a_new_optimiser_is_named_once(tmp_path: Path) -> None:
    history = followed(tmp_path, training("AdamW", restarts=True), _nothing)
    assert found(history) == [("optimizer-reset", "warn", "epoch_4.pt", ("optimizer",))]
    assert "epoch_5.pt to" not in " ".join(str(history).split())


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_training_without_a_fault_has_no_verdict(tmp_path: Path, optimiser: str) -> None:
    history = followed(tmp_path, training(optimiser), _nothing)
    assert (found(history), history.warnings, history.exit_code) == ([], (), 0)


def _missing(content: Content) -> None:
    del content["model"]["2.bias"]


def _reshaped(content: Content) -> None:
    content["model"]["2.weight"] = content["model"]["2.weight"].reshape(4, 9)


def _more(content: Content) -> None:
    content["model"]["4.weight"] = torch.arange(9.0).reshape(3, 3)


def _half(content: Content) -> None:
    content["model"] = {name: value.half() for name, value in content["model"].items()}


def _one_half(content: Content) -> None:
    content["model"]["2.weight"] = content["model"]["2.weight"].bfloat16()


TENSORS = ("0.weight", "0.bias", "2.weight", "2.bias")
CHANGED: dict[str, tuple[Callable[[Content], None], str, str, tuple[str, ...], str]] = {
    "missing": (_missing, "tensors-change", "fail", ("2.bias",), "epoch_4.pt lacks 1 tensor of epoch_3.pt: '2.bias'."),
    "reshaped": (
        _reshaped,
        "tensors-change",
        "fail",
        ("2.weight",),
        "epoch_4.pt holds 1 tensor in another shape than epoch_3.pt: '2.weight' (4 x 9, before 3 x 12).",
    ),
    "more": (
        _more,
        "tensors-change",
        "warn",
        ("4.weight",),
        "epoch_4.pt holds 1 tensor that is not in epoch_3.pt: '4.weight'.",
    ),
    "float16": (
        _half,
        "dtype-change",
        "warn",
        TENSORS,
        "epoch_4.pt stores 4 tensors in float16, epoch_3.pt in float32: '0.weight', '0.bias', '2.weight' and 1 more.",
    ),
    "one in bfloat16": (
        _one_half,
        "dtype-change",
        "warn",
        ("2.weight",),
        "epoch_4.pt stores 1 tensor in bfloat16, epoch_3.pt in float32: '2.weight'.",
    ),
}


@pytest.mark.parametrize("fault", CHANGED)
def test_tensors_that_differ_in_one_file_are_a_finding_on_that_file(tmp_path: Path, fault: str) -> None:
    change, rule, level, places, message = CHANGED[fault]
    history = followed(tmp_path, training("SGD without momentum"), change)
    assert found(history) == [(rule, level, "epoch_4.pt", places)]
    assert history.verdicts[0].message == message
    assert headline(history) == message
    assert (history.exit_code, history.passed) == ((1, False) if level == "fail" else (0, True))
    assert not history.warnings


@pytest.mark.parametrize("fault", ["missing", "float16"])
def test_tensors_that_differ_from_a_file_on_are_a_warning(tmp_path: Path, fault: str) -> None:
    change, rule, _, places, message = CHANGED[fault]
    history = followed(tmp_path, training("SGD without momentum"), change, on=True)
    assert found(history) == [(rule, "warn", "epoch_4.pt", places)]
    assert (history.verdicts[0].message, history.exit_code) == (message, 0)


def test_the_last_file_may_lack_the_optimiser_and_no_weight(tmp_path: Path) -> None:
    files = training("SGD")[:AT]
    assert found(followed(tmp_path, files, _left_out)) == []
    history = followed(tmp_path, files, _missing)
    assert (found(history), history.exit_code) == ([("tensors-change", "fail", "epoch_4.pt", ("2.bias",))], 1)
