"""The last line about a watched script: no all-clear over what was not looked at."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import hookscope
from hookscope.commands.watch.closing import Watched, closing_line
from hookscope.commands.watch.describe import answer
from hookscope.results.training import TrainingFinding, TrainingRecord, TrainingStep, WatchedLayer, WatchedStep
from tests.commands.watch.conftest import Forked
from tests.commands.watch.test_script import said


def step(number: int, *, loss: float | None = 1.0, norm: float | None = 1.0) -> TrainingStep:
    return TrainingStep(number, loss, norm, None, (), ())


def verdict(number: int, rule: str, state: str = "began") -> TrainingFinding:
    return TrainingFinding(rule, "fail", "", "", step=number, value=None, limit=None, state=state)  # type: ignore[arg-type]


LAYER = WatchedLayer("0", "Linear", 0.0, 1.0, -1.0, 1.0, 0.0, 0.0, None, 0)


def test_findings_are_counted_and_the_first_is_named() -> None:
    watched = Watched()
    for number in range(1, 101):
        watched.add(step(number))
    watched.add(WatchedStep(100, "every", (), (LAYER,)))
    for case in (
        verdict(77, "non-finite-loss"),
        verdict(78, "dead-layer"),
        verdict(90, "dead-layer", "ended"),
    ):
        watched.add(case)
    line = closing_line(watched, folder=None, started=0)
    assert line == (
        "2 problems in 100 steps (1 measured in full); first at step 77: non-finite-loss. For a page: --out DIR."
    )
    assert closing_line(watched, folder="run 1", started=0).endswith(" As a page: hookscope report 'run 1'")


@pytest.mark.parametrize(
    ("loss", "norm", "layers", "expected"),
    [
        (None, 1.0, (LAYER,), " Not judged: the loss."),
        (1.0, None, (LAYER,), " Not judged: gradients and whether the loss falls."),
        (1.0, 1.0, (), " Not judged: activations and whether the loss falls."),
        (None, None, (), " Not judged: the loss, gradients and activations."),
    ],
)
def test_what_was_never_seen_is_said(
    loss: float | None, norm: float | None, layers: tuple[WatchedLayer, ...], expected: str
) -> None:
    watched = Watched()
    watched.add(step(1, loss=loss, norm=norm))
    watched.add(WatchedStep(1, "every", (), layers))
    line = closing_line(watched, folder=None, started=0)
    assert line == f"No problems in 1 step (1 measured in full).{expected} For a page: --out DIR."


def test_a_network_that_is_not_seen_whole_is_not_cleared() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8)
    seen = Watched()
    with hookscope.watch(layer, torch.optim.SGD(layer.parameters()), on_line=lambda _: None) as watch:
        pass
    records: list[TrainingRecord] = [*watch.log.starts, step(1), WatchedStep(1, "every", (), (LAYER,))]
    for record in records:
        seen.add(record)
    line = closing_line(seen, folder="a", started=0)
    assert line == (
        "No problems in what was seen of 1 step (1 measured in full). Not judged: whether the loss falls. As a page: "
        "hookscope report a"
    )
    log = replace(watch.log, steps=(step(1),))
    assert answer(log) == [
        "No problems in what was seen of 1 step.",
        "None was measured in full, so activations, weights and updates were not judged: try --every 1.",
        "Not judged: whether the loss falls.",
        *watch.notes,
    ]


def test_without_a_step_nothing_is_cleared() -> None:
    assert closing_line(Watched(), folder="runs/a", started=0) == "No step was watched."


QUIET = """
    import sys
    import torch
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for step in range(40):
        network(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
UNMEASURED = "None was measured in full, so activations, weights and updates were not judged: try --every 4."
LOSS = "Not judged: whether the loss falls."


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--every", "10", "--out", "run"],
            f"No problems in 40 steps (4 measured in full). {LOSS} As a page: hookscope report run",
        ),
        ([], f"No problems in 40 steps. {UNMEASURED} {LOSS} For a page: --out DIR."),
    ],
)
def test_a_script_ends_with_one_line(tmp_path: Path, forked: Forked, options: list[str], expected: str) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(QUIET))
    done = forked("-m", "hookscope", "watch", "train.py", *options)
    assert (done.returncode, done.stdout) == (0, "")
    assert said(done) == ["watching Linear (SGD, lr 0.01), from step 1 on, loss at train.py:8", expected]


OUTSIDE = """
    import torch
    torch.manual_seed(0)
    seen, unseen = torch.nn.Linear(4, 4), torch.nn.Bilinear(4, 4, 2)
    optimizer = torch.optim.SGD([*seen.parameters(), *unseen.parameters()], lr=0.01)
    for step in range(4):
        hidden = seen(torch.ones(8, 4))
        torch.nn.functional.bilinear(hidden, hidden, unseen.weight, unseen.bias).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.exhaustive
def test_a_network_whose_forward_pass_is_not_seen_is_not_cleared(tmp_path: Path, forked: Forked) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(OUTSIDE))
    *_, line, last = said(forked("-m", "hookscope", "watch", "train.py", "--every", "4"))
    assert line.startswith("No forward pass of Bilinear was seen at step 4")
    assert last.startswith("No problems in what was seen of 4 steps (1 measured in full). Not judged: whether the loss")


@pytest.mark.exhaustive
def test_a_failure_while_a_training_is_found_is_printed(tmp_path: Path, forked: Forked) -> None:
    broken = "from hookscope.commands.watch.watch import Watch\n    del Watch.frozen_in_optimizers\n    torch.manual"
    (tmp_path / "train.py").write_text(textwrap.dedent(QUIET.replace("torch.manual", broken)))
    done = forked("-m", "hookscope", "watch", "train.py")
    assert done.returncode == 0
    [line] = said(done)
    assert line.startswith("Watching ends, because hookscope failed: AttributeError")
