"""Run a training script as `python` runs it, and watch it once it has imported torch.

torch is not imported here: a script may set environment variables before it imports torch. The script is `__main__` of
this process, compiled under its own path. `runpy.run_path` is not enough: it clears `__main__` when the script ends,
although functions of the script may still be called at exit.
"""

import atexit
import builtins
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from hookscope import options
from hookscope.commands.watch.closing import say
from hookscope.errors import EXIT_CHECK_FAILED, UsageError
from hookscope.regular_files import open_regular
from hookscope.text import exception_line, printable

if TYPE_CHECKING:
    from hookscope.commands.watch.script_watch import ScriptWatch

_HOOKSCOPE = f"{Path(__file__).parents[2]}{os.sep}"
_KEEPS_DYNAMO_OUT = tuple(str(Path("torch", *parts)) for parts in (("_compile.py",), ("_dynamo", "eval_frame.py")))


@dataclass(slots=True)
class Script:
    """A script, or a module, to run with `sys.argv[1:]`; `folder` is the log's, as the user wrote it."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]
    option: options.Watch
    folder: str | None
    _watch: "ScriptWatch | None" = None  # begins when torch is imported
    _process: int = field(default_factory=os.getpid)
    _has_failed: bool = False

    def run(self) -> None:
        """Run the script; its exceptions are raised, and printed without frames of hookscope.

        With `--strict`, a script that ends with 0 raises SystemExit(1) where a problem, or no training, was seen.

        Raises:
            UsageError: If a module cannot be found.
        """
        atexit.register(self._end)
        sys.argv = [self.name, *self.arguments]
        if not sys.flags.safe_path:  # in place of the folder of hookscope's entry point, as Python does
            sys.path[0] = os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.name))  # noqa: PTH109, PTH120
        if "torch" in sys.modules:  # imported before this process reached the script
            self._begin()
        else:
            sys.meta_path.insert(0, _FindsTorch(self._begin))
        main = ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, __cached__=None)
        if "__annotations__" in vars(sys.modules["__main__"]):  # not in every version of Python
            main.__annotations__ = {}
        code: CodeType | None = None
        try:
            code = _prepare_module(main, self.name) if self.is_module else _prepare_file(main, self.name)
            sys.modules["__main__"] = main
            exec(code, main.__dict__)  # noqa: S102 - the user's own script
        except UsageError as error:
            if code is None:
                self._has_failed = True
                raise
            self._end_with(error)
        except BaseException as error:  # noqa: BLE001 - any end of a script
            if not (self.option.strict and _is_success(error)):
                self._end_with(error)
        if self.option.strict and self._ends_badly():
            sys.exit(EXIT_CHECK_FAILED)

    def _begin(self) -> None:
        if os.getpid() != self._process:
            return
        try:
            from hookscope.commands.watch.script_watch import ScriptWatch  # noqa: PLC0415 - imports torch

            self._watch = ScriptWatch(self.option, self.folder, say)
        except UsageError as error:
            say("\n".join(["error: an edit cannot be made", *str(error).split("\n")]))
            raise SystemExit(error.exit_code) from None
        except Exception as error:  # noqa: BLE001 - never into a script
            say(f"Not watched, because hookscope failed: {exception_line(error)}.")

    def _ends_badly(self) -> bool:
        """End the watch with the script, not with the process; tell whether a problem, or no training, was seen."""
        atexit.unregister(self._end)
        self._end()
        return self._watch is None or self._watch.ends_badly

    def _end(self) -> None:
        if os.getpid() != self._process:
            return
        if self._watch is not None and self._watch.has_watched:
            self._watch.end("the process ended")
        elif not self._has_failed:
            say(
                nothing_seen("the script did not import torch", 0)
                if self._watch is None
                else nothing_seen("no optimizer stepped", self._watch.started_count)
            )

    def _end_with(self, error: BaseException) -> NoReturn:
        """Raise the error that ended the script; the interpreter prints it without frames of hookscope."""
        self._has_failed = not _is_success(error)
        if self._watch is not None and not isinstance(error, SystemExit):
            self._watch.end(exception_line(error), has_failed=True)
        print_error = sys.excepthook

        def excepthook(kind: type[BaseException], value: BaseException, _traceback: TracebackType | None) -> None:
            _strip(value, set())
            print_error(kind, value, value.__traceback__)

        sys.excepthook = excepthook
        raise error


def nothing_seen(why: str, started: int) -> str:
    """Return the line on a script that did not train; `started` is the number of processes that it started."""
    if not started:
        return f"No training was seen: {why} in this process. Processes that a script starts are not watched."
    subject = "process that it started is" if started == 1 else f"{started:,} processes that it started are"
    return (
        f"No training was seen: {why} in this process, and the {subject} not watched. Start such processes with "
        "torchrun, or call hookscope.watch in the function that trains."
    )


def _prepare_file(main: ModuleType, name: str) -> CodeType:
    path = os.path.abspath(name)  # noqa: PTH100 - as Python does, links are kept
    main.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
    with open_regular(Path(path)) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _prepare_module(main: ModuleType, name: str) -> CodeType:
    spec = _found_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _found_spec(f"{name}.__main__")
    loader = None if spec is None else spec.loader
    code = loader.get_code(spec.name) if isinstance(loader, InspectLoader) and spec is not None else None
    if spec is None or code is None:
        raise UsageError(f"There is no module '{printable(name)}' to run: give its name as for `python -m`.")
    main.__dict__.update(
        __file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader, __package__=spec.parent, __spec__=spec
    )
    sys.argv[0] = str(spec.origin)
    return code


def _found_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:  # the module or its package; other errors are the script's
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise
    except ValueError:
        return None


class _FindsTorch(MetaPathFinder):
    """Calls a function once torch has been imported, and then removes itself."""

    def __init__(self, imported: Callable[[], None]) -> None:
        self._imported = imported
        self._is_asked = False

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != "torch" or self._is_asked:
            return None
        self._is_asked = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._is_asked = False
        if spec is not None and spec.loader is not None:  # some only ask whether torch is there
            _call_after(spec.loader, self._torch_is_there)
        return spec

    def _torch_is_there(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._imported()


def _call_after(loader: Loader, imported: Callable[[], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # the class's method remains
        execute(module)
        imported()

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _strip(error: BaseException, seen: set[int]) -> None:
    """Remove frames of hookscope, and all frames before the script, from an exception and those chained to it."""
    if id(error) in seen:
        return
    seen.add(id(error))
    entries = []
    traceback = error.__traceback__
    while traceback is not None:
        entries.append(traceback)
        if traceback.tb_frame.f_code is Script.run.__code__:
            entries.clear()
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    is_ours = False
    for entry in reversed(entries):
        path = entry.tb_frame.f_code.co_filename
        # Frames of torch that keep dynamo out of our functions are removed too.
        is_ours = path.startswith(_HOOKSCOPE) or (is_ours and path.endswith(_KEEPS_DYNAMO_OUT))
        if not is_ours:
            entry.tb_next = kept
            kept = entry
    error.__traceback__ = kept
    related: list[Any] = [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]
    for other in related:
        if isinstance(other, BaseException):
            _strip(other, seen)
