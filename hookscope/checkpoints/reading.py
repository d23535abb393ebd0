"""Read files of tensors with readers that import and call nothing they name, after a separate process checked them."""

import os
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from hookscope.checkpoints.distributed import ChunkedTensor, Slice, Stored, nested, read_metadata
from hookscope.checkpoints.fileformat import (
    LEGACY_PICKLES,
    PICKLE_BYTES_LIMIT,
    FileKind,
    Opened,
    archive_kind,
    check_checksums,
    is_utf8,
    open_archive,
    open_regular,
)
from hookscope.checkpoints.global_names import is_data, is_forbidden, refused_names
from hookscope.checkpoints.isolation import run_isolated
from hookscope.checkpoints.nested import tensors_in
from hookscope.checkpoints.pickle_scan import PickleSurvey, survey_pickle
from hookscope.checkpoints.sandbox.worker import CAN_FORK
from hookscope.checkpoints.unknown_classes import read_bytes_past_unknown, read_past_unknown
from hookscope.checkpoints.weight_sets import listed
from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.errors import CheckpointError, UntrustedFileError, is_out_of_memory
from hookscope.text import printable

_UNTYPED = torch.storage._new_dtypes()  # noqa: SLF001 - whose values torch.save stores as mere bytes

_PACKED = {torch.quint4x2: 2, torch.quint2x4: 4}  # elements in a byte

Visitor = Callable[[Path, FileKind, object], object]
"""Takes a file, its kind and its content; returns what the caller wants of it, or raises one of hookscope's errors."""

ReadMode = Literal["torch", "past unknown", "runs code"]
"""How a file is read: as torch does safely, past what torch's safe reader refuses, or by running what it names."""

# Kinds of files that run code whatever they hold, in words.
_RUNNING_KINDS: dict[FileKind, str] = {
    "torchscript": "a TorchScript archive, which is a program",
    "exported program": "an exported program (.pt2), whose pickles and expressions are evaluated",
    "torch tar": "a tar archive, torch's oldest format, made of pickles",
}

_LISTED_NAMES = 5  # names that a refusal lists

RESAVE_REMEDY = "save `model.state_dict()` where it was made"
"""Advice for messages about a file that runs code, where it must not run."""

TrustedReader = Callable[[Path, FileKind], object]
"""Reads a file that its user trusts, and runs what it names."""


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """What may be read.

    `remedy` says at the end of a message what to do about a file that runs code. `read_trusted` reads such a file; None
    to refuse it. `allowed_globals` are globs of the classes and functions that a pickle may name beside plain data;
    with None, only names that can run code are refused. Nothing is imported. `option` allows a further name:
    "--allow-global".
    """

    remedy: str
    read_trusted: TrustedReader | None = None
    allowed_globals: tuple[str, ...] | None = None
    option: str = ""


class ScanResult(NamedTuple):
    """How a file may be read, the names that torch's safe reader refuses, and the content or a visitor's result."""

    how: ReadMode
    names: tuple[str, ...] = ()
    content: Any = None


def inspect_isolated(files: WeightsFiles, look: Visitor, rules: ReadingRules) -> list[ScanResult]:
    """Check files in a separate process, where `look` gets the content of each.

    The content of each result is what `look` returned, tuples as lists; `look` does not get a trusted file that runs
    code. Raises UntrustedFileError for a file that would run code without trust, or that the rules do not allow;
    CheckpointError if a file is damaged, made to be misread, crashes its reader or changes meanwhile; what `look`
    raises.
    """

    def verify_all() -> list[ScanResult]:
        if CAN_FORK:
            torch.set_num_threads(1)  # a forked process has none of its parent's threads
        return [_verify_file(path, kind, look, rules) for path, kind in files.kinds.items()]

    answers = run_isolated(verify_all, files)
    return [ScanResult(how, tuple(names), content) for how, names, content in answers]


def read_verified(
    files: WeightsFiles, check: Callable[[object, str], object], rules: ReadingRules
) -> dict[Path, ScanResult]:
    """Return the contents of files, read after `inspect_isolated` has checked all of them.

    `check` gets each file's content, and its name for messages, and raises if the caller cannot use it. A tensor
    anywhere in the content that claims more than its storage is a CheckpointError: going through its values could take
    for ever.
    """

    def look(path: Path, _: FileKind, content: object) -> None:
        shown = printable(str(path))
        check(content, shown)
        if any(map(claims_too_much, tensors_within(content))):
            raise CheckpointError(
                f"{shown} holds a tensor that claims more elements than its storage has; save it again after "
                ".contiguous()."
            )

    contents: dict[Path, ScanResult] = {}
    scans = inspect_isolated(files, look, rules)
    with files.unchanged():
        for (path, kind), scan in zip(files.kinds.items(), scans, strict=True):
            run = rules.read_trusted if scan.how == "runs code" else None
            contents[path] = scan._replace(content=run(path, kind) if run else read_content(path, kind, scan.how))
    return contents


def _verify_file(path: Path, kind: FileKind, look: Visitor, rules: ReadingRules) -> ScanResult:
    name, opened = printable(str(path)), partial(open_regular, path)
    if kind == "distributed":
        return _verify_distributed(path, look, rules)
    if kind in _RUNNING_KINDS:
        if kind != "torch tar":  # trust does not make a damaged file readable
            check_checksums(opened, name)
        if rules.read_trusted is None:
            raise _refusal(name, f"is {_RUNNING_KINDS[kind]}", _imports(path, kind), rules.remedy)
        return ScanResult("runs code")
    survey = PickleSurvey((), {}) if kind == "safetensors" else _checked_survey(opened, kind, name, rules)
    how: ReadMode = "torch"
    if survey.imports or kind == "pickle" or not survey.is_known_to_torch:
        how = "runs code" if _is_to_run(survey, rules) else "past unknown"
    seen = None if how == "runs code" else look(path, kind, read_content(path, kind, how))
    return ScanResult(how, survey.imports, seen)


def _verify_distributed(path: Path, look: Visitor, rules: ReadingRules) -> ScanResult:
    """Check every slice of a distributed checkpoint; none runs code, even if it is trusted."""
    rules = replace(rules, read_trusted=None)
    names: dict[str, None] = {}
    how: ReadMode = "torch"
    for stored in read_metadata(path):
        for place in stored.slices():
            opened, shown = partial(BytesIO, place.read()), _slice_name(path, stored)
            if archive_kind(opened(), shown) != "torch":
                raise CheckpointError(f"{shown} is not what torch.save writes; download it again.")
            survey = _checked_survey(opened, "torch", shown, rules)
            if survey.imports and isinstance(stored.value, ChunkedTensor):
                raise _refusal(shown, "holds more than a tensor", survey.imports, rules.remedy)
            names |= dict.fromkeys(survey.imports)
            if survey.imports or not survey.is_known_to_torch:
                how = "past unknown"
    return ScanResult(how, tuple(names), look(path, "distributed", read_content(path, "distributed", how)))


def _slice_name(path: Path, stored: Stored) -> str:
    return f"{printable(str(path))}: the slice of '{printable(stored.name, 80)}'"


def _is_to_run(survey: PickleSurvey, rules: ReadingRules) -> bool:
    return rules.read_trusted is not None and not all(map(is_data, survey.imports))


def _checked_survey(opened: Opened, kind: FileKind, name: str, rules: ReadingRules) -> PickleSurvey:
    if kind == "torch":
        check_checksums(opened, name)
    with opened() as file:
        survey, sizes = _SURVEYS[kind](file, name)
        length = file.seek(0, 2)
    if survey.truncated:  # checked first: the last import may be half a name
        raise CheckpointError(f"{name} is truncated; download it again.")
    if _is_to_run(survey, rules):
        return survey
    if refused := refused_names(survey.imports, rules.allowed_globals):
        remedy = rules.remedy
        if rules.option and not any(map(is_forbidden, refused)):
            remedy += f", or skip these names, running nothing, with {rules.option} {printable(refused[0])}"
        raise _refusal(name, "holds pickled objects", refused, remedy)
    if survey.malformed:
        damaged = "is damaged, or made to be misread; download it again"
        wraps = f"holds tensors of {printable(survey.wrapper, 80)}, unreadable without that class; save plain tensors"
        raise CheckpointError(f"{name} {wraps if survey.wrapper else damaged}.")
    for key, claimed in survey.storages.items():
        if kind == "torch" and sizes.get(key) != claimed:
            there = f"has {sizes[key]} bytes" if key in sizes else "is missing"
            raise CheckpointError(
                f"{name} is damaged: its storage {printable(key, 40)} should have {claimed} bytes but {there}; "
                "download it again."
            )
    if sum(survey.storages.values()) > length:
        raise CheckpointError(f"{name} claims more bytes for its tensors than the file has; download it again.")
    return survey


def _refusal(name: str, reason: str, imports: Sequence[str], remedy: str) -> UntrustedFileError:
    named = listed([printable(symbol, 80) for symbol in imports[: _LISTED_NAMES + 1]], _LISTED_NAMES)
    would = f"would import {named}, which " if imports else ""
    return UntrustedFileError(f"{name} {reason}: reading it {would}can run code; {remedy}.")


def _survey_archive(file: BinaryIO, name: str) -> tuple[PickleSurvey, dict[str, int]]:
    members = open_archive(file, name).infolist()
    pickle = next(member.filename for member in members if member.filename.endswith("/data.pkl"))
    folder = pickle.removesuffix("data.pkl") + "data/"
    survey = survey_pickle(BytesIO(open_archive(file, name).read(pickle)))
    return survey, {m.filename.removeprefix(folder): m.file_size for m in members if m.filename.startswith(folder)}


def _survey_legacy(file: BinaryIO, _: str) -> tuple[PickleSurvey, dict[str, int]]:
    surveys = [survey_pickle(file)]
    while len(surveys) < LEGACY_PICKLES and not (surveys[-1].truncated or surveys[-1].malformed):
        surveys.append(survey_pickle(file))
    storages = {key: size for survey in surveys for key, size in survey.storages.items()}
    filled = surveys[-1].content  # torch fills only these storages; the others keep old contents of memory
    is_named = isinstance(filled, list) and all(isinstance(key, str) for key in filled)
    is_filled = isinstance(filled, list) and is_named and set(filled) >= set(storages)
    imports = tuple(dict.fromkeys(symbol for survey in surveys for symbol in survey.imports))
    is_known, wrapper = all(survey.is_known_to_torch for survey in surveys), max(survey.wrapper for survey in surveys)
    malformed = not is_filled or any(survey.malformed for survey in surveys)
    return PickleSurvey(imports, storages, is_known, surveys[-1].truncated, malformed, wrapper=wrapper), {}


_SURVEYS: dict[FileKind, Callable[[BinaryIO, str], tuple[PickleSurvey, dict[str, int]]]] = {
    "torch": _survey_archive,
    "legacy torch": _survey_legacy,
    "pickle": lambda file, _: (survey_pickle(file), {}),
}


def _imports(path: Path, kind: FileKind) -> tuple[str, ...]:
    if kind == "torchscript":  # its classes are in the file itself
        return ()
    with open_regular(path) as file, suppress(Exception):
        surveys = [survey_pickle(pickle) for pickle in _pickles(file, kind)]
        return tuple(dict.fromkeys(symbol for survey in surveys for symbol in survey.imports))
    return ()


def _pickles(file: BinaryIO, kind: FileKind) -> Iterator[BinaryIO]:
    if kind == "torch tar":
        with tarfile.open(fileobj=file, mode="r:") as archive:
            extracted = archive.extractfile("pickle")
            if extracted:
                yield BytesIO(extracted.read(PICKLE_BYTES_LIMIT))
    else:
        with zipfile.ZipFile(file) as members:
            for member in members.infolist():
                with members.open(member) as content:
                    start = content.read(4)
                    if start[:1] == b"\x80":
                        yield BytesIO(start + content.read(PICKLE_BYTES_LIMIT))
                    elif start == b"PK\x03\x04":  # .pt2 holds its example inputs as torch.save writes them
                        yield from _pickles(BytesIO(start + content.read(PICKLE_BYTES_LIMIT)), kind)


def read_content(path: Path, kind: FileKind, how: ReadMode) -> object:
    """Return what a file holds; mapped into memory where that can be.

    `inspect_isolated` must have passed the file, because it finds faults that these readers miss; it returns `how`.

    Raises:
        CheckpointError: If the file is damaged, or too large for the memory.
        UntrustedFileError: If it holds more than plain data after all.
    """
    name = printable(str(path))
    try:
        if kind == "distributed":
            return nested([(stored, _value_of(path, stored, how)) for stored in read_metadata(path)], name)
        if how == "past unknown":
            return read_past_unknown(path, kind)
        return _read_safetensors(path) if kind == "safetensors" else _bare(_read_torch(path, kind))
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


def _value_of(path: Path, stored: Stored, how: ReadMode) -> object:
    name, value = _slice_name(path, stored), stored.value
    read: Callable[[bytes, str], Any] = read_bytes_past_unknown if how == "past unknown" else _read_bytes
    if isinstance(value, Slice):
        return read(value.read(), name)
    whole: Tensor | None = None
    for chunk in value.chunks:
        if chunk.place is None:
            continue
        part = read(chunk.place.read(), name)
        is_as_described = isinstance(part, Tensor) and part.layout is torch.strided and not part.is_meta
        if not is_as_described or tuple(part.shape) != chunk.sizes or str(part.dtype) != f"torch.{value.dtype}":
            raise CheckpointError(f"{name} does not match its .metadata; download it again.")
        if chunk.sizes == value.shape:
            return part
        if whole is None:
            whole = torch.empty(value.shape, dtype=part.dtype)
        region = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[region].copy_(Tensor.detach(part))
    return torch.empty(value.shape, dtype=getattr(torch, value.dtype)) if whole is None else whole


def _read_bytes(content: bytes, name: str) -> Any:
    """Return the content of a "torch" file from its bytes; torch's safe reader must know all names in them."""
    if _is_swapped(BytesIO(content)):
        raise CheckpointError(f"{name} was written on a machine of the other byte order; save it again on this one.")
    with _torch_allow_list_only():
        return _bare(torch.load(BytesIO(content), map_location="cpu", weights_only=True))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    if not is_utf8(path):
        with open_regular(path) as file:
            return safetensors.torch.load(file.read())
    with safetensors.safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def _read_torch(path: Path, kind: FileKind) -> object:
    with _torch_allow_list_only():
        by_path = is_utf8(path) and not os.fspath(path).endswith(".safetensors")  # torch goes by the suffix
        if kind == "torch" and by_path:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            with open_regular(path) as file:
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=False)
    if kind == "torch":
        with open_regular(path) as file:
            if _is_swapped(file):
                _swap_untyped_values(content)
    return content


def _bare(content: Any) -> Any:
    """Remove the attributes that a file gave its tensors, because they may hide methods; return the content."""
    for tensor in tensors_in(content):
        if isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter):  # others keep parts there
            vars(tensor).clear()
    return content


def _swap_untyped_values(content: object) -> None:
    """Swap the bytes of tensors in a file of the other byte order, if their storages were saved without a dtype."""
    tensors = [tensor for tensor in tensors_within(content) if tensor.dtype in _UNTYPED and tensor.numel()]
    for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values():
        width = tensor.element_size() // (2 if tensor.is_complex() else 1)
        swap = tensor.untyped_storage()._byteswap  # noqa: SLF001 - byteswap() fails for dtypes that torch.finfo lacks
        swap(width)  # type: ignore[no-untyped-call]


def tensors_within(content: object) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples, no container twice, in the file's order.

    They are detached, because a file can put anything in the place of a tensor's methods.
    """
    return (Tensor.detach(tensor) for tensor in tensors_in(content) if isinstance(tensor, Tensor))


def claims_too_much(tensor: Tensor) -> bool:
    """Return whether a dense tensor has more elements than its storage, because it repeats some (stride 0)."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    packed = _PACKED.get(tensor.dtype, 1)
    return tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes() * packed


def _is_swapped(file: BinaryIO) -> bool:
    archive: Any = torch._C.PyTorchFileReader(file)  # noqa: SLF001 - what torch.load reads with
    order = archive.get_record("byteorder") if archive.has_record("byteorder") else b"little"
    return bool(order != sys.byteorder.encode())


@contextmanager
def _torch_allow_list_only() -> Iterator[None]:
    """Suspend the classes that other packages (torchvision among them) have allowed torch to unpickle."""
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about torch's own internals, or which pickle instructions it lacks
            yield
    finally:
        torch.serialization.add_safe_globals(added)
