"""`hookscope history`: what it prints and writes, and its exit codes."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.cli.conftest import Run
from tests.docs.test_schemas import check, check_run
from tests.models import distributed


def weights(at: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(at)
    return {"conv.weight": torch.randn(8, 4, 3, 3), "conv.bias": torch.randn(8)}


@pytest.mark.exhaustive
def test_the_command_answers_in_a_sentence_and_writes_a_run(run: Run, tmp_path: Path) -> None:
    for at in range(1, 4):
        state = weights(0)
        state["conv.weight"] = state["conv.weight"] * (1 + at / 100)
        state["conv.bias"][0] = torch.nan if at == 3 else 0
        torch.save({"epoch": at, "model": state, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}}, f"{at}.pt")
    ended = run("history", "*.pt", "--report", "page.html", "--json")
    assert ended.code == 1
    assert ended.stderr.splitlines()[0] == "conv.bias holds NaN or Inf in 3.pt, the last file."
    document = check("history", ended.stdout)
    assert document["exit_code"] == 1
    assert document["files"][0]["optimisers"][0]["rates"] == [0.1]
    check_run(tmp_path / document["run"])
    assert (tmp_path / "page.html").is_file()
    assert json.loads((tmp_path / document["run"] / "run.json").read_text())["verb"] == "history"


def test_a_glob_that_the_shell_expanded_is_the_files_of_it(run: Run, tmp_path: Path) -> None:
    for at in (1, 2):
        torch.save(weights(at), f"epoch_{at}.pt")
    ended = run("history", "epoch_1.pt", "epoch_2.pt", "--json")
    document = json.loads(ended.stdout)
    assert [file["label"] for file in document["files"]] == ["epoch_1.pt", "epoch_2.pt"]
    assert document["run"] == f"hookscope-runs/history-{tmp_path.name}-epoch"
    alone = run("history", "epoch_1.pt")
    assert alone.code == 2
    assert "'epoch_1.pt' is one: name more, a folder, or a glob" in alone.stderr


def test_indices_of_shards_are_files_as_well(run: Run) -> None:
    for at in (1, 2):
        safetensors.torch.save_file(weights(at), f"{at}.safetensors")
        listed = dict.fromkeys(weights(at), f"{at}.safetensors")
        Path(f"{at}.safetensors.index.json").write_text(json.dumps({"weight_map": listed}), encoding="utf-8")
    document = json.loads(run("history", "1.safetensors.index.json", "2.safetensors.index.json", "--json").stdout)
    assert [file["label"] for file in document["files"]] == ["1.safetensors.index.json", "2.safetensors.index.json"]


def test_folders_that_are_checkpoints_are_files_as_well(run: Run) -> None:
    for at in (1, 2):
        distributed.save(weights(at), Path(f"step_{at}"))
    document = json.loads(run("history", "step_1", "step_2", "--json").stdout)
    assert [file["label"] for file in document["files"]] == ["step_1", "step_2"]
    assert "'step_1' is one: name more" in run("history", "step_1").stderr


def test_an_error_of_every_file_is_printed_once(run: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\ndef build():\n    return nn.Bilinear(3, 3, 2)\n", "utf-8")
    for at in (1, 2, 3):
        torch.save({"weight": torch.randn(2, 3, 3), "bias": torch.randn(2)}, f"{at}.pt")
    ended = run("history", "?.pt", "--arch", "net.py:build", "--quiet")
    assert ended.code == 2
    (error,) = ended.errors
    assert "1.pt (net.py:build) has an unknown input shape" in error
    assert error.endswith("The same holds for 2 more files.")


def test_files_that_were_not_checked_to_the_end_get_no_all_clear(run: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("", "utf-8")
    for at in (1, 2):
        torch.save({"weight": torch.randn(2, 3)}, f"{at}.pt")
    ended = run("history", "?.pt", "--arch", "net.py:build", "--input-shape", "1,3")
    assert ended.code == 5
    assert ended.stdout.startswith("No problems in what could be checked of 2 files.")
