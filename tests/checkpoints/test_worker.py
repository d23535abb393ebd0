import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookscope.checkpoints import worker
from hookscope.checkpoints.worker import attempt
from hookscope.errors import CheckpointError, HookscopeError, MisfitError, UntrustedFileError

MIB = 2**20

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much is mapped")


def run(work: Callable[[], Any], *, memory_bytes: int = 256 * MIB, seconds: int = 60) -> Any:
    return attempt(work, "model.pt", memory_bytes=memory_bytes, seconds=seconds)


def failure(work: Callable[[], Any], **limits: int) -> str:
    with pytest.raises(CheckpointError) as caught:
        run(work, **limits)
    assert str(caught.value).isprintable()
    assert "model.pt" in str(caught.value)
    return str(caught.value)


def fail(error: BaseException) -> Callable[[], Any]:
    def work() -> Any:
        raise error

    return work


def test_result_comes_back_from_another_process() -> None:
    assert run(lambda: [True, "é\ud800", {"a": None}]) == [True, "é\ud800", {"a": None}]
    assert run(os.getpid) != os.getpid()


def test_long_result_comes_back_whole() -> None:
    assert run(lambda: "x" * MIB) == "x" * MIB


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("model.pt is empty."),
        MisfitError("model.pt does not fit."),
        UntrustedFileError("model.pt runs code."),
    ],
)
def test_error_comes_back_as_it_was(error: HookscopeError) -> None:
    with pytest.raises(type(error)) as caught:
        run(fail(error))
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)


def test_any_other_error_is_a_bug_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"in work\n(.*\n)*ZeroDivisionError: oops"):
        run(fail(ZeroDivisionError("oops")))


@pytest.mark.parametrize(
    ("number", "phrase"),
    [
        (signal.SIGBUS, "SIGBUS; the file was cut short"),
        (signal.SIGKILL, "SIGKILL; the system ended it"),
        (signal.SIGSEGV, "SIGSEGV; the file is damaged"),
    ],
)
def test_crash_is_an_error_that_says_by_what(number: signal.Signals, phrase: str) -> None:
    assert phrase in failure(lambda: os.kill(os.getpid(), number))


def test_exit_is_an_error() -> None:
    assert "exit code 3" in failure(lambda: os._exit(3))


@linux
def test_memory_is_limited_on_top_of_what_this_process_has() -> None:
    here = bytearray(512 * MIB)
    assert run(lambda: len(bytearray(128 * MIB)), memory_bytes=256 * MIB) == 128 * MIB
    assert "takes more than 256 MiB" in failure(lambda: len(bytearray(1024 * MIB)), memory_bytes=256 * MIB)
    assert len(here) == 512 * MIB


@linux
@pytest.mark.parametrize("piece", [1024 * MIB, MIB, 100_000])
def test_memory_that_this_process_has_freed_is_no_gift(piece: int) -> None:
    threshold = bytearray(31 * MIB)
    del threshold  # from here on the C library takes as much from its heap, which it does not give back
    blocks = [bytearray(16 * MIB) for _ in range(80)]
    ends = [bytearray(8 * MIB) for _ in range(4)]  # of the heap
    del blocks

    def take() -> int:
        return len([bytearray(piece) for _ in range(1024 * MIB // piece)])

    assert "takes more than 256 MiB" in failure(take, memory_bytes=256 * MIB)
    assert run(lambda: len(bytearray(128 * MIB)), memory_bytes=256 * MIB) == 128 * MIB
    assert len(ends) == 4


@linux
def test_what_torch_raises_for_lack_of_memory_is_said_like_any_other() -> None:
    assert "takes more than 256 MiB" in failure(lambda: torch.ones(2**28).numel(), memory_bytes=256 * MIB)


def test_processor_time_is_limited() -> None:
    def work() -> None:
        while True:
            pass

    began = time.process_time()
    assert "SIGXCPU" in failure(work, seconds=1)
    assert time.process_time() - began < 1


def test_waiting_is_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_PATIENCE", 1)
    assert "SIGXCPU" in failure(lambda: time.sleep(600), seconds=1)


def test_interrupt_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: children.append(fork()) or children[-1])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "_read_to_end", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(lambda: time.sleep(600))
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)


def test_nothing_of_this_process_is_done_twice() -> None:
    code = """
import atexit, sys
from hookscope.checkpoints.worker import attempt
sys.stdout.write("once")  # still in the buffer when the child is made
atexit.register(sys.stdout.write, ", at exit")
attempt(lambda: sys.stderr.write("never shown"), "model.pt", memory_bytes=2**28, seconds=60)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert (ended.stdout, ended.stderr) == ("once, at exit", "")


def test_limits_stay_in_the_child() -> None:
    kinds = [resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_CORE]
    before = [resource.getrlimit(kind) for kind in kinds], torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    run(lambda: None)
    after = [resource.getrlimit(kind) for kind in kinds], torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    assert before == after


def test_process_with_threads_is_forked_without_a_warning() -> None:
    wait = threading.Event()
    thread = threading.Thread(target=wait.wait)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert run(lambda: torch.ones(1000, 1000).sum().item()) == 1e6
    finally:
        wait.set()
        thread.join()


def test_no_file_stays_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    run(lambda: None)
    failure(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_where_python_cannot_fork_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "CAN_FORK", False)
    assert run(os.getpid) == os.getpid()
    with pytest.raises(CheckpointError, match="is empty"):
        run(fail(CheckpointError("is empty")))
    with pytest.raises(CheckpointError, match="more memory than there is"):
        run(fail(MemoryError()))
