"""Work over many items: hosts, which import once and fork a worker for every request, and how their parent sees them.

They speak in frames through a host's stdin and stdout.
"""

import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import IO, Any, NoReturn, TypeVar

from hookscope.checkpoints.sandbox.worker import (
    CAN_FORK,
    Limits,
    WorkerFailure,
    answer_to,
    ended,
    fork_worker,
    read_frame,
    result_of,
    write_frame,
)

Item = TypeVar("Item")

# Python looks for nothing in the current folder; the module search path is the parent's own.
_HOST_PROGRAM = """
import gc, json, sys
gc.set_threshold(10_000)  # as in cli/app.py
sys.path[:] = json.loads(sys.argv[1])
from hookscope.checkpoints.sandbox.jobs import serve
from hookscope.checkpoints.sandbox.worker import Limits
serve(json.loads(sys.argv[2]), Limits(*json.loads(sys.argv[3])), forks=json.loads(sys.argv[4]))
"""


def run_jobs(
    work: Callable[[Item], Any],
    items: Sequence[Item],
    limits: Limits,
    *,
    at_once: int = 1,
    preload: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Generator[tuple[int, Any], None, None]:
    """Do `work` on every item, each in a separate process; what it prints goes to stderr.

    Yields the position of an item and its result, or a `WorkerFailure`, as they finish. Leaving early, by an exception
    or by closing the iterator, kills every process. `work` is a function of a module, picklable like its items, and
    returns what JSON can hold; tuples come back as lists. At most `at_once` workers run at once, each within `limits`.
    The modules `preload` are imported once before any work begins; `environment` is added to this process's own.
    """
    team = _Team(limits, [*preload], {**os.environ, **(environment or {})})
    of_thread = threading.local()

    def outcome_of(item: Item) -> Any:
        try:
            request = pickle.dumps((work, item))
            host: _Host | None = getattr(of_thread, "host", None)
            of_thread.host = host if host is not None and host.is_alive else team.start()
            return of_thread.host.outcome(request)
        except Exception:  # noqa: BLE001 - the item's own failure, among the results
            return WorkerFailure("raised", "internal error", traceback.format_exc())

    pool = ThreadPoolExecutor(at_once)
    try:
        running = {pool.submit(outcome_of, item): position for position, item in enumerate(items)}
        for finished in as_completed(running):
            yield running[finished], finished.result()
    finally:
        team.dismiss()
        pool.shutdown(cancel_futures=True)
        for host in team.hosts:
            host.close()


@dataclass(slots=True)
class _Team:
    limits: Limits
    preload: list[str]
    environment: dict[str, str]
    dismissed: bool = False
    hosts: "list[_Host]" = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> "_Host":
        with self.lock:  # start none after the others have been killed
            if self.dismissed:
                raise RuntimeError("the work was cancelled")
            arguments = sys.path, self.preload, astuple(self.limits), CAN_FORK
            process = subprocess.Popen(  # noqa: S603 - this Python, and our own program
                [sys.executable, "-P", "-c", _HOST_PROGRAM, *map(json.dumps, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=_standard_error(),
                env=self.environment,
                start_new_session=True,  # Ctrl-C is for this process, which kills the others
                bufsize=0,
            )
            self.hosts.append(_Host(process, self.limits))
            return self.hosts[-1]

    def dismiss(self) -> None:
        with self.lock:
            self.dismissed = True
            for host in self.hosts:
                host.kill()


@dataclass(slots=True)
class _Host:
    process: "subprocess.Popen[bytes]"
    limits: Limits
    is_ready: bool = False  # imports are finished
    is_late: bool = False  # the worker has exceeded its time

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Kill the host, its worker and whatever that has started, unless it is known to be gone."""
        if self.process.returncode is not None:
            return
        with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group that is dying
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def outcome(self, request: bytes) -> Any:
        """Have a worker answer `request`; return its result, or a `WorkerFailure`."""
        if not self.is_ready:
            begun = self._result()
            if isinstance(begun, WorkerFailure):
                self.kill()
                return begun
            self.is_ready = True
        clock = threading.Timer(self.limits.seconds, self._out_of_time)
        clock.daemon = True
        clock.start()
        try:
            with suppress(OSError):  # a host that is gone is noticed by its missing answer
                write_frame(_descriptor(self.process.stdin), request)
            result = self._result()
        finally:
            clock.cancel()
            clock.join()  # a clock that has just gone off must not kill the host during the next item
        if not CAN_FORK:  # the system cannot fork, so the host can do no more
            self.process.wait()
        return result

    def _out_of_time(self) -> None:
        self.is_late = True
        self.kill()

    def _result(self) -> Any:
        message = read_frame(_descriptor(self.process.stdout))
        if message is None:
            self.kill()  # where the system has ended the host, its worker is left
            if not self.is_late:
                return ended(self.process.wait())
            message = json.dumps({"time": None}).encode()
        return result_of(message, self.limits)


def _descriptor(pipe: IO[bytes] | None) -> int:
    assert pipe is not None  # noqa: S101 - the host was started with pipes
    return pipe.fileno()


def _standard_error() -> int:
    """Return the descriptor for a worker's output; the parent process may have closed stderr."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def serve(preload: Sequence[str], limits: Limits, *, forks: bool) -> NoReturn:
    """Be a host: import, then answer requests from stdin on stdout until there are no more.

    Without `forks` this process answers a single request itself, and its parent enforces only the limit on seconds.
    """
    requests, answers = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)  # a model may print
    try:
        for name in preload:
            importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - the parent reports it
        write_frame(answers, json.dumps({"raised": traceback.format_exc()}).encode())
        os._exit(0)
    write_frame(answers, json.dumps({"value": "ready"}).encode())
    while (request := read_frame(requests)) is not None:

        def work(request: bytes = request) -> Any:
            function, item = pickle.loads(request)  # noqa: S301 - by our own parent
            return function(item)

        if not forks:
            write_frame(answers, answer_to(work, limits))
            break
        write_frame(answers, fork_worker(work, limits, parent=(requests, answers)))
    os._exit(0)  # taking the interpreter apart takes half a second once torch is loaded
