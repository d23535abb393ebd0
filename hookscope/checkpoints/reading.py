"""Read what a file holds with the readers that import and call nothing it names."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from hookscope.checkpoints.fileformat import FileKind, open_regular
from hookscope.errors import CheckpointError, UntrustedFileError, is_out_of_memory
from hookscope.text import printable

_UNTYPED = torch.storage._new_dtypes()  # noqa: SLF001 - whose values torch.save stores as mere bytes


def read_content(path: Path, kind: FileKind) -> object:
    """Return what a "torch", "legacy torch" or "safetensors" file holds; mapped into memory where that can be.

    It has passed `verify_file`, which finds what these readers would not notice.

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
        if is_out_of_memory(error):
            raise MemoryError from error
        if "legacy .tar format" in str(error):
            raise UntrustedFileError(f"{name} can be read as a tar archive too, which runs code; refused.") from error
        damaged = "is damaged, truncated or not what it seems"
        raise CheckpointError(f"{name} {damaged} ({type(error).__name__}); download it again.") from error


def read_layout(path: Path) -> object:
    """Return what a "torch" file holds, with tensors on the meta device whose storages know where in it they begin.

    Raises:
        NotImplementedError: If it holds a quantised tensor, which cannot be on the meta device, or was written on a
            machine of the other byte order: torch would swap bytes that are not there, and crash.
    """
    if _is_swapped(path):
        raise NotImplementedError("its bytes are in the other order")
    with _torch_allow_list_only(), warnings.catch_warnings(), open_regular(path) as file:
        warnings.simplefilter("ignore")  # about its own internals
        return torch.load(file, map_location="meta", weights_only=True)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
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
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            with open_regular(path) as file:
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=False)
    if kind == "torch" and _is_swapped(path):
        _swap_what_torch_leaves(content)
    return content


def _swap_what_torch_leaves(content: object) -> None:
    """Swap the bytes of the tensors in a file of the other byte order whose dtypes its storages do not tell."""
    tensors = [tensor for tensor in tensors_within(content) if tensor.dtype in _UNTYPED and tensor.numel()]
    for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values():
        width = tensor.element_size() // (2 if tensor.is_complex() else 1)
        swap = tensor.untyped_storage()._byteswap  # noqa: SLF001 - byteswap() asks torch.finfo, which knows not all of them
        swap(width)  # type: ignore[no-untyped-call]


def tensors_within(content: object) -> Iterator[Tensor]:
    """Yield the tensors anywhere in nested dicts, lists and tuples, each of these once, in the file's order.

    They are detached, because a file can put anything in the place of a tensor's methods.
    """
    seen: set[int] = set()
    waiting = [content]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            yield Tensor.detach(part)
        elif isinstance(part, dict | list | tuple) and id(part) not in seen:
            seen.add(id(part))
            waiting += reversed([*(dict.values(part) if isinstance(part, dict) else part)])


def _is_swapped(path: Path) -> bool:
    """Say whether a "torch" file was written on a machine of the other byte order, as torch itself tells."""
    with open_regular(path) as file:
        archive: Any = torch._C.PyTorchFileReader(file)  # noqa: SLF001 - what torch.load reads with
        order = archive.get_record("byteorder") if archive.has_record("byteorder") else b"little"
    return bool(order != sys.byteorder.encode())


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
