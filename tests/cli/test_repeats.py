"""Rows that repeat another, as the commands show them: folded in every format, unless asked for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.cli.conftest import Run, names_below, record_of, rows_of, table

NETWORK = """
from torch import nn


def build():
    return nn.Sequential(nn.Conv2d(3, 2, 1), nn.Dropout(), nn.Identity(), nn.ReLU(), nn.Dropout(), nn.Conv2d(2, 2, 1))
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder that commands run in, with a network and an input."""
    (tmp_path / "dropout.py").write_text(NETWORK, "utf-8")
    np.save(tmp_path / "picture.npy", np.random.default_rng(0).normal(size=(1, 3, 8, 8)).astype(np.float32))
    return tmp_path


def folded(rows: list[Any]) -> list[tuple[int, str, str]]:
    """Return index, layer and the rows folded into it, however the format has them."""
    return [(int(row["index"]), row["layer"], "".join(row["duplicates"]).replace(";", "")) for row in rows]


FOLDED = [(0, "0", "12"), (1, "3", "4"), (2, "5", "")]


def test_activations_folds_rows_that_repeat_another_in_everything_it_writes(run: Run, here: Path) -> None:
    options = ("--save-tensors", "--out", "out", "--tensorboard", "logs", "--report", "page.html")
    ended = run("activations", "dropout.py:build", "picture.npy", *options)
    assert (ended.code, ended.stderr) == (0, "")
    assert "3 rows repeat others and are not shown: --repeats shows all" in ended.stdout
    assert folded(rows_of(here / "out")) == folded(table(here / "out" / "layers.csv")) == FOLDED
    grids = [grid["path"] for grid in record_of(here / "out")["grids"]]
    assert {name for name in names_below(here / "out") if name.startswith("grids/")} == set(grids)
    assert [Path(path).stem for path in grids] == ["000-0", "001-3", "002-5"]
    assert set(load_file(here / "out" / "activations.safetensors")) == {"0", "3", "5"}
    logged = EventAccumulator(str(here / "logs"))
    logged.Reload()
    assert {tag for tag in logged.Tags()["scalars"] if "l2" in tag} == {f"activation l2/{name}" for name in "035"}
    page = (here / "page.html").read_text("utf-8")
    assert "<dt>output also of</dt><dd>1, 2</dd>" in page
    assert "<dt>output also of</dt><dd>4</dd>" in page


def test_grads_folds_rows_that_repeat_another_in_everything_it_writes(run: Run, here: Path) -> None:
    options = ("--inputs", "--grids", "--per-image", "--save-tensors", "--out", "out", "--report", "page.html")
    ended = run("grads", "dropout.py:build", "picture.npy", *options)
    assert ended.code == 0
    assert "3 rows repeat others and are not shown" in ended.stdout
    document = json.loads((here / "out" / "result.json").read_bytes())
    outputs = [row for row in document["gradients"] if row["role"] == "output"]
    assert [row["layer"] for row in document["gradients"]] == ["0", "0", "3", "3", "5", "5"]
    assert [row["backward_index"] for row in document["gradients"]] == [5, 4, 3, 2, 1, 0]
    assert [row["duplicates"] for row in outputs] == [["1", "2"], ["4"], []]
    assert folded(rows_of(here / "out")) == folded(table(here / "out" / "layers.csv")) == FOLDED
    assert len(table(here / "out" / "gradients.csv")) == 6
    assert [Path(grid["path"]).stem for grid in record_of(here / "out")["grids"]] == ["001-0", "003-3", "005-5"]
    assert set(table(here / "out" / "inputs.csv")[0]) == {"name", "loss", "parameters_l2", "l2 0", "l2 3", "l2 5"}
    kept = set(load_file(here / "out" / "gradients.safetensors"))
    assert {name.partition(" ")[0] for name in kept} == {
        "0",
        "0[0]",
        "3",
        "3[0]",
        "5",
        "5[0]",
        "0.weight",
        "0.bias",
        "5.weight",
        "5.bias",
    }
    assert "<dt>output also of</dt><dd>4</dd>" in (here / "page.html").read_text("utf-8")
