import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookscope.checkpoints import isolation
from hookscope.checkpoints.sandbox import worker
from hookscope.checkpoints.sandbox.worker import Limits, WorkerFailure, result_of, run_forked
from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.errors import CheckpointError, HookscopeError, MisfitError, UntrustedFileError

MIB = 2**20

MODEL = WeightsFiles(Path("model.pt"), "torch", {}, versions=[])

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much is mapped")


def run(work: Callable[[], Any], **limits: Any) -> Any:
    return run_forked(work, Limits(**{"seconds": 60, "memory_bytes": 256 * MIB, **limits}))


def fail(error: BaseException) -> Callable[[], Any]:
    def work() -> Any:
        raise error

    return work


def test_the_result_comes_back_whole_from_another_process() -> None:
    result = [True, "é\ud800", {"a": None}, "x" * MIB]
    assert run(lambda: result) == result
    assert run(os.getpid) != os.getpid()


@pytest.mark.parametrize("kind", [MisfitError, UntrustedFileError])
def test_an_error_of_hookscope_is_raised_here(kind: type[HookscopeError]) -> None:
    with pytest.raises(kind, match=r"^model\.pt is empty, and out of memory\.$") as caught:
        run(fail(kind("model.pt is empty, and out of memory.")))
    assert type(caught.value) is kind


def test_any_other_error_comes_back_with_its_traceback() -> None:
    failure = run(fail(ZeroDivisionError("oops")))
    assert (failure.cause, failure.reason) == ("raised", "internal error")
    assert "in work\n" in failure.traceback
    assert failure.traceback.endswith("ZeroDivisionError: oops\n")


@linux
def test_memory_is_limited_on_top_of_what_this_process_has() -> None:
    here = bytearray(256 * MIB)
    assert run(lambda: len(bytearray(64 * MIB)), memory_bytes=128 * MIB) == 64 * MIB
    for work in (lambda: len(bytearray(512 * MIB)), lambda: torch.ones(2**27).numel()):
        assert run(work, memory_bytes=128 * MIB) == WorkerFailure("memory", "it needs more memory than 0.125 GiB")
    assert len(here) == 256 * MIB


@linux
@pytest.mark.parametrize("piece", [512 * MIB, 100_000])
@pytest.mark.exhaustive
def test_memory_that_this_process_has_freed_is_no_gift(piece: int) -> None:
    threshold = bytearray(31 * MIB)
    del threshold  # from here on the C library takes as much from its heap, which it does not give back
    blocks = [bytearray(16 * MIB) for _ in range(32)]
    ends = [bytearray(8 * MIB) for _ in range(4)]  # of the heap
    del blocks

    def take() -> int:
        return len([bytearray(piece) for _ in range(512 * MIB // piece)])

    assert run(take, memory_bytes=128 * MIB).cause == "memory"
    assert run(lambda: len(bytearray(64 * MIB)), memory_bytes=128 * MIB) == 64 * MIB
    assert len(ends) == 4


def test_waiting_is_limited_too() -> None:
    assert run(lambda: time.sleep(600), seconds=1) == WorkerFailure("time", "it did not finish within 1 s")


def test_interrupt_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: children.append(fork()) or children[-1])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "read_frame", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(lambda: time.sleep(600))
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)


def test_nothing_of_this_process_is_done_twice() -> None:
    code = """
import atexit, sys
from hookscope.checkpoints.sandbox.worker import Limits, run_forked
sys.stdout.write("once")  # still in the buffer when the child is made
atexit.register(sys.stdout.write, ", at exit")
run_forked(lambda: sys.stderr.write("never shown"), Limits(60))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert (ended.stdout, ended.stderr) == ("once, at exit", "")


def test_limits_and_open_files_stay_in_the_child() -> None:
    kinds = [resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_CORE]

    def state() -> list[Any]:
        files = len(list(Path("/proc/self/fd").iterdir()))
        return [*map(resource.getrlimit, kinds), torch.get_num_threads(), signal.getsignal(signal.SIGTERM), files]

    before = state()
    run(lambda: None, processor_seconds=20)
    run(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert state() == before


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"[]",
        b'{"ended": "x"}',
        b"[" * 100_000,
        json.dumps({"raised": 1, "error": ["CheckpointError", "x"]}).encode(),
        pickle.dumps({"value": 1}),
    ],
    ids=lambda message: message[:10].decode(errors="replace"),
)
def test_what_no_worker_of_ours_answers_is_a_failure(message: bytes) -> None:
    assert result_of(message, Limits(1)).reason == "its answer is damaged"


@pytest.mark.parametrize("name", ["nearest", "UnfitInputError", "__builtins__", "absent"])
def test_an_answer_names_no_other_class(name: str) -> None:
    failure = result_of(json.dumps({"raised": "trace", "error": [name, "x"]}).encode(), Limits(1))
    assert failure == WorkerFailure("raised", "internal error", "trace")


# What is said of files


def read(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(isolation, "_SPARE_BYTES", 256 * MIB)
    monkeypatch.setattr(isolation, "_SPARE_SECONDS", 1)
    with pytest.raises(CheckpointError) as caught:
        isolation.run_isolated(work, MODEL)
    assert str(caught.value).startswith("model.pt ")
    return str(caught.value)


@pytest.mark.parametrize(
    ("work", "phrase"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGBUS), "SIGBUS; the file was cut short"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL; the system ended it"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV; the file is damaged"),
        (lambda: os._exit(3), "exit code 3; the file is damaged"),
        (lambda: time.sleep(600), "SIGXCPU; it takes far longer than a file of its size should"),
        pytest.param(lambda: len(bytearray(1024 * MIB)), "takes more than 256 MiB to read, far more", marks=linux),
    ],
)
@pytest.mark.sample(
    "<lambda>-SIGBUS; the file was cut short",
    "<lambda>-SIGSEGV; the file is damaged",
    "<lambda>-SIGXCPU; it takes far longer than a file of its size should",
)
def test_what_a_file_does_to_its_reader_is_said(
    work: Callable[[], Any], phrase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "_PATIENCE", 1)
    assert phrase in read(work, monkeypatch)


def test_a_bug_in_reading_is_none_of_the_file() -> None:
    with pytest.raises(RuntimeError, match=r"in work\n(.*\n)*ZeroDivisionError: oops"):
        isolation.run_isolated(fail(ZeroDivisionError("oops")), MODEL)


def test_where_python_cannot_fork_a_file_is_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "CAN_FORK", False)
    assert isolation.run_isolated(os.getpid, MODEL) == os.getpid()
    assert "more memory than there is" in read(fail(MemoryError()), monkeypatch)
    assert "model.pt is empty" in read(fail(CheckpointError("model.pt is empty")), monkeypatch)
