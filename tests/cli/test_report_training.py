"""`hookscope report` on the folder of a watched training: the sentence, the table, page, picture and scalars."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from hookscope.commands.watch.training_log import FILE, TrainingLogFile, read_training
from hookscope.results.runs.reports import MARK
from hookscope.results.training import TrainingLog
from tests.cli.conftest import Run, assert_refused
from tests.reporting.trained import START, train

exhaustive = pytest.mark.exhaustive


def write(folder: Path, log: TrainingLog) -> Path:
    file = TrainingLogFile(folder, resume=False, warn=pytest.fail)
    for record in (*log.starts, *log.steps, *log.watched, *log.verdicts, *log.ends):
        file.append(record)
    file.close()
    return folder


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return write(tmp_path / "runs" / "a", train(40, broken_at=25))


def test_the_finding_comes_first_then_the_verdicts_then_picture_and_page(run: Run, stored: Path) -> None:
    ended = run("report", stored)
    assert (ended.code, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[0] == "At step 25, 0.weight: its gradient holds NaN (limit 0)."
    [line] = [line for line in lines if "non-finite-gradient" in line]
    assert line == "FAIL non-finite-gradient at 0.weight from step 25 on", "the message stands above"
    assert lines[-2] == f"Picture: {stored}/overview.png"
    assert lines[-1].startswith(f"Report: {stored}.html (")
    assert stored.with_name("a.html").read_text(encoding="utf-8").startswith(MARK)
    with Image.open(stored / "overview.png") as picture:
        assert picture.width == 1200


@exhaustive
def test_a_training_that_still_runs_is_reported_and_goes_on(run: Run, tmp_path: Path) -> None:
    log = train(30)
    file = TrainingLogFile(tmp_path / "a", resume=False, warn=pytest.fail)
    for record in (*log.starts, *log.steps[:20]):
        file.append(record)
    with (tmp_path / "a" / FILE).open("ab") as other:
        other.write(b'{"type":"ste')
    ended = run("report", tmp_path / "a")
    assert ended.code == 0
    assert "The record stops at step 20 without an end" in ended.stdout.replace("\n", " ")
    file.close()
    resumed = TrainingLogFile(tmp_path / "a", resume=True, warn=pytest.fail)  # overview.png is no hindrance
    assert resumed.last_step == 20
    resumed.append(replace(START, step=21))
    for step in log.steps[20:]:
        resumed.append(step)
    resumed.append(log.ends[0])
    resumed.append(log.ends[0])
    resumed.close()
    assert run("report", tmp_path / "a").stdout.startswith("No problems in 30 steps.")


@exhaustive
@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_that_is_only_read_has_a_page_and_a_note(run: Run, stored: Path) -> None:
    stored.chmod(0o500)
    ended = run("report", stored)
    stored.chmod(0o700)
    assert ended.code == 0
    assert ended.stderr.startswith("note: Cannot write ")


@exhaustive
def test_a_damaged_file_ends_in_one_line(run: Run, stored: Path) -> None:
    with (stored / FILE).open("ab") as file:
        file.write(b"nonsense\n")
    assert_refused(run("report", stored), 3, "watch.jsonl is not as hookscope writes it")
    assert not stored.with_name("a.html").exists()


@exhaustive
def test_scalars_reach_tensorboard_at_their_steps(run: Run, stored: Path, tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert run("report", stored, "--tensorboard", tmp_path / "logs").code == 0
    events = event_accumulator.EventAccumulator(str(tmp_path / "logs"), size_guidance={"scalars": 0}).Reload()
    log = read_training(stored)
    losses = [(event.step, event.value) for event in events.Scalars("training/loss")]
    assert losses[:24] == [(step.step, pytest.approx(step.loss, rel=1e-6)) for step in log.steps[:24]]
    assert [step for step, _ in losses] == [*range(1, 41)]
    assert losses[-1][1] != losses[-1][1]  # NaN
    rates = [event.value for event in events.Scalars("learning rate/group 0")]
    assert rates == pytest.approx([step.learning_rates[0] for step in log.steps], rel=1e-6)
    ratios = [(event.step, event.value) for event in events.Scalars("update ratio/2.weight")]
    rows = [row for watched_step in log.watched for row in watched_step.parameters if row.name == "2.weight"]
    assert [step for step, _ in ratios] == [10, 20, 25, 30, 40]
    assert [ratio for _, ratio in ratios[:2]] == pytest.approx([row.update_ratio for row in rows[:2]], rel=1e-6)
    assert "update ratio/0.bias" not in events.Tags()["scalars"]
    assert [event.step for event in events.Scalars("saturated fraction/3")] == [10, 20, 25, 30, 40]


@exhaustive
def test_tensorboard_is_refused_inside_the_folder_and_for_other_runs(run: Run, stored: Path, tmp_path: Path) -> None:
    inside = run("report", stored, "--tensorboard", stored / "logs")
    assert_refused(inside, 3, "which may hold only its own files")
    assert not stored.with_name("a.html").exists()
    (tmp_path / "other").mkdir()
    other = run("report", tmp_path / "other", "--tensorboard", tmp_path / "logs")
    assert_refused(other, 2, "--tensorboard is for a watched training")
