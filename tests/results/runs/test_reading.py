"""Parts of a run that do not belong together are refused in one line, though each has the right type."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn

import hookscope
from hookscope.errors import EXIT_BUG, InputError, most_severe
from hookscope.results.accuracy import ClassAccuracy
from hookscope.results.runs.reading import read_run
from hookscope.results.runs.store import ARRAYS, checked
from hookscope.results.survey import CropSheet


@pytest.fixture
def differences(tmp_path: Path) -> Path:
    """The run directory of two classifiers over two inputs."""
    one, other = (nn.Sequential(nn.Linear(4, 10)) for _ in range(2))
    classes = [str(number) for number in range(10)]
    return hookscope.diff(one, other, torch.randn(2, 4), classes=classes).save(tmp_path / "run")


def lose_a_class(output: Mapping[str, Any]) -> None:
    output["predictions"][0][0]["class_indices"].pop()


def lose_an_input(output: Mapping[str, Any]) -> None:
    output["predictions"][1].pop()


def name_another_input(output: Mapping[str, Any]) -> None:
    output["predictions"][0][0]["input_index"] = 2


@pytest.mark.parametrize("spoil", [lose_a_class, lose_an_input, name_another_input])
def test_best_classes_that_cannot_be_are_refused(differences: Path, spoil: Callable[[Mapping[str, Any]], None]) -> None:
    document = json.loads((differences / "result.json").read_bytes())
    spoil(document["outputs"][0])
    (differences / "result.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InputError, match=r"best classes in its result\.json cannot be"):
        read_run(differences)


def test_a_first_gradient_that_is_not_listed_is_refused(differences: Path) -> None:
    document = json.loads((differences / "result.json").read_bytes())
    document["first_gradient_difference"] = "0.weight grad"
    (differences / "result.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InputError, match=r"the first gradient that differs is none that its result\.json lists"):
        read_run(differences)


def test_an_exit_code_that_is_none_of_ours_is_as_bad_as_a_bug() -> None:
    assert most_severe([0, 2**40]) == 2**40
    assert most_severe([EXIT_BUG, 3]) == EXIT_BUG


def test_a_cost_without_modules_is_refused(tmp_path: Path) -> None:
    run = hookscope.activations(nn.Linear(4, 3), torch.randn(2, 4), cost=True).save(tmp_path / "run")
    document = json.loads((run / "result.json").read_bytes())
    document["cost"]["modules"] = []
    (run / "result.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InputError, match=r"a cost without modules, or an accuracy without labels"):
        read_run(run)


SHEET = {"row": 0, "path": "a.jpg", "channels": [0], "tile": 8, "columns": 1, "gap": 0, "is_whole": True}


@pytest.mark.parametrize(
    ("kind", "entries", "name"),
    [
        (ClassAccuracy, {"label": "cat", "indices": [0], "count": 1, "right": 0}, "count"),
        (CropSheet, SHEET, "tile"),
        (CropSheet, SHEET, "columns"),
    ],
)
def test_a_share_of_no_pictures_and_a_picture_without_pixels_are_refused(
    kind: type, entries: Mapping[str, Any], name: str
) -> None:
    assert isinstance(checked(kind, entries), kind)
    with pytest.raises(ValueError, match=name):
        checked(kind, {**entries, name: 0})


def test_a_duplicate_channel_without_its_correlation_is_refused(tmp_path: Path) -> None:
    run = hookscope.survey(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4)).save(tmp_path / "run")  # type: ignore[union-attr]
    arrays = load_file(run / ARRAYS)
    arrays["rows.0.channels.arrays.duplicate_of"][2] = 1
    save_file(arrays, run / ARRAYS)
    with pytest.raises(InputError, match=rf"its {ARRAYS} is cut short or damaged"):
        read_run(run)
