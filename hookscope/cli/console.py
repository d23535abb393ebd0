"""What commands print with: consoles, a progress bar, and errors as one line."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import get_terminal_size
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

import typer

from hookscope.errors import HookscopeError, UsageError
from hookscope.text import safe_text

if TYPE_CHECKING:
    from rich.console import Console


def report(error: HookscopeError) -> int:
    """Print an error to stderr, as one line, and return its exit code.

    A usage error may have further lines: an expression, and a caret below the place that is wrong.
    """
    print_error(*str(error).split("\n")) if isinstance(error, UsageError) else print_error(str(error))
    return error.exit_code


def print_error(*lines: str) -> None:
    """Print the lines of an error to stderr; if that cannot be written, only the exit code is left."""
    with suppress(OSError):
        typer.echo("hookscope: error: " + "\n".join(map(safe_text, lines)), err=True)


def height_of(console: "Console") -> int | None:
    """Return how many lines the screen of a terminal has; None for a pipe or a file."""
    return console.height if console.is_terminal else None


def print_path(console: "Console", name: str, path: Path, more: str = "") -> None:
    """Print the path of a file that was written: a link in terminals that have links."""
    from rich.style import Style
    from rich.text import Text

    link = Style(link=path.absolute().as_uri())
    console.print(Text.assemble(f"{name}: ", (safe_text(str(path)), link), more), soft_wrap=True)


def consoles(*, json: bool) -> "tuple[Console, Console]":
    """Return a console for tables, on stderr if JSON takes stdout, and a console for messages, on stderr."""
    from rich.console import Console

    # Names may hold what Rich would take for markup or an emoji.
    def plain(stream: TextIO, *, stderr: bool) -> Console:
        file = None if stream.isatty() else cast("IO[str]", _WithoutTrailingBlanks(stream))
        # Rich takes COLUMNS=0 for a width; other programs take it for none.
        width = get_terminal_size().columns if os.environ.get("COLUMNS", "").strip() == "0" else None
        return Console(file=file, stderr=stderr, highlight=False, markup=False, emoji=False, width=width)

    messages = plain(sys.stderr, stderr=True)
    return (messages if json else plain(sys.stdout, stderr=False)), messages


class _WithoutTrailingBlanks:
    """A pipe or file that Rich writes to, without trailing blanks."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


# Seconds between lines about the progress where there is no terminal.
_BETWEEN_LINES = 10.0

_WHOLE_RUN = 1e9  # seconds


@contextmanager
def progress_bar(console: "Console", *, shown: bool, of: str = "inputs") -> Iterator[Callable[[int, int], None]]:
    """Show that something is loading, then how many of all inputs are finished; yield a function of both numbers.

    On a terminal it is a bar. Elsewhere a line is printed now and then, if a run takes longer.
    """
    if not shown:
        yield lambda _finished, _total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    is_bar = console.is_terminal
    loading = TextColumn("{task.description}"), BarColumn()
    running = MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()
    settings: Any = {"transient": True, "disable": not is_bar, "speed_estimate_period": _WHOLE_RUN}
    with Progress(*loading, console=console, **settings) as progress:
        task = progress.add_task("loading", total=None, rate="")
        printed = time.monotonic()

        def advance(finished: int, total: int) -> None:
            nonlocal printed
            progress.columns = (*loading, *running)
            progress.update(task, description="running", completed=finished, total=total)
            speed = progress.tasks[task].speed  # since the first update: what was finished before does not count
            rate = f"{speed:.3g} per second" if speed else ""
            progress.update(task, rate=rate)
            if not is_bar and finished < total and time.monotonic() - printed >= _BETWEEN_LINES:
                printed = time.monotonic()
                left = f", {rate}, {(total - finished) / speed:,.0f} s left" if speed else ""
                typer.echo(f"hookscope: {finished} of {total} {of} finished{left}", err=True)

        yield advance
