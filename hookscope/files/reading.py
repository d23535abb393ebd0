"""Read what a file holds with the readers that import and call nothing it names."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch

from hookscope.errors import CheckpointError, UntrustedFileError
from hookscope.files.fileformat import FileKind, open_regular
from hookscope.text import printable


def read_content(path: Path, kind: FileKind) -> object:
    """Return what a "torch", "legacy torch" or "safetensors" file holds; mapped into memory where that can be.

    Args:
        path: A file that passed `hookscope.files.vetting.vet`, which finds what these readers would not notice.
        kind: As `file_kind` says.

    Raises:
        CheckpointError: If it is damaged, or too large for the memory there is.
        UntrustedFileError: If it holds more than plain data after all.
    """
    name = printable(str(path))
    try:
        return _read_safetensors(path) if kind == "safetensors" else _read_torch(path, kind)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # torch raises whatever the instructions in a file run into
        # Its messages tell how to switch the protection off, so none of them is passed on.
        message = str(error)
        if any(sign in message for sign in ("allocate memory", "std::bad_alloc", "unable to mmap")):
            raise MemoryError from error
        if "legacy .tar format" in message:
            raise UntrustedFileError(f"{name} can be read as a tar archive too, which runs code; refused.") from error
        damaged = "is damaged, truncated or not what it seems"
        raise CheckpointError(f"{name} {damaged} ({type(error).__name__}); download it again.") from error


def read_layout(path: Path) -> object:
    """Return what a "torch" file holds, with tensors on the meta device whose storages know where in it they begin.

    Args:
        path: A file that passed `hookscope.files.vetting.vet`.
    """
    with _torch_allow_list_only(), warnings.catch_warnings(), open_regular(path) as file:
        warnings.simplefilter("ignore")  # about its own internals
        return torch.load(file, map_location="meta", weights_only=True)


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    if not _is_utf8(path):
        with open_regular(path) as file:
            return safetensors.torch.load(file.read())
    with safetensors.safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def _read_torch(path: Path, kind: FileKind) -> object:
    with _torch_allow_list_only(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own internals, or which pickle instructions it lacks
        by_path = _is_utf8(path) and not os.fspath(path).endswith(".safetensors")  # which torch goes by
        if kind == "torch" and by_path:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        with open_regular(path) as file:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=False)


def _is_utf8(path: Path) -> bool:
    """Say whether a path is UTF-8, which is all that the libraries that map files take."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _torch_allow_list_only() -> Iterator[None]:
    """Take away the classes that other packages (torchvision among them) added to what torch unpickles."""
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(added)
