"""Hosts and the work they are given, as the parent sees them."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

from hookscope.sandbox.host import read_frame, write_frame
from hookscope.sandbox.memory import CAN_LIMIT_MEMORY

Item = TypeVar("Item")
Result = TypeVar("Result")

_CAN_FORK = hasattr(os, "fork") and sys.platform != "darwin"  # whose libraries may crash in the child

# Python looks for nothing in the current folder; the module search path is the parent's own.
_HOST_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from hookscope.sandbox.host import serve
serve(json.loads(sys.argv[2]), forks=json.loads(sys.argv[3]))
"""

_RAISED = "internal error"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one worker may take.

    Attributes:
        seconds: From its start to its result, by the clock.
        memory_bytes: Address space on top of what is mapped after the imports; None for no limit, and without effect
            unless `CAN_LIMIT_MEMORY`.
    """

    seconds: float
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """How a worker ended that has no result.

    Attributes:
        cause: "raised": the work raised an unexpected error; "killed": a signal, or an exit in the midst of it;
            "memory" and "time": over the limit.
        reason: For people, as the end of a sentence: "it was ended by SIGSEGV".
        traceback: Of what it raised; "" otherwise.
    """

    cause: Literal["raised", "killed", "memory", "time"]
    reason: str
    traceback: str = ""


def run_jobs(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    limits: Limits,
    *,
    at_once: int = 1,
    preload: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Generator[tuple[int, Result | WorkerFailure], None, None]:
    """Do `work` on every item, each in a separate process; what it prints goes to stderr.

    Leaving early, by an exception or by closing the iterator, kills every process.

    Args:
        work: A function of a module, picklable like its items and results; they are unpickled in the worker only.
        items: What to work on, begun in this order.
        limits: Of each worker.
        at_once: Workers at a time.
        preload: Modules imported once before any work begins; their time does not count.
        environment: Variables that the workers have besides this process's own.

    Yields:
        The position of an item and its result, or how its worker ended, as they finish.
    """
    team = _Team(tuple(preload), {**os.environ, **(environment or {})})
    waiting = deque(enumerate(items))
    finished: SimpleQueue[tuple[int, Any]] = SimpleQueue()

    def work_off() -> None:
        host: _Host | None = None
        while not team.dismissed:
            try:
                position, item = waiting.popleft()
            except IndexError:
                return
            outcome: Any
            try:
                request = pickle.dumps((work, item, limits.memory_bytes))
                host = host if host is not None and host.is_alive else team.start()
                outcome = host.outcome(request, limits)
            except Exception:  # noqa: BLE001 - a thread's exception would be lost, and the item with it
                outcome = WorkerFailure("raised", _RAISED, traceback.format_exc())
            finished.put((position, outcome))

    threads = [threading.Thread(target=work_off, daemon=True) for _ in range(min(at_once, len(items)))]
    try:
        for thread in threads:
            thread.start()
        for _ in items:
            yield finished.get()
    finally:
        team.dismiss()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        team.close()


class _Team:
    """The hosts of one `run_jobs`."""

    def __init__(self, preload: tuple[str, ...], environment: dict[str, str]) -> None:
        self.dismissed = False
        self._preload = preload
        self._environment = environment
        self._hosts: list[_Host] = []
        self._lock = threading.Lock()

    def start(self) -> "_Host":
        with self._lock:  # so that none is started after the others have been killed
            if self.dismissed:
                raise RuntimeError("the work was broken off")
            process = subprocess.Popen(  # noqa: S603 - this Python, and our own program
                [sys.executable, "-P", "-c", _HOST_PROGRAM, *map(json.dumps, (sys.path, self._preload, _CAN_FORK))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=_standard_error(),
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for this process, which kills the others
                bufsize=0,
            )
            self._hosts.append(_Host(process))
            return self._hosts[-1]

    def dismiss(self) -> None:
        with self._lock:
            self.dismissed = True
            for host in self._hosts:
                host.kill()

    def close(self) -> None:
        for host in self._hosts:
            for pipe in (host.process.stdin, host.process.stdout):
                if pipe is not None:
                    pipe.close()


@dataclass(slots=True)
class _Host:
    """A host as its parent sees it.

    Attributes:
        process: Speaks through its stdin and stdout.
        is_ready: Whether it has finished its imports.
        is_late: Whether its worker took more time than it may.
    """

    process: "subprocess.Popen[bytes]"
    is_ready: bool = False
    is_late: bool = False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Kill the host, its worker and whatever that has started, unless it is known to be gone."""
        if self.process.returncode is not None:
            return
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group that is dying
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def outcome(self, request: bytes, limits: Limits) -> Any:
        """Have a worker answer `request`; return its result, or a `WorkerFailure`."""
        if not self.is_ready:
            answer = self._answer()
            if answer is None or answer[0] != "ready":
                self.kill()
                return self._ending(answer, limits)
            self.is_ready = True
        clock = threading.Timer(limits.seconds, self._out_of_time)
        clock.daemon = True
        clock.start()
        try:
            answer = self._ask(request)
        finally:
            clock.cancel()
            clock.join()  # or it could kill the host in the midst of the next item
        if not _CAN_FORK:  # the host has done what it can
            self.process.wait()
        return answer[1] if answer is not None and answer[0] == "result" else self._ending(answer, limits)

    def _out_of_time(self) -> None:
        self.is_late = True
        self.kill()

    def _ask(self, request: bytes) -> tuple[str, Any] | None:
        assert self.process.stdin is not None  # noqa: S101 - it was started with a pipe
        with suppress(OSError):  # a host that is gone says so by its missing answer
            write_frame(self.process.stdin.fileno(), request)
        return self._answer()

    def _answer(self) -> tuple[str, Any] | None:
        assert self.process.stdout is not None  # noqa: S101
        frame = read_frame(self.process.stdout.fileno())
        answer: tuple[str, Any] | None = None if frame is None else pickle.loads(frame)  # noqa: S301 - by our own host
        return answer

    def _ending(self, answer: tuple[str, Any] | None, limits: Limits) -> WorkerFailure:
        """Say how a worker ended that gave no result: None for an answer means that its host is gone too."""
        if answer is None:
            self.kill()  # where the system has ended the host, its worker is left
            if self.is_late:
                return WorkerFailure("time", f"it was not done after {limits.seconds:g} s")
            return WorkerFailure("killed", _exit_text(self.process.wait()))
        kind, detail = answer
        if kind == "raised":
            return WorkerFailure("raised", _RAISED, detail)
        if kind == "memory":
            limited = CAN_LIMIT_MEMORY and limits.memory_bytes is not None
            limit = f"than {(limits.memory_bytes or 0) / 2**30:.3g} GiB" if limited else "than there is"
            return WorkerFailure("memory", f"it needs more memory {limit}")
        return WorkerFailure("killed", _exit_text(detail))


def _exit_text(code: int) -> str:
    """Say what an exit code means; a negative one is a signal's number."""
    if code >= 0:
        return f"it ended with exit code {code} before it had a result"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    remark = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"it was ended by {name}{remark}"


def _standard_error() -> int:
    """Return the descriptor for what a worker prints; the parent process may have closed stderr."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
