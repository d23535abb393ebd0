"""Operations on the command line: `--ops`, patterns, edits, lists."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hookscope.models.user_code import importable
from tests.cli.conftest import Run, table
from tests.models.saved import SAVERS

NETWORK = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = x + F.relu(self.conv2(x))
        return self.fc(x.mean((2, 3)))


def build():
    torch.manual_seed(0)
    return Net()
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    """Write the network, and its input, (1, 3, 8, 8), as `x.npy` beside it."""
    (tmp_path / "ops.py").write_text(NETWORK, "utf-8")
    values = np.random.default_rng(1).normal(size=(1, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", values)


def table_by_call(path: Path) -> dict[str, dict[str, str]]:
    return {f"{row['layer']}#{row['call']}": row for row in table(path)}


def test_ops_adds_every_operation_with_its_line_inputs_and_values(run: Run, tmp_path: Path) -> None:
    result = run("activations", "ops.py:build", "x.npy", "--ops", "--save-tensors", "--out", "out")
    assert result.code == 0
    rows = table_by_call(tmp_path / "out" / "layers.csv")
    assert {name: (row["source"], row["inputs"]) for name, row in rows.items()} == {
        "conv1#0": ("", "input"),
        "(model):relu#0": ("ops.py:15", "conv1"),
        "conv2#0": ("", "(model):relu"),
        "(model):relu#1": ("ops.py:16", "conv2"),
        "(model):add#0": ("ops.py:16", "(model):relu;(model):relu#1"),
        "(model):mean#0": ("ops.py:17", "(model):add"),
        "fc#0": ("", "(model):mean"),
    }
    kept = load_file(tmp_path / "out" / "activations.safetensors")
    first = kept["conv1"].relu()
    assert torch.equal(kept["(model):relu"], first)
    assert torch.equal(kept["(model):add"], first + kept["conv2"].relu())
    assert float(rows["(model):add#0"]["mean"]) == pytest.approx(kept["(model):add"].double().mean().item(), rel=1e-6)
    assert len([*(tmp_path / "out" / "grids").iterdir()]) == len(rows)
    assert "ops.py:16" in result.stdout


def test_an_edit_of_an_operation_changes_what_follows(run: Run, tmp_path: Path) -> None:
    arguments = ("--layer", "op:*", "--edit", "(model):add:output:scale(2)", "--save-tensors", "--out", "out")
    assert run("activations", "ops.py:build", "x.npy", *arguments).code == 0
    kept = load_file(tmp_path / "out" / "activations.safetensors")
    assert torch.equal(kept["(model):add"], 2 * (kept["(model):relu"] + kept["(model):relu#1"]))
    torch.testing.assert_close(kept["(model):mean"], kept["(model):add"].mean((2, 3)), rtol=0, atol=0)


def test_layers_lists_operations_below_their_module(run: Run) -> None:
    result = run("layers", "ops.py:build", "--ops", "--input-shape", "1,3,8,8", "--json")
    modules = {row["layer"]: row for row in json.loads(result.stdout)["rows"]}
    assert list(modules) == ["", "(model):relu", "(model):add", "(model):mean", "conv1", "conv2", "fc"]
    assert modules["(model):relu"] == {
        "layer": "(model):relu",
        "kind": "relu",
        "parameter_count": 0,
        "total_parameter_count": 0,
        "call_count": 2,
        "input_shapes": [[1, 4, 8, 8]],
        "output_shapes": [[1, 4, 8, 8]],
        "selected": True,
        "note": "ops.py:15",
        "owner": "",
    }
    marked = run("layers", "ops.py:build", "--layer", "op:add", "--input-shape", "1,3,8,8", "--json")
    rows = json.loads(marked.stdout)["rows"]
    assert [row["layer"] for row in rows if row["selected"]] == ["(model):add"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ("--layer", "op:relu", "--layer", "!op:relu"),
            5,
            "'!op:relu' leave no operation: drop an exclusion.",
        ),
        (("--layer", "op:reul"), 5, "No operation matches 'op:reul'. Nearest: 'op:relu'"),
        (("--edit", "op:gelu:output:zero"), 5, "No operation matches 'op:gelu'."),
        (("--edit", "op:relu#1:output:zero"), 2, "An edit changes every call of an operation: leave out #1."),
        (("--layer", "op:"), 2, "is half a pattern: give op:NAME or MODULE:NAME"),
        (("--layer", ":relu"), 2, "is half a pattern: give op:NAME or MODULE:NAME"),
        (("--layer", "op:relu@1"), 2, "Give a call: op:relu#1 is the second."),
    ],
)
def test_a_pattern_of_operations_that_cannot_be_is_refused(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = run("activations", "ops.py:build", "x.npy", *arguments, "--out", "out")
    assert result.code == code
    assert words in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_page_shows_the_line_and_both_arms_of_a_sum(run: Run, tmp_path: Path) -> None:
    arguments = ("--ops", "--no-grids", "--report", "page.html", "--out", "out")
    assert run("activations", "ops.py:build", "x.npy", *arguments).code == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<dt>called at</dt><dd>ops.py:16</dd>" in page
    arms = (
        'href="#layer=%28model%29%3Arelu">(model):relu</a>',
        'href="#layer=%28model%29%3Arelu%231">(model):relu#1</a>',
    )
    assert "computed from" in page
    assert all(arm in page for arm in arms)


@pytest.mark.parametrize("form", ["scripted", "traced"])
@pytest.mark.exhaustive
def test_commands_say_that_operations_inside_torchscript_are_not_seen(run: Run, tmp_path: Path, form: str) -> None:
    x = torch.from_numpy(np.load(tmp_path / "x.npy"))
    with importable():
        SAVERS[form](importlib.import_module("ops").build().eval(), (x,), tmp_path / "net.pt")
    sys.modules.pop("ops")
    note = "Operations inside TorchScript are not seen: (model)."
    for command in (
        ("activations", "net.pt", "x.npy", "--ops", "--no-grids", "--out", "out"),
        ("layers", "net.pt", "--ops", "--input-shape", "1,3,8,8"),
        ("grads", "net.pt", "x.npy", "--loss", "sum"),
        ("check", "net.pt"),
    ):
        result = run(*command, "--trust")
        assert note in " ".join((result.stdout + result.stderr).split()), command
    assert {row["kind"] for row in table(tmp_path / "out" / "layers.csv")} == {"Conv2d", "Linear"}
