"""What commands print with: consoles, a progress bar, and errors as one line."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, TextIO, cast

import typer

from hookscope.errors import HookscopeError, UsageError
from hookscope.text import safe_text

if TYPE_CHECKING:
    from rich.console import Console


def report(error: HookscopeError) -> int:
    """Print an error to stderr, as one line, and return its exit code.

    A usage error may have further lines: an expression, and a caret below the place that is wrong.
    """
    lines = str(error).split("\n") if isinstance(error, UsageError) else [str(error)]
    with suppress(OSError):  # where stderr cannot be written, only the exit code is left
        typer.echo("hookscope: error: " + "\n".join(map(safe_text, lines)), err=True)
    return error.exit_code


def consoles(*, json: bool) -> "tuple[Console, Console]":
    """Return the console for tables, on stderr where JSON takes stdout, and that for messages, which is on stderr."""
    from rich.console import Console

    # Names may hold what Rich would take for markup or an emoji.
    def plain(stream: TextIO, *, stderr: bool) -> Console:
        file = None if stream.isatty() else cast("IO[str]", _WithoutTrailingBlanks(stream))
        return Console(file=file, stderr=stderr, highlight=False, markup=False, emoji=False)

    messages = plain(sys.stderr, stderr=True)
    return (messages if json else plain(sys.stdout, stderr=False)), messages


class _WithoutTrailingBlanks:
    """A pipe or file that gets lines without the blanks that Rich fills them with."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.stream.fileno()


@contextmanager
def progress_bar(console: "Console", *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show how many inputs are finished, on a terminal only; yield a function of that number and the total."""
    if not shown or not console.is_terminal:
        yield lambda _finished, _total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("running"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("running", total=None)
        yield lambda finished, total: progress.update(task, completed=finished, total=total)
