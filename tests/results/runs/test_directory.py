import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookscope.errors import OutputError
from hookscope.results.runs import directory
from hookscope.results.runs.directory import check_target, command_of, default_run_path, free_run_path, new_run

ROOT = Path(__file__).parents[3]
FILES = ("layers.csv", "grids/000-conv1.png", "grids/001-relu.png")


def write_run(target: Path, content: str, pause_seconds: float = 0.0) -> None:
    """Write a small run whose every file holds `content`."""
    with new_run(target) as run:
        for name in FILES:
            path = run.path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
            time.sleep(pause_seconds)
        run.finish({"content": content})


def content_of(folder: Path) -> str | None:
    """Return what the run at `folder` holds, None if nothing is there; fail if it is not one whole run."""
    if not folder.exists():
        return None
    record = json.loads((folder / "run.json").read_text())
    actual = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert actual == {"run.json", *FILES} == {"run.json", *record["files"]}
    contents = {(folder / name).read_text() for name in FILES}
    assert contents == {record["content"]}
    return str(record["content"])


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def whole_runs(folder: Path) -> set[str]:
    """Return the contents of every whole run in `folder`, those set aside included."""
    finished = (path for path in folder.iterdir() if ".partial-" not in path.name)
    return {str(content_of(path)) for path in finished if (path / "run.json").exists()}


# What a finished run is


def test_a_finished_run_holds_its_files_and_a_record_and_nothing_beside_it(tmp_path: Path) -> None:
    with new_run(tmp_path / "deep" / "run") as run:
        (run.path / "layers.csv").write_text("a")
        (run.path / "grids").mkdir()
        (run.path / "grids" / "0.png").write_text("b")
        assert listing(tmp_path / "deep") == [run.path.name]
        run.finish({"seed": 7, "schema_version": 99, "tool": "other", "files": []})
    assert listing(tmp_path) == ["deep"]
    assert listing(tmp_path / "deep") == ["run"]
    assert json.loads((tmp_path / "deep" / "run" / "run.json").read_text()) == {
        "schema_version": 3,
        "tool": "hookscope",
        "seed": 7,
        "files": ["grids/0.png", "layers.csv"],
    }


def test_the_record_is_strict_json_whatever_the_command_line_held(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as run:
        run.finish({"command": ["hookscope", "caf\udce9.jpg"], "timings": {"forward": float("nan")}})
    text = (tmp_path / "run" / "run.json").read_bytes().decode("ascii")
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["command"] == ["hookscope", r"caf\udce9.jpg"]
    assert record["timings"] == {"forward": "NaN"}


def test_replaces_an_earlier_run_with_all_its_files_and_has_the_permissions_of_any_new_folder(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as run:
        (run.path / "activations.safetensors").write_text("old")
        run.finish({})
    write_run(tmp_path / "run", "new")
    assert content_of(tmp_path / "run") == "new"
    assert listing(tmp_path) == ["run"]
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "run").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_fills_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".DS_Store").write_text("")
    write_run(tmp_path / "run", "new")
    assert content_of(tmp_path / "run") == "new"
    assert listing(tmp_path) == ["run"]


# What is refused


def a_folder(target: Path, name: str = "notes.txt", content: str = "mine") -> None:
    target.mkdir()
    (target / name).write_text(content)


def a_run(target: Path) -> Path:
    write_run(target, "old")
    return target


def another_run(target: Path) -> Path:
    return a_run(target.with_name("other"))


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file": lambda target: target.write_text("mine"),
    "a folder with files": a_folder,
    "a run with a note in it": lambda target: (a_run(target) / "grids" / "notes\n.txt").write_text("mine"),
    "a record of somebody else": lambda target: a_folder(target, "run.json", '{"schema_version": 1, "files": []}'),
    "a record without names of files": lambda target: a_folder(
        target, "run.json", '{"tool": "hookscope", "files": [{}]}'
    ),
    "a record that is no object": lambda target: a_folder(target, "run.json", "[" * 100_000),
    "a record that never ends": lambda target: (target.mkdir(), os.mkfifo(target / "run.json")),
    "a linked record": lambda target: (
        target.mkdir(),
        (target / "run.json").symlink_to(another_run(target) / "run.json"),
    ),
    "a link to a run": lambda target: target.symlink_to(another_run(target)),
    "a dangling link": lambda target: target.symlink_to(target.with_name("nowhere")),
    "a run with a linked folder": lambda target: (a_run(target) / "more").symlink_to(target.parent),
}


@pytest.mark.parametrize("made", FOREIGN)
def test_refuses_what_is_not_a_run_of_ours_and_leaves_it_alone(tmp_path: Path, made: str) -> None:
    target = tmp_path / "some\nthing"
    FOREIGN[made](target)
    before = sorted(tmp_path.rglob("*"))
    for attempt in (check_target, lambda path: write_run(path, "new")):
        with pytest.raises(OutputError, match=r"some\\nthing.*Name another folder\.$") as raised:
            attempt(target)
        assert "\n" not in str(raised.value)
        assert ("symbolic link" in str(raised.value)) == ("link to" in made or "dangling" in made)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_refusal_names_the_option_that_gave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(OutputError, match=r"Name another folder with --evidence\.$"):
        check_target(tmp_path / "kept", "--evidence")
    with pytest.raises(OutputError, match=r"Name another folder\.$"):
        check_target(tmp_path / "kept")
    with (
        pytest.raises(OutputError, match=r"Name another folder with --evidence\.$"),
        new_run(tmp_path / "kept", "--evidence"),
    ):
        pytest.fail("the folder is taken")


@pytest.mark.parametrize("where", [".", "../..", "../inner"])
def test_refuses_the_current_folder_those_above_it_and_mount_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "outer" / "inner")
    for target, reason in ((Path(where), "current folder"), (Path("/"), "mount point")):
        with pytest.raises(OutputError, match=rf"{reason}.*Name a folder inside it with --out"):
            check_target(target, "--out")


@pytest.mark.parametrize("name", ["x" * 240, "x" * 300 + "/run", "nul\0", "\ud800"])
def test_refuses_a_name_no_file_can_have_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match="--out"):
        check_target(tmp_path / "new" / name, "--out")
    assert listing(tmp_path) == []


def test_refuses_a_parent_that_is_a_file_or_cannot_be_written_and_names_a_foreign_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="not a directory"):
        check_target(tmp_path / "file" / "deep" / "run")
    (a_run(tmp_path / "kept") / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"besides a hookscope run it holds 'notes\.txt'"):
        check_target(tmp_path / "kept")
    # Permissions do not bind the superuser, so the answer is given for him.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OutputError, match="no permission to write"):
        check_target(tmp_path / "run")


def test_a_target_that_became_foreign_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as run:
        a_folder(tmp_path / "run")
        with pytest.raises(OutputError, match="not a hookscope run"):
            run.finish({})
    assert listing(tmp_path) == ["run"]
    assert listing(tmp_path / "run") == ["notes.txt"]


# What a failure leaves


@pytest.mark.parametrize("old", ["old", None])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OutputError])
def test_an_exception_leaves_no_trace_and_passes_on(
    tmp_path: Path, error: type[BaseException], old: str | None
) -> None:
    target = tmp_path / "hookscope-runs" / "run"
    if old:
        write_run(target, old)

    def interrupted() -> None:
        with new_run(target) as run:
            (run.path / "layers.csv").write_text("new")
            raise error

    with pytest.raises(error):
        interrupted()
    assert content_of(target) == old
    assert listing(tmp_path) == (["hookscope-runs"] if old else [])
    assert not old or listing(target.parent) == ["run"]


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EROFS])
def test_a_full_or_read_only_disk_is_one_line_with_the_remedy(tmp_path: Path, code: int) -> None:
    with (
        pytest.raises(OutputError, match=r"^Cannot write to '.*run': .*folder\.$") as raised,
        new_run(tmp_path / "run"),
    ):
        raise OSError(code, os.strerror(code))
    assert ("Free some space" in str(raised.value)) == (code in (errno.ENOSPC, errno.EDQUOT))
    assert isinstance(raised.value.__cause__, OSError)
    assert listing(tmp_path) == []


STEPS = ((os, "mkdir"), (os, "open"), (os, "fsync"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (io, "open"))


@contextmanager
def failing(step: int, *, from_then_on: bool) -> Iterator[list[int]]:
    """Let the given step of the run, counted over all calls that change the disk, fail with a full disk."""
    taken = [0]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            taken[0] += 1
            if taken[0] == step or (from_then_on and taken[0] > step):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in STEPS:
            patch.setattr(module, name, wrap(getattr(module, name)))
        yield taken


@pytest.mark.parametrize("from_then_on", [False, True])
@pytest.mark.parametrize("old", ["old", None])
@pytest.mark.sample("old-False", "None-False")
def test_a_full_disk_at_any_step_leaves_the_old_run_or_the_new(
    tmp_path: Path, old: str | None, *, from_then_on: bool
) -> None:
    failed = 0
    for step in range(1, 1000):
        folder = tmp_path / str(step)
        folder.mkdir()
        if old:
            write_run(folder / "run", old)
        try:
            with failing(step, from_then_on=from_then_on) as taken:
                write_run(folder / "run", "new")
        except OutputError as error:
            failed += 1
            assert "no space left on device" in str(error)  # noqa: PT017 - some steps may fail without an error
        else:
            assert content_of(folder / "run") == "new"
        if from_then_on:  # with a dead disk nothing can be deleted or put back; nothing may be lost
            assert whole_runs(folder) & {old, "new"} or not old
        else:
            assert content_of(folder / "run") in ({"old", "new"} if old else {"new", None})
        write_run(folder / "run", "next")
        assert content_of(folder / "run") == "next"
        assert listing(folder) == ["run"]
        if taken[0] < step:
            break
    assert taken[0] < step
    assert failed > 20


def fault_everywhere(folder: Path, fault: str, old: str | None) -> None:
    """Write a run in a child once for every line of `directory.py` that this executes, and let the fault strike there.

    Runs in a separate process, which has a single thread and may fork.
    """
    # A process that dies takes nothing with it that the system has been told to write.
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "fsync", lambda _: None)
    # An interrupt in the line that gives a lock back keeps it; the clean-up then goes on without.
    patch.setattr(directory, "_LOCK_SECONDS", 0.05)
    for step in range(1, 10_000):
        base = folder / str(step)
        base.mkdir()
        if old:
            write_run(base / "run", old)
        child = os.fork()
        if not child:
            try:
                strike_at(step, fault, base.with_suffix(".stack"))
                write_run(base / "run", "new")
            except KeyboardInterrupt:
                os._exit(130)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        left = listing(base)
        content = content_of(base / "run")
        if code == 0:
            assert (content, left) == ("new", ["run"])
            assert step > 100, "the trace saw too few lines"
            return
        stack = base.with_suffix(".stack").read_text().split()
        assert code == {"interrupt": 130, "kill": -signal.SIGKILL}[fault], (step, code)
        if fault == "interrupt" and stack[:2] != ["new_run", "__exit__"]:
            # Only on the few lines around the clean-up can an interrupt leave something hidden, for the next run.
            assert left == (["run"] if content else []), (step, stack, left)
        if old:
            assert {content} <= ({old, "new"} if fault == "interrupt" else {old, "new", None}), (step, stack)
            assert whole_runs(base) & {old, "new"}, (step, stack)
        if step % 2:
            write_run(base / "run", "next")
            assert content_of(base / "run") == "next", (step, stack)
            assert listing(base) == ["run"], (step, stack, listing(base))
        else:
            # A later run that fails puts right what the first one left.
            with new_run(base / "run"):
                pass
            assert content_of(base / "run") == (content or old), (step, stack)
            assert listing(base) == (["run"] if content or old else []), (step, stack)


def strike_at(step: int, fault: str, report: Path) -> None:
    """Trace this process, and at the given line of `directory.py` note who was running and raise or die."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != directory.__file__:
            return None
        if event == "line":
            lines += 1
            if lines == step:
                sys.settrace(None)
                names = []
                caller: FrameType | None = frame
                while caller:
                    names.append(caller.f_code.co_name)
                    caller = caller.f_back
                report.write_text(" ".join(names))
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)


@pytest.mark.parametrize("old", ["old", None])
@pytest.mark.parametrize("fault", ["interrupt", "kill"])
@pytest.mark.sample("kill-None")
def test_interrupted_or_killed_at_any_line_leaves_the_old_run_or_the_new(
    tmp_path: Path, fault: str, old: str | None
) -> None:
    this = "tests.results.runs.test_directory"
    call = f"from {this} import *; fault_everywhere(Path({str(tmp_path)!r}), {fault!r}, {old!r})"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


# More than one process


def writer(target: Path, content: str, repeats: int, pause_seconds: float) -> subprocess.Popen[str]:
    code = (
        "import sys; from tests.results.runs.test_directory import *\n"
        f"for repeat in range({repeats}):\n"
        f"    write_run(Path({str(target)!r}), f'{content}{{repeat}}', {pause_seconds})\n"
        "    print(repeat, flush=True)\n"
    )
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.exhaustive
def test_runs_to_the_same_target_at_the_same_time_all_succeed_and_one_stays(tmp_path: Path) -> None:
    target = tmp_path / "run"
    processes = [writer(target, name, 40, 0) for name in ("a", "b", "c")]
    for process in processes:
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
    assert content_of(target) in {"a39", "b39", "c39"}
    assert listing(tmp_path) == ["run"]


def test_a_run_in_progress_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    target = tmp_path / "run"
    with new_run(target) as slow:
        (slow.path / "layers.csv").write_text("slow")
        write_run(target, "quick")
        assert (slow.path / "layers.csv").read_text() == "slow"
        slow.finish({"content": "slow"})
    assert json.loads((target / "run.json").read_text())["content"] == "slow"
    assert listing(tmp_path) == ["run"]


def test_leftovers_of_other_targets_and_names_that_only_look_alike_stay(tmp_path: Path) -> None:
    alike = [".other.partial-1-0123abcd", ".run.partial-1-0123abcd.bak", ".run.partial-x", "run.partial-1-0123abcd"]
    for name in alike:
        (tmp_path / name).mkdir()
    write_run(tmp_path / "run", "new")
    assert listing(tmp_path) == sorted([*alike, "run"])


def test_a_run_whose_deletion_was_interrupted_is_never_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    write_run(tmp_path / "run", "old")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_run(tmp_path / "run", "new")
    assert content_of(tmp_path / "run") == "new"
    shutil.rmtree(tmp_path / "run")
    with new_run(tmp_path / "run"):
        pass
    assert listing(tmp_path) == []


def test_a_run_set_aside_survives_while_something_foreign_stands_in_its_place(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as run:
        write_run(tmp_path / "run", "old")
        (tmp_path / "run").rename(run.previous)
        a_folder(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with new_run(tmp_path / "run"):
        pass
    assert content_of(tmp_path / "run") == "old"
    assert listing(tmp_path) == ["run"]


def test_a_suspended_process_does_not_hold_others_up_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_LOCK_SECONDS", 0.01)
    with directory._locked(tmp_path):
        write_run(tmp_path / "run", "new")
    assert content_of(tmp_path / "run") == "new"


# Default names


@given(st.text(), st.text())
def test_default_names_are_always_one_folder_that_can_be_made(model: str, image: str) -> None:
    path = default_run_path("activations", model, image)
    assert path.parent == Path("hookscope-runs")
    assert path.name.isprintable()
    assert "/" not in path.name
    assert len(f".{path.name}.previous-4194304-01234567".encode()) <= 255


# Runs of other commands


def write_numbered(path: Path, command: str) -> Path:
    with new_run(path, numbered=True) as run:
        (run.path / "a.txt").write_text(command)
        return run.finish({"command": command})


def test_a_run_of_another_command_keeps_its_place_and_the_new_one_has_a_number(tmp_path: Path) -> None:
    first = tmp_path / "run"
    for command, name in [("one", "run"), ("one", "run"), ("two", "run-2"), ("three", "run-3"), ("two", "run-2")]:
        target = free_run_path(first, command)
        assert target == tmp_path / name
        assert write_numbered(target, command) == target
    assert [command_of(tmp_path / name) for name in ("run", "run-2", "run-3", "run-4")] == ["one", "two", "three", None]
    assert (first / "a.txt").read_text() == "one"


def test_a_run_that_cannot_be_read_keeps_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", "old")

    def refuse(path: Path, *_: object, **__: object) -> bytes:
        if path == tmp_path / "run" / "run.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        raise FileNotFoundError(path)

    monkeypatch.setattr("hookscope.results.runs.directory.read_bounded", refuse)
    assert free_run_path(tmp_path / "run", "hookscope activations a b.png") == tmp_path / "run-2"


def test_a_run_that_came_while_this_one_was_made_is_not_replaced(tmp_path: Path) -> None:
    first = tmp_path / "run"
    with new_run(first, numbered=True) as run:
        (run.path / "a.txt").write_text("slow")
        assert write_numbered(first, "quick") == first
        assert run.finish({"command": "slow"}) == tmp_path / "run-2"
    assert [(tmp_path / name / "a.txt").read_text() for name in ("run", "run-2")] == ["quick", "slow"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-2"]


def test_a_run_saved_from_python_has_no_command_and_keeps_its_place_too(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as run:
        run.finish({})
    assert free_run_path(tmp_path / "run", "one") == tmp_path / "run-2"
    (tmp_path / "empty").mkdir()
    assert free_run_path(tmp_path / "empty", "one") == tmp_path / "empty"
