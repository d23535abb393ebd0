"""Import and run a user's own Python. Imports leave nothing behind but the modules."""

import importlib
import importlib.util
import itertools
import operator
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from hookscope.checkpoints.fileformat import open_regular
from hookscope.errors import InputError, ModelError, ModelNotFoundError, UsageError, nearest
from hookscope.text import an, exception_line, printable, some_of

_import_numbers = itertools.count()

# Modules that the last import took from the file's own folder. Another folder may have modules of these names.
_siblings: set[str] = set()


@contextmanager
def importable(source: str = "") -> Iterator[None]:
    """Let imports find what lies next to a Python file, or else in the current folder, and leave no bytecode there."""
    is_file = source.endswith(".py")
    if is_file:
        for sibling in _siblings:
            sys.modules.pop(sibling, None)
        _siblings.clear()
    before_path, before_bytecode, before_modules = list(sys.path), sys.dont_write_bytecode, set(sys.modules)
    folder = (Path(source).parent if is_file else Path.cwd()).resolve()
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before_path
        sys.dont_write_bytecode = before_bytecode
        if is_file:
            _siblings.update(name for name in sys.modules.keys() - before_modules if _is_sibling(name, folder))


def _is_sibling(name: str, folder: Path) -> bool:
    module = sys.modules[name]
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    if not isinstance(file, str) or name.startswith("hookscope"):
        return False
    return Path(file).is_relative_to(folder) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def imported(source: str, name: str) -> object:
    """Return what a path that ends in ".py", or a module, has by a dotted name.

    Raises InputError if the file cannot be read, ModelError if its code raises, and ModelNotFoundError if there is no
    such module, or no such name in it.
    """
    home = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    with user_code(f"{printable(source)} raised while its '{printable(name)}' was looked up"), suppress(AttributeError):
        return operator.attrgetter(name)(home)  # a module's own __getattr__ may import more
    offered = [key for key, value in vars(home).items() if callable(value) and not key.startswith("_")]
    defined = [key for key in offered if getattr(vars(home)[key], "__module__", "") == home.__name__]
    hint = nearest(name, offered) or (f" It defines {some_of(defined[::-1], 6)}." if defined else "")
    raise ModelNotFoundError(f"{printable(source)} has no '{printable(name)}'.{hint}")


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Return the callable of that name in a Python file; raises as `imported`, and UsageError if it is none."""
    with importable(str(path)):
        function = imported(str(path), name)
    if not callable(function):
        raise UsageError(f"{printable(f'{path.name}:{name}')} is {an(type(function).__name__)}, not a function.")
    return function


def _import_file(path: Path) -> ModuleType:
    with open_regular(path, "FILE.py:NAME, a function in a Python file", InputError):
        pass
    shown = printable(str(path))
    name = f"hookscope_model_{next(_import_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        with user_code(f"{shown} raised while it was imported"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    with user_code(f"{name} raised while it was imported"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it exists, but imports something missing
            missing = error
    raise ModelNotFoundError(
        f"No module '{missing.name}' in the current folder or among the installed packages; "
        "give net.py:FACTORY, package.module:FACTORY, or a name that `hookscope models` lists."
    ) from missing


@contextmanager
def user_code(event: str) -> Iterator[None]:
    """Turn whatever the user's code raises, an attempt to exit included, into one line with its place."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ModelError(f"{event}: {_raised_at(error)}{exception_line(error)}") from error


def _raised_at(error: BaseException) -> str:
    """Return "net.py:12: " for where the user's code raised: the innermost line outside installed packages."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: "
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")} | {str(Path(__file__).parent)}
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [f for f in frames if not f.filename.startswith(("<", *installed))]
    return f"{Path(user_frames[-1].filename).name}:{user_frames[-1].lineno}: " if user_frames else ""
