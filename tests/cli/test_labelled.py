"""`hookscope check --data`: the accuracy on labelled pictures, as a release gate."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.cli.conftest import Run
from tests.commands.check.measuring.squares import COLOURS, SOURCE, draw_squares, trained_on
from tests.reporting.html_page import Page

CONFIG = """
[model]
arch = "net.py:Colours"
classes = "names.txt"

[input]
data = "val"
resize = "none"
crop = "none"
mean = "none"
std = "none"

[rules]
accuracy = { level = "fail", min-fraction = 0.7 }
class-accuracy = { level = "fail", min-fraction = 0.5 }
accuracy-drop = { level = "fail", max-fraction = 0.02 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled squares; the network that was trained on them, with its head permuted, and with two classes swapped."""
    folder = tmp_path_factory.mktemp("labelled")
    draw_squares(folder / "val")
    (folder / "net.py").write_text(SOURCE, encoding="utf-8")
    (folder / "names.txt").write_text("\n".join(COLOURS), encoding="utf-8")
    (folder / "hookscope.toml").write_text(CONFIG, encoding="utf-8")
    state = trained_on(folder / "val").state_dict()
    torch.save(state, folder / "sound.pt")
    torch.save({name: value.half().float() for name, value in state.items()}, folder / "rounded.pt")
    for name, order in (("permuted", [1, 2, 3, 0]), ("swapped", [1, 0, 2, 3])):
        changed = {key: value[order] if key.startswith("head.") else value for key, value in state.items()}
        torch.save(changed, folder / f"{name}.pt")
    return folder


@pytest.fixture(scope="module")
def reports(command: Run, folder: Path) -> dict[str, dict[str, Any]]:
    """Write the baseline of the sound network, and check all of them against it."""
    baseline = ("--baseline", "baseline.json")
    written = command("check", "sound.pt", *baseline, "--update-baseline", cwd=folder)
    assert written.code == 0, written.stdout + written.stderr
    networks = [f"{name}.pt" for name in ("sound", "rounded", "permuted", "swapped")]
    files = ("--evidence", "evidence", "--report", "page.html", "--format", "json")
    ended = command("check", *networks, *baseline, "--ignore", "drift", *files, cwd=folder)
    assert ended.code == 1, ended.stdout + ended.stderr
    return {Path(checkpoint["checkpoint"]).stem: checkpoint for checkpoint in json.loads(ended.stdout)["checkpoints"]}


def statuses(report: dict[str, Any]) -> list[str]:
    rules = {rule["rule"]: rule["status"] for rule in report["outcomes"]}
    return [rules[name] for name in ("accuracy", "class-accuracy", "accuracy-drop")]


def messages(report: dict[str, Any], name: str) -> list[str]:
    return [actual["message"] for rule in report["outcomes"] if rule["rule"] == name for actual in rule["findings"]]


@pytest.mark.exhaustive
def test_a_sound_network_passes_and_so_does_its_half_precision_copy(reports: dict[str, dict[str, Any]]) -> None:
    for name in ("sound", "rounded"):
        assert statuses(reports[name]) == ["pass"] * 3
        accuracy = reports[name]["accuracy"]
        assert (accuracy["right"], accuracy["count"], accuracy["share"]) == (72, 80, 0.9)
        # Clopper and Pearson's for 72 of 80.
        assert accuracy["interval"] == pytest.approx({"low": 0.8124, "high": 0.9558}, abs=5e-5)


@pytest.mark.exhaustive
def test_two_swapped_classes_fail_by_class_accuracy_and_drop(reports: dict[str, dict[str, Any]]) -> None:
    # 38 of 80: two classes are as they were, and the two swapped show each other in at most two pictures.
    assert statuses(reports["swapped"])[1:] == ["fail"] * 2
    (message,) = messages(reports["swapped"], "class-accuracy")
    assert message.startswith("2 of 4 labels are right less often than the limit, 50%: ")
    assert "(18 taken for 'green')" in message
    classes = {class_name["label"]: class_name for class_name in reports["swapped"]["accuracy"]["classes"]}
    assert (classes["blue"]["right"], classes["red"]["right"]) == (2, 18)
    assert classes["blue"]["mistaken_for"] == "green"


@pytest.mark.exhaustive
def test_the_worst_pictures_are_evidence(reports: dict[str, dict[str, Any]], folder: Path) -> None:
    worst = reports["swapped"]["accuracy"]["worst"]
    assert len(worst) == 8
    for index, each in enumerate(worst):
        kept = folder / "evidence" / "swapped.pt" / "pictures" / f"{index}.png"
        with Image.open(kept) as shown, Image.open(folder / each["name"]) as original:
            assert shown.tobytes() == original.tobytes()  # nothing was resized or cropped
    with Image.open(folder / "evidence" / "swapped.pt" / "overview.png") as overview:
        colours = {colour for _, colour in overview.getcolors(2**20)}
    for index in range(8):
        with Image.open(folder / "evidence" / "swapped.pt" / "pictures" / f"{index}.png") as shown:
            assert {colour for _, colour in shown.getcolors()} <= colours
    page = Page((folder / "page.html").read_text(encoding="utf-8"))
    page.assert_self_contained()
    text = (folder / "page.html").read_text(encoding="utf-8")
    assert text.count("<summary>Labelled pictures</summary>") == 4
    assert text.count(", as the network got it") == len([*folder.glob("evidence/*/pictures/*.png")])
    assert re.search(rf"<p>labelled {worst[0]['label']} \(.*</p>\n<p>taken for {worst[0]['taken_for']} \(", text)
