"""The process that imports once and forks a worker for every request; it speaks in frames through stdin and stdout."""

import importlib
import os
import pickle
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from hookscope.sandbox.memory import CAN_LIMIT_MEMORY, is_lack_of_memory, limit_memory

_LENGTH_BYTES = 8


def serve(preload: Sequence[str], *, forks: bool) -> NoReturn:
    """Be a host: import, then answer requests from stdin on stdout until there are no more.

    Args:
        preload: What to import.
        forks: Whether to fork a worker for each request; else this process answers one itself.
    """
    requests, answers = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)  # a model may print
    try:
        for name in preload:
            importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - the parent hears of it
        write_frame(answers, pickle.dumps(("raised", traceback.format_exc())))
    else:
        write_frame(answers, pickle.dumps(("ready", None)))
        while (request := read_frame(requests)) is not None:
            if not forks:
                write_frame(answers, _answer_to(request))
                break
            write_frame(answers, _answer_of_worker(request, requests, answers))
    os._exit(0)  # taking the interpreter apart takes half a second once torch is loaded


def _answer_of_worker(request: bytes, requests: int, answers: int) -> bytes:
    """Return what a forked worker answers, or how it ended."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Of other threads, whose locks stay taken in the child: libraries' own, which care for that.
        warnings.simplefilter("ignore", DeprecationWarning)
        worker = os.fork()
    if worker == 0:
        for descriptor in (reading, requests, answers):  # what outlives it must not keep the parent waiting
            os.close(descriptor)
        _work_and_leave(request, writing)
    os.close(writing)
    # The parent asks nothing before it has its answer, so whatever comes now is the end of the pipe.
    if requests in select.select([reading, requests], [], [])[0]:
        os.killpg(0, signal.SIGKILL)
    answer = read_frame(reading)
    os.close(reading)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    return answer if answer is not None else pickle.dumps(("ended", code))


def _work_and_leave(request: bytes, writing: int) -> NoReturn:
    """Answer, and leave without doing anything on the host's behalf."""
    code = 1
    try:
        answer = _answer_to(request)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        write_frame(writing, answer)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else code
    finally:
        os._exit(code)


def _answer_to(request: bytes) -> bytes:
    """Do the work that is asked for."""
    try:
        work, item, memory_bytes = pickle.loads(request)  # noqa: S301 - by our own parent
        if memory_bytes is not None and CAN_LIMIT_MEMORY:
            limit_memory(memory_bytes)
            _leave_no_core()
        return pickle.dumps(("result", work(item)))
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the parent hears of it
        if CAN_LIMIT_MEMORY:
            limit_memory(None)  # saying what happened takes some
        if is_lack_of_memory(error):
            return pickle.dumps(("memory", None))
        return pickle.dumps(("raised", traceback.format_exc()))


def _leave_no_core() -> None:
    import resource  # noqa: PLC0415 (Windows has none)

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def write_frame(descriptor: int, content: bytes) -> None:
    """Write a message with its length before it."""
    rest = memoryview(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_frame(descriptor: int) -> bytes | None:
    """Return what `write_frame` has written; None if the other side ends before all of it is there."""
    length = _read_exactly(descriptor, _LENGTH_BYTES)
    return None if length is None else _read_exactly(descriptor, int.from_bytes(length, "big"))


def _read_exactly(descriptor: int, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = os.read(descriptor, min(count, 2**20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
