"""Work in processes of its own: whatever a worker does, it is told how it ended, and the others finish."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hookscope.checkpoints.sandbox import jobs
from hookscope.checkpoints.sandbox.jobs import run_jobs
from hookscope.checkpoints.sandbox.worker import Limits, WorkerFailure, machine_memory_bytes, usable_cores

ENOUGH = Limits(seconds=60)


def act(source: str) -> Any:
    """Evaluate an expression; run in a worker."""
    return eval(source)


def hang(witness: str = "") -> None:
    if witness:
        Path(witness).write_text(str(os.getpid()), encoding="utf-8")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def hang_with_child(witness: str) -> None:
    child = os.fork()
    if child == 0:
        hang()
    Path(witness).write_text(f"{os.getpid()} {child}", encoding="utf-8")
    hang()


def talk() -> str:
    sys.stdout.write("worker's stdout\n")
    os.write(1, b"worker's descriptor 1\n")
    sys.stderr.write("worker's stderr\n")
    return "done"


def fork_and_wait() -> int:
    child = os.fork()
    if child == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def core_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_CORE)[0]


def meet(folder: str, name: str, other: str) -> bool:
    """Wait for another worker that does the same at the same time."""
    Path(folder, name).touch()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if Path(folder, other).exists():
            return True
        time.sleep(0.01)
    return False


def outcomes(*items: str, limits: Limits = ENOUGH, **options: Any) -> list[Any]:
    """Run items; return what came of each, in their order."""
    finished = dict(run_jobs(act, items, limits, **options))
    assert sorted(finished) == list(range(len(items)))
    return [finished[position] for position in range(len(items))]


def is_running(process: int) -> bool:
    """Tell whether a process runs; a zombie, whom nobody has waited for, does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> bool:
    for _ in range(3000):  # not by the clock: a machine may stand still for a minute
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_every_item_gives_its_result() -> None:
    assert outcomes(*(f"{number} ** 2" for number in range(5)), at_once=2) == [0, 1, 4, 9, 16]
    assert outcomes() == []


def test_a_worker_is_a_process_of_its_own_with_nothing_to_read_that_may_fork_and_leaves_no_core_file() -> None:
    items = "os.getpid()", "os.getpid()", "sys.stdin.read()", "fork_and_wait()", "core_limit()"
    variable = "os.environ['HOOKSCOPE_TEST']"
    actual = outcomes(*items, variable, limits=Limits(60, 2**30), environment={"HOOKSCOPE_TEST": "given"})
    assert len({os.getpid(), *actual[:2]}) == 3
    assert actual[2:] == ["", 7, 0, "given"]
    assert "HOOKSCOPE_TEST" not in os.environ


def test_items_run_at_the_same_time_when_asked_for(tmp_path: Path) -> None:
    assert outcomes(*(f"meet({str(tmp_path)!r}, *{case!r})" for case in ("ab", "ba")), at_once=2) == [True, True]


def test_a_worker_that_is_killed_or_leaves_says_how_and_the_others_finish() -> None:
    signals = [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM]
    left = {"os._exit(0)": 0, "os._exit(3)": 3, "sys.exit(4)": 4}
    first, *ended, last = outcomes("4", *(f"os.kill(os.getpid(), {int(each)})" for each in signals), *left, "9")
    assert (first, last) == (4, 9)
    for failure, number in zip(ended, signals, strict=False):
        assert failure.cause == "killed"
        assert number.name in failure.reason
    assert ended[4:] == [
        WorkerFailure("killed", f"it ended with exit code {code} before it had a result", ending=f"exit code {code}")
        for code in left.values()
    ]


def test_a_worker_that_hangs_is_ended_with_what_it_started_and_the_others_finish(tmp_path: Path) -> None:
    witness = tmp_path / "processes"
    late, after = outcomes(f"hang_with_child({str(witness)!r})", "9", limits=Limits(seconds=1))
    assert late == WorkerFailure("time", "it did not finish within 1 s")
    assert after == 9
    processes = [int(word) for word in witness.read_text(encoding="utf-8").split()]
    assert len(processes) == 2
    assert wait_until(lambda: not any(map(is_running, processes)))


def test_a_worker_that_takes_too_much_memory_says_so_and_the_others_finish() -> None:
    limits = Limits(seconds=60, memory_bytes=256 * 2**20)
    large, small = outcomes("len(bytearray(300 * 2**20))", "len(bytearray(100 * 2**20))", limits=limits)
    assert large == WorkerFailure("memory", "it needs more memory than 0.25 GiB")
    assert small == 100 * 2**20


def test_what_a_worker_raises_and_what_cannot_be_sent_come_with_their_tracebacks() -> None:
    unpicklable_item: Any = lambda: 1  # noqa: E731
    raised, unsent, unpicklable, after = outcomes("{}['no such key']", "lambda: 1", unpicklable_item, "9")
    assert {case.cause for case in (raised, unsent, unpicklable)} == {"raised"}
    assert "KeyError: 'no such key'" in raised.traceback
    assert "in act" in raised.traceback
    assert "function is not JSON serializable" in unsent.traceback
    assert after == 9


def test_imports_that_fail_are_reported() -> None:
    first, second = outcomes("4", "9", preload=["hookscope_has_no_such_module"])
    for ended in (first, second):
        assert ended.cause == "raised"
        assert "No module named 'hookscope_has_no_such_module'" in ended.traceback


def test_workers_print_to_stderr_only(capfd: pytest.CaptureFixture[str]) -> None:
    assert outcomes("talk()") == ["done"]
    captured = capfd.readouterr()
    assert captured.out == ""
    for line in ("worker's stdout", "worker's descriptor 1", "worker's stderr"):
        assert line in captured.err


def test_modules_in_the_current_folder_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = tmp_path / "witness"
    for name in ("json", "pickle", "subprocess", "wave", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(witness)!r}, 'w')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert outcomes("9", preload=["wave"]) == [9]
    assert not witness.exists()


def test_leaving_early_kills_the_workers(tmp_path: Path) -> None:
    witness = tmp_path / "process"
    running = run_jobs(act, [f"hang({str(witness)!r})", "4"], ENOUGH, at_once=2)
    with closing(running):
        assert next(running) == (1, 4)
        assert wait_until(lambda: witness.exists() and witness.read_text(encoding="utf-8") != "")
    assert wait_until(lambda: not is_running(int(witness.read_text(encoding="utf-8"))))


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    witness = tmp_path / "process"
    program = (
        "from tests.checkpoints.sandbox.test_sandbox import ENOUGH, act, run_jobs\n"
        f"list(run_jobs(act, [{f'hang({str(witness)!r})'!r}], ENOUGH))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[3])
    assert wait_until(lambda: witness.exists() and witness.read_text(encoding="utf-8") != "")
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not is_running(int(witness.read_text(encoding="utf-8"))))


def test_where_python_cannot_fork_every_item_has_a_host_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "CAN_FORK", False)
    first, killed, second = outcomes("os.getpid()", "os.kill(os.getpid(), 11)", "os.getpid()")
    assert len({os.getpid(), first, second}) == 3
    assert killed == WorkerFailure("killed", "it was ended by SIGSEGV", ending="SIGSEGV")


def test_the_machine_has_memory_and_cores() -> None:
    memory = machine_memory_bytes()
    assert 2**28 < memory <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usable_cores() == len(os.sched_getaffinity(0))
