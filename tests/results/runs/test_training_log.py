"""The file of a watched training: written line by line, and read back whatever happened to it."""

import errno
import json
import math
import os
import sys
from pathlib import Path

import pytest

from hookscope.commands.watch import training_log
from hookscope.commands.watch.training_log import FILE, TrainingLogFile, read_training
from hookscope.errors import InputError, OutputError
from hookscope.results.training import (
    TrainingEnd,
    TrainingFinding,
    TrainingLog,
    TrainingStart,
    TrainingStep,
    WatchedLayer,
    WatchedParameter,
    WatchedStep,
)

START = TrainingStart(
    step=1,
    networks=("Net",),
    optimizers=("SGD, lr 0.1",),
    every=2,
    patterns=("conv*",),
    started="2026-01-01T00:00:00+00:00",
    versions={"torch": "2.15"},
)
STEP = TrainingStep(1, 0.5, 1.25, 800.0, (("a.weight", 1.0), ("b\udcff.weight", math.inf)), (0.1, 0.01))
FROZEN = WatchedParameter("a.weight", "frozen", 2.0)
MOVED = WatchedParameter("b.weight", "gradient", 4.0, 1.0, 0.5, 0.25, 0, 0.125)
LAYER = WatchedLayer("conv", "Conv2d", math.nan, None, -1.0, math.inf, 0.0, None, None, 3)
WATCHED = WatchedStep(2, "every", (FROZEN, MOVED), (LAYER,))
VERDICT = TrainingFinding(
    "dead-channels", "warn", "conv", "75% are dead (limit 50%).", ("fc",), step=2, value=0.75, limit=0.5, state="began"
)
END = TrainingEnd(2, "closed")


def silent(message: str) -> None:
    raise AssertionError(message)


def write(folder: Path, *records: object, resume: bool = False) -> None:
    file = TrainingLogFile(folder, resume=resume, warn=silent)
    for record in records:
        file.append(record)  # type: ignore[arg-type]
    file.close()


def lines_of(folder: Path) -> list[str]:
    return (folder / FILE).read_text().splitlines()


def test_the_line_of_a_step_is_json_with_seven_digits_and_words_for_what_is_not_finite(tmp_path: Path) -> None:
    largest, losses = (("a", 1 / 3), ("b", 1e-30), ("a", math.nan)), (("x.py:1", -math.inf),)
    edits = (("a:zero", 2),)
    write(tmp_path, START, TrainingStep(7, math.nan, None, 0.1, largest, (1e-5,), True, losses, edits))
    assert json.loads(lines_of(tmp_path)[-1]) == {
        "type": "step",
        "step": 7,
        "loss": "NaN",
        "gradient_norm": None,
        "norm_before_clipping": 0.1,
        "learning_rates": [1e-5],
        "skipped": True,
        "largest": [[0, 0.3333333], [1, 1e-30], [0, "NaN"]],
        "losses": [[2, "-Infinity"]],
        "edits": [[3, 2]],
    }


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path, START, STEP, WATCHED, VERDICT, END)
    read = read_training(tmp_path)
    named = TrainingStep(1, 0.5, 1.25, 800.0, (("a.weight", 1.0), ("b\\udcff.weight", math.inf)), (0.1, 0.01))
    assert (read.starts, read.steps, read.verdicts, read.ends) == ((START,), (named,), (VERDICT,), (END,))
    assert read.watched[0].parameters == (FROZEN, MOVED)
    assert math.isnan(read.watched[0].layers[0].mean or 0.0)
    assert read.watched[0].layers[0].max == math.inf
    assert not read.cut_short
    for line in lines_of(tmp_path):
        json.loads(line, parse_constant=silent)


@pytest.mark.exhaustive
def test_every_prefix_of_a_file_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    write(tmp_path, START, STEP, WATCHED, VERDICT, END)
    content = (tmp_path / FILE).read_bytes()
    first_line = content.index(b"\n")
    for length in range(len(content)):
        (tmp_path / FILE).write_bytes(content[:length])
        if length <= first_line:
            with pytest.raises(InputError, match="holds nothing yet"):
                read_training(tmp_path)
        else:
            assert read_training(tmp_path).cut_short == (content[length - 1 : length] != b"\n")


@pytest.mark.exhaustive
def test_resuming_a_file_that_was_cut_drops_the_cut_line_and_counts_on(tmp_path: Path) -> None:
    write(tmp_path, START, STEP)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"type":"step","st')
    file = TrainingLogFile(tmp_path, resume=True, warn=silent)
    assert file.last_step == 1
    file.append(START)
    file.append(WATCHED)
    file.close()
    read = read_training(tmp_path)
    assert len(read.starts) == 2
    assert read.watched[0].parameters[1].name == "b.weight"
    assert not read.cut_short


@pytest.mark.exhaustive
def test_a_training_is_not_written_over(tmp_path: Path) -> None:
    write(tmp_path, START)
    with pytest.raises(OutputError, match=r"holds a training already.*--resume"):
        TrainingLogFile(tmp_path, resume=False, warn=silent)
    assert len(lines_of(tmp_path)) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("resume", [True, False])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, resume: bool) -> None:
    (tmp_path / FILE).write_text('{"loss": 1}\n')
    with pytest.raises(OutputError, match="holds no watched training"):
        TrainingLogFile(tmp_path, resume=resume, warn=silent)
    assert lines_of(tmp_path) == ['{"loss": 1}']


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform == "win32", reason="has no such locks")
def test_a_second_training_into_one_folder_is_refused(tmp_path: Path) -> None:
    first = TrainingLogFile(tmp_path, resume=False, warn=silent)
    first.append(START)
    for resume in (True, False):
        with pytest.raises(OutputError, match="another training is being watched into it"):
            TrainingLogFile(tmp_path, resume=resume, warn=silent)
    first.close()
    TrainingLogFile(tmp_path, resume=True, warn=silent).close()


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no named pipes")
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_plain_file_is_neither_written_nor_read(tmp_path: Path, kind: str) -> None:
    made = {"pipe": os.mkfifo, "link": lambda path: path.symlink_to("elsewhere"), "folder": os.mkdir}
    made[kind](tmp_path / FILE)
    with pytest.raises(OutputError, match="no regular file"):
        TrainingLogFile(tmp_path, resume=True, warn=silent)
    with pytest.raises(InputError):
        read_training(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("written", [0, 10])
def test_a_full_disk_is_one_warning_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    warnings: list[str] = []
    file = TrainingLogFile(tmp_path, resume=False, warn=warnings.append)
    file.append(START)
    whole, left = os.write, [written]

    def write(descriptor: int, content: bytes) -> int:
        if left[0]:
            part, left[0] = content[: left[0]], 0
            return whole(descriptor, part)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(training_log.os, "write", write)
    for _ in range(3):
        file.append(STEP)
    file.close()
    monkeypatch.undo()
    assert len(warnings) == 1
    assert "no space left on device" in warnings[0]
    assert read_training(tmp_path) == TrainingLog((START,), (), (), (), ())


BROKEN = {
    "no JSON": "nonsense",
    "deep": "[" * 100_000,
    "a name that is not there": '{"type":"step","step":1,"largest":[[7,1.0]],"loss":1.0}',
    "a name before the first": '{"type":"step","step":1,"largest":[[-1,1.0]],"loss":1.0}',
    "a loss as text": json.dumps(
        {"type": "step", "step": 1, "loss": "one", "gradient_norm": None, "norm_before_clipping": None}
        | {"largest": [], "learning_rates": []}
    ),
    "a negative step": json.dumps(
        {"type": "step", "step": -1, "loss": None, "gradient_norm": None, "norm_before_clipping": None}
        | {"largest": [], "learning_rates": []}
    ),
    "a step beyond all": '{"type":"end","step":9007199254740993,"reason":"closed"}',
    "uneven columns": '{"type":"watched","step":1,"reason":"every","parameters":{"weight_norm":[1],"update_norm":[]}}',
    "rows": '{"type":"watched","step":1,"reason":"every","parameters":[{"name":"a"}]}',
    "another version": '{"type":"start","tool":"hookscope","schema_version":99}',
    "an unknown state": json.dumps(
        {"type": "verdict", "step": 1, "rule": "a", "level": "warn", "where": "", "value": None, "limit": None}
        | {"state": "maybe", "message": ""}
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_line_that_is_not_ours_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    write(tmp_path, START)
    with (tmp_path / FILE).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match="line 2") as raised:
        read_training(tmp_path)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.exhaustive
def test_lines_of_a_type_that_a_later_version_adds_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, START)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"type":"weather","sun":true}\n')
    assert read_training(tmp_path) == TrainingLog((START,), (), (), (), ())
