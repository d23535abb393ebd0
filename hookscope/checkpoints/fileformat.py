"""Tell the kind of a file by its content, not its name, without running anything in it.

torch reads some damaged or hostile zip archives without noticing; they are refused here. It checks no CRC, unpacks
compressed members of any size, ignores the case of names, and takes the first of two members of one name, where Python
takes the last.
"""

import codecs
import errno
import json
import os
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

from hookscope import regular_files
from hookscope.errors import CheckpointError, InputError, nearest
from hookscope.parameters import arg
from hookscope.regular_files import NotRegularError
from hookscope.text import counted, printable

ArchiveKind = Literal["torch", "torchscript", "exported program"]
FileKind = (
    ArchiveKind
    | Literal["legacy torch", "safetensors", "safetensors index", "torch index", "torch tar", "pickle", "distributed"]
)

PROGRAMS = ("torchscript", "exported program")
"""Kinds of files that hold a whole network, as a program."""

WEIGHTS_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pt2", ".index.json")
"""Suffixes of weights files, in lower case, by which files are found; their content decides what they are."""

CONFIG = "config.json"
"""transformers' name for the file with a network's configuration, in the folder of its weights."""
_CONFIG_BYTES_LIMIT = 16 * 2**20  # names of many thousand classes, twice

# Weights files that `save_pretrained` of peft, transformers and diffusers writes; the first that exists is read.
_PRETRAINED = (
    *("adapter_model.safetensors", "adapter_model.bin"),
    *("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin"),
    *("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors"),
)

# How DeepSpeed names the files of an optimiser's state, one for each process, beside those of the weights.
STATES_OF_OPTIMISERS = re.compile(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")

METADATA = ".metadata"
"""The name of `torch.distributed.checkpoint`'s index of slices and files."""
_SLICES_SUFFIX = ".distcp"

_INDEX_BYTES_LIMIT = 16 * 2**20  # an index names a shard per tensor; 16 MiB hold 100,000 of them

_MOST_SHARDS = 10_000  # looking for this many takes two seconds. The largest networks have a few hundred

_SNIFFED_BYTES = 512  # a tar's first header

_ZIP_START = b"PK\x03\x04"
_MAGIC_NUMBER = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"  # torch's, pickled
_LEGACY_START = b"\x80\x02" + _MAGIC_NUMBER
LEGACY_PICKLES = 5  # magic number, protocol, system, object, storage keys
_TORCH_TAR_MEMBERS = {b"sys_info", b"pickle", b"tensors", b"storages"}

_BLANKS = b"\xef\xbb\xbf \t\r\n"  # and the mark some editors put before text

_UNPACK = "unpack it first"
_NO_WEIGHTS = "not weights; give a weights file"


def holds_inputs() -> str:
    """Return the remedy for a file of one tensor, in place of weights."""
    return f"If it holds inputs, name the network first, then this file (in `check`: {arg('images')})."


_UNREAD = "which hookscope cannot read; convert it to a PyTorch state dict"

_NUMPY = b"\x93NUMPY"

# Starts of files that are no weights of PyTorch.
_FOREIGN_STARTS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file it stands for; fetch it with `git lfs pull`",
    b"\x1f\x8b": f"gzip-compressed; {_UNPACK}",
    b"BZh": f"bzip2-compressed; {_UNPACK}",
    b"\xfd7zXZ": f"xz-compressed; {_UNPACK}",
    b"\x28\xb5\x2f\xfd": f"zstd-compressed; {_UNPACK}",
    b"7z\xbc\xaf": f"a 7z archive; {_UNPACK}",
    b"Rar!": f"a RAR archive; {_UNPACK}",
    b"PK\x05\x06": "an empty zip archive; download it again",
    b"\xff\xd8\xff": f"a JPEG image, {_NO_WEIGHTS}",
    b"\x89PNG": f"a PNG image, {_NO_WEIGHTS}",
    b"GIF8": f"a GIF image, {_NO_WEIGHTS}",
    b"BM": f"a BMP image, {_NO_WEIGHTS}",
    b"RIFF": f"a RIFF file such as a WebP image, {_NO_WEIGHTS}",
    b"II*\x00": f"a TIFF image, {_NO_WEIGHTS}",
    b"MM\x00*": f"a TIFF image, {_NO_WEIGHTS}",
    b"%PDF": f"a PDF document, {_NO_WEIGHTS}",
    b"\x89HDF": f"an HDF5 file (Keras .h5?), {_UNREAD}",
    _NUMPY: "a NumPy array, not a state dict; give a weights file",
    b"GGUF": f"a GGUF file, {_UNREAD}",
    b"MATLAB": f"a MATLAB file, {_UNREAD}",
    b"SQLite format 3": f"an SQLite database, {_NO_WEIGHTS}",
    b"\x7fELF": f"a program or shared library, {_NO_WEIGHTS}",
    b"<": "an HTML or XML page, probably saved in place of the download; download the file itself",
    b"[": f"JSON text, {_NO_WEIGHTS}",
}

# Patterns of such files that have no fixed start.
_FOREIGN_PATTERNS = {
    rb"\x08[\x01-\x1f][\x12\x1a\x22\x3a\x42]": f"an ONNX model, {_UNREAD}",  # the first fields of a ModelProto
    rb".{4}TFL3": f"a TensorFlow Lite model, {_UNREAD}",
    rb".{4}ftyp": f"an MP4, HEIF or AVIF file, {_NO_WEIGHTS}",
    rb".{257}ustar": f"a tar archive; {_UNPACK}",
    rb"\0{16}\0*\Z": "nothing but zero bytes at its start, like an unfinished download; download it again",
}

# The largest published state dicts pickle to about 10 MiB, the rest of the file is raw storages.
PICKLE_BYTES_LIMIT = 64 * 2**20

# The largest published checkpoints are sharded long before they have a tenth of this many tensors.
_MEMBERS_LIMIT = 1_000_000

_NEIGHBOURS_LIMIT = 10_000  # files that are compared with the name of a missing one

_CHECKSUM_THREADS = 2  # two sum faster than most disks read

Opened = Callable[[], AbstractContextManager[BinaryIO]]
"""Opens a file anew, each time at its start."""

_END = struct.Struct("<4s4H2LH")  # end of central directory, as PKWARE's APPNOTE 4.3.16 lays it out
_LOCATOR = struct.Struct("<4sLQL")  # zip64 end of central directory locator, 4.3.15
_END64 = struct.Struct("<4sQ2H2L4Q")  # zip64 end of central directory record, 4.3.14


def file_kind(path: Path) -> FileKind:
    """Return what kind of weights file `path` is: "distributed" for the folder of a distributed checkpoint.

    A "torch" file has passed the checks of its zip directory: nothing compressed, repeated, or larger than the file.
    Raises CheckpointError if it cannot be read, is damaged, or is anything else; the message has which.
    """
    name = printable(str(path))
    if is_distributed(path):
        return "distributed"
    if path.suffix == _SLICES_SUFFIX or (path.name == METADATA and is_distributed(path.parent)):
        raise CheckpointError(f"{name} is one file of a distributed checkpoint; give its folder.")
    with open_regular(path) as file:
        start = file.read(_SNIFFED_BYTES)
        file.seek(0)
        if not start:
            raise CheckpointError(f"{name} is empty; download or save it again.")
        if start.startswith(_ZIP_START):
            return archive_kind(file, name)
        return _kind_by_start(start, file, name)


@contextmanager
def open_regular(path: Path, wanted: str = "", failure: type[InputError] = CheckpointError) -> Iterator[BufferedReader]:
    """Open a regular file for reading; anything else could block for ever, and raises `failure`.

    Messages ask for `wanted` instead, by default for weights.
    """
    name = printable(str(path))
    try:
        with regular_files.open_regular(path) as file:
            yield file
    except NotRegularError as error:
        raise failure(f"{name} is {error.strerror}; give {wanted or 'a weights file'}.") from error
    except IsADirectoryError as error:
        raise failure(f"{name} is a folder; {f'give {wanted}' if wanted else _inside(path)}.") from error
    except OSError as error:
        raise failure(f"{name} {_failure(path, error)}.") from error


def bounded_text(path: Path, wanted: str, limit: int) -> str:
    """Return a file's UTF-8 text.

    Raises:
        InputError: If it cannot be read, is over `limit` bytes or is not UTF-8; the message asks for `wanted`.
    """
    with open_regular(path, wanted, InputError) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise InputError(f"{printable(str(path))} is over the limit of {limit} bytes for {wanted}.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{printable(str(path))} is not UTF-8; give {wanted}.") from error


def _failure(path: Path, error: OSError) -> str:
    if error.errno == errno.ENOENT and path.is_symlink():
        return f"is a dangling link: '{printable(str(path.readlink()))}' does not exist"
    if error.errno == errno.ENOENT:
        return f"does not exist; check the path.{nearest_file(path)}".removesuffix(".")
    if error.errno == errno.ELOOP:
        return "is a link that leads back to itself (Too many levels of symbolic links)"
    if error.errno == errno.EACCES:
        return "cannot be read: Permission denied; make it readable"
    return f"cannot be read: {error.strerror or type(error).__name__}"


def nearest_file(path: Path) -> str:
    """Return a sentence with the file in the same folder that has nearly the name of a missing one; "" for none."""
    names: list[str] = []
    with suppress(OSError, ValueError), os.scandir(path.parent) as entries:
        names = [printable(entry.name, 80) for entry in islice(entries, _NEIGHBOURS_LIMIT) if entry.name != path.name]
    return nearest(path.name, names, 1, cutoff=0.75)


def _inside(folder: Path) -> str:
    try:
        names = sorted(path.name for path in folder.iterdir() if not STATES_OF_OPTIMISERS.fullmatch(path.name))
    except OSError as error:
        return f"it {_failure(folder, error)}"
    if any(name.endswith(_SLICES_SUFFIX) for name in names):
        return f"its {_SLICES_SUFFIX} files belong to a distributed checkpoint, whose {METADATA} is missing; add it"
    for ending in (".index.json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt"):
        matching = [name for name in names if name.endswith(ending)]
        if matching:
            return f"give the weights file in it, such as '{printable(str(folder / matching[0]))}'"
    if "data.pkl" in names:
        return "it looks like an unpacked torch.save file; give the file as it was before"
    return "no weights lie directly in it; give a weights file"


def _kind_by_start(start: bytes, file: BinaryIO, name: str) -> FileKind:
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= 100_000_000:  # safetensors' own limit
        return "safetensors"
    if start[257:262] == b"ustar" and (start[:100].rstrip(b"\0") in _TORCH_TAR_MEMBERS or _is_legacy(start)):
        return "torch tar"  # torch tries this first, whatever else a file starts like
    if start[257:262] != b"ustar" and _is_legacy(start):
        return "legacy torch"
    if start.lstrip(_BLANKS).startswith(b"{"):
        shards = [str(shard) for shard in read_weight_map(file, name).values()]
        return "safetensors index" if all(path.endswith(".safetensors") for path in shards) else "torch index"
    if len(start) > 1 and _is_pickle(start) and not _LEGACY_START.startswith(start):
        return "pickle"
    raise CheckpointError(f"{name} {_foreign(start)}.")


def _is_legacy(start: bytes) -> bool:
    frame = 11 if start[2:3] == b"\x95" else 2  # from protocol 4 on, a frame's length comes first
    return start[0] == 0x80 and start[frame:].startswith(_MAGIC_NUMBER)


def _is_pickle(start: bytes) -> bool:
    if start[0] == 0x80:
        return start[1] in range(2, 6)
    return start[:1] in b"c(]}" and re.search(rb"c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n", start) is not None


def _foreign(start: bytes) -> str:
    if any(magic.startswith(start) for magic in (_ZIP_START, _LEGACY_START)):
        return f"is truncated after {counted(len(start), 'byte')}; download it again"
    for magic, kind in _FOREIGN_STARTS.items():
        if start.startswith(magic) or start.lstrip(_BLANKS).startswith(magic):
            return f"is {kind}. {holds_inputs()[:-1]}" if magic == _NUMPY else f"is {kind}"
    for pattern, kind in _FOREIGN_PATTERNS.items():
        if re.match(pattern, start, re.DOTALL):
            return f"is {kind}"
    if len(start) < 16:
        return f"is only {counted(len(start), 'byte')} long: truncated, or not a weights file; download it again"
    with suppress(UnicodeDecodeError):
        text = codecs.getincrementaldecoder("utf-8")().decode(start)  # the start may end inside a character
        if "".join(text.split()).isprintable():
            return f"is text, not weights: '{printable(text.strip().partition(chr(10))[0], 30)}'; give a weights file"
    return (
        f"is not a weights file hookscope knows: it starts with {start[:8]!r}; give one that torch.save or safetensors "
        f"has written"
    )


def looks_like_file(name: str | os.PathLike[str]) -> bool:
    """Return whether a name means a weights file: it has such a file's suffix, or something of that name exists."""
    return os.fspath(name).lower().endswith(WEIGHTS_SUFFIXES) or os.path.lexists(name)


def is_distributed(path: Path) -> bool:
    """Return whether a path is a folder that `torch.distributed.checkpoint` has written."""
    is_folder = os.path.isdir(path)  # noqa: PTH112 never raises, for a name too long either
    return is_folder and os.path.lexists(path / METADATA) and any(path.glob(f"*{_SLICES_SUFFIX}"))


def weights_file(path: Path) -> Path:
    """Return the weights file of a folder that a `save_pretrained` of Hugging Face wrote; any other path as it is."""
    if not os.path.isdir(path) or is_distributed(path):  # noqa: PTH112 never raises
        return path
    return next((path / name for name in _PRETRAINED if os.path.isfile(path / name)), path)  # noqa: PTH113 never raises


def config_in(folder: Path) -> dict[str, Any]:
    """Return a folder's `config.json`, as timm and transformers write it, unchecked; {} without one."""
    with suppress(CheckpointError):
        return json_object(folder / CONFIG) or {}
    return {}


def json_object(path: Path, limit: int = _CONFIG_BYTES_LIMIT) -> dict[str, Any] | None:
    """Return the JSON object in a file; None for anything else, and for more than `limit` bytes."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    with suppress(ValueError, RecursionError):
        document = json.loads(content) if len(content) <= limit else None
        return document if isinstance(document, dict) else None
    return None


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return a folder's `config.json` if it is transformers', unchecked; else None."""
    held = config_in(folder)
    return held if isinstance(held.get("model_type"), str) else None


def is_weights_folder(path: Path) -> bool:
    """Return whether a folder counts as one weights file: it is distributed, or has transformers' configuration."""
    return is_distributed(path) or (weights_file(path) != path and read_config(path) is not None)


def is_utf8(path: Path) -> bool:
    """Tell whether a path is valid UTF-8: libraries that memory-map files take no other."""
    return str(path).encode(errors="ignore") == os.fsencode(path)


def distributed_files(folder: Path) -> list[Path]:
    """Return the files of a distributed checkpoint: its index, then its slices."""
    return [folder / METADATA, *sorted(folder.glob(f"*{_SLICES_SUFFIX}"))]


def path_beside(index: Path, file: str, name: str) -> Path:
    """Return the path of a file that an index names; refuse a path outside of the index's folder.

    If both are links (Hugging Face's cache), the file may lie next to the index's target. Messages call the index
    `name`.
    """
    plain = file not in ("", ".", "..") and file.isprintable() and not {"/", "\\"} & set(file)
    if not plain:
        raise CheckpointError(f"{name} names '{printable(file, 80)}', which is not a file next to it; refused.")
    path = index.with_name(file)
    try:
        folder = path.resolve().parent
        folders = {index.parent.resolve(), index.resolve().parent}
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{name} names '{printable(file, 80)}', a link that leads nowhere; refused.") from error
    if folder not in folders:
        raise CheckpointError(f"{name} names '{printable(file, 80)}', a link out of its folder; refused.")
    return path


def read_weight_map(file: BinaryIO, name: str) -> dict[str, Any]:
    """Return which shard holds which tensor, unchecked; CheckpointError if it is no such index, or names one twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        document = dict(pairs)
        if len(document) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(
                f"{name} is JSON that lists '{printable(twice, 80)}' twice, for example in two files."
            )
        return document

    file.seek(0)
    content = file.read(_INDEX_BYTES_LIMIT + 1)
    try:
        document = json.loads(content, object_pairs_hook=once) if len(content) <= _INDEX_BYTES_LIMIT else None
    except (ValueError, RecursionError):
        document = None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if isinstance(weight_map, dict) and weight_map:
        return weight_map
    if isinstance(document, dict) and {"architectures", "model_type"} & document.keys():
        kind = "a Hugging Face configuration, not weights; give the weights file beside it"
    elif isinstance(weight_map, dict):
        kind = "an index of shards that names no tensors; download it again"
    else:
        kind = f"JSON text, {_NO_WEIGHTS}"
    raise CheckpointError(f"{name} is {kind}.")


def read_index(path: Path) -> dict[Path, list[str]]:
    """Return the tensors' names by the file that holds them, shards in the order of their names.

    Shards lie beside the index; where both are links (Hugging Face's cache), beside what the index links to. Raises
    CheckpointError if the index names anything else or too many, a shard is missing, or a tensor is in two of them.
    """
    name = printable(str(path))
    with open_regular(path) as file:
        weight_map = read_weight_map(file, name)
    by_shard: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{name} lists no file for '{printable(tensor, 80)}'; download it again.")
        by_shard.setdefault(shard, []).append(tensor)
    if len(by_shard) > _MOST_SHARDS:
        raise CheckpointError(f"{name} names {len(by_shard)} files, over the limit of {_MOST_SHARDS}; refused.")
    shards = {path_beside(path, shard, name): tensors for shard, tensors in sorted(by_shard.items())}
    missing = [shard for shard in shards if not shard.exists()]
    if missing:
        raise CheckpointError(
            f"{name} lacks {len(missing)} of its {len(shards)} files, such as '{printable(missing[0].name, 80)}'; "
            "download them next to it."
        )
    return shards


def archive_kind(file: BinaryIO, name: str) -> ArchiveKind:
    """Return the kind of a zip archive, from its directory alone.

    A "torch" archive has one data.pkl of bounded size, and its members are stored under plain, distinct names and fit
    into the file. Raises CheckpointError if it is damaged, encrypted, not torch's, or made to be misread.
    """
    archive = open_archive(file, name)
    members = archive.infolist()
    names = [member.filename for member in members]
    if any(member.flag_bits & 0x2041 for member in members):  # encrypted, strongly, or the directory itself
        raise CheckpointError(f"{name} is an encrypted zip archive; unpack it with its password first.")
    kind = _writer(names, name)
    for member in members:
        _check_name(member, name)
    repeated = [entry for entry, count in Counter(entry.lower() for entry in names).items() if count > 1]
    if repeated:
        raise CheckpointError(
            f"{name} was not written by torch.save: its member {printable(repeated[0], 80)} is there twice, "
            "so readers disagree about what it holds."
        )
    packed = [m for m in members if m.compress_type != zipfile.ZIP_STORED or m.compress_size != m.file_size]
    if packed and kind == "torch":
        raise CheckpointError(
            f"{name} was not written by torch.save: its member {printable(packed[0].filename, 80)} is compressed; "
            "unpack it and save it again with torch.save."
        )
    if kind == "torch":
        _check_sizes(members, file, name)
    return kind


def open_archive(file: BinaryIO, name: str) -> zipfile.ZipFile:
    """Return an archive whose directory is where both Python and torch look for it; CheckpointError if it is not."""
    try:
        archive = zipfile.ZipFile(file)
        where = archive.start_dir
        plain = _directory_offset(file) == where
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError) as error:
        raise CheckpointError(f"{name} is a damaged or truncated zip archive; download it again.") from error
    if not plain:
        raise CheckpointError(f"{name} was not written by torch.save: its zip directory is not at its stated offset.")
    if len(archive.infolist()) > _MEMBERS_LIMIT:
        raise CheckpointError(f"{name} has more than {_MEMBERS_LIMIT} members; refused.")
    return archive


def _directory_offset(file: BinaryIO) -> int | None:
    """Return the directory's offset by the end records; None if these do not end the file.

    Python corrects wrong offsets and torch does not, so that a file could show them different contents.
    """
    size = file.seek(0, 2)
    file.seek(size - _END.size)
    end = _END.unpack(file.read(_END.size))
    if end[0] != b"PK\x05\x06" or end[-1]:
        return None
    file.seek(max(0, size - _END.size - _LOCATOR.size))
    locator = _LOCATOR.unpack(file.read(_LOCATOR.size))
    if locator[0] != b"PK\x06\x07":
        return int(end[6])
    if locator[2] != size - _END.size - _LOCATOR.size - _END64.size:
        return None
    file.seek(locator[2])
    end64 = _END64.unpack(file.read(_END64.size))
    return int(end64[-1]) if end64[0] == b"PK\x06\x06" else None


def _writer(names: list[str], name: str) -> ArchiveKind:
    inside = {entry.partition("/")[2] for entry in names}
    if "constants.pkl" in inside:
        return "torchscript"
    if "archive_format" in inside or "serialized_exported_program.json" in {*inside, *names}:
        return "exported program"
    if any(entry.startswith(".data/extern_modules") for entry in inside):
        raise CheckpointError(f"{name} is a torch.package archive, which hookscope cannot read; save a state dict.")
    if "data.pkl" in inside:
        return "torch"
    if names and all(entry.endswith(".npy") for entry in names):
        kind = "a NumPy .npz archive of arrays"
    elif "config.json" in names and any(entry.endswith(".h5") for entry in names):
        kind = "a Keras archive"
    else:
        kind = f"a zip archive of {printable(names[0], 60)}{', …' if names[1:] else ''}" if names else "an empty zip"
    raise CheckpointError(f"{name} is {kind}, not one that torch.save wrote; give PyTorch weights or tensors.")


def _check_name(member: zipfile.ZipInfo, name: str) -> None:
    # zipfile cuts a name off at a null byte, torch does not
    plain = member.filename == member.orig_filename and member.filename.isprintable() and "\\" not in member.filename
    if not plain or ".." in PurePosixPath(member.filename).parts or member.filename.startswith("/"):
        shown = printable(member.orig_filename, 80)
        raise CheckpointError(f"{name} was not written by torch.save: a member is called '{shown}'; refused.")


def _check_sizes(members: list[zipfile.ZipInfo], file: BinaryIO, name: str) -> None:
    pickles = [member for member in members if member.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{name} was not written by torch.save: it holds {len(pickles)} files data.pkl.")
    if pickles[0].file_size > PICKLE_BYTES_LIMIT:
        limit = f"{PICKLE_BYTES_LIMIT // 2**20} MiB"
        raise CheckpointError(f"{name} has a data.pkl of more than {limit}, which no state dict needs; refused.")
    if sum(member.file_size for member in members) > file.seek(0, 2):
        raise CheckpointError(f"{name} claims to hold more bytes than the file has: damaged, or made to be misread.")


def check_checksums(opened: Opened, name: str) -> None:
    """Compare the content of every member of a zip archive with its checksum, if that is not 0.

    Raises CheckpointError if one differs. Each thread opens the file for itself: since Python 3.12 a `ZipFile` skips
    parts of headers by seeking from the position of the file, which another thread may just have moved.
    """
    with ThreadPoolExecutor(_CHECKSUM_THREADS) as pool:  # summing releases the interpreter lock
        list(pool.map(partial(_compare, opened, name), range(_CHECKSUM_THREADS)))


def _compare(opened: Opened, name: str, first: int) -> None:
    """Compare the members at `first`, `first + _CHECKSUM_THREADS`, … in the directory."""
    with opened() as file:
        archive = open_archive(file, name)
        member = None
        try:
            for member in [info for info in archive.infolist() if info.CRC][first::_CHECKSUM_THREADS]:
                with archive.open(member) as content:
                    while content.read(2**20):  # zipfile compares at the end
                        pass
        except MemoryError:
            raise
        except Exception as error:  # what the decompressors raise has no class in common
            if isinstance(error, OSError) and error.errno is not None:  # from the disk, not from bzip2
                raise
            where = printable(member.filename, 80) if member else ""
            raise CheckpointError(
                f"{name} is damaged or truncated: its member {where} is not intact; download it again."
            ) from error


def content_begins(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Return where a stored member's bytes begin: behind a header of 30 bytes, name and fields (APPNOTE 4.3.7)."""
    file.seek(member.header_offset + 26)
    lengths = file.read(4)
    return member.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def safetensors_header(path: Path, of_pairs: Callable[[Any], Any] | None = None) -> tuple[dict[str, Any], int]:
    """Return the header of an intact safetensors file, each object made by `of_pairs`, and where the bytes begin.

    Source: the format's description, https://github.com/huggingface/safetensors#format.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length), object_pairs_hook=of_pairs)
    return header, 8 + length


def safetensors_metadata(path: Path) -> dict[str, Any]:
    """Return the texts in the header of a safetensors file; {} without any."""
    try:
        metadata = safetensors_header(path)[0].get("__metadata__")
    except (ValueError, RecursionError):  # the file has changed
        return {}
    return metadata if isinstance(metadata, dict) else {}
