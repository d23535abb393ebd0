"""Pictures with several labels each: counted as scikit-learn defines exact match, recall and F1."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookscope
from hookscope.results.accuracy import Accuracy
from hookscope.results.check import CheckReport
from tests.fork_server import Finished, ForkServer

NAMES = ("red", "green", "blue")


class Scores(nn.Module):
    """Returns what stands in the first pixel of each picture."""

    def __init__(self, *last: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1, bias=False)
        nn.init.dirac_(self.conv.weight)
        self.last = nn.Sequential(*last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.conv(x)[:, :, 0, 0])
        return scores


def write(folder: Path, logits: np.ndarray, truth: np.ndarray) -> Path:
    """Write pictures whose first pixel holds their logits, (N, 3), and labels of 0 and 1, (N, 3), as a CSV file."""
    folder.mkdir(exist_ok=True)
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["path", *NAMES])
        for number, (scores, labels) in enumerate(zip(logits, truth, strict=True)):
            picture = np.zeros((3, 4, 4), np.float32)
            picture[:, 0, 0] = scores
            picture[0, 3, 3] = number  # so that no two are equal
            np.save(folder / f"{number}.npy", picture)
            lines.writerow([f"{number}.npy", *labels])
    return folder / "labels.csv"


def random_pictures(folder: Path, count: int = 40) -> tuple[np.ndarray, np.ndarray, Path]:
    random = np.random.default_rng(0)
    truth = random.integers(0, 2, (count, 3))
    logits = ((truth * 2 - 1) * random.choice([1.0, -1.0], (count, 3), p=[0.85, 0.15])).astype(np.float32)
    logits *= random.uniform(0.1, 5, (count, 3)).astype(np.float32)
    return logits, truth, write(folder, logits, truth)


def check(network: nn.Module, data: Path, **changes: Any) -> CheckReport:
    options = {"select": "*accuracy*", "classes": NAMES, "multi_label": True, **changes}
    return hookscope.check(network, data=data, **options)


def accuracy_of(network: nn.Module, data: Path, **changes: Any) -> Accuracy:
    report = check(network, data, **changes)
    assert report.accuracy is not None, report.error
    return report.accuracy


def test_exact_match_recall_and_f1_are_those_of_their_definitions(tmp_path: Path) -> None:
    logits, truth, data = random_pictures(tmp_path)
    inputs = logits > 0
    accuracy = accuracy_of(Scores(), data)
    assert (accuracy.count, accuracy.right) == (40, int((inputs == truth).all(1).sum()))
    assert 0 < accuracy.right < 40
    assert accuracy.mapping == "labels are names of classes; a label is given where its sigmoid is above 0.5"
    f1s = []
    for class_name in accuracy.classes:
        index = NAMES.index(class_name.label)
        hits, wrongly = inputs[:, index] & (truth[:, index] == 1), inputs[:, index] & (truth[:, index] == 0)
        missed = ~inputs[:, index] & (truth[:, index] == 1)
        assert (class_name.count, class_name.right) == (truth[:, index].sum(), hits.sum())
        assert class_name.false_positives == wrongly.sum()
        f1s.append(2 * hits.sum() / (2 * hits.sum() + wrongly.sum() + missed.sum()))
        assert class_name.f1 == pytest.approx(f1s[-1])
    assert accuracy.macro_f1 == pytest.approx(np.mean(f1s))


def test_the_surest_mistakes_come_first_with_both_probabilities(tmp_path: Path) -> None:
    logits = np.array([[4.0, -3, 0.5], [-2, 3, 3], [1, -1, -1], [-5, -5, -5]], np.float32)
    truth = np.array([[0, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]])
    accuracy = accuracy_of(Scores(), write(tmp_path, logits, truth))
    assert accuracy.right == 2
    both, missed = accuracy.worst
    share = 1 / (1 + np.exp(-logits))
    assert (both.label, both.taken_for) == ("green", "red, blue")
    assert (both.probability, both.label_probability) == pytest.approx((share[0, 0], share[0, 1]))
    assert (missed.label, missed.taken_for, missed.probability) == ("red, green, blue", "green, blue", None)
    assert missed.label_probability == pytest.approx(share[1, 0])
    green = next(class_name for class_name in accuracy.classes if class_name.label == "green")
    assert (green.right, green.count, green.mistaken_count) == (1, 2, 1)


def test_scores_are_probabilities_only_if_all_of_all_batches_are(tmp_path: Path) -> None:
    logits, truth = np.full((20, 3), 0.25, np.float32), np.ones((20, 3), int)
    data = write(tmp_path / "low", logits, truth)
    assert accuracy_of(Scores(), data).right == 0  # 0.25 as returned
    logits[19, 2] = 3  # in the last batch: all are logits, and sigmoid(0.25) is above 0.5
    accuracy = accuracy_of(Scores(), write(tmp_path / "high", logits, truth))
    assert (accuracy.right, accuracy.count) == (20, 20)
    assert accuracy_of(Scores(nn.Sigmoid()), data).mapping.endswith("where its score is above 0.5")


def test_nan_is_wrong_and_one_score_is_a_label_that_is_there_or_not(tmp_path: Path) -> None:
    data = write(tmp_path, np.array([[np.nan, 1, 1], [2, 2, 2]], np.float32), np.ones((2, 3), int))
    broken = accuracy_of(Scores(), data, select=["accuracy", "forward"])
    assert (broken.right, broken.worst[0].taken_for) == (1, "NaN")
    (tmp_path / "one.csv").write_text("path,there\n0.npy,0\n1.npy,1\n")
    one = accuracy_of(Scores(nn.Flatten(), Last()), tmp_path / "one.csv", classes=["there"])
    assert (one.right, one.class_count) == (2, 1)


class Last(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 2:].nan_to_num() - 1.5


def test_columns_stand_for_classes_in_their_order(tmp_path: Path) -> None:
    _, _, data = random_pictures(tmp_path)
    by_name, by_order = accuracy_of(Scores(), data), accuracy_of(Scores(), data, classes=None)
    assert by_order.mapping.startswith("columns in order: 'red' is class 0;")
    assert (by_order.right, by_order.classes) == (by_name.right, by_name.classes)


def test_rules_judge_exact_match_recall_and_guessing(tmp_path: Path) -> None:
    _, _, data = random_pictures(tmp_path)
    failing = check(Scores(), data, limit={"accuracy.min-fraction": 0.99, "class-accuracy.min-fraction": 0.99})
    assert [(finding.rule, finding.level) for finding in failing.findings] == [
        ("accuracy", "fail"),
        ("class-accuracy", "fail"),
    ]
    assert "labelled pictures (42.5%) are given exactly their labels" in failing.findings[0].message
    assert "macro F1" in failing.findings[0].message
    assert ", F1 0." in failing.findings[1].message
    assert not check(Scores(), data).findings


@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_a_network_that_gives_no_label_or_every_label_is_a_warning(tmp_path: Path, bias: float) -> None:
    class Constant(Scores):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + bias

    _, _, data = random_pictures(tmp_path)
    (finding,) = check(Constant(), data).findings
    assert (finding.rule, finding.level) == ("accuracy", "warn")
    assert "indistinguishable from giving each label as often to any pictures" in finding.message


def test_a_baseline_compares_pictures_by_their_sets_of_labels(fork_server: ForkServer, tmp_path: Path) -> None:
    def run(*arguments: str) -> Finished:
        return fork_server.run(
            "-m", "hookscope", "check", "net.py:Net", *arguments, cwd=tmp_path, environment=os.environ
        )

    logits, truth, _ = random_pictures(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, flip=0):\n"
        "        super().__init__()\n"
        "        self.conv = torch.nn.Conv2d(3, 3, 1, bias=False)\n"
        "        torch.nn.init.dirac_(self.conv.weight)\n"
        "        self.sign = -1 if flip else 1\n"
        "    def forward(self, x):\n"
        "        return self.conv(x)[:, :, 0, 0] * torch.tensor([self.sign, 1, 1])\n"
    )
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    options = ["--select", "*accuracy*", "--baseline", "b.json", "--classes", "names.txt"]
    written = run("--multi-label", "--data", "labels.csv", *options, "--update-baseline")
    assert written.returncode == 0, written.stderr
    document = json.loads((tmp_path / "b.json").read_text())
    assert document["multi_label"] is True
    sets = {each["label"]: len(each["right"]) + len(each["wrong"]) for each in document["labelled"]}
    expected = {", ".join(NAMES[i] for i in range(3) if row[i]) or "no label" for row in truth}
    assert {*sets} == expected
    assert sum(sets.values()) == 40
    flipped = run("--model-arg", "flip=1", "--multi-label", "--data", "labels.csv", *options)
    before, now = ((logits * signs > 0) == truth for signs in ([1, 1, 1], [-1, 1, 1]))
    lost = int((before.all(1) & ~now.all(1)).sum())
    assert f"{lost} lost and" in " ".join(flipped.stdout.split())
    (tmp_path / "one.csv").write_text("".join(f"{number}.npy,red\n" for number in range(40)))
    other = run(*options, "--data", "one.csv")
    assert other.returncode == 2
    assert "its labelled pictures were counted with --multi-label" in " ".join(other.stdout.split())


def test_multi_label_false_overrides_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hookscope.toml").write_text("[output]\nmulti-label = true\n", encoding="utf-8")
    np.save(tmp_path / "x.npy", np.zeros((1, 2), np.float32))
    (tmp_path / "data.csv").write_text("x.npy,0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for given, expected in (({}, True), ({"multi_label": False}, False)):
        report = hookscope.check(nn.Linear(2, 2), data="data.csv", **given)
        assert report.accuracy is not None, report.error
        assert report.accuracy.multi_label is expected
