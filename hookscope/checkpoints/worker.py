"""Try something risky in a separate process first: a crash, a hang or a runaway allocation ends only that process."""

import faulthandler
import gc
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import torch

from hookscope import errors
from hookscope.errors import CheckpointError, HookscopeError
from hookscope.sandbox import CAN_LIMIT_MEMORY, is_lack_of_memory, limit_memory

# Windows does not fork; macOS does, but its libraries may crash in the child.
CAN_FORK = hasattr(os, "fork") and sys.platform != "darwin"

# Our choice: on a busy or stopped machine work takes longer than the processor time it needs.
_PATIENCE = 10

_ENDINGS = {
    "SIGBUS": "the file was cut short while it was read, or its disk failed",
    "SIGKILL": "the system ended it, as it does when memory runs out",
    "SIGXCPU": "it takes far longer than a file of its size should",
}


def attempt(work: Callable[[], Any], name: str, *, memory_bytes: int, seconds: int) -> Any:
    """Return what `work` returns, run in a forked process with limits, so that nothing it does can harm this one.

    Where Python cannot fork safely (Windows, macOS), it runs in this process, without limits.

    Args:
        work: Returns what JSON can hold. It may use torch on the CPU, in one thread.
        name: What is read, for messages.
        memory_bytes: Memory it may take on top of what this process has; without limit where the system does not tell
            how much that is (no /proc). See `hookscope.sandbox.limit_memory`.
        seconds: Processor time it may take.

    Raises:
        CheckpointError: If it raises that, runs out of memory or time, or crashes.
        UntrustedFileError: If it raises that.
        RuntimeError: With the traceback, if it raises anything that is not one of hookscope's errors: a bug.
    """
    if not CAN_FORK:
        try:
            return work()
        except MemoryError as error:
            raise CheckpointError(f"{name} needs more memory than there is.") from error
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Of other threads, whose locks stay taken in the child: it takes none of theirs, and has a deadline.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reading)
        _work_and_leave(work, name, writing, memory_bytes, seconds)
    os.close(writing)
    answer = None
    try:
        answer = _read_to_end(reading, time.monotonic() + _PATIENCE * seconds)
    finally:
        os.close(reading)
        if answer is None:  # late, or this process is interrupted
            os.kill(child, signal.SIGKILL)
        ending = _ending(child)
    if answer is None:
        ending = "SIGXCPU"
    return _outcome(answer or b"", ending, name)


def _read_to_end(reading: int, deadline: float) -> bytes | None:
    """Return all that the child writes; None if it is not done in time."""
    parts: list[bytes] = []
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reading, 2**16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


def _ending(child: int) -> str:
    """Wait for the child and return the name of the signal that ended it, or its exit code."""
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:  # the parent process lets the system wait for children
        code = 0
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _outcome(answer: bytes, ending: str, name: str) -> Any:
    try:
        document = json.loads(answer)
    except ValueError:
        why = _ENDINGS.get(ending, "the file is damaged, or made to crash its reader")
        raise CheckpointError(f"{name} cannot be read: the reading process ended by {ending}; {why}.") from None
    if "bug" in document:
        raise RuntimeError(document["bug"])
    if "error" in document:
        kind, message = document["error"]
        raise getattr(errors, kind)(message)
    return document["value"]


def _work_and_leave(work: Callable[[], Any], name: str, writing: int, memory_bytes: int, seconds: int) -> NoReturn:
    """Work under limits, write down what came of it, and leave without doing anything on the parent's behalf."""
    try:
        _set_limits(memory_bytes, seconds)
        answer = json.dumps(_result(work, name, memory_bytes)).encode()
        while answer:
            answer = answer[os.write(writing, answer) :]
    finally:
        os._exit(0)


def _result(work: Callable[[], Any], name: str, memory_bytes: int) -> dict[str, Any]:
    try:
        return {"value": work()}
    except HookscopeError as error:
        return {"error": [type(error).__name__, str(error)]}
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        if not is_lack_of_memory(error):
            return {"bug": traceback.format_exc()}
        limit = f"{memory_bytes // 2**20} MiB"
        message = f"{name} takes more than {limit} to read, far more than a file of its size should; refused."
        return {"error": [CheckpointError.__name__, message]}


def _set_limits(memory_bytes: int, seconds: int) -> None:
    import resource  # noqa: PLC0415 (Windows has none)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_DFL)
    gc.disable()  # or it would finalise what the parent has thrown away
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # a crash prints; the parent says it better
        os.dup2(nowhere, stream)
    faulthandler.disable()
    torch.set_num_threads(1)  # the parent's other threads do not exist here
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: seconds}
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (soft, hard))
    if CAN_LIMIT_MEMORY:
        with suppress(OSError):  # no /proc
            limit_memory(memory_bytes)
