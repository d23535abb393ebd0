"""Whole processes: how soon a command or an import is there, and a command beside a bare script."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchvision.models import get_model

from benchmarks.comparing import Budget, Ready, over_first, timeable
from benchmarks.findings import Measurement, Section, Work
from benchmarks.same_work import TOLERANCES, failed
from benchmarks.timing import interleaved, spread

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "sample_images" / "cat.jpg"

_HELP_AT_MOST_SECONDS = 0.25
_COMMAND: dict[str, Budget] = {"hookscope": (1.15, 1.10)}
_CHECK_AT_MOST_SECONDS = 1.0
_EDIT = "layer2.1.conv2:output:scale(1.5)"

# What a script that uses the peer loads: some load the rest on first use.
_LOADS = {
    "activations": "from hookscope import activations",
    "torch": "import torch",
    "torchvision feature extractor": "import torchvision.models.feature_extraction",
    "timm": "import timm.models",
    "torchinfo": "import torchinfo; torchinfo.summary",
    "torchextractor": "import torchextractor",
    "torchlens": "import torchlens; torchlens.trace",
    "nnsight": "import nnsight; nnsight.NNsight",
    "captum": "import captum.attr",
}


def run(command: Sequence[str]) -> str:
    """Run a command in the repository root; return what it printed.

    Bytecode is written whatever the environment says. Otherwise each process compiles hookscope anew, but not torch.

    Raises:
        subprocess.CalledProcessError: If it failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=environment).stdout


def measure_start_up() -> Section:
    """Time `hookscope --help`, and a process that imports hookscope's library or a peer."""
    python = sys.executable
    commands = {"hookscope --help": [python, "-m", "hookscope", "--help"]}
    commands |= {f"import {name}": [python, "-c", code] for name, code in _LOADS.items()}
    works: dict[str, Work | None] = {}
    for name, command in commands.items():
        try:
            run(command)
            works[name] = None
        except subprocess.CalledProcessError as error:
            works[name] = failed(ImportError(error.stderr.strip().splitlines()[-1]))
    runs = {name: partial(run, command) for name, command in commands.items() if works[name] is None}
    seconds = interleaved(runs, {name: 9 if name == "hookscope --help" else 2 for name in runs}, warm=True)
    found = []
    for name, work in works.items():
        times = spread(seconds[name]) if name in seconds else None
        at_most = _HELP_AT_MOST_SECONDS if name == "hookscope --help" else None
        median = times.median if times else None
        found.append(Measurement("a separate process", name, median, "s", times, work, at_most))
    note = "From the start of the process to its end, with every file in the system's cache."
    return Section("Start-up", note, tuple(found))


def measure_whole_command() -> Section:
    """Time a command beside a script that imports, builds, reads the picture and runs once."""
    bare = [sys.executable, "-m", "benchmarks.children.bare", str(PICTURE)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        fixed = [sys.executable, "-m", "hookscope", "activations", "resnet34", str(PICTURE), "--weights", "none"]
        command = [*fixed, "--out", str(out), "--layer", "conv"]
        ways = {
            "bare script": Ready(None, partial(run, bare), 7),
            "hookscope": Ready(
                _same_network(bare, [*fixed, "--out", f"{folder}/fc"], command), partial(run, command), 7
            ),
        }
        seconds = interleaved(*timeable(ways), warm=True)
    found = over_first("activations resnet34 IMAGE --layer conv", ways, seconds, _COMMAND)
    note = (
        "Both processes build resnet34, preprocess the same picture and run the network once; hookscope besides "
        "measures and draws 36 layers and writes the run. Checked beforehand: the largest output of both networks "
        "is the same, and there are 36 rows and grids."
    )
    return Section("The whole command, over a bare script", note, tuple(found))


def measure_commands() -> Section:
    """Time each command that runs a network, with its defaults, beside the script."""
    bare = [sys.executable, "-m", "benchmarks.children.bare", str(PICTURE)]
    hookscope = [sys.executable, "-m", "hookscope"]
    network = ["resnet34", "--weights", "none"]
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "activations": ["activations", *network, str(PICTURE), "--out", f"{folder}/activations"],
            "grads": ["grads", *network, str(PICTURE), "--out", f"{folder}/grads"],
            "attribute": ["attribute", *network, str(PICTURE), "--out", f"{folder}/attribute"],
            "diff": [
                *("diff", "resnet34", "same", str(PICTURE), "--weights", "none", "--edit-b", _EDIT),
                *("--out", f"{folder}/diff"),
            ],
        }
        ways = {"bare script": Ready(None, partial(run, bare), 5)}
        ways |= {name: Ready(None, partial(run, [*hookscope, *words]), 5) for name, words in commands.items()}
        seconds = interleaved(*timeable(ways))
    note = (
        "Whole processes with the defaults of each command on resnet34 and one picture: all leaves, the self-check, "
        "every table, the overview and its files; activations also draws the grids of 124 layers."
    )
    return Section("Whole commands, over a bare script", note, tuple(over_first("resnet34 IMAGE", ways, seconds, {})))


def measure_check() -> Section:
    """Time the check of a good checkpoint beside its imports and three forward passes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "resnet18.pt")
        torch.manual_seed(0)
        torch.save(get_model("resnet18").state_dict(), path)
        ways = {
            "imports and three passes": partial(run, [sys.executable, "-m", "benchmarks.children.passes"]),
            "hookscope": partial(run, [sys.executable, "-m", "hookscope", "check", str(path)]),  # raises if it fails
        }
        seconds = interleaved(ways, 7)
    plain, checked = (spread(found) for found in seconds.values())
    subject = "check resnet18.pt, over imports and three passes"
    note = "Whole processes. A good checkpoint: the check passes, with every rule that is on by default."
    return Section(
        "The check of a checkpoint",
        note,
        (
            Measurement(subject, "imports and three passes", 0.0, "s", plain),
            Measurement(
                subject, "hookscope", checked.median - plain.median, "s", checked, None, _CHECK_AT_MOST_SECONDS
            ),
        ),
    )


def _same_network(bare: Sequence[str], to_last: Sequence[str], command: Sequence[str]) -> Work:
    """Compare the largest output that the script prints with hookscope's, and count what the command wrote."""
    largest = float(run(bare))
    run([*to_last, "--layer", "fc"])
    run(command)
    (last,) = _rows(to_last)
    wrong = int(abs(last["activation"]["max"] - largest) > TOLERANCES["cpu"] * abs(largest))
    grids = len(list(Path(_out(command), "grids").glob("*.png")))
    missing = 36 - min(len(_rows(command)), grids)
    return Work("differs" if wrong or missing else "same", 36, wrong, missing)


def _out(command: Sequence[str]) -> str:
    return command[command.index("--out") + 1]


def _rows(command: Sequence[str]) -> list[Any]:
    found: list[Any] = json.loads(Path(_out(command), "layers.json").read_text(encoding="utf-8"))["rows"]
    return found
