"""Read files whose reading runs code: pickles, TorchScript and exported programs.

The caller has asked for trust; nothing here asks again.
"""

import logging
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hookscope.checkpoints.fileformat import PROGRAMS, FileKind
from hookscope.errors import CheckpointError
from hookscope.models.construction import seeded, silenced_known_warnings
from hookscope.models.user_code import importable
from hookscope.parameters import arg
from hookscope.regular_files import open_regular
from hookscope.text import exception_line, printable

# Pickle's message about a class or function that is no longer where it was.
_MISSING_CLASS = re.compile(r"Can't get attribute '(?P<name>[^']+)' on <module '(?P<module>[^']+)'")


def read_trusted(path: Path, kind: FileKind) -> object:
    """Return the content of a trusted file; for a program, its module. Tensors of a pickle come to the CPU.

    Classes are looked for in the current folder first. Raises CheckpointError if reading fails.
    """
    if kind in PROGRAMS:
        return read_program(path, kind)[0]
    shown = printable(str(path))
    try:
        # By its name alone, torch would take some file for safetensors.
        with open_regular(path) as file, importable(), silenced_known_warnings():
            if kind == "pickle":
                return pickle.load(file)  # noqa: S301 - trusted
            return torch.load(file, map_location="cpu", weights_only=False)
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{shown} needs the Python module '{printable(str(error.name), 80)}', which cannot be imported here: "
            f"install it, or run hookscope in the folder it lies in."
        ) from error
    except (Exception, SystemExit) as error:
        missing = _MISSING_CLASS.search(str(error)) if isinstance(error, AttributeError) else None
        if missing is None:
            raise CheckpointError(f"{shown} cannot be unpickled: {exception_line(error)}") from error
        raise CheckpointError(
            f"{shown} needs '{printable(missing['name'], 80)}' of the Python module "
            f"'{printable(missing['module'], 80)}', which does not have it here: run hookscope where it does, or "
            f"save `model.state_dict()` and name the network with {arg('arch')}."
        ) from error


def read_program(path: Path, kind: FileKind) -> tuple[nn.Module, tuple[str, ...], tuple[tuple[int, ...], bool] | None]:
    """Return a program as a tree of modules, remarks, and its only input if the file has it.

    Those are as of `hookable` for TorchScript, and as of `unflattened` for an exported program, which runs once on its
    example inputs, if the file has them. Raises CheckpointError.
    """
    if kind == "torchscript":
        import torchvision  # noqa: F401, PLC0415 - registers operators that detection networks call

        from hookscope.models.torchscript import hookable  # noqa: PLC0415 - only for such files

        with _loading(path, "TorchScript", "save"), seeded(0):
            return (*hookable(partial(torch.jit.load, path, map_location="cpu")), None)
    from hookscope.models.unflattened import unflattened  # noqa: PLC0415 - only for such files

    with _loading(path, "an exported program", "export"), seeded(0), open_regular(path) as file:
        return unflattened(torch.export.load(file))


@contextmanager
def _loading(path: Path, kind: str, make: str) -> Iterator[None]:
    """Turn whatever loading a file raises into one line, with the cause that torch.export only logs."""
    causes: list[BaseException] = []

    def collect(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1]:
            causes.append(record.exc_info[1])
        return False

    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.export.pt2_archive._package")]
    for logger in loggers:
        logger.addFilter(collect)
    try:
        with silenced_known_warnings():
            yield
    except (Exception, SystemExit) as error:
        shown, cause = printable(str(path)), exception_line(causes[0] if causes else error)
        raise CheckpointError(
            f"{shown} cannot be loaded as {kind}: {cause}; {make} it again for torch {torch.__version__}."
        ) from error
    finally:
        for logger in loggers:
            logger.removeFilter(collect)
