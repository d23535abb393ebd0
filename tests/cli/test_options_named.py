"""A message that names an option names one that the command has."""

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import typer.main
from torch import nn

from hookscope.cli.app import app
from tests.cli.conftest import CAT, Run

OPTION = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*")

NETS = """
import torch
from torch import nn


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, ids):
        return self.embedding(ids).mean(1)


class Entries(Tokens):
    def forward(self, batch):
        return super().forward(batch["input_ids"])


class Two(Tokens):
    def forward(self, ids, mask):
        return super().forward(ids) * mask


class Spectrogram(nn.Conv1d):
    def __init__(self):
        super().__init__(129, 3, 3)

    def forward(self, x):
        window = torch.hann_window(256)
        return super().forward(torch.stft(x, 256, window=window, return_complex=True).abs()).mean(2)


def picture():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3))
"""

# How each command is given a network and inputs; those that run none are left out.
LINES = {
    **dict.fromkeys(("activations", "grads", "attribute", "attention", "survey"), ("{model}", "{input}")),
    "diff": ("{model}", "{model}", "{input}"),
    "check": ("{weights}", "--arch", "{model}", "--images", "{input}"),
    "history": ("{folder}", "{input}", "--arch", "{model}"),
    "layers": ("{model}",),
}
FILES_ALONE = {
    **dict.fromkeys(("activations", "grads", "attribute", "attention", "survey"), ("{weights}", "cat.jpg")),
    "diff": ("{weights}", "{weights}"),
    "check": ("{weights}",),
    "checkpoint": ("{weights}",),
    "history": ("{folder}",),
    "layers": ("{weights}",),
}


def options_of(command: str) -> set[str]:
    parameters = typer.main.get_command(app).commands[command].params
    return {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def strange_options(text: str, command: str) -> Iterator[str]:
    """Yield the options in a text that the command lacks, those of a command line in backticks apart."""
    for quoted, other in re.findall(r"`([^`]*)`|([^`]+)", " ".join(text.split())):
        if quoted:
            named = re.match(r"hookscope (\w+)|(\w+)$", quoted)
            if named and named[1]:
                yield from (f"{named[1]}: {each}" for each in {*OPTION.findall(quoted)} - options_of(named[1]))
        else:
            own = other.replace("other commands load it into your network with --arch net.py:build", "")
            yield from {*OPTION.findall(own)} - options_of(command)


class Own(nn.Linear):
    """A class of the user's, for a pickled module."""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS, encoding="utf-8")
    (tmp_path / "cat.jpg").write_bytes(CAT.read_bytes())
    np.save(tmp_path / "wave.npy", np.ones((4, 4000), np.float32))
    np.save(tmp_path / "floats.npy", np.ones((4, 9), np.float32))
    np.save(tmp_path / "far.npy", np.full((4, 9), 100))
    torch.save({"input_ids": torch.ones(2, 4, dtype=torch.long)}, tmp_path / "dict.pt")
    return tmp_path


def save_twice(folder: Path, content: object) -> Path:
    (folder / "saved").mkdir(exist_ok=True)
    for name in ("1.pt", "2.pt"):
        torch.save(content, folder / "saved" / name)
    return folder / "saved" / "1.pt"


RUNS = [
    *(("Tokens", name) for name in ("floats.npy", "far.npy", "dict.pt", "")),
    *(("Entries", "dict.pt"), ("Entries", "far.npy"), ("Two", "far.npy"), ("Spectrogram", "wave.npy")),
    *(("Two", "1,2,3"), ("picture", "cat.jpg"), ("picture", "wave.npy"), ("picture", ""), ("picture", "missing.jpg")),
]


def spread(cases: Sequence[tuple[str, ...]], commands: Iterable[str]) -> list[tuple[str, ...]]:
    """Give each case a fifth of the commands, and each command a fifth of the cases."""
    places = product(enumerate(cases), enumerate(commands))
    return [(*case, command) for (row, case), (column, command) in places if (row + column) % 5 == 0]


@pytest.mark.parametrize(("network", "arguments", "command"), spread(RUNS, LINES))
@pytest.mark.sample("Tokens-far.npy-survey", "Two-1,2,3-attribute", "Tokens--history", "picture-wave.npy-diff")
def test_what_a_run_says(run: Run, files: Path, command: str, network: str, arguments: str) -> None:
    states = {
        "Spectrogram": nn.Conv1d(129, 3, 3),
        "picture": nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3)),
    }
    built = states.get(network) or nn.ModuleDict({"embedding": nn.Embedding(9, 4)})
    weights = save_twice(files, built.state_dict())
    values = {"model": f"nets.py:{network}", "input": arguments, "weights": weights, "folder": weights.parent}
    line = [line.format(**values) for line in LINES[command]]
    if not arguments:
        line = [each for each in line if each not in ("", "--images")]
    ended = run(command, *line)
    assert not {*strange_options(ended.stdout + ended.stderr, command)}


KINDS = ("own", "module", "unknown", "two networks", "function", "ema", "torchscript")


@pytest.mark.parametrize(("kind", "command"), spread([(kind,) for kind in KINDS], FILES_ALONE))
@pytest.mark.sample("module-layers", "function-check")
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_a_file_brings_up(run: Run, files: Path, command: str, kind: str) -> None:
    linear = nn.Linear(3, 2)
    contents = {
        "module": nn.Sequential(linear),
        "own": Own(3, 2),
        "function": {"state_dict": linear.state_dict(), "hook": save_twice},
        "unknown": linear.state_dict(),
        "two networks": {"a": linear.state_dict(), "b": OrderedDict(linear.state_dict())},
        "ema": {"model": linear.state_dict(), "ema": linear.state_dict()},
    }
    weights = save_twice(files, contents.get(kind))
    if kind == "torchscript":
        for path in weights.parent.iterdir():
            torch.jit.script(linear).save(str(path))
    values = {"weights": weights, "folder": weights.parent}
    ended = run(command, *(text.format(**values) for text in FILES_ALONE[command]))
    assert not {*strange_options(ended.stdout + ended.stderr, command)}
