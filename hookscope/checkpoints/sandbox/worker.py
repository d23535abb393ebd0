"""One worker: a fork of this process that sets itself limits, does one piece of work, and answers in JSON."""

import ctypes
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from hookscope import errors
from hookscope.errors import HookscopeError, is_out_of_memory

if sys.platform != "win32":
    import resource

CAN_FORK = hasattr(os, "fork") and sys.platform != "darwin"  # macOS libraries may crash in a forked child

_LENGTH_BYTES = 8

CAN_LIMIT_MEMORY = sys.platform == "linux"  # relative to what is mapped, which /proc lists

# Freed memory is allocated again in pieces of these sizes, in bytes. Each piece costs a written page, more than a
# quarter of anything smaller.
_LARGEST_PIECE, _SMALLEST_PIECE = 2**44, 2**14


@dataclass(frozen=True, slots=True)
class Limits:
    """What one worker may take: seconds by the clock, memory, and seconds of processor time, None for no limit.

    Memory is address space on top of what is mapped when it starts, and without effect unless `CAN_LIMIT_MEMORY`.
    """

    seconds: float
    memory_bytes: int | None = None
    processor_seconds: int | None = None

    def set(self) -> None:
        """Limit the memory and processor time of this process, and let it leave no core file; not the seconds."""
        if sys.platform == "win32":
            return
        _set_limit(resource.RLIMIT_CORE, 0)
        if self.processor_seconds is not None:
            _set_limit(resource.RLIMIT_CPU, self.processor_seconds)
        if self.memory_bytes is not None and CAN_LIMIT_MEMORY:
            with suppress(OSError):  # without /proc
                limit_memory(self.memory_bytes)


def _set_limit(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def limit_memory(memory_bytes: int | None) -> None:
    """Limit the memory that this process and its forks take on top of what it has; only on Linux.

    None means as much as the system allows. The system counts what is mapped, not what is used: as address space, and
    as memory to write to, which leaves out what libraries have only reserved. What was freed before but is still mapped
    would come on top of the limit: in a process that has worked for long, gigabytes. So all of it is allocated first,
    and never used. Only pieces below 16 KiB and Python's own pools, of objects up to 512 bytes, are left.
    """
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if memory_bytes is None:
        for kind in kinds:
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (hard, hard))
        return
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    mapped = [int(pages[field]) * resource.getpagesize() for field in (0, 5)]  # the two kinds of memory

    def allow(more: int) -> None:
        for kind, taken in zip(kinds, mapped, strict=True):
            _set_limit(kind, taken + more)

    allow(0)
    try:
        _take_what_was_freed()
    finally:
        allow(memory_bytes)


def _take_what_was_freed() -> None:
    allocate = ctypes.CDLL(None).malloc
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    size = _LARGEST_PIECE
    while size >= _SMALLEST_PIECE:
        while allocate(size):
            pass
        size //= 2


def machine_memory_bytes() -> int | None:
    """Return the memory of this machine, or the container's limit if that is lower; None where neither is known."""
    sizes = []
    with suppress(OSError, ValueError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" means no limit
            sizes.append(int(Path(path).read_text(encoding="ascii")))
    return min(sizes, default=None)


def usable_cores() -> int:
    """Return how many processor cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """How a worker without a result ended: unexpected error, signal or exit, or over a limit.

    `reason` is the end of a sentence for people: "it was ended by SIGSEGV". `traceback` is for "raised", `ending` for
    "killed": the name of the signal or "exit code 3". `error` is what it raised, if that is one of hookscope's own.
    """

    cause: Literal["raised", "killed", "memory", "time"]
    reason: str
    traceback: str = ""
    ending: str = ""
    error: HookscopeError | None = None


def run_forked(work: Callable[[], Any], limits: Limits) -> Any:
    """Return what `work` returns in a fork of this process, or a `WorkerFailure`; hookscope's own errors are raised.

    The worker prints nothing, and its other threads are gone. Its result is what JSON can hold; tuples come back as
    lists. Without `CAN_FORK`, `work` runs here, without limits.
    """
    if not CAN_FORK:
        return work()
    result = result_of(fork_worker(work, limits, deadline=time.monotonic() + limits.seconds), limits)
    if isinstance(result, WorkerFailure) and result.error is not None:
        raise result.error
    return result


def fork_worker(
    work: Callable[[], Any], limits: Limits, *, deadline: float | None = None, parent: tuple[int, int] | None = None
) -> bytes:
    """Do `work` in a fork of this process; return the worker's message, or one about how it ended.

    It is killed at the deadline, by `time.monotonic`; None leaves that to the parent of this process. In a host,
    `parent` holds the pipes from and to its parent: the worker may print, and when the parent closes its pipe, the
    whole process group is killed.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns that the child keeps locks of other threads; the child uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        worker = os.fork()
    if worker == 0:
        for descriptor in (reading, *(parent or ())):  # what outlives the worker must not keep the parent waiting
            os.close(descriptor)
        _work_and_leave(work, limits, writing, prints=parent is not None)
    os.close(writing)
    answer = None
    try:
        answer = read_frame(reading, deadline, parent and parent[0])
    except TimeoutError:
        answer = json.dumps({"time": None}).encode()
        os.kill(worker, signal.SIGKILL)
    except BaseException:  # Ctrl-C
        os.kill(worker, signal.SIGKILL)
        raise
    finally:
        os.close(reading)
        code = 0
        with suppress(ChildProcessError):  # the parent process ignores SIGCHLD, so the system has waited
            code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    return json.dumps({"ended": code}).encode() if answer is None else answer


def _work_and_leave(work: Callable[[], Any], limits: Limits, writing: int, *, prints: bool) -> NoReturn:
    """Do the work, answer and exit, without finalisers and exit handlers of the parent."""
    code = 1
    try:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        gc.freeze()  # do not finalise objects that the parent has dropped
        if not prints:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):  # a crash prints; the parent reports it better
                os.dup2(nowhere, stream)
            faulthandler.disable()
        answer = answer_to(work, limits)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        write_frame(writing, answer)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else code
    finally:
        os._exit(code)


def answer_to(work: Callable[[], Any], limits: Limits) -> bytes:
    """Do the work within limits; return its result or failure as a message for `result_of`."""
    try:
        limits.set()
        return json.dumps({"value": work()}).encode()
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the parent reports it
        if CAN_LIMIT_MEMORY:
            limit_memory(None)  # the message needs memory
        answer: dict[str, Any] = {"raised": traceback.format_exc()}
        if isinstance(error, HookscopeError):
            answer["error"] = [type(error).__name__, str(error)]
        elif is_out_of_memory(error):
            answer = {"memory": None}
        return json.dumps(answer).encode()


def result_of(message: bytes, limits: Limits) -> Any:
    """Return the result in a worker's message, or a `WorkerFailure`; a worker taken over by a file writes anything."""
    try:
        answer = dict(json.loads(message))
    except (ValueError, TypeError, RecursionError):
        answer = {}
    match answer:
        case {"value": value}:
            return value
        case {"raised": str(trace)}:
            return WorkerFailure("raised", "internal error", trace, error=_own_error(answer.get("error")))
        case {"memory": _}:
            limited = CAN_LIMIT_MEMORY and limits.memory_bytes is not None
            limit = f"than {(limits.memory_bytes or 0) / 2**30:.3g} GiB" if limited else "than there is"
            return WorkerFailure("memory", f"it needs more memory {limit}")
        case {"time": _}:
            return WorkerFailure("time", f"it did not finish within {limits.seconds:g} s")
        case {"ended": int(code)}:
            return ended(code)
    return WorkerFailure("killed", "its answer is damaged", ending="a damaged answer")


def _own_error(parts: object) -> HookscopeError | None:
    match parts:
        case [str(name), str(message)]:
            kind = vars(errors).get(name)
            if isinstance(kind, type) and issubclass(kind, HookscopeError) and "__init__" not in vars(kind):
                return kind(message)
    return None


def ended(code: int) -> WorkerFailure:
    """Return the failure that an exit code stands for; a negative one is a signal's number."""
    if code >= 0:
        reason, name = f"it ended with exit code {code} before it had a result", f"exit code {code}"
    else:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"  # a real-time signal
        remark = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        reason = f"it was ended by {name}{remark}"
    return WorkerFailure("time" if name == "SIGXCPU" else "killed", reason, ending=name)


def write_frame(descriptor: int, content: bytes) -> None:
    """Write a message with its length before it."""
    rest = memoryview(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_frame(descriptor: int, deadline: float | None = None, parent: int | None = None) -> bytes | None:
    """Return what `write_frame` has written; None if the other side ends before all of it is there.

    Raises TimeoutError if the deadline, by `time.monotonic`, passes. A parent sends nothing before it has the answer:
    if its pipe becomes readable, the parent has ended, and the process group is killed.
    """
    length = _read_exactly(descriptor, _LENGTH_BYTES, deadline, parent)
    return None if length is None else _read_exactly(descriptor, int.from_bytes(length, "big"), deadline, parent)


def _read_exactly(descriptor: int, count: int, deadline: float | None, parent: int | None) -> bytes | None:
    parts: list[bytes] = []
    while count:
        if deadline is not None or parent is not None:
            waiting = [descriptor] if parent is None else [descriptor, parent]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            poll = select.poll()  # `select.select` takes no descriptor above 1023
            for readable in waiting:
                poll.register(readable, select.POLLIN)
            ready = [readable for readable, _ in poll.poll(None if left is None else 1000 * left)]
            if not ready:
                raise TimeoutError
            if parent in ready:
                os.killpg(0, signal.SIGKILL)
        part = os.read(descriptor, min(count, 2**20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
