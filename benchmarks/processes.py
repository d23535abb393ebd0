"""Whole processes: how soon a command is there, and commands beside a bare script."""

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

from benchmarks.comparing import Ready, over_first, timeable
from benchmarks.findings import Measurement, Section, Work
from benchmarks.same_work import TOLERANCES
from benchmarks.timing import interleaved, spread

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "sample_images" / "cat.jpg"

_HELP_AT_MOST_SECONDS = 0.25
_COMMAND_AT_MOST = 1.15
_CHECK_AT_MOST_SECONDS = 1.0
_CONVOLUTIONS = "activations --layer conv"
_EDIT = "layer2.1.conv2:output:scale(1.5)"

_NOTE_OF_COMMANDS = f"""\
Whole processes on resnet34 and one picture. The script imports, builds resnet34, preprocesses the picture and runs the
network once. `{_CONVOLUTIONS}` measures and draws 36 layers, as is checked beforehand; the others have their
defaults: all layers, the self-check, tables and an overview, for `activations` also grids of all layers, for
`attribute` tests of its map, for `diff` two networks."""

# Bytecode is written whatever the environment says. Otherwise each process compiles hookscope anew, but not torch.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(command: Sequence[str]) -> str:
    """Run a command in the repository root; return what it printed.

    Raises:
        subprocess.CalledProcessError: If it failed.
    """
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout


def measure_start_up() -> Section:
    """Time `hookscope --help`."""
    (seconds,) = interleaved({"hookscope": partial(run, [sys.executable, "-m", "hookscope", "--help"])}, 9).values()
    times = spread(seconds)
    note = "The whole process, with every file in the system's cache."
    actual = Measurement("hookscope --help", "hookscope", times.median, "s", times, None, _HELP_AT_MOST_SECONDS)
    return Section("hookscope --help", note, (actual,))


def measure_commands() -> Section:
    """Time the commands that run a network beside a script that imports, builds, reads the picture and runs once."""
    bare = [sys.executable, "-m", "benchmarks.children.bare", str(PICTURE)]
    network = ["resnet34", "--weights", "none"]
    with tempfile.TemporaryDirectory() as folder:

        def command(name: str, *words: str, out: str = "") -> list[str]:
            return [sys.executable, "-m", "hookscope", name, *words, "--out", f"{folder}/{out or name}"]

        convolutions = command("activations", *network, str(PICTURE), "--layer", "conv", out="conv")
        last = command("activations", *network, str(PICTURE), "--layer", "fc", out="fc")
        commands = {
            "activations": command("activations", *network, str(PICTURE)),
            "grads": command("grads", *network, str(PICTURE)),
            "attribute": command("attribute", *network, str(PICTURE)),
            "diff": command("diff", "resnet34", "same", str(PICTURE), "--weights", "none", "--edit-b", _EDIT),
        }
        ways = {
            "bare script": Ready(None, partial(run, bare), 7),
            _CONVOLUTIONS: Ready(_same_network(bare, last, convolutions), partial(run, convolutions), 7),
        }
        ways |= {name: Ready(None, partial(run, words), 5) for name, words in commands.items()}
        seconds = interleaved(*timeable(ways))
    actual = over_first("resnet34 IMAGE", ways, seconds, {_CONVOLUTIONS: _COMMAND_AT_MOST})
    return Section("Whole commands, over a bare script", _NOTE_OF_COMMANDS, tuple(actual))


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
    plain, checked = (spread(actual) for actual in seconds.values())
    subject = "check resnet18.pt, over imports and three passes"
    note = "Whole processes; a good checkpoint, with the rules that are on by default."
    return Section(
        "hookscope check",
        note,
        (
            Measurement(subject, "imports and three passes", 0.0, "s", plain),
            Measurement(
                subject, "hookscope", checked.median - plain.median, "s", checked, None, _CHECK_AT_MOST_SECONDS
            ),
        ),
    )


def _same_network(bare: Sequence[str], last: Sequence[str], convolutions: Sequence[str]) -> Work:
    """Compare the largest output that the script prints with hookscope's, and count what the command wrote."""
    largest = float(run(bare))
    (row,) = _rows(last)
    wrong = int(abs(row["activation"]["max"] - largest) > TOLERANCES["cpu"] * abs(largest))
    count = len(_rows(convolutions))
    grids = len(list(Path(convolutions[-1], "grids").glob("*.png")))
    missing = 36 - min(count, grids)
    return Work("differs" if wrong or missing else "same", 36, wrong, missing)


def _rows(command: Sequence[str]) -> list[Any]:
    """Run a command and return the rows that it wrote; the folder is its last word."""
    run(command)
    actual: list[Any] = json.loads(Path(command[-1], "result.json").read_text(encoding="utf-8"))["rows"]
    return actual
