"""How a watch begins, ends, writes and fails: files that survive, refusals in one line, and no error in a training."""

import copy
import errno
import math
import os
import pickle
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.commands.watch import ring, training_log
from hookscope.commands.watch.describe import answer
from hookscope.commands.watch.discovery import found_text
from hookscope.commands.watch.ring import Ring
from hookscope.commands.watch.training_log import read_training
from hookscope.results.training import TrainingStep
from tests.commands.watch.conftest import Forked


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return network, torch.optim.SGD(network.parameters(), lr=0.1)


def turns(network: nn.Module, optimizer: torch.optim.Optimizer, watch: hookscope.Watch, count: int) -> None:
    for _ in range(count):
        loss = network(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)


def test_a_training_is_written_read_and_resumed(tmp_path: Path) -> None:
    network, optimizer = small()
    with hookscope.watch(network, optimizer, every=4, out=tmp_path / "run") as watch:
        turns(network, optimizer, watch, 9)
    assert repr(watch) == "<Watch of Sequential, closed: 0 open verdicts>"
    with hookscope.watch(network, optimizer, every=4, out=tmp_path / "run", resume=True) as second:
        turns(network, optimizer, second, 5)
    log = read_training(tmp_path / "run")
    assert [start.step for start in log.starts] == [1, 10]
    assert log.starts[0].networks == ("Sequential",)
    assert log.starts[0].optimizers == ("SGD, lr 0.1",)
    assert [step.step for step in log.steps] == [*range(1, 15)]
    assert [watched_step.step for watched_step in log.watched] == [4, 8, 12]
    assert [end.reason for end in log.ends] == ["closed", "closed"]
    assert log.steps[13].loss == second.log.steps[-1].loss
    written, kept = log.watched[-1], second.log.watched[-1]
    assert [parameter.name for parameter in written.parameters] == [parameter.name for parameter in kept.parameters]
    for ours, theirs in zip(written.parameters, kept.parameters, strict=True):
        assert ours.update_norm == pytest.approx(theirs.update_norm, rel=1e-6)


@pytest.mark.exhaustive
def test_an_exception_in_the_loop_closes_the_watch_and_goes_on(tmp_path: Path) -> None:
    network, optimizer = small()
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        hookscope.watch(network, optimizer, out=tmp_path) as watch,
    ):
        turns(network, optimizer, watch, 2)
        _ = 1 / 0
    log = read_training(tmp_path)
    assert len(log.steps) == 2
    assert log.ends[0].reason == "ZeroDivisionError: division by zero"
    assert not optimizer._optimizer_step_pre_hooks


SCRIPT = """
    import os, sys, signal, torch, hookscope
    from torch import nn
    network = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    watch = hookscope.watch(network, optimizer, every=2, out=sys.argv[1])
    for number in range(6):
        loss = network(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    ENDING
"""


@pytest.mark.exhaustive
def test_a_full_disk_is_one_line_and_the_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, optimizer = small()
    lines: list[str] = []
    watch = hookscope.watch(network, optimizer, every=2, out=tmp_path, on_line=lines.append)
    turns(network, optimizer, watch, 3)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(training_log.os, "write", full)
    turns(network, optimizer, watch, 3)
    watch.close()
    monkeypatch.undo()
    assert len(lines) == 1
    assert "no space left on device" in lines[0]
    assert len(watch.log.steps) == 6
    assert [step.step for step in read_training(tmp_path).steps] == [1, 2, 3]


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform == "win32", reason="has no such locks")
def test_two_trainings_into_one_folder_are_refused(tmp_path: Path) -> None:
    network, optimizer = small()
    with hookscope.watch(network, optimizer, out=tmp_path):
        for resume in (False, True):
            with pytest.raises(hookscope.HookscopeError, match="another training is being watched into it"):
                hookscope.watch(network, optimizer, out=tmp_path, resume=resume)
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    with pytest.raises(hookscope.HookscopeError, match="holds a training already"):
        hookscope.watch(network, optimizer, out=tmp_path)


class Sharded(nn.Module):
    pass


Sharded.__name__ = "FullyShardedDataParallel"

REFUSED: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "DataParallel": (lambda network, _: ((nn.DataParallel(network), _), {}), "nn.DataParallel, which copies"),
    "sharded": (lambda network, _: ((nn.Sequential(network, Sharded()), _), {}), "is sharded"),
    "lazy": (lambda network, _: ((nn.Sequential(network, nn.LazyLinear(3)), _), {}), "run the network once"),
    "no network": (lambda _, optimizer: ((3, optimizer), {}), "model=int is not a network"),
    "no networks": (lambda _, optimizer: (([], optimizer), {}), "is not a network"),
    "a name twice": (
        lambda network, optimizer: (({"a": nn.Sequential(network), "a.0": nn.Sequential(nn.ReLU())}, optimizer), {}),
        "'a.0.0' is a name in two",
    ),
    "no optimiser": (lambda network, _: ((network, network), {}), "is not a torch.optim.Optimizer"),
    "another's optimiser": (lambda _, optimizer: ((nn.Linear(1, 1), optimizer), {}), "belongs to the network"),
    "every 0": (lambda *both: (both, {"every": 0}), "`every` 0 is not possible: give 1 or more."),
    "a position": (lambda *both: (both, {"layer": "conv@2"}), "not known before the training starts"),
    "no such layer": (lambda *both: (both, {"layer": "conv"}), "No layer matches"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_watched_is_refused_in_one_line(case: Any, tmp_path: Path) -> None:
    build, words = case
    args, options = build(*small())
    with pytest.raises(hookscope.HookscopeError) as raised:
        hookscope.watch(*args, out=tmp_path / "run", **options)
    assert words in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_an_error_of_our_own_is_one_line_and_not_the_trainings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network, optimizer = small()
    lines: list[str] = []
    watch = hookscope.watch(network, optimizer, every=1, out=tmp_path, on_line=lines.append)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    for method, place in (
        ("read_gradients", "hookscope.commands.watch.watch"),
        ("watched_layer", "hookscope.commands.watch.watch"),
    ):
        turns(network, optimizer, watch, 2)
        monkeypatch.setattr(f"{place}.{method}", broken)
        turns(network, optimizer, watch, 2)
        monkeypatch.undo()
        assert len(lines) == 1
        assert "RuntimeError: a bug" in lines[0]
        assert not optimizer._optimizer_step_pre_hooks
        assert read_training(tmp_path).ends[-1].reason == "RuntimeError: a bug"
        lines.clear()
        watch.close()
        watch = hookscope.watch(network, optimizer, every=1, out=tmp_path, resume=True, on_line=lines.append)
    watch.close()


@pytest.mark.exhaustive
def test_a_loss_that_is_no_number_is_one_line() -> None:
    network, optimizer = small()
    lines: list[str] = []
    with hookscope.watch(network, optimizer, on_line=lines.append) as watch:
        losses = (torch.ones(3), torch.tensor(1 + 1j), {"a": 1}, None, 2.5, torch.tensor([0.5]), np.float32(0.25))
        for loss in losses:
            optimizer.zero_grad()
            network(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            watch.step(loss)  # type: ignore[arg-type]
    assert [step.loss for step in watch.log.steps] == [None, None, None, None, 2.5, 0.5, 0.25]
    assert len(lines) == 1
    assert "tensor of 3 values" in lines[0]


@pytest.mark.exhaustive
def test_steps_are_counted_without_step_and_with_subclasses_that_step_twice() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    network, _ = small()
    optimizer = Twice(network.parameters(), lr=0.1)
    with hookscope.watch(network, optimizer) as watch:
        for _ in range(3):
            network(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step.step for step in watch.log.steps] == [1, 2, 3]


def test_no_activation_of_a_later_forward_pass_is_taken_for_that_of_a_step_that_began_after_its_own() -> None:
    """Of two trainings one goes on alone: it steps once per iteration, and each of its steps ends the one before."""
    lines: list[str] = []
    (network, optimizer), (other, resting) = small(), small()
    with hookscope.watch([network, other], [optimizer, resting], every=2, on_line=lines.append) as watch:
        for _ in range(6):
            network(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(step.step, step.layers) for step in watch.log.watched] == [(2, ()), (4, ()), (6, ())]
    (line,) = lines
    cause = "because the step before it ended only when an optimizer stepped again"
    assert line.startswith(f"The forward pass of Sequential[0] was over when step 2 began, {cause}: at such steps")


def test_the_forward_pass_of_the_network_whose_turn_comes_later_is_measured() -> None:
    (critic, fast), (generator, slow) = small(), small()
    means = []
    with hookscope.watch([critic, generator], [fast, slow], every=2, on_line=lambda _: None) as watch:
        for turn in (0, 0, 1, 0, 0, 1):
            output = (critic, generator)[turn](torch.randn(8, 4))
            means.append(output.mean().item())
            output.square().mean().backward()
            (fast, slow)[turn].step()
            (fast, slow)[turn].zero_grad()
    measured = {step.step: {row.label: row.mean for row in step.layers} for step in watch.log.watched}
    assert {step: [*rows] for step, rows in measured.items()} == {
        2: [f"Sequential[1].{layer}" for layer in range(3)],
        4: [f"Sequential[1].{layer}" for layer in range(3)],
    }
    assert [rows["Sequential[1].2"] for rows in measured.values()] == pytest.approx([means[2], means[5]], abs=1e-6)


def test_the_settings_of_an_optimiser_are_those_of_its_groups() -> None:
    network, _ = small()
    slow, fast = [{"params": network[at].parameters(), "lr": lr, "weight_decay": 0} for at, lr in ((0, 0.01), (2, 0.1))]
    optimizer = torch.optim.SGD([slow, fast | {"weight_decay": 0.5}], lr=7, momentum=0.9)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.001)  # the first rate of a warm-up is no setting
    with hookscope.watch(network, optimizer, on_line=lambda _: None) as watch:
        (shown,) = watch.log.starts[0].optimizers
    assert shown == "SGD, lr 0.01 to 0.1, momentum 0.9, weight_decay 0 to 0.5"


def test_optimizers_that_are_alike_are_counted() -> None:
    network, optimizer = small()
    alike = [torch.optim.Adam([weight], lr=0.01) for weight in network.parameters()]
    assert found_text([network], [optimizer, *alike]) == "Sequential (SGD, lr 0.1; 4 × Adam, lr 0.01)"


@pytest.mark.exhaustive
def test_networks_and_optimisers_are_copied_and_pickled_without_the_watch() -> None:
    network, optimizer = small()
    watch = hookscope.watch(network, optimizer, every=1, on_line=lambda _: None)
    turns(network, optimizer, watch, 1)  # so that the hooks of the next forward pass are on
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        twin(torch.randn(8, 4))
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in twin.modules())
    assert not copy.deepcopy(optimizer).__dict__.get("_optimizer_step_pre_hooks")
    turns(network, optimizer, watch, 1)
    watch.close()
    assert len(watch.log.watched[-1].layers) == 3


@pytest.mark.parametrize("activation", ["relu", nn.ReLU()])
def test_a_layer_of_torchs_that_calls_its_activation_as_a_function_is_noted(activation: Any) -> None:
    network = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, activation=activation, batch_first=True))
    with hookscope.watch(network, torch.optim.SGD(network.parameters()), on_line=lambda _: None) as watch:
        pass
    note = "Activation functions inside torch's own layers are not seen: 0. Build the layers with a module"
    assert [line[: len(note)] for line in watch.notes] == [note] * (activation == "relu")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.jit
def test_a_network_is_scripted_between_watched_steps() -> None:
    network, optimizer = small()
    with hookscope.watch(network, optimizer) as watch:
        turns(network, optimizer, watch, 2)
        scripted = torch.jit.script(network)
    assert scripted(torch.ones(1, 4)).equal(network(torch.ones(1, 4)))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's, with or without a watch
def test_a_compiled_step_is_read_at_every_step() -> None:
    network, _ = small()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    @torch.compile(backend="aot_eager")
    def step(inputs: Tensor) -> Tensor:
        loss = network(inputs).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lines: list[str] = []
    with hookscope.watch(network, optimizer, every=2, on_line=lines.append) as watch:
        for _ in range(4):
            watch.step(step(torch.randn(8, 4)))
    assert [step.step for step in watch.log.steps] == [1, 2, 3, 4]
    assert all(step.gradient_norm for step in watch.log.steps)
    assert watch.log.watched[-1].parameters[0].update_norm


@pytest.mark.exhaustive
def test_a_killed_training_leaves_a_file_that_is_read_and_resumed(tmp_path: Path, forked: Forked) -> None:
    killed = textwrap.dedent(SCRIPT).replace("ENDING", "os.kill(os.getpid(), signal.SIGKILL)")
    assert forked("-c", killed, tmp_path).returncode == -signal.SIGKILL
    log = read_training(tmp_path)
    assert [step.step for step in log.steps] == [1, 2, 3, 4, 5, 6]
    assert len(log.watched) == 3
    assert log.ends == ()
    network, optimizer = small()
    with hookscope.watch(network, optimizer, out=tmp_path, resume=True) as watch:
        turns(network, optimizer, watch, 1)
    assert [step.step for step in read_training(tmp_path).steps] == [1, 2, 3, 4, 5, 6, 7]


def test_a_training_that_ended_after_one_that_was_killed_is_not_said_to_run(tmp_path: Path) -> None:
    network, optimizer = small()
    with hookscope.watch(network, optimizer, out=tmp_path) as watch:
        turns(network, optimizer, watch, 3)
    file = tmp_path / "watch.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))  # as if it had been killed
    assert "the training still runs, or was killed" in answer(read_training(tmp_path))[-1]
    hookscope.watch(network, optimizer, out=tmp_path, resume=True).close()
    log = read_training(tmp_path)
    assert [(end.step, end.reason) for end in log.ends] == [(3, "not recorded"), (3, "closed")]
    assert not any("still runs" in sentence for sentence in answer(log))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ending", "code"), [("", 0), ("1 / 0", 1)])
def test_a_script_that_does_not_close_its_watch_has_an_end(
    tmp_path: Path, forked: Forked, ending: str, code: int
) -> None:
    ended = forked("-c", textwrap.dedent(SCRIPT).replace("ENDING", ending), tmp_path)
    assert ended.returncode == code
    assert str(Path(hookscope.__file__).parent) not in ended.stderr
    assert [end.reason for end in read_training(tmp_path).ends] == ["the process ended"]


def losses_of(scales: list[float]) -> tuple[hookscope.Watch, list[str]]:
    """Watch a training with these gradients of its one weight, which are its losses too."""
    weight = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
    lines: list[str] = []
    with hookscope.watch(weight, optimizer, on_line=lines.append) as watch:
        for scale in scales:
            nn.init.ones_(weight.weight)
            loss = weight(torch.full((1, 1), scale)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
    return watch, lines


@pytest.mark.parametrize(
    ("before", "advice"),
    [
        ([8.0, 536.0], "(median 8), the loss 8 → 536: lower the learning rate, warm it up or clip gradients."),
        ([8.0, 9.0], "8 → 9, the loss 8 → 9: lower the learning rate, or look at the batch of step 3."),
        ([8.0] * 6, "the loss 8 → 8 → 8 → 8, as usual: look at the batch of step 7."),
    ],
)
def test_what_came_before_nan_decides_the_advice(before: list[float], advice: str) -> None:
    _, lines = losses_of([*before, math.nan])
    assert any(line.endswith(advice) for line in lines)


def test_a_verdict_on_gradients_stays_while_the_loss_is_nan_and_ends_with_it() -> None:
    watch, lines = losses_of([1.0, math.inf, *[math.nan] * 30])
    assert all(verdict.state == "began" for verdict in watch.verdicts)
    watch, lines = losses_of([1.0, math.nan, *[1.0] * 40])
    assert [verdict.message for verdict in watch.verdicts if verdict.state == "ended"] == ["Cleared."]
    assert any("non-finite-loss cleared." in line for line in lines)


def test_weights_that_stay_nan_are_not_said_to_pass_where_another_one_is_the_first() -> None:
    """The second layer's weight is NaN from step 2 on, and from then on the update makes all weights NaN."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    with hookscope.watch(network, optimizer, every=5, on_line=lambda _: None) as watch:
        for step in range(1, 31):
            if step == 2:
                network[1].weight.data[0, 0] = math.nan
            network(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
    actual = [(verdict.step, verdict.where) for verdict in watch.verdicts if verdict.rule == "non-finite-weight"]
    assert actual == [(2, "1.weight"), (3, "0.weight")]
    assert all(verdict.state == "began" for verdict in watch.verdicts)


def test_robust_deviations_are_those_of_the_definition() -> None:
    losses = [1.0 + 0.2 * ((7 * number) % 10) for number in range(20)]
    logarithms = torch.tensor(losses, dtype=torch.float64).log()
    history = Ring()
    for number, loss in enumerate(losses):
        history.add(TrainingStep(number, loss, None, None, (), ()))
    jump, _ = history.add(TrainingStep(20, 50.0, None, None, (), ()))
    middle = torch.tensor(sorted(losses), dtype=torch.float64)[9:11].mean()
    deviation = (logarithms - middle.log()).abs().quantile(0.5)
    assert jump is not None
    assert jump.deviations == pytest.approx(((torch.tensor(50.0).log() - middle.log()) / (1.4826 * deviation)).item())
    assert jump.usual.median == pytest.approx(middle.item())
    assert len(history.steps) == 21
    for number, loss in enumerate((3.0, 3.0, 3.0, 1e6)):  # median and spread are those of all steps before
        jump, _ = history.add(TrainingStep(number, loss, None, None, (), ()))
    assert jump is not None
    assert jump.usual.median == pytest.approx(sum(sorted([*losses, 50.0, 3.0, 3.0, 3.0])[11:13]) / 2)
    for number in range(ring.LENGTH):
        history.add(TrainingStep(number, 1.0, None, None, (), ()))
    assert len(history.steps) == ring.LENGTH


@pytest.mark.parametrize(("every", "first", "watched"), [(1, 0, [0, 1, 2]), (2, 0, [2]), (3, 100, [102]), (2, 7, [8])])
def test_watched_steps_are_multiples_wherever_the_loop_begins(every: int, first: int, watched: list[int]) -> None:
    network, optimizer = small()
    with hookscope.watch(network, optimizer, every=every) as watch:
        for number in np.arange(first, first + 3):
            network(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            watch.step(step=number)
    assert [step.step for step in watch.log.watched] == watched


def test_a_step_has_the_number_of_the_loop_and_others_are_refused_in_one_line() -> None:
    network = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    lines: list[str] = []
    with hookscope.watch(network, optimizer, every=4, on_line=lines.append) as watch:
        for number in (0, 1, 3, 5, 5, "7", True, 9):
            network(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(0.5, step=number)  # type: ignore[arg-type]
    assert [step.step for step in watch.log.steps] == [0, 1, 3, 5, 6, 7, 8, 9]
    assert [watched_step.step for watched_step in watch.log.watched] == [
        5,
        8,
    ]  # the first at 4 and after, and at 8 and after
    assert lines == ["step() got 5 as step: give whole numbers above that of the step before. Steps are counted on."]
