"""`hookscope diff` of weights alone and of two runs: what it says, leaves on the disk and refuses."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cli.conftest import CAT, Run, assert_refused, names_below, record_of, table

NETWORK = """
import torch
from torch import nn


def small(scale=1.0):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.Flatten())
    with torch.no_grad():
        network[2].weight.mul_(scale)
    return network
"""


def state(scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "first.weight": torch.randn(6, 4, generator=generator),
        "second.weight": scale * torch.randn(5, generator=generator),
    }


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    torch.save(state(), tmp_path / "a.pt")
    torch.save(state(-1.0) | {"third.weight": torch.ones(3)}, tmp_path / "b.pt")
    return tmp_path / "a.pt", tmp_path / "b.pt"


@pytest.fixture
def runs(run: Run, tmp_path: Path) -> tuple[Path, Path]:
    """Two runs over one picture, of which the second one's last convolution gives twice as much."""
    (tmp_path / "small.py").write_text(NETWORK, encoding="utf-8")
    for name, scale in (("before", 1.0), ("after", 2.0)):
        ended = run(
            *("activations", "small.py:small", CAT, "--model-arg", f"scale={scale}", "--resize", "none"),
            *("--crop", "24", "--no-grids", "--quiet", "--out", tmp_path / name),
        )
        assert ended.code == 0
    return tmp_path / "before", tmp_path / "after"


def test_two_files_are_compared_without_a_network(run: Run, files: tuple[Path, Path], tmp_path: Path) -> None:
    ended = run("diff", *files)
    assert ended.code == 0
    assert "1 of 2 tensors differs: ‖Δ‖/‖w‖ at most 2.00, at second.weight." in ended.stdout
    assert "Signs are opposite in 1 tensor, most in second.weight: 100%." in ended.stdout
    assert "only in B: third.weight (float32, 3): A has no such tensor" in ended.stdout
    folder = tmp_path / "hookscope-runs" / "diff-a.pt-b"
    assert names_below(folder) == {"diff.csv", "result.json", "overview.png", "run.json"}
    rows = {row["name"] or row["name_b"]: row for row in table(folder / "diff.csv")}
    assert float(rows["first.weight"]["relative_l2"]) == 0
    assert float(rows["second.weight"]["relative_l2"]) == 2
    assert float(rows["second.weight"]["sign_flips"]) == 1
    assert rows["third.weight"]["note"] == "A has no such tensor"
    record = record_of(folder)
    assert (record["verb"], record["way"], record["inputs"]) == ("diff", "weights", [])
    assert record["preprocessing"] is None


def test_equal_files_are_said_to_be_equal_and_a_condition_fails_others(run: Run, files: tuple[Path, Path]) -> None:
    same = run("diff", files[0], "same", "--fail-over", "rel>0")
    assert same.code == 0
    assert "A and B hold the same values in 2 tensors." in same.stdout
    failing = run("diff", *files, "--fail-over", "second*:rel>1", "--json")
    assert failing.code == 1
    document = json.loads(failing.stdout)
    assert [(each["where"], each["value"]) for each in document["exceeded"]] == [("second.weight", 2.0)]
    assert [weight["measures"]["relative_l2"] for weight in document["weights"]] == [0.0, 2.0]


def test_runs_are_compared_by_the_values_they_keep(run: Run, runs: tuple[Path, Path], tmp_path: Path) -> None:
    conditions = ("--fail-over", "2:rel>0.5", "--fail-over", "0:rel>0")
    ended = run("diff", *runs, "--out", tmp_path / "found", *conditions, "--report", tmp_path / "page.html")
    assert ended.code == 1
    assert "\nReport: " in ended.stdout
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "The difference first shows at layer 2 (Conv2d): relative L2 " in ended.stdout
    assert "measured on up to 256 values per input" in " ".join(ended.stdout.split())
    assert "FAIL 2:rel>0.5: layer 2 is beyond " in ended.stdout
    assert names_below(tmp_path / "found") == {"diff.csv", "result.json", "overview.png", "run.json"}
    rows = json.loads((tmp_path / "found" / "result.json").read_bytes())["rows"]
    assert [row["label"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["measures"]["relative_l2"] for row in rows[:2]] == [0.0, 0.0]
    # W x + b and 2 W x + b: a little less than |W x + b| apart, as the bias stays.
    assert rows[2]["measures"]["relative_l2"] == pytest.approx(1.0, abs=0.3)
    assert [row["measures"]["value_count"] for row in rows] == [256] * 4


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("before", "after", CAT), 2, "IMAGE applies to models that run over pictures: two run directories"),
        (("before", "a.pt"), 2, "'a.pt' is not a run directory. Give two runs"),
        (("before", "behind"), 2, "'behind' is not a run directory. Give two runs"),
        (("before", "empty"), 3, "without run.json it is not a hookscope run"),
        (("a.pt", "b.pt", "--layer", "conv"), 2, "--layer applies to models that run over pictures: without IMAGE"),
        (("a.pt", "b.pt", "--fail-over", "kl>1"), 2, "kl is not known here"),
        (("a.pt", "b.pt", "--fail-over", "none*:rel>1"), 5, "matches no row"),
        (("a.pt", "b.pt", "--map", "x.*=y.*"), 5, "matches no layer of A"),
        (("a.pt", "torn.pt"), 3, "torn.pt"),
        (("a.pt", "other.pt"), 5, "No tensor of A (a.pt) has a partner in B (other.pt)"),
        (("before", "after", "--weights-b", "b.pt"), 2, "--weights-b applies to models: two run directories"),
    ],
)
@pytest.mark.sample(
    "arguments0-2-IMAGE applies to models that run over pictures: two run directories",
    "arguments2-3-without run.json it is not a hookscope run",
    "arguments5-5-matches no row",
    "arguments7-3-torn.pt",
)
def test_what_cannot_be_compared_is_refused_in_a_line(
    run: Run,
    runs: tuple[Path, Path],
    files: tuple[Path, Path],
    tmp_path: Path,
    arguments: tuple[object, ...],
    code: int,
    message: str,
) -> None:
    del runs
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.pt").write_bytes(files[0].read_bytes()[:200])
    torch.save({"other": torch.ones(9)}, tmp_path / "other.pt")
    assert_refused(run("diff", *arguments), code, message)
