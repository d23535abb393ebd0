"""Write a report whole or not at all, where the user says."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hookscope.errors import OutputError
from hookscope.text import safe_text


def check_writable(path: Path, option: str) -> None:
    """Refuse a place that a file could not be written to, without changing anything: before the long work.

    Args:
        path: Where the file goes; folders that are missing would be made.
        option: What named it, for the message.

    Raises:
        OutputError: If it is a folder, lies where nothing can be written, or cannot be a name.
    """
    with _reported(path, option):
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise _refusal(path, "it is a folder", option)
        standing = target if os.path.lexists(target) else next(each for each in target.parents if each.exists())
        if standing != target and not standing.is_dir():
            raise _refusal(path, f"'{safe_text(str(standing))}' is not a folder", option)
        if not os.access(standing, os.W_OK):
            raise _refusal(path, f"no permission to write '{safe_text(str(standing))}'", option)


def write_whole(path: Path, text: str, option: str) -> None:
    """Write `text` as UTF-8: a reader sees all of it, or what was there before. Links are followed.

    Args:
        path: Where; folders that are missing are made.
        text: What.
        option: What named the path, for the message.

    Raises:
        OutputError: If it cannot be written.
    """
    with _reported(path, option):
        target = Path(os.path.realpath(path))
        content = text.encode()
        if target.exists() and not target.is_file():  # a pipe or a terminal takes what it gets
            target.write_bytes(content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name[:80]}.partial-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            partial.write_bytes(content)
            partial.replace(target)
        finally:
            with suppress(FileNotFoundError):
                partial.unlink()


def append(path: Path, text: str, option: str) -> None:
    """Add `text` as UTF-8 to a file that others write too.

    Raises:
        OutputError: If it cannot be written.
    """
    with _reported(path, option), path.open("a", encoding="utf-8") as file:
        file.write(text)


@contextmanager
def _reported(path: Path, option: str) -> Iterator[None]:
    """Turn an operating system error into one line about the file."""
    try:
        yield
    except OSError as error:
        raise _refusal(path, (error.strerror or str(error)).lower(), option) from error
    except ValueError as error:
        raise _refusal(path, "no file can have such a name", option) from error


def _refusal(path: Path, reason: str, option: str) -> OutputError:
    return OutputError(f"Cannot write '{safe_text(str(path))}': {reason}. Name another file with {option}.")
