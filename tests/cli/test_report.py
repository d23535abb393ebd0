import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hookscope
from hookscope.errors import UsageError
from hookscope.results.runs.reports import MARK
from tests.cli.conftest import CAT, Run, assert_refused
from tests.reporting.stored import drawn, maps, row, write_run


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs/first", [row(0, "conv")], grids={"000-conv.png": drawn(maps())})


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_report_stands_beside_its_run(run: Run, tmp_path: Path, stored: Path) -> None:
    ended = run("report", "runs/first")
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout.startswith("Report: runs/first.html (")
    assert (tmp_path / "runs/first.html").read_text(encoding="utf-8").startswith(MARK)
    assert names_in(stored.parent) == ["first", "first.html"]
    assert names_in(stored) == ["grids", "result.json", "run.json"]


def test_what_is_not_ours_is_never_overwritten(run: Run, tmp_path: Path, stored: Path) -> None:
    (tmp_path / "thesis.html").write_text("<!doctype html>")
    (tmp_path / "link.html").symlink_to("thesis.html")
    reasons = {
        "thesis.html": "it exists and is not a hookscope report",
        "link.html": "it is a symbolic link",
        "runs": "it is a folder",
        "thesis.html/a.html": "not a directory",
        "x" * 300: "file name too long",
    }
    for target, reason in reasons.items():
        assert_refused(run("report", stored, "-o", target), 3, f": {reason}. Name another file.")
    assert (tmp_path / "thesis.html").read_text() == "<!doctype html>"
    assert names_in(tmp_path) == ["link.html", "net.py", "runs", "thesis.html"]


def test_a_wrong_name_is_answered_with_the_nearest_runs(run: Run, stored: Path) -> None:
    assert run("report", "runs/frist").stderr.endswith("Give the folder of a run. Nearest: 'runs/first'.\n")
    assert "Nearest" not in run("report", "elsewhere/frist").stderr
    shutil.copytree(stored, "hookscope-runs/activations-net-cat")
    (Path("hookscope-runs/watched")).mkdir()
    Path("hookscope-runs/watched/watch.jsonl").touch()
    assert "Nearest: 'hookscope-runs/activations-net-cat'." in run("report", "activation-net-cat").stderr
    assert "Nearest: 'hookscope-runs/watched'." in run("report", "watch").stderr
    assert "of a run, such as 'hookscope-runs/activations-net-cat'." in run("report", "0").stderr


def test_what_is_no_run_ends_in_one_line(run: Run, stored: Path) -> None:
    (stored / "run.json").unlink()
    assert_refused(run("report", stored), 3, "or an unfinished one")
    assert names_in(stored.parent) == ["first"]
    assert run("report").code == 2


def made_otherwise(folder: Path, **values: object) -> None:
    record = json.loads((folder / "run.json").read_bytes())
    (folder / "run.json").write_text(json.dumps(record | values), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (shutil.rmtree, "there is no such folder. Give the folder of a run."),
        (
            lambda folder: made_otherwise(folder, verb="check"),
            "it is the evidence of a check, not a run. `hookscope ch",
        ),
        (
            lambda folder: (folder / "grids/000-conv.png").write_bytes(b"x"),
            "it is no picture of a run. Run the command",
        ),
    ],
)
def test_a_spoiled_run_ends_in_one_line_and_leaves_no_report(
    run: Run, stored: Path, spoil: Callable[[Path], object], says: str
) -> None:
    spoil(stored)
    assert_refused(run("report", stored), 3, "hookscope: error: Cannot read ", says)
    assert not (stored.parent / "first.html").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("value", [3, None, ["runs/a"]])
def test_what_has_no_page_is_refused_in_a_line(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"There is no page of type \w+: give a run directory, or a run's result\."):
        hookscope.report(value, tmp_path / "page.html")


def test_a_report_is_made_without_torch(python: Run, tmp_path: Path, stored: Path) -> None:
    checked = (
        "import sys; from hookscope.cli.app import run; code = run(sys.argv[1:]);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert python("-c", checked, "report", stored, cwd=tmp_path).code == 0


def test_a_run_becomes_a_report(run: Run, tmp_path: Path) -> None:
    assert run("activations", "net.py:tiny", CAT, "--resize", "16", "--crop", "16", "--out", "made").code == 0
    ended = run("report", "made")
    assert (ended.code, ended.stderr) == (0, "")
    page = (tmp_path / "made.html").read_text(encoding="utf-8")
    grids = len(list((tmp_path / "made/grids").iterdir()))
    assert len(re.findall(r'<image id="p\d', page)) == grids > 0
