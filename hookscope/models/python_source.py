"""Networks out of a user's own Python: `net.py:build` and `package.module:build`. Imports leave nothing behind."""

import ast
import copy
import importlib
import importlib.util
import inspect
import itertools
import operator
import stat
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hookscope.errors import InputError, ModelError, ModelNotFoundError, UsageError, nearest
from hookscope.models.checkpoint import looks_like_file
from hookscope.models.construction import LoadedModel, model_info, seeded
from hookscope.models.input_spec import default_preprocessing
from hookscope.models.statedict import load_into
from hookscope.models.weights import BuildOptions, ChosenWeights
from hookscope.text import exception_line, printable

_numbers = itertools.count()


def parse_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Read `--model-arg` values such as "width=2": a Python literal, or else the text itself; UsageError for others."""
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise UsageError(f"--model-arg '{printable(text)}' is not of the form NAME=VALUE, such as width=2.")
        if name in arguments:
            raise UsageError(f"--model-arg {name} is given twice.")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            arguments[name] = value
    return arguments


def load_python(source: str, factory: str, options: BuildOptions) -> LoadedModel:
    """Build a network with `factory`, dots allowed, of a path that ends in ".py" or an importable module.

    Weights "auto" and "none" leave the network as it was made. On the meta device it is made there if the factory can;
    a weights file is read and has to fit, but is not loaded. Raises InputError, ModelNotFoundError, ModelError if the
    user's code raises, UsageError if the factory does not take the arguments, makes no Module, or the weights are not a
    file, and what reading weights raises.
    """
    is_file = source.endswith(".py")
    name = f"{Path(source).name if is_file else source}:{factory}"
    weights = options.weights
    if isinstance(weights, str) and weights not in ("auto", "none") and not looks_like_file(weights):
        raise UsageError(f"{name} has no weights '{printable(weights)}'; give auto, none or a state dict file.")
    if is_file:
        _check_readable(Path(source))
    with importable(Path(source).parent if is_file else Path.cwd(), is_file=is_file):
        with seeded(options.seed):
            home = _import_file(Path(source)) if is_file else _import_module(source)
        made = _attribute(home, factory, source)
        with seeded(options.seed):
            module = _make(made, options.arguments, name, on_meta=options.on_meta)
    chosen = options.file_weights() or ChosenWeights(f"as built by {name}")
    checkpoint, notes = chosen.checkpoint, [*chosen.notes]
    misfits = load_into(module, checkpoint.state, chosen.origin, options.file, notes=notes) if checkpoint else ()
    info = model_info(
        name,
        module,
        "not loaded" if options.on_meta else chosen.origin,
        sha256=checkpoint.sha256 if checkpoint else None,
        categories=checkpoint.categories if checkpoint else (),
        arguments=options.arguments,
    )
    return LoadedModel(module, info, default_preprocessing(module), chosen.warnings + misfits, notes=tuple(notes))


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Import a Python file and return the callable of that name in it.

    Raises InputError if the file cannot be read, ModelError if it raises, ModelNotFoundError if it has no such name,
    and UsageError if what has the name cannot be called.
    """
    _check_readable(path)
    with importable(path.parent, is_file=True):
        found = _attribute(_import_file(path), name, str(path))
    if not callable(found):
        raise UsageError(f"{printable(f'{path.name}:{name}')} is a {type(found).__name__}, not a function.")
    return found


def _check_readable(path: Path) -> None:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would block for ever
            raise InputError(f"{printable(str(path))} is not a file.")
        with path.open("rb"):
            pass
    except FileNotFoundError as error:
        raise InputError(
            f"{printable(str(path))} does not exist. FILE.py:NAME is a Python file, and what in it builds the network."
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise InputError(f"{printable(str(path))} cannot be read: {reason}.") from error


def _import_file(path: Path) -> ModuleType:
    """Import a Python file under a name that nothing else has."""
    shown = printable(str(path))
    name = f"hookscope_model_{next(_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"{shown} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        with _user_code(f"{shown} raised while it was imported"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    with _user_code(f"{name} raised while it was imported"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it was found, and itself imports something missing
            missing = error
    raise ModelNotFoundError(
        f"No module '{missing.name}' in the current folder or among the installed packages; "
        "give net.py:FACTORY, package.module:FACTORY, or a name that `hookscope models` lists."
    ) from missing


def _attribute(home: ModuleType, factory: str, source: str) -> object:
    try:
        return operator.attrgetter(factory)(home)
    except AttributeError as error:
        offered = [name for name, value in vars(home).items() if callable(value) and not name.startswith("_")]
        hint = nearest(factory, offered) or " Name a function in it."
        raise ModelNotFoundError(f"{printable(source)} has no '{printable(factory)}'.{hint}") from error


def _make(made: object, arguments: Mapping[str, Any], name: str, *, on_meta: bool) -> nn.Module:
    """Return the Module that a factory makes, or that was found in its place."""
    if isinstance(made, nn.Module):
        if arguments:
            raise UsageError(f"{name} is a {type(made).__name__} already, so it takes no --model-arg.")
        return copy.deepcopy(made).to("meta") if on_meta else made  # others may hold the same object
    if not callable(made):
        raise UsageError(f"{name} is a {type(made).__name__}, neither a callable nor a Module.")
    _check_call(made, arguments, name)
    result: object = None
    if on_meta:
        with suppress(Exception, SystemExit), warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # of values that go nowhere
            result = made(**arguments)
    if result is None:
        with _user_code(f"{name} raised while the network was built"):
            result = made(**arguments)
    if not isinstance(result, nn.Module):
        raise UsageError(f"{name} returned a {type(result).__name__}; it has to return a torch.nn.Module.")
    return result.to("meta") if on_meta else result


def _check_call(factory: Callable[..., object], arguments: Mapping[str, Any], name: str) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"{name}{printable(str(signature))} cannot be called with what --model-arg gives: {error}."
        ) from error


@contextmanager
def _user_code(what: str) -> Iterator[None]:
    """Turn whatever the user's code raises, an attempt to exit included, into one line with its place."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ModelError(f"{what}: {_place(error)}{exception_line(error)}") from error


def _place(error: BaseException) -> str:
    """Return "net.py:12: " for where the user's code raised: the innermost line outside installed packages."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: "
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")} | {str(Path(__file__).parent)}
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(("<", *installed))]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: " if own else ""


# What a file's own folder gave to the last import. Another file's folder may have modules of the same names.
_siblings: set[str] = set()


@contextmanager
def importable(folder: Path, *, is_file: bool) -> Iterator[None]:
    """Let imports find what lies in `folder`, as if Python had been started there, and leave no bytecode in it."""
    if is_file:
        for sibling in _siblings:
            sys.modules.pop(sibling, None)
        _siblings.clear()
    before_path, before_bytecode, before_modules = list(sys.path), sys.dont_write_bytecode, set(sys.modules)
    folder = folder.resolve()
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
    """Say whether an imported module lies in `folder` and is neither hookscope's own nor installed there."""
    module = sys.modules[name]
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    if not isinstance(file, str) or name.startswith("hookscope"):
        return False
    return Path(file).is_relative_to(folder) and not {"site-packages", "dist-packages"} & set(Path(file).parts)
