"""`hookscope watch` under torchrun: two processes on gloo, one speaks; sums over shards are of the whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hookscope.results.runs.training_log import read_training
from tests.fork_server import Finished
from tests.watching.training_scripts import DISTRIBUTED_SCRIPTS

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def torchrun(folder: Path, *arguments: object, processes: int = 2) -> Finished:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, str(processes), *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    return Finished(done.returncode, done.stdout, done.stderr, 0)


def said(done: Finished) -> list[str]:
    lines = done.stderr.splitlines()
    return [line.removeprefix("hookscope watch: ") for line in lines if line.startswith("hookscope watch: ")]


@pytest.mark.parametrize("name", DISTRIBUTED_SCRIPTS)
def test_weights_of_two_processes_are_those_of_the_plain_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DISTRIBUTED_SCRIPTS[name])
    torchrun(tmp_path, "train.py", "plain.pt", 0)
    watched = torchrun(
        tmp_path, "-m", "hookscope", "watch", "train.py", "--every", 4, "--out", "run", "--", "watched.pt", 0
    )
    assert all(map(torch.equal, torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "watched.pt")))
    (first, *others) = said(watched)
    assert first.startswith("watching FSDPSequential (AdamW" if name == "fsdp" else "watching Net (SGD, lr 0.1), loss")
    assert len(others) == (name == "fsdp")
    log = read_training(tmp_path / "run")
    assert [each.step for each in log.steps] == [*range(1, 13)]
    assert {each.step for each in log.watched} == {4, 8, 12}
    assert not log.verdicts


@pytest.mark.parametrize("name", DISTRIBUTED_SCRIPTS)
def test_a_batch_that_breaks_on_the_second_process_is_named_at_its_step(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DISTRIBUTED_SCRIPTS[name])
    torchrun(tmp_path, "-m", "hookscope", "watch", "train.py", "--every", 4, "--out", "run", "--", "watched.pt", 7)
    first = read_training(tmp_path / "run").verdicts[0]
    assert (first.step, first.rule) == (7, "non-finite-gradient")


# Four processes as two replicas of two shards: what replicas hold must be counted once.
REPLICATED = """
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
fully_shard(network[0], mesh=mesh)
fully_shard(network, mesh=mesh)
"""


@pytest.mark.parametrize("processes", [2, 4])
def test_norms_over_shards_are_those_of_whole_tensors(processes: int, tmp_path: Path) -> None:
    source = DISTRIBUTED_SCRIPTS["fsdp"]
    sharding = "fully_shard(network[0])\nfully_shard(network)\n"
    assert sharding in source
    (tmp_path / "train.py").write_text(source.replace(sharding, REPLICATED) if processes > 2 else source)
    arguments = ["watch", "train.py", "--every", 4, "--out", "run", "--", "watched.pt", 0, "told"]
    told = json.loads(torchrun(tmp_path, "-m", "hookscope", *arguments, processes=processes).stdout)
    log = read_training(tmp_path / "run")
    assert [each.gradient_norm is None for each in log.steps[:3]] == [True, True, False]
    for step in log.steps[2:]:
        norms = {name: gradient for name, (_, gradient, _) in told[step.step - 1].items()}
        assert dict(step.largest) == {name: pytest.approx(norm, rel=1e-5) for name, norm in norms.items()}
    for watched in log.watched:
        for row in watched.parameters:
            weight, gradient, update = told[watched.step - 1][row.name]
            assert row.weight_norm == pytest.approx(weight, rel=1e-5)
            assert row.gradient_norm == pytest.approx(gradient, rel=1e-5)
            assert row.update_norm == pytest.approx(update, rel=1e-4)


CLIPPED = """
    norms = [each.grad.full_tensor().double().norm() for each in network.parameters()]
    told.append(float(torch.stack(norms).norm()))
    nn.utils.clip_grad_norm_(network.parameters(), 0.05, norm_type=NORM)
    optimizer.step()
"""


@pytest.mark.parametrize("norm_type", ["2.0", "float('inf')"])
def test_norms_before_clipping_are_those_of_whole_tensors(norm_type: str, tmp_path: Path) -> None:
    source = DISTRIBUTED_SCRIPTS["fsdp"].replace("    told.append({", "    ({")
    source = source.replace("    optimizer.step()\n", CLIPPED.replace("NORM", norm_type).lstrip("\n"))
    (tmp_path / "train.py").write_text(source.replace("if len(sys.argv) > 3 and rank == 0:", "if rank == 0:"))
    torchrun(tmp_path, "train.py", "plain.pt", 0)
    arguments = ["watch", "train.py", "--every", 4, "--out", "run", "--", "watched.pt", 0]
    told = json.loads(torchrun(tmp_path, "-m", "hookscope", *arguments).stdout)
    assert all(map(torch.equal, torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "watched.pt")))
    found = [each.norm_before_clipping for each in read_training(tmp_path / "run").steps]
    assert found[:3] == [None, None, None]
    assert found[3:] == pytest.approx(told[3:], rel=1e-5)


def test_a_process_that_is_not_watched_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DISTRIBUTED_SCRIPTS["fsdp"])
    (tmp_path / "start.sh").write_text(
        f'if [ "$RANK" = 0 ]; then exec {sys.executable} -m hookscope watch train.py --every 4 -- watched.pt 0; fi\n'
        f"exec {sys.executable} train.py watched.pt 0\n"
    )
    done = torchrun(tmp_path, "--no-python", "bash", "start.sh")
    assert (tmp_path / "watched.pt").exists()
    assert any("not every process runs under hookscope watch" in line for line in said(done))


def test_a_process_that_dies_ends_all_with_the_message_of_torchrun(tmp_path: Path) -> None:
    source = DISTRIBUTED_SCRIPTS["fsdp"].replace(
        "    loss.backward()\n", "    1 / (rank != 1 or step < 6)\n    loss.backward()\n"
    )
    (tmp_path / "train.py").write_text(source)
    done = torchrun(tmp_path, "-m", "hookscope", "watch", "train.py", "--out", "run", "--", "watched.pt", 0)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "ChildFailedError" in done.stderr
    assert [each.step for each in read_training(tmp_path / "run").steps] == [1, 2, 3, 4, 5]
