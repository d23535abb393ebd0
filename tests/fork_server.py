"""Processes that start without importing: forks of one that has imported torch, torchvision and hookscope.

Each command is a process of its own, with the streams, folder, environment and limits it is given, and runs the real
entry point; only the three seconds that every start of Python spends on importing torch are spent once. Tests about
starting itself (imports, closed streams, signals, broken pipes) start Python.
"""

import atexit
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_ROOT = Path(__file__).parents[1]
_START = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from tests.fork_server import serve; serve(int(sys.argv[1]))"
_LENGTH_BYTES = 8
_PATIENCE_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Finished:
    """How a process ended, and the most memory that it, or a process it started, ever held."""

    returncode: int
    stdout: str
    stderr: str
    peak_bytes: int  # the most memory that it, or a process it started, ever held


class ForkServer:
    """The process that forks, as tests see it; started when it is first asked for something."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self,
        *arguments: object,
        cwd: Path,
        environment: Mapping[str, str],
        stdout: io.IOBase | None = None,
        largest_file: int | None = None,
    ) -> Finished:
        """Run what `python ARGUMENTS` would: `-m MODULE …`, `-c PROGRAM …` or a script; its stdout to a pipe or a file.

        No file that it writes may be larger than `largest_file` bytes.
        """
        if self._process is None:
            self._start()
        request = json.dumps([list(map(str, arguments)), str(cwd), dict(environment), largest_file]).encode()
        pipes = [os.pipe() for _ in range(2)]
        streams = [writing for _, writing in pipes]
        if stdout is not None:
            os.dup2(stdout.fileno(), streams[0])
        socket.send_fds(self._connection, [len(request).to_bytes(_LENGTH_BYTES, "big")], streams)
        self._connection.sendall(request)
        for stream in streams:
            os.close(stream)
        try:
            out, err = _read_to_end([reading for reading, _ in pipes])
            code, peak_bytes = json.loads(self._connection.recv(100))
        except TimeoutError:
            self.close()
            raise
        return Finished(code, out, err, peak_bytes)

    def _start(self) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(_PATIENCE_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def close(self) -> None:
        """End it, and whatever it runs."""
        if self._process is not None:
            self._connection.close()
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def _read_to_end(pipes: Sequence[int]) -> list[str]:
    """Read pipes until nothing can write to them any more; close them."""
    contents = {pipe: bytearray() for pipe in pipes}
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(_PATIENCE_SECONDS)
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                part = os.read(key.fd, 2**16)
                contents[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
                    os.close(key.fd)
    return [io.TextIOWrapper(io.BytesIO(content), "utf-8").read() for content in contents.values()]


# ---------------------------------------------------------------------------------------------------- in that process


def serve(descriptor: int) -> None:
    """Import once, then fork a process for every request."""
    sys.path[:2] = []  # this checkout, and the current folder
    subprocess.Popen = _ForkingPopen  # before torchrun takes the name
    _import_everything()
    connection = socket.socket(fileno=descriptor)
    while True:
        length, streams, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 2)
        request = b""
        while len(request) < int.from_bytes(length, "big"):
            request += connection.recv(2**16)
        if not request:
            return
        child = os.fork()
        if child == 0:
            arguments, cwd, environment, largest_file = json.loads(request)
            os.chdir(cwd)
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
            _run_python(arguments, [0, *streams], environment)
        for stream in streams:
            os.close(stream)
        _, status, usage = os.wait4(child, 0)
        connection.sendall(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024]).encode())


def _import_everything() -> None:
    hookscope = importlib.import_module("hookscope")
    for module in pkgutil.walk_packages(hookscope.__path__, "hookscope."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in ("torchvision.models", "pandas", "torch.distributed.run"):
        importlib.import_module(name)
    importlib.import_module("PIL.Image").init()  # its readers of formats
    gc.collect()
    gc.freeze()


class _ForkingPopen(subprocess.Popen[bytes]):
    """Starts this Python by forking too: the command's workers import torch as well."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        inputs = inspect.signature(super()._execute_child).bind(args, *rest).arguments
        special = any(inputs[name] for name in ("preexec_fn", "pass_fds", "cwd", "shell"))
        if special or not isinstance(args, list | tuple) or args[0] != sys.executable:
            super()._execute_child(args, *rest)
            return
        pipes = [inputs[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self.pid = os.fork()
        if self.pid == 0:
            if inputs["start_new_session"]:
                os.setsid()
            ends = (inputs[name] for name in ("p2cread", "c2pwrite", "errwrite"))
            streams = [number if end == -1 else end for number, end in enumerate(ends)]
            _run_python(args[1:], streams, inputs["env"] if inputs["env"] is not None else os.environ)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def _run_python(arguments: Sequence[str], streams: Sequence[int], environment: Mapping[str, str]) -> NoReturn:
    """Be `python ARGUMENTS` in a process just forked: standard streams, environment, signals, module search path."""
    code = 1
    atexit._clear()  # those of the process that forks
    try:
        copies = [os.dup(stream) for stream in streams]
        for number, copy in enumerate(copies):
            os.dup2(copy, number)
        os.closerange(3, 1024)
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            _open_stream(name, mode)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        variables = dict(environment)
        os.environ.clear()
        os.environ.update(variables)
        tempfile.tempdir = None
        if "OMP_NUM_THREADS" in variables:  # read when torch is imported
            sys.modules["torch"].set_num_threads(int(variables["OMP_NUM_THREADS"]))
        if arguments[0] == "-u":  # as torchrun starts its processes
            arguments = arguments[1:]
        if arguments[0] == "-P":
            arguments = arguments[1:]
        else:
            first = {"-m": str(Path.cwd()), "-c": ""}
            sys.path.insert(0, first.get(arguments[0], str(Path(arguments[0]).resolve().parent)))
        if arguments[0] == "-m":
            sys.argv[:] = ["-c", *arguments[2:]]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv[:] = ["-c", *arguments[2:]]
            exec(arguments[1], {"__name__": "__main__"})
        else:
            sys.argv[:] = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - as Python does with any
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _open_stream(name: str, mode: str) -> None:
    """Open a standard stream as Python does when it starts."""
    old = getattr(sys, f"__{name}__")
    buffering = 1 if name == "stderr" or os.isatty(old.fileno()) else -1
    stream = open(old.fileno(), mode, buffering, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
