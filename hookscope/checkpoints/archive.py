"""Look at the directory of a zip archive that torch wrote, and refuse what torch would read without noticing.

torch checks no CRC, unpacks compressed members of any size, ignores the case of names, and takes the first of two
members of one name, where Python takes the last.
"""

import struct
import zipfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath
from typing import BinaryIO, Literal

from hookscope.errors import CheckpointError
from hookscope.text import printable

# Our choice: the largest published state dicts pickle to about 10 MiB, the rest of the file is raw storages.
PICKLE_BYTES_LIMIT = 64 * 2**20

# Our choice: the largest published checkpoints are sharded long before they have a tenth of this many tensors.
_MEMBERS_LIMIT = 1_000_000

_THREADS = 2  # our choice: two sum faster than most disks read

_END = struct.Struct("<4s4H2LH")  # end of central directory, as PKWARE's APPNOTE 4.3.16 lays it out
_LOCATOR = struct.Struct("<4sLQL")  # zip64 end of central directory locator, 4.3.15
_END64 = struct.Struct("<4sQ2H2L4Q")  # zip64 end of central directory record, 4.3.14

ArchiveKind = Literal["torch", "torchscript", "exported program"]


def archive_kind(file: BinaryIO, name: str) -> ArchiveKind:
    """Return what wrote a zip archive, from its directory alone.

    What is "torch" holds one data.pkl of bounded size, and stored members with plain, distinct names that the file has
    room for. Raises CheckpointError if it is damaged, encrypted, not torch's, or made to be misread.
    """
    archive = open_archive(file, name)
    members = archive.infolist()
    names = [member.filename for member in members]
    if any(member.flag_bits & 0x2041 for member in members):  # encrypted, strongly, or the directory itself
        raise CheckpointError(f"{name} is an encrypted zip archive; unpack it with its password first.")
    kind = _writer(names, name)
    for member in members:
        _check_name(member, name)
    repeated = [each for each, count in Counter(each.lower() for each in names).items() if count > 1]
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
        raise CheckpointError(f"{name} was not written by torch.save: its zip directory is not where it says.")
    if len(archive.infolist()) > _MEMBERS_LIMIT:
        raise CheckpointError(f"{name} has more than {_MEMBERS_LIMIT} members; refused.")
    return archive


def _directory_offset(file: BinaryIO) -> int | None:
    """Return where the end records say the directory starts; None if they are not the last thing in the file.

    Python corrects offsets that are off, torch takes them as they are, so that a file could show each another content.
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
    """Return what writes archives with such members."""
    inside = {each.partition("/")[2] for each in names}
    if "constants.pkl" in inside:
        return "torchscript"
    if "archive_format" in inside or "serialized_exported_program.json" in {*inside, *names}:
        return "exported program"
    if any(each.startswith(".data/extern_modules") for each in inside):
        raise CheckpointError(f"{name} is a torch.package archive, which hookscope cannot read; save a state dict.")
    if "data.pkl" in inside:
        return "torch"
    if names and all(each.endswith(".npy") for each in names):
        what = "a NumPy .npz archive of arrays"
    elif "config.json" in names and any(each.endswith(".h5") for each in names):
        what = "a Keras archive"
    else:
        what = f"a zip archive of {printable(names[0], 60)}{', …' if names[1:] else ''}" if names else "an empty zip"
    raise CheckpointError(f"{name} is {what}, not one that torch.save wrote; give a file of PyTorch weights.")


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
        raise CheckpointError(f"{name} claims to hold more bytes than the file has; it is damaged, or made to be.")


def check_checksums(file: BinaryIO, name: str) -> None:
    """Compare the content of every member with its checksum, if that is not 0; CheckpointError if one differs."""
    archive = open_archive(file, name)
    members = [member for member in archive.infolist() if member.CRC]
    with ThreadPoolExecutor(_THREADS) as pool:  # summing lets go of the interpreter
        list(pool.map(partial(_compare, archive, name), [members[first::_THREADS] for first in range(_THREADS)]))


def _compare(archive: zipfile.ZipFile, name: str, members: Iterable[zipfile.ZipInfo]) -> None:
    member = None
    try:
        for member in members:
            with archive.open(member) as content:
                while content.read(2**20):  # zipfile compares at the end
                    pass
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError, ValueError) as error:
        where = printable(member.filename, 80) if member else ""
        raise CheckpointError(
            f"{name} is damaged or truncated: its member {where} is not intact; download it again."
        ) from error
