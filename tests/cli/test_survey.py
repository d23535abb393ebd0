"""`hookscope survey`: what it prints and writes, under torchrun and in shards, and its exit codes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cli.conftest import Run, assert_refused
from tests.docs.test_schemas import check, check_run
from tests.fork_server import Finished, ForkServer

NETWORK = """
import os
import signal

from torch import nn


class Slow(nn.Module):
    def forward(self, x):
        if os.environ.get("DIES") == os.environ.get("RANK", "0"):
            with open("calls", "a+") as calls:  # what the network holds is restored after each chunk
                calls.write("x")
                calls.seek(0)
                if len(calls.read()) == 6:
                    os.kill(os.getpid(), signal.SIGKILL)
        return x

def build():
    return nn.Sequential(Slow(), nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Fifty inputs in two folders, one of them unreadable, beside a network."""
    folder = tmp_path / "data"
    torch.manual_seed(7)
    for number in range(50):
        path = folder / "ab"[number % 2] / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, torch.randn(3, 8, 8).numpy())
    (folder / "a" / "7.npy").write_bytes(b"\x93NUMPY, and no more")
    (tmp_path / "slow.py").write_text(NETWORK, encoding="utf-8")
    return folder


def command(*arguments: object, processes: int = 1) -> list[str]:
    """Return a command line, under torchrun if there are several processes."""
    options = ["--batch-size", "4", "--chunk-size", "8", "--crops", "0", "--quiet"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "-m"]
    start = launcher if processes > 1 else ["-m"]
    return [sys.executable, *start, "hookscope", "survey", "slow.py:build", *map(str, arguments), *options]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("data")
def test_torchrun_gives_the_bits_of_one_process_also_after_a_killed_worker(
    tmp_path: Path, environment: dict[str, str], fork_server: ForkServer
) -> None:
    (tmp_path / "slow.py").write_text(NETWORK.replace("nn.Linear(6, 4)", "nn.Linear(6, 2)"), encoding="utf-8")
    variables = environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}

    def ended(out: str, *options: str, processes: int = 1, **further: str) -> Finished:
        _, *line = command("data", "--by-class", "--out", out, *options, processes=processes)
        return fork_server.run(*line, cwd=tmp_path, environment=variables | further)

    assert ended("one").returncode == 3  # an input cannot be read
    assert "7.npy" in ended("2", processes=2).stderr
    killed = ended("killed", processes=2, DIES="1")
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr
    assert not (tmp_path / "killed").exists()
    assert list((tmp_path / "killed.chunks").glob("*.json"))
    ended("killed", "--resume", processes=3)
    for name in ("2", "killed"):
        for file in ("arrays.safetensors", "channels.csv"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "one" / file).read_bytes()
        one, other = (json.loads((tmp_path / case / "result.json").read_bytes()) for case in ("one", name))
        assert one["failures"]["inputs"]
        assert (other["accuracy"], other["failures"]) == (one["accuracy"], one["failures"])
        assert not (tmp_path / f"{name}.chunks").exists()


RAISING = """
from torch import nn


class Raising(nn.Module):
    def forward(self, x):
        raise ValueError("no")


build = Raising
"""


@pytest.mark.usefixtures("data")
def test_nothing_to_go_on_from_is_left_where_no_input_could_be_measured(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(RAISING, encoding="utf-8")
    assert run("survey", "bad.py:build", "data", "--out", "run").code == 6
    for path in (tmp_path / "data").rglob("*.npy"):
        path.write_bytes(b"\x93NUMPY, and no more")
    ended = run("survey", "slow.py:build", "data", "--out", "run")
    assert ended.code == 3  # the files cannot be read; the network was not asked
    assert "None of the inputs could be measured" in ended.errors[-1]
    assert "--resume" not in ended.stderr
    assert not (tmp_path / "run.chunks").exists()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("data")
def test_ctrl_c_says_how_to_go_on(tmp_path: Path, environment: dict[str, str]) -> None:
    text = NETWORK.replace("return x", "import time; time.sleep(0.3); return x")
    (tmp_path / "slow.py").write_text(text, encoding="utf-8")
    variables = environment | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command("data", "--out", "run"), cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True
    ) as started:
        deadline = time.monotonic() + 200
        while not (tmp_path / "run.chunks" / "000001.json").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(started.pid, signal.SIGINT)
        _, errors = started.communicate(timeout=200)
    assert started.returncode == 130
    assert "finished chunks wait in run.chunks: the same command with --resume goes on." in errors


def test_the_command_merges_shards_and_lists_what_it_could_not_read(data: Path, run: Run, tmp_path: Path) -> None:
    usual = ("--batch-size", 4, "--chunk-size", 16, "--crops", 0)
    for share in ("1/2", "2/2"):
        ended = run("survey", "slow.py:build", data, *usual, "--shard", share, "--out", "s")
        assert ended.code == 0, ended.stderr
        assert "Chunks of this shard: s.chunks" in ended.stdout
    merged = run("survey", "--merge", "s")
    assert merged.code == 3
    assert "7.npy" in merged.errors[0]
    assert (tmp_path / "s" / "result.json").exists()
    assert not (tmp_path / "s.chunks").exists()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("data")
def test_a_full_disk_is_one_line_and_leaves_no_broken_chunk(
    tmp_path: Path, environment: dict[str, str], fork_server: ForkServer
) -> None:
    variables = environment | {"PYTHONPATH": str(Path(__file__).parents[2])}
    _, *line = command("data", "--out", "run")
    ended = fork_server.run(*line, cwd=tmp_path, environment=variables, largest_file=4000)
    assert ended.returncode == 3
    assert "hookscope: error: Cannot write to 'run.chunks': file too large." in ended.stderr
    assert not list((tmp_path / "run.chunks").glob("*[0-9].json"))
    assert not (tmp_path / "run").exists()


def test_json_fits_its_schema_and_the_run_its_own(data: Path, run: Run, tmp_path: Path) -> None:
    ended = run("survey", "slow.py:build", data, "--by-class", "--batch-size", 8, "--crops", 0, "--out", "r", "--json")
    assert ended.code == 3
    document = check("survey", ended.stdout)
    assert document["classes"] == {"a": 25, "b": 25}
    assert document["unusable"][0]["exit_code"] == 3
    assert [row["kind"] for row in document["rows"]][1:3] == ["Conv2d", "ReLU"]
    check_run(tmp_path / "r")


def test_scalars_reach_tensorboard(data: Path, run: Run, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tmp_path / "slow.py").write_text(NETWORK.replace("nn.Linear(6, 4)", "nn.Linear(6, 2)"), encoding="utf-8")
    options = ("--by-class", "--batch-size", 8, "--crops", 0, "--out", "r", "--tensorboard", "logs", "--json")
    document = json.loads(run("survey", "slow.py:build", data, *options).stdout)
    events = accumulator.EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    for row in document["rows"]:
        label = row["layer"] + (f"#{row['call']}" if row["call"] else "")
        [mean] = events.Scalars(f"activation mean/{label}")
        assert mean.value == pytest.approx(row["activation"]["mean"], rel=1e-6)
        [dead] = events.Scalars(f"dead channels/{label}")
        assert dead.value == len(row["dead_channels"])
    [accuracy] = events.Scalars("accuracy")
    assert accuracy.value == pytest.approx(document["accuracy"]["right"] / 50)
    refused = run("survey", "slow.py:build", data, "--out", "r2", "--tensorboard", "r2/logs")
    assert_refused(refused, 3, "it is inside the run directory")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Missing MODEL and INPUT, or --merge DIR."),
        (("slow.py:build",), "Missing INPUT: name a folder or files."),
        (("slow.py:build", "data", "--features", "f.safetensors"), "--features needs --layer"),
        (("slow.py:build", "data", "--layer", "0", "--features", "8"), "--features takes a path, not a number (8)"),
        (("slow.py:build", "data", "--shard", "9/8"), "--shard '9/8' is no share"),
        (("slow.py:build", "data", "--shard", "1/8", "--json"), "--shard only measures a part"),
        (("slow.py:build", "--merge", "x"), "--merge DIR, the --out of the shards, takes no MODEL"),
        (("--merge", "x", "--layer", "0"), "--merge DIR, the --out of the shards, takes no --layer"),
        (("--merge", "x", "--no-verify"), "--merge DIR, the --out of the shards, takes no --no-verify"),
        (("slow.py:build", "data", "data", "--by-class"), "--by-class takes one folder"),
    ],
)
@pytest.mark.usefixtures("data")
def test_what_cannot_be_is_one_line(run: Run, arguments: tuple[str, ...], sentence: str) -> None:
    assert_refused(run("survey", *arguments), 2, sentence)


@pytest.mark.parametrize("features", ["out/f.safetensors", "out"])
@pytest.mark.usefixtures("data")
def test_features_inside_the_run_directory_are_refused_before_anything_runs(
    run: Run, tmp_path: Path, features: str
) -> None:
    ended = run("survey", "slow.py:build", "data", "--layer", "0", "--out", "out", "--features", features)
    assert_refused(ended, 3, f"'{features}': it is inside the run directory")
    assert not [*tmp_path.glob("out*")]


def test_a_folder_without_chunks_cannot_be_merged(run: Run) -> None:
    assert_refused(run("survey", "--merge", "nothing"), 3, "there is no plan.json")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("data")
def test_a_dead_process_ends_the_others_within_half_a_minute_in_one_line(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Without an agent that would end them: as processes on another machine are left behind."""
    text = NETWORK.replace("return x", "import time; time.sleep(1 if os.environ['RANK'] == '0' else 0.1); return x")
    (tmp_path / "slow.py").write_text(text, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = environment | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    variables |= {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    line = [each for each in command("data", "--out", "run") if each != "--quiet"]
    started = [
        subprocess.Popen(
            line, cwd=tmp_path, env=variables | {"RANK": rank, "DIES": "1"}, stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    first, second = started
    assert second.wait(timeout=300) == -signal.SIGKILL
    died = time.monotonic()
    _, errors = first.communicate(timeout=300)
    assert time.monotonic() - died < 30
    second.communicate()
    assert first.returncode == 3
    lines = errors.splitlines()
    [message] = [line for line in lines if "error" in line]
    assert message.endswith(
        "Process 2 of 2 has ended: nothing was heard of it for 20 s. Finished chunks stay; go on with --resume."
    )
    progress = [line for line in lines if "finished," in line]
    assert progress
    assert re.search(r"of 51 inputs finished, [\d.]+ per second, \d+ s left", progress[-1])
