"""Read files after a separate process has gone through them, so that a crash or a hang stays in that process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hookscope.checkpoints.fileformat import FileKind, stored_files, version_of
from hookscope.checkpoints.limits import reading_limits
from hookscope.checkpoints.reading import (
    ReadingRules,
    ScanResult,
    Visitor,
    claims_too_much,
    read_content,
    tensors_within,
    verify_file,
)
from hookscope.checkpoints.sandbox import CAN_FORK, WorkerFailure, run_forked
from hookscope.errors import CheckpointError
from hookscope.text import printable

_ENDINGS = {
    "SIGBUS": "the file was cut short while it was read, or its disk failed",
    "SIGKILL": "the system ended it, as it does when memory runs out",
    "SIGXCPU": "it takes far longer than a file of its size should",
}


@dataclass(frozen=True, slots=True)
class ReadFile:
    """What a file holds, and the names in it that torch's safe reader refuses and that were read past."""

    content: object
    unknown: tuple[str, ...] = ()
    is_refused_by_torch: bool = False


def inspect_isolated(kinds: Mapping[Path, FileKind], name: str, look: Visitor, rules: ReadingRules) -> list[ScanResult]:
    """Go through files in a separate process, where `look` gets the content of each.

    Args:
        kinds: What each file is.
        name: What to call all of them in messages.
        look: As for `verify_file`; what it returns for each file comes back, tuples as lists.
        rules: As for `verify_file`.

    Raises:
        HookscopeError: As `verify_file` and `look` do; a CheckpointError if one crashes its reader or changes
            meanwhile.
    """
    before = _versions(kinds)
    answers: list[Any] = _run_isolated(
        lambda: [verify_file(path, kind, look, rules) for path, kind in kinds.items()], kinds, name
    )
    _check_unchanged(kinds, before, name)
    return [ScanResult(how, tuple(names), seen) for how, names, seen in answers]


def read_verified(
    kinds: Mapping[Path, FileKind],
    name: str,
    check: Callable[[object, str], object],
    rules: ReadingRules,
    read_trusted: Callable[[Path, FileKind], object] | None = None,
) -> dict[Path, ReadFile]:
    """Return what files hold, read after all have been gone through by `inspect_isolated`.

    `check` gets each file's content, and its name for messages, and raises unless the content is what is wanted. A file
    whose reading runs code is read by `read_trusted`, which has to be there if the rules trust. A tensor anywhere in
    the content that claims more than its storage is a CheckpointError: going through its values could take for ever.
    """

    def look(path: Path, _: FileKind, content: object) -> None:
        shown = printable(str(path))
        check(content, shown)
        if any(map(claims_too_much, tensors_within(content))):
            raise CheckpointError(
                f"{shown} holds a tensor that claims more elements than its storage has; save it again after "
                ".contiguous()."
            )

    before = _versions(kinds)
    try:
        contents: dict[Path, ReadFile] = {}
        for (path, kind), (how, names, _) in zip(
            kinds.items(), inspect_isolated(kinds, name, look, rules), strict=True
        ):
            if how == "runs code" and read_trusted is not None:
                contents[path] = ReadFile(read_trusted(path, kind))
            else:
                contents[path] = ReadFile(read_content(path, kind, how), names, how == "past unknown")
    except MemoryError as error:
        raise CheckpointError(f"{name} needs more memory than there is.") from error
    _check_unchanged(kinds, before, name)
    return contents


def _run_isolated(work: Callable[[], Any], kinds: Mapping[Path, FileKind], name: str) -> Any:
    """Work in a separate process, within what files of such sizes should take; `work` returns what JSON can hold."""

    def work_alone() -> Any:
        torch.set_num_threads(1)  # the threads of the process that was forked do not exist here
        return work()

    length = sum(size for _, size, _ in _versions(kinds))
    limits = reading_limits(length)
    try:
        result = run_forked(work_alone if CAN_FORK else work, limits)
    except MemoryError as error:  # where it ran in this process
        raise CheckpointError(f"{name} needs more memory than there is.") from error
    match result:
        case WorkerFailure(cause="raised"):
            raise RuntimeError(result.traceback)
        case WorkerFailure(cause="memory"):
            limit = f"{(limits.memory_bytes or 0) // 2**20} MiB"
            raise CheckpointError(
                f"{name} takes more than {limit} to read, far more than a file of its size should; refused."
            )
        case WorkerFailure():
            ending = result.ending or "SIGXCPU"
            why = _ENDINGS.get(ending, "the file is damaged, or made to crash its reader")
            raise CheckpointError(f"{name} cannot be read: the reading process ended by {ending}; {why}.")
    return result


def _versions(kinds: Mapping[Path, FileKind]) -> list[tuple[int, int, int]]:
    return [version_of(file) for path in kinds for file in stored_files(path)]


def _check_unchanged(kinds: Mapping[Path, FileKind], before: list[tuple[int, int, int]], name: str) -> None:
    if before != _versions(kinds):
        raise CheckpointError(f"{name} was changed while it was read; read it again when it is complete.")
