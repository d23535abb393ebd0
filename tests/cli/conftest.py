"""The command line as tests run it: in a separate process, or inside this one, always without a network."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from tests.fork_server import ForkServer

SAMPLES = Path(__file__).parents[2] / "sample_images"
CAT = SAMPLES / "cat.jpg"

NETWORKS = """
import os
import sys
import time

import torch
from torch import nn


def tiny(width=4, channels=3, dtype=torch.float32):
    return nn.Sequential(
        nn.Conv2d(channels, width, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, 2 * width, 3, stride=2),
        nn.ReLU(),
    ).to(dtype)


def nothing():
    return nn.Sequential(nn.Identity())


def long(depth=70):
    return nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(depth)))


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("no such luck\\nand a second line")


def raises_in_20th_layer():
    return nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(19)), Raises(), nn.Conv2d(3, 3, 1))


def raises_when_built():
    raise RuntimeError("cannot be built")


class Talks(nn.Module):
    def __init__(self):
        super().__init__()
        print("built")
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, x):
        print("ran")
        return self.conv(x)


class Sleeps(nn.Module):
    def forward(self, x):
        print("asleep", file=sys.stderr, flush=True)
        time.sleep(60)
        return x


def sleeps_in_forward():
    return nn.Sequential(nn.Conv2d(3, 2, 3), Sleeps())


def sleeps_when_built():
    Sleeps()(None)
"""


@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The lines of stderr that report an error."""
        return [line for line in self.stderr.splitlines() if line.startswith("hookscope: error: ")]


Run = Callable[..., Ended]


def assert_refused(ended: Ended, code: int, *words: str) -> None:
    """Assert that a command has ended with this code, and printed one line alone, which holds these words."""
    assert (ended.code, ended.stdout) == (code, "")
    assert len(ended.errors) == len(ended.stderr.splitlines()) == 1
    for word in words:
        assert word in ended.stderr


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of every command: 80 columns, no cached weights, and a proxy that refuses connections."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    colours = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "no_proxy", "NO_PROXY")
    for name in colours:
        kept.pop(name, None)
    refusing = "http://127.0.0.1:9"
    cache = str(tmp_path_factory.mktemp("torch-home"))
    # A test may limit the size of files, and Python would leave cut bytecode behind.
    fixed = {"COLUMNS": "80", "TORCH_HOME": cache, "PYTHONDONTWRITEBYTECODE": "1"}
    return kept | fixed | {"https_proxy": refusing, "HTTPS_PROXY": refusing}


@pytest.fixture(scope="session")
def command(environment: dict[str, str], fork_server: ForkServer) -> Run:
    """Run `python -m hookscope` in a separate process, forked from one that has imported torch."""

    def run_command(*arguments: object, cwd: Path, columns: int = 80, **options: Any) -> Ended:
        variables = environment | {"COLUMNS": str(columns)}
        done = fork_server.run("-m", "hookscope", *arguments, cwd=cwd, environment=variables, **options)
        return Ended(done.returncode, done.stdout, done.stderr)

    return run_command


@pytest.fixture(scope="session")
def python(environment: dict[str, str]) -> Run:
    """Start Python, for what starting has a part in."""

    def start(*arguments: object, **options: Any) -> Ended:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            **({"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options),
            text=True,
            timeout=300,
            check=False,
        )
        return Ended(done.returncode, done.stdout or "", done.stderr or "")

    return start


@pytest.fixture(scope="session")
def started(python: Run) -> Run:
    """Start `python -m hookscope`."""
    return partial(python, "-m", "hookscope")


@pytest.fixture
def run(
    tmp_path: Path,
    networks: Path,
    environment: dict[str, str],
    fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Run a command line inside this process, in `tmp_path`, beside the networks of this file.

    `check` runs in a forked process, whose workers are forked too: each would import torch for three seconds.
    """
    from hookscope.cli.app import run as run_in_process

    for name in ("COLUMNS", "TORCH_HOME", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(networks.read_text(encoding="utf-8"), encoding="utf-8")

    def run_here(*arguments: object) -> Ended:
        if arguments[:1] == ("check",):
            done = fork_server.run("-m", "hookscope", *arguments, cwd=Path.cwd(), environment=os.environ)
            return Ended(done.returncode, done.stdout, done.stderr)
        capsys.readouterr()
        code = run_in_process([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run_here


@pytest.fixture(scope="session")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python file of small networks."""
    path = tmp_path_factory.mktemp("networks") / "net.py"
    path.write_text(NETWORKS, encoding="utf-8")
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Five different small pictures, named so that alphabetical and natural order differ."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    paths = [folder / f"{number}.png" for number in (1, 2, 3, 10, 11)]
    with Image.open(CAT) as cat:
        for number, path in enumerate(paths):
            cat.crop((40 * number, 20 * number, 40 * number + 64, 20 * number + 64)).save(path)
    return paths


def rows_of(run_path: Path) -> list[dict[str, Any]]:
    """Read the rows of a run's `result.json`."""
    return json.loads((run_path / "result.json").read_bytes())["rows"]


def without_arrays(entry: Any) -> Any:
    """Return what `--json` has of `result.json`: all but the names of arrays."""
    if isinstance(entry, list):
        return list(map(without_arrays, entry))
    if not isinstance(entry, dict):
        return entry
    named = {name: without_arrays(value) for name, value in entry.items()}
    return {name: value for name, value in named.items() if name not in ARRAYS or not isinstance(value, str)}


ARRAYS = ("kept_values", "values", "keys", "counts")


def record_of(run_path: Path) -> dict[str, Any]:
    """Read how a run was made, and its result: `run.json` and `result.json`."""
    record, result = (json.loads((run_path / name).read_bytes()) for name in ("run.json", "result.json"))
    return {**result, **record}


def statistics_of(values: NDArray[Any], channel_axis: int | None = None) -> dict[str, float]:
    """Compute in float64 what a row says of a tensor; of an activation with its channel axis."""
    wide = values.astype(np.float64)
    others = tuple(axis for axis in range(wide.ndim) if axis != channel_axis)
    dead = {} if channel_axis is None else {"dead_channel_count": (wide == 0).all(others).sum()}
    return dead | {
        "mean": wide.mean(),
        "std": wide.std(),
        "min": wide.min(),
        "max": wide.max(),
        "mean_abs": np.abs(wide).mean(),
        "l2": np.sqrt((wide**2).sum()),
        "zero_fraction": (wide == 0).mean(),
        "nan_count": np.isnan(wide).sum(),
        "inf_count": np.isinf(wide).sum(),
    }


def table(path: Path) -> list[dict[str, str]]:
    """Read a table of a run."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def built(source: str, name: str) -> nn.Module:
    """Build a network that some source text defines, as hookscope does by default."""
    space: dict[str, Any] = {}
    exec(source, space)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return space[name]()


def names_below(folder: Path) -> set[str]:
    """Return the paths of everything below a folder, hidden files included."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def table_lines(text: str, names: Sequence[str]) -> list[str]:
    """Return the lines of a printed table that hold one of `names` as a word."""
    return [line for line in text.splitlines() if set(line.split()) & set(names)]
