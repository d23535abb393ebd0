"""The names of classes that commands show: whose they are, and what is said where they do not fit."""

from pathlib import Path

import pytest
import torch

from hookscope.models.spec import load_model
from tests.cli.conftest import CAT, Run


@pytest.mark.exhaustive
def test_predictions_of_a_state_dict_have_names_from_the_network_the_file_or_the_option(
    run: Run, tmp_path: Path
) -> None:
    torch.save(load_model("demo").module.state_dict(), tmp_path / "demo.pt")
    quick = ("--layer", "_fc", "--no-grids", "--no-verify", "--out", tmp_path / "run")
    recognised = run("activations", tmp_path / "demo.pt", CAT, *quick)
    assert recognised.code == 0
    assert "Egyptian cat" in recognised.stdout
    assert "takes ImageNet's class names" in " ".join(recognised.stdout.split())
    (tmp_path / "names.txt").write_text("\n".join(f"number {index}" for index in range(1000)), encoding="utf-8")
    named = run("activations", tmp_path / "demo.pt", CAT, *quick, "--classes", tmp_path / "names.txt")
    assert "number 285" in named.stdout
    (tmp_path / "few.json").write_text('["cat", "dog"]', encoding="utf-8")
    few = run("activations", tmp_path / "demo.pt", CAT, *quick, "--classes", tmp_path / "few.json")
    shown = " ".join(few.stderr.replace("│", " ").split())
    assert "The output has 1,000 scores per input, but 2 class names are known, so none is shown." in shown
    wrong = run("activations", "demo", CAT, *quick, "--classes", CAT)
    assert (wrong.code, "is not UTF-8; give a file of class names" in wrong.stderr) == (3, True)
