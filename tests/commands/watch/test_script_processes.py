"""`hookscope watch` under torchrun: two processes on gloo, one speaks; sums over shards are of the whole."""

import json
import math
from pathlib import Path

import pytest
import torch

from hookscope.commands.watch.training_log import read_training
from hookscope.results.training import TrainingStep
from tests.commands.watch.conftest import Forked
from tests.commands.watch.training_scripts import DISTRIBUTED, DISTRIBUTED_SCRIPTS, HEAD
from tests.fork_server import Finished

pytestmark = pytest.mark.exhaustive


def said(done: Finished) -> list[str]:
    lines = done.stderr.splitlines()
    return [line.removeprefix("hookscope watch: ") for line in lines if line.startswith("hookscope watch: ")]


SHARDED = (
    "The network is sharded: its modules gather and free parameters around each call, so hooks stay off them and "
    "activations are not watched. Norms begin at step 3."
)


@pytest.mark.parametrize("name", DISTRIBUTED_SCRIPTS)
def test_weights_of_two_processes_are_those_of_the_plain_run(name: str, tmp_path: Path, torchrun: Forked) -> None:
    (tmp_path / "train.py").write_text(DISTRIBUTED_SCRIPTS[name])
    torchrun("train.py", "plain.pt", 0)
    arguments = ["--every", 4, "--strict", "--out", "run", "--", "watched.pt", 0]
    watched = torchrun("-m", "hookscope", "watch", "train.py", *arguments)
    assert all(map(torch.equal, torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "watched.pt")))
    first, *others, last = said(watched)
    assert first.startswith(
        "watching FSDPSequential (AdamW" if name == "fsdp" else "watching Net (SGD, lr 0.1), from step 1 on, loss"
    )
    assert others == ([SHARDED] if name == "fsdp" else [])
    seen, activations = ("what was seen of ", "activations and ") if name == "fsdp" else ("", "")
    assert last == (
        f"No problems in {seen}12 steps (3 measured in full). Not judged: {activations}whether the loss falls. "
        "As a page: hookscope report run"
    )
    log = read_training(tmp_path / "run")
    assert [step.step for step in log.steps] == [*range(1, 13)]
    assert {watched_step.step for watched_step in log.watched} == {4, 8, 12}
    assert not log.verdicts


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_batch_that_breaks_on_the_second_process_is_named_at_its_step(
    name: str, tmp_path: Path, torchrun: Forked
) -> None:
    (tmp_path / "train.py").write_text(DISTRIBUTED_SCRIPTS[name])
    arguments = ["--every", 4, "--strict", "--out", "run", "--", "watched.pt", 7]
    torchrun("-m", "hookscope", "watch", "train.py", *arguments, code=1)
    first = read_training(tmp_path / "run").verdicts[0]
    assert (first.step, first.rule) == (7, "non-finite-gradient")
    assert "or the loss of another process, which is not seen, was not finite" in first.message


@pytest.mark.parametrize(
    ("accumulates", "resets"),
    [("under no_sync", True), ("under no_sync", False), ("synchronised", True)],
)
def test_forgotten_resets_are_told_of_two_processes(
    accumulates: str, resets: bool, tmp_path: Path, torchrun: Forked
) -> None:
    source = DISTRIBUTED_SCRIPTS["ddp"]
    if accumulates != "under no_sync":
        source = source.replace(
            "network.no_sync() if part == 0 else contextlib.nullcontext()", "contextlib.nullcontext()"
        )
    if not resets:
        source = source.replace("    optimizer.zero_grad()\n", "")
    (tmp_path / "train.py").write_text(source)
    torchrun("-m", "hookscope", "watch", "train.py", "--out", "run", "--", "watched.pt", 0)
    verdicts = [
        verdict for verdict in read_training(tmp_path / "run").verdicts if verdict.rule == "gradients-not-reset"
    ]
    assert [(verdict.step, verdict.value) for verdict in verdicts] == ([] if resets else [(4, 3.0)])


# Four processes as two replicas of two shards: what replicas hold must be counted once.
REPLICATED = """
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
fully_shard(network[0], mesh=mesh)
fully_shard(network, mesh=mesh)
"""


def test_norms_over_shards_are_those_of_whole_tensors(tmp_path: Path, torchrun: Forked) -> None:
    source = DISTRIBUTED_SCRIPTS["fsdp"]
    sharding = "fully_shard(network[0])\nfully_shard(network)\n"
    assert sharding in source
    (tmp_path / "train.py").write_text(source.replace(sharding, REPLICATED))
    arguments = ["watch", "train.py", "--every", 4, "--out", "run", "--", "watched.pt", 0, "told"]
    message = json.loads(torchrun("-m", "hookscope", *arguments, processes=4).stdout)
    log = read_training(tmp_path / "run")
    assert [step.gradient_norm is None for step in log.steps[:3]] == [True, True, False]
    for step in log.steps[2:]:
        norms = {name: gradient for name, (_, gradient, _) in message[step.step - 1].items()}
        assert dict(step.largest) == {name: pytest.approx(norm, rel=1e-5) for name, norm in norms.items()}
    for watched in log.watched:
        for row in watched.parameters:
            weight, gradient, update = message[watched.step - 1][row.name]
            assert row.weight_norm == pytest.approx(weight, rel=1e-5)
            assert row.gradient_norm == pytest.approx(gradient, rel=1e-5)
            assert row.update_norm == pytest.approx(update, rel=1e-4)


CLIPPED = """
    norms = [each.grad.full_tensor().double().norm() for each in network.parameters()]
    told.append(float(torch.stack(norms).norm()))
    nn.utils.clip_grad_norm_(network.parameters(), 0.05, norm_type=2.0 if step % 2 else float("inf"))
    optimizer.step()
"""


def test_norms_before_clipping_are_those_of_whole_tensors(tmp_path: Path, torchrun: Forked) -> None:
    source = DISTRIBUTED_SCRIPTS["fsdp"].replace("    told.append({", "    ({")
    source = source.replace("    optimizer.step()\n", CLIPPED.lstrip("\n"))
    (tmp_path / "train.py").write_text(source.replace("if len(sys.argv) > 3 and rank == 0:", "if rank == 0:"))
    arguments = ["watch", "train.py", "--every", 4, "--out", "run", "--", "watched.pt", 0]
    message = json.loads(torchrun("-m", "hookscope", *arguments).stdout)
    actual = [step.norm_before_clipping for step in read_training(tmp_path / "run").steps]
    assert actual[:3] == [None, None, None]
    assert actual[3:] == pytest.approx(message[3:], rel=1e-5)


def test_a_loss_of_one_process_that_is_nan_waits_for_no_other(tmp_path: Path, torchrun: Forked) -> None:
    source = DISTRIBUTED_SCRIPTS["fsdp"].replace(
        "    loss.backward()\n", "    loss = loss * (math.nan if rank == 0 and step == 5 else 1)\n    loss.backward()\n"
    )
    (tmp_path / "train.py").write_text("import math\n" + source)
    torchrun("-m", "hookscope", "watch", "train.py", "--out", "run", "--", "watched.pt", 0)
    log = read_training(tmp_path / "run")
    assert (log.verdicts[0].step, log.verdicts[0].rule) == (5, "non-finite-loss")
    assert len(log.steps) > 5


def test_a_process_that_is_not_watched_is_not_waited_for(tmp_path: Path, torchrun: Forked) -> None:
    (tmp_path / "train.py").write_text(DISTRIBUTED_SCRIPTS["fsdp"])
    (tmp_path / "start.py").write_text(
        "import os, runpy, sys\n"
        "from hookscope.cli.app import main\n"
        "if os.environ['RANK'] == '0':\n"
        "    sys.argv = ['hookscope', 'watch', 'train.py', '--every', '4', '--', 'watched.pt', '0']\n"
        "    main()\n"
        "sys.argv = ['train.py', 'watched.pt', '0']\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    done = torchrun("start.py")
    assert (tmp_path / "watched.pt").exists()
    assert any("not every process runs under hookscope watch" in line for line in said(done))


def test_a_process_that_dies_ends_all_with_the_message_of_torchrun(tmp_path: Path, torchrun: Forked) -> None:
    source = DISTRIBUTED_SCRIPTS["fsdp"].replace(
        "    loss.backward()\n", "    1 / (rank != 1 or step < 6)\n    loss.backward()\n"
    )
    (tmp_path / "train.py").write_text(source)
    done = torchrun("-m", "hookscope", "watch", "train.py", "--out", "run", "--", "watched.pt", 0, code=1)
    assert "ZeroDivisionError" in done.stderr
    assert "ChildFailedError" in done.stderr
    assert [step.step for step in read_training(tmp_path / "run").steps] == [1, 2, 3, 4, 5]


# The first optimiser steps twice as often as the second; a third one, made later, takes the parameters of the first.
SEVERAL_OPTIMISERS = """
import json
from torch.distributed.fsdp import fully_shard
first, second = nn.Sequential(nn.Linear(8, 16), nn.GELU()), nn.Linear(16, 3)
fully_shard(first)
fully_shard(second)
often = torch.optim.AdamW(first.parameters(), lr=1e-2)
seldom = torch.optim.SGD(second.parameters(), lr=1e-1)
torch.set_rng_state(draws)
told = []

def whole(network):
    gradients = [each.grad.full_tensor().double().norm() for each in network.parameters()]
    return float(torch.stack(gradients).norm())

for step in range(1, 25):
    given, labels = batch(step if rank else -1)
    F.cross_entropy(second(first(given)), labels).backward()
    nn.utils.clip_grad_norm_(first.parameters(), 0.05)
    told.append([whole(first), whole(second) if step % 2 == 0 else 0])
    often.step()
    if step % 2 == 0:
        seldom.step()
    first.zero_grad()
    second.zero_grad()
    if step == 12 and AGAIN:
        often = torch.optim.SGD(first.parameters(), lr=1e-2)
if rank == 0:
    print(json.dumps(told), flush=True)
weights = [each.full_tensor() for each in (*first.state_dict().values(), *second.state_dict().values())]
if rank == 0:
    torch.save([*weights, torch.get_rng_state()], TARGET)
torch.distributed.barrier()
"""


@pytest.mark.parametrize("again", [False, True])
def test_several_optimisers_of_sharded_networks_are_watched(again: bool, tmp_path: Path, torchrun: Forked) -> None:
    source = HEAD + DISTRIBUTED + SEVERAL_OPTIMISERS.replace("AGAIN", str(again))
    (tmp_path / "train.py").write_text(source)
    arguments = ["watch", "train.py", "--every", 4, "--out", "run", "--", "watched.pt", 0]
    done = torchrun("-m", "hookscope", *arguments)
    assert not any("failed" in line or "Not watched" in line for line in said(done))
    message = json.loads(done.stdout)
    log = read_training(tmp_path / "run")
    assert not log.verdicts
    if again:
        assert [end.reason for end in log.ends][:1] == ["another optimizer stepped"]
        assert norm_of(log.steps[-1], "FSDPSequential") == pytest.approx(message[-1][0], rel=1e-5)
        return
    torchrun("train.py", "plain.pt", 0)
    assert all(map(torch.equal, torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "watched.pt")))
    assert [step.step for step in log.steps] == [*range(1, 25)]
    for step in log.steps[3:]:  # a step of the first optimiser, and that of the second before or after it
        second = norm_of(step, "FSDPLinear")
        assert norm_of(step, "FSDPSequential") == pytest.approx(message[step.step - 1][0], rel=1e-5)
        assert second == 0 or second == pytest.approx(message[step.step // 2 * 2 - 1][1], rel=1e-5)
    assert {watched_step.step for watched_step in log.watched} >= {4, 8, 12, 16, 20, 24}
    watched = {watched_step.step: {row.name: row for row in watched_step.parameters} for watched_step in log.watched}
    for step, (first, _) in enumerate(message, start=1):
        rows = [row for name, row in watched.get(step, {}).items() if name.startswith("FSDPSequential")]
        if step % 4 == 0:
            assert math.hypot(*[row.gradient_norm or 0 for row in rows]) == pytest.approx(first, rel=1e-5)
        assert all(row.status == "gradient" and row.update_norm for row in rows)


def norm_of(step: TrainingStep, network: str) -> float:
    """Return the gradient norm of one network at a step."""
    return math.hypot(*[norm for name, norm in step.largest if name.startswith(network)])
