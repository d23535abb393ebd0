import json
from argparse import Namespace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.cli.conftest import Run, assert_refused, names_below
from tests.models.hostile import Call


@pytest.fixture(autouse=True)
def only_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recognise torchvision's networks alone, in this process: timm's take a while."""
    monkeypatch.setattr("hookscope.models.architecture.find_spec", lambda _name: None)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    tied = torch.ones(4, 6)
    bad = torch.tensor([1.0, float("nan"), float("inf"), float("-inf")])
    return {"net.a": tied, "net.b": tied, "net.bad": bad, "net.half": torch.zeros(1024, dtype=torch.float16)}


def test_a_report_says_all_that_is_to_be_known(
    run: Run, tmp_path: Path, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(state, tmp_path / "w.pt")
    monkeypatch.setenv("COLUMNS", "120")
    ended = run("checkpoint", "w.pt")
    assert (ended.code, ended.stderr) == (0, "")
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert ["torch", "·", "torch.save,", "zip", "format", "3"] in lines
    assert ["prefix", "of", "every", "name:", "net"] in lines
    assert "fits no network known to hookscope" in ended.stdout
    ones = ["1.000", "0", "1.000", "1.000", "0%"]  # mean, std, min, max, zeros
    assert ["net.a", "4x6", "float32", "96", "B", *ones] in lines
    assert ["net.b", "4x6", "float32", "96", "B", *ones, "shares", "storage", "with", "net.a"] in lines
    assert ["net.bad", "4", "float32", "16", "B", *ones, "1", "NaN,", "2", "Inf"] in lines
    assert ["net.half", "1024", "float16", "2.05", "kB", "0", "0", "0", "0", "100%"] in lines
    total = 96 + 16 + 2048  # what is tied counts once
    assert total == 2160
    assert ended.stdout.splitlines()[0] == "4 tensors · 2.16 kB · float16, float32 · NaN or Inf: 3 values"


def test_an_entry_without_a_short_value_is_its_kind_alone(
    run: Run, tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    torch.save({"model": state, "args": Namespace(lr=1), "note": ""}, tmp_path / "w.pt")
    lines = [line.strip() for line in run("checkpoint", "w.pt").stdout.splitlines()]
    assert {"args: argparse.Namespace", "note: str"} <= {*lines}


def test_json_holds_the_same_and_nothing_else_goes_to_stdout(
    run: Run, tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    torch.save({"model": state, "epoch": 3}, tmp_path / "w.pt")
    ended = run("checkpoint", "w.pt", "--json")
    document = json.loads(ended.stdout)
    assert ended.code == 0
    assert ended.stderr == ""
    [part] = document["parts"]
    assert part["key"] == "model"
    assert [(tensor["key"], tensor["tied_to"]) for tensor in part["tensors"]] == [
        ("net.a", ""),
        ("net.b", "net.a"),
        ("net.bad", ""),
        ("net.half", ""),
    ]
    assert (part["key"], part["is_weights"], part["prefix"]) == ("model", True, "net")
    assert (document["kind"], document["nonfinite_count"]) == ("torch", 3)
    assert [entry["key"] for entry in document["entries"]] == ["model", "epoch"]


def test_names_from_the_file_are_shown_harmlessly(run: Run, tmp_path: Path) -> None:
    hostile = "\x1b[31m[bold]a\n::error::\u202e"
    safetensors.torch.save_file({hostile: torch.ones(1)}, tmp_path / "w.safetensors", metadata={hostile: hostile})
    ended = run("checkpoint", "w.safetensors")
    assert ended.code == 0
    assert "[bold]a" in ended.stdout
    assert not {"\x1b", "\u202e"} & set(ended.stdout)
    assert not any(line.lstrip().startswith("::") for line in ended.stdout.splitlines())


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("a\0b",), 3, r"a\x00b"),
        (("",), 3, ""),
        (("runs.pt",), 4, "builtins.exec"),
        (("two.pt", "--key", "nowhere"), 5, "nowhere"),
        (("words.pt",), 3, "no tensors"),
        ((), 2, "FILE"),
    ],
)
@pytest.mark.sample("arguments0-3-a\\\\x00b", "arguments3-5-nowhere")
def test_what_cannot_be_is_one_line(run: Run, tmp_path: Path, arguments: tuple[str, ...], code: int, word: str) -> None:
    torch.save({"w": torch.ones(1), "x": Call(exec, "1")}, tmp_path / "runs.pt")
    torch.save({"model": {"w": torch.ones(1)}, "ema": {"w": torch.ones(1)}}, tmp_path / "two.pt")
    torch.save(["a", "b"], tmp_path / "words.pt")
    before = names_below(tmp_path)
    ended = run("checkpoint", *arguments)
    assert_refused(ended, code, word)
    assert "--trust" not in ended.stderr, "which this command does not have"
    assert names_below(tmp_path) == before
