"""Read the tensors out of a weights file without running anything that comes with it, and put them into a network."""

import hashlib
import pickletools
import re
import stat
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import nn

from hookscope.errors import CheckpointError, HookscopeError, UntrustedFileError
from hookscope.models.building import printable

WEIGHTS_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")

# Where training scripts put the weights inside a larger checkpoint, in order of preference.
WRAPPING_KEYS = ("state_dict", "model_state_dict", "model")

# Our choice: the largest published state dicts pickle to about 10 MiB, the rest of the file is raw storages.
_PICKLE_BYTES_LIMIT = 64 * 2**20

_LEGACY_START = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"  # torch's magic number, pickled

_FOREIGN_STARTS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file it stands for; fetch it with `git lfs pull`",
    b"\x1f\x8b": "gzip-compressed; unpack it first",
    b"BZh": "bzip2-compressed; unpack it first",
    b"\xfd7zXZ": "xz-compressed; unpack it first",
    b"\x28\xb5\x2f\xfd": "zstd-compressed; unpack it first",
    b"7z\xbc\xaf": "a 7z archive; unpack it first",
    b"\xff\xd8\xff": "a JPEG image, not weights",
    b"\x89PNG": "a PNG image, not weights",
    b"GIF8": "a GIF image, not weights",
    b"BM": "a BMP image, not weights",
    b"RIFF": "a RIFF file such as a WebP image, not weights",
    b"II*\x00": "a TIFF image, not weights",
    b"MM\x00*": "a TIFF image, not weights",
    b"%PDF": "a PDF document, not weights",
    b"\x89HDF": "an HDF5 file (Keras?), which hookscope does not read",
    b"\x93NUMPY": "a NumPy array, not a state dict",
    b"GGUF": "a GGUF file, which hookscope does not read",
    b"<": "an HTML or XML page, probably saved in place of the download",
    b"{": "JSON text, not weights",
    b"[": "JSON text, not weights",
}

_RUNS_CODE = "reading it can run code; save `model.state_dict()` instead and name its network with --arch"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights in a file.

    Attributes:
        state: Tensors by name. The file of a quantised network also holds tuples of tensors and dtypes. Carries torch's
            `_metadata` when the file does.
        sha256: Hex digest of the file's bytes.
        warnings: Sentences a reader must see, such as what else the file holds.
    """

    state: "OrderedDict[str, Any]"
    sha256: str
    warnings: tuple[str, ...] = ()


def looks_like_file(text: str) -> bool:
    """Say whether `text` is meant as a weights file: it has such a file's suffix, or something of that name exists."""
    return text.lower().endswith(WEIGHTS_SUFFIXES) or exists(text)


def exists(text: str) -> bool:
    """Say whether something of that name exists; what cannot be a name does not."""
    try:
        return text != "" and Path(text).exists()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def read_state_dict(path: Path) -> dict[str, Any]:
    """Return the state dict in a weights file: tensors by name, on the CPU.

    Raises:
        CheckpointError: If the file cannot be read, is damaged, or holds no state dict.
        UntrustedFileError: If reading it would run code from the file.
    """
    return read_checkpoint(path).state


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the state dict in a weights file, with the file's digest. What the file is, its content decides.

    Raises:
        CheckpointError: If the file cannot be read, is damaged, or holds no state dict.
        UntrustedFileError: If reading it would run code from the file.
    """
    name = printable(str(path))
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would block for ever
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise CheckpointError(f"{name} is {kind}; give a weights file.")
        with path.open("rb") as file:
            content = _read_content(file, name)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise CheckpointError(f"{name} cannot be read: {reason}.") from error
    state, notes = _state_dict_in(content, name)
    return Checkpoint(state, digest, notes)


def _state_dict_in(content: object, name: str) -> tuple["OrderedDict[str, Any]", tuple[str, ...]]:
    """Find the state dict in what a file holds, which may be a larger training checkpoint, and notes about the rest.

    Everything here comes from a stranger: methods are called through their class, since an object can shadow its own.
    """
    notes: tuple[str, ...] = ()
    wrapped = [key for key in WRAPPING_KEYS if isinstance(content, dict) and _tensors_in(dict.get(content, key))]
    if isinstance(content, dict) and wrapped:
        rest = [printable(str(key), 40) for key in dict.keys(content) if key != wrapped[0]]
        ignored = f"; ignored: {', '.join(rest[:5])}{', …' if len(rest) > 5 else ''}" if rest else ""
        notes = (f"{name}: weights taken from its key '{wrapped[0]}'{ignored}.",)
        content = dict.__getitem__(content, wrapped[0])
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} holds a {type(content).__name__}, not a state dict (tensors by name).")
    if not _tensors_in(content):
        keys = [printable(str(key), 40) for key in dict.keys(content)]
        inside = f"only {', '.join(keys[:5])}{', …' if len(keys) > 5 else ''}" if keys else "nothing"
        raise CheckpointError(f"{name} holds no tensors by name: {inside}.")
    if any(tensor.is_meta for tensor in _tensors_in(content)):
        raise CheckpointError(f"{name} holds shapes without data (tensors on the meta device).")
    state = OrderedDict(
        (str(key), torch.Tensor.detach(value) if isinstance(value, torch.Tensor) else value)
        for key, value in dict.items(content)
    )
    metadata = vars(content).get("_metadata") if isinstance(content, OrderedDict) else None
    if isinstance(metadata, dict):
        vars(state)["_metadata"] = metadata
    return state, notes


def _tensors_in(content: object) -> list[torch.Tensor]:
    """Return the tensors that stand directly in a dict; none for anything else."""
    if not isinstance(content, dict):
        return []
    return (
        [value for value in dict.values(content) if isinstance(value, torch.Tensor)]
        if isinstance(content, dict)
        else []
    )


def fits(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Say whether `state` has exactly the names and shapes that `module` has."""
    own = module.state_dict()
    return own.keys() == state.keys() and all(_form(own[key]) == _form(value) for key, value in state.items())


def load_into(module: nn.Module, state: Mapping[str, Any], origin: str) -> None:
    """Copy `state` into `module`, strictly: every name and shape must fit.

    Only a BatchNorm's `num_batches_tracked` may be missing: old files do not have it, and evaluation does not use it.

    Args:
        module: Its parameters and buffers are overwritten, in part also when this raises.
        state: Tensors by name.
        origin: What to call the weights in messages: a file name.

    Raises:
        CheckpointError: If names or shapes do not fit; one line naming the first few of each group.
    """
    own = module.state_dict()
    # A lazy parameter takes the shape it is given.
    formed = {key: value for key, value in own.items() if not nn.parameter.is_lazy(value)}
    other_shape = {key: value for key, value in state.items() if key in formed and _form(value) != _form(own[key])}
    fitting = OrderedDict((key, value) for key, value in state.items() if key not in other_shape)
    # Without it (safetensors) modules would take the file for one of torch's first versions.
    vars(fitting)["_metadata"] = getattr(state, "_metadata", getattr(own, "_metadata", None))
    try:
        result = module.load_state_dict(fitting, strict=False)
    except Exception as error:  # torch raises RuntimeError, ValueError and more for what it cannot copy
        raise CheckpointError(f"{origin} does not fit {type(module).__name__}: {type(error).__name__}.") from error
    missing = [key for key in result.missing_keys if key not in other_shape and not key.endswith("num_batches_tracked")]
    shapes = [f"{printable(k, 80)}: file {_form(v)}, network {_form(own[k])}" for k, v in other_shape.items()]
    groups = [
        _group("missing", [printable(key, 80) for key in missing]),
        _group("of another shape", shapes),
        _group("unknown to the network", [printable(key, 80) for key in result.unexpected_keys]),
    ]
    if any(groups):
        misfits = ", ".join(filter(None, groups))
        raise CheckpointError(f"{origin} does not fit {type(module).__name__}: {misfits}. Is it another network's?")


def _form(value: object) -> str:
    """Return a tensor's shape, or what stands in its place; equal forms can be copied into each other."""
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def _group(what: str, members: list[str], shown: int = 3) -> str:
    more = ", …" if len(members) > shown else ""
    return f"{len(members)} {what} ({', '.join(members[:shown])}{more})" if members else ""


def _read_content(file: BinaryIO, name: str) -> object:
    """Return what the file holds, by the reader its first bytes call for."""
    start = file.read(512)
    file.seek(0)
    if not start:
        raise CheckpointError(f"{name} is empty.")
    if _is_safetensors(start):
        return _read_safetensors(file, name)
    if start.startswith(b"PK\x03\x04"):
        _check_archive(file, name)
        return _read_torch(file, name)
    if start.startswith(_LEGACY_START):
        return _read_torch(file, name)
    if start[257:262] == b"ustar":
        raise UntrustedFileError(f"{name} is a tar archive, torch's oldest format: {_RUNS_CODE}.")
    if start[0] == 0x80 and len(start) > 1 and start[1] in range(2, 6):
        raise UntrustedFileError(f"{name} is a bare pickle: {_RUNS_CODE}.")
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    for magic, what in _FOREIGN_STARTS.items():
        if start.startswith(magic) or text.startswith(magic):
            raise CheckpointError(f"{name} is {what}.")
    raise CheckpointError(f"{name} is not a weights file hookscope knows; it starts with {start[:8]!r}.")


def _is_safetensors(start: bytes) -> bool:
    """Say whether a file starts like safetensors: the header's length, at most 100 MB, then a JSON object."""
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= 100_000_000


def _read_safetensors(file: BinaryIO, name: str) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load(file.read())
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{name} is a damaged or truncated safetensors file; download it again.") from error


def _check_archive(file: BinaryIO, name: str) -> None:
    """Refuse a zip that torch cannot read safely, or would read without noticing that it is damaged.

    torch checks no CRC, unpacks compressed members of any size, and takes the first of two members of one name.
    """
    damaged = f"{name} is a damaged or truncated zip archive; download it again."
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise CheckpointError(damaged) from error
    members = archive.infolist()
    names = [member.filename for member in members]
    if any(n.endswith("/constants.pkl") for n in names):
        raise UntrustedFileError(f"{name} is a TorchScript archive: {_RUNS_CODE}.")
    if any("/data/weights/" in n or n.endswith("/archive_format") for n in names):
        raise UntrustedFileError(f"{name} is an exported program (.pt2): {_RUNS_CODE}.")
    pickles = [member for member in members if member.filename.endswith("/data.pkl")]
    if not pickles:
        raise CheckpointError(f"{name} is a zip archive, but not one that torch.save wrote.")
    if len(set(names)) != len(names) or any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise CheckpointError(f"{name} was not written by torch.save: its members repeat or are compressed.")
    if sum(member.file_size for member in pickles) > _PICKLE_BYTES_LIMIT:
        raise CheckpointError(f"{name} has a data.pkl of more than {_PICKLE_BYTES_LIMIT // 2**20} MiB; refused.")
    try:
        _compare_checksums(archive)
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
        raise CheckpointError(damaged) from error


def _compare_checksums(archive: zipfile.ZipFile) -> None:
    for member in archive.infolist():
        if member.CRC:  # 0 stands for "not computed"
            with archive.open(member) as content:
                while content.read(2**20):  # zipfile compares at the end
                    pass


def _read_torch(file: BinaryIO, name: str) -> object:
    file.seek(0)
    try:
        with _torch_allow_list_only(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own internals, or which pickle instructions it lacks
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _torch_load_error(error, file, name) from error


# torch's messages tell how to switch the protection off, so none of them is passed on.
def _torch_load_error(error: Exception, file: BinaryIO, name: str) -> HookscopeError:
    message = str(error)
    if isinstance(error, MemoryError) or "allocate memory" in message:
        return CheckpointError(f"{name} needs more memory than there is.")
    if found := re.search(r"(?:Unsupported global: GLOBAL|unsupported GLOBAL) (\S+)", message):
        if _ends_before_global(file, found[1]):
            return CheckpointError(f"{name} is truncated; download it again.")
        return UntrustedFileError(f"{name} holds a pickled {printable(found[1], 80)}: {_RUNS_CODE}.")
    if "Unsupported operand" in message:
        return UntrustedFileError(f"{name} holds more than plain tensors: {_RUNS_CODE}.")
    return CheckpointError(f"{name} is truncated, damaged, or not from torch.save ({type(error).__name__}).")


def _ends_before_global(file: BinaryIO, dotted: str) -> bool:
    """Say whether a file in torch's legacy format is cut off in the middle of the name `dotted`.

    torch then complains about the rest of the name as an unsupported global, which looks like an attack.
    """
    file.seek(0)
    if file.read(len(_LEGACY_START)) != _LEGACY_START:
        return False
    file.seek(0)
    try:
        for _ in range(5):  # magic number, protocol, system, object, storage keys
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name == "GLOBAL" and str(argument).replace(" ", ".") == dotted:
                    return False
    except ValueError:
        return True
    return False


@contextmanager
def _torch_allow_list_only() -> Iterator[None]:
    """Take away the classes that other packages (torchvision among them) added to what torch unpickles."""
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(added)
