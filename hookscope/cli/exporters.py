"""Where a run can be seen besides its directory: in the terminal, in TensorBoard, on a page."""

import logging
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hookscope import options
from hookscope.cli.console import print_path
from hookscope.errors import UsageError
from hookscope.text import safe_text, scaled_text

if TYPE_CHECKING:
    from rich.console import Console

# How large a picture in the terminal is.
_MOST_COLUMNS = 100
_MOST_LINES = 40

_NOTHING_SHOWN = "--show shows nothing here: it needs a terminal with colours on stdin and stdout, and no --json."
_RUN_IS_CLOSED = "it is inside the run directory, which may hold only its own files"


def check_exports(run: Path, option: options.OutputOptions) -> None:
    """Raise if --show, --tensorboard, --features or --report cannot be done, before a model is run for nothing."""
    if isinstance(option, options.ShowOption) and option.show and find_spec("textual_image") is None:
        raise UsageError("--show needs one more package: pip install 'hookscope[show]'")
    if isinstance(option, options.TensorBoardOption) and option.tensorboard is not None:
        check_tensorboard(option.tensorboard, run)
    from hookscope.results.runs.atomic import refusal

    if isinstance(option, options.Survey) and option.features is not None and _within(Path(option.features), run):
        raise refusal(Path(option.features), _RUN_IS_CLOSED, "--features")
    if option.page is not None:
        from hookscope.results.runs.reports import check_report_target

        check_report_target(option.page)
        if _within(option.page, run):
            raise refusal(option.page, _RUN_IS_CLOSED)


def print_page(page: Path, tables: "Console") -> None:
    """Print the line about a page that was written."""
    print_path(tables, "Report", page, f" ({scaled_text(page.stat().st_size, 'B')})")


def open_file(path: Path, messages: "Console") -> None:
    """Open a page or picture with the browser that the system, or BROWSER, names."""
    import webbrowser

    if not webbrowser.open(path.absolute().as_uri()):
        messages.print(f"--open opens nothing here: no browser was found. See {safe_text(str(path))}", soft_wrap=True)


def show_picture(path: Path, tables: "Console", messages: "Console", *, json: bool) -> None:
    """Draw a PNG file where stdin and stdout are a terminal with colours, else print a line about it to stderr.

    The terminal's own image protocol is used (kitty's, Sixel), or half blocks. textual_image asks the terminal for it
    while it is imported: it writes an escape sequence to stdout and reads the answer from stdin. So it is imported for
    a terminal only, and after everything else is done.
    """
    if json or not is_interactive(tables):
        messages.print(_NOTHING_SHOWN, soft_wrap=True)
        return
    logging.getLogger("textual_image").setLevel(logging.ERROR)  # it warns of terminals that do not tell their size
    from PIL import Image
    from textual_image.renderable import Image as TerminalImage

    with Image.open(path) as picture:
        preview = TerminalImage(picture.convert("RGB"), width="auto", height="auto")
    height = max(1, min(tables.height - 2, _MOST_LINES))
    tables.print(preview, width=min(tables.width, _MOST_COLUMNS), height=height)


def is_interactive(console: "Console") -> bool:
    """Tell whether stdin and stdout are a terminal that answers this process; one without a size may be a pipe."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    if console.color_system is None or console.no_color or 0 in os.get_terminal_size(sys.stdout.fileno()):
        return False
    if sys.platform == "win32":
        return True
    with suppress(OSError):  # the terminal of another session
        # A process in the background that touches the terminal's mode is stopped.
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return False


def check_tensorboard(folder: Path, run: Path) -> None:
    """Raise if the folder for TensorBoard cannot be written, or is inside the run directory."""
    from hookscope.results.runs.atomic import check_writable, refusal

    if find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs one more package: pip install 'hookscope[tensorboard]'")
    check_writable(folder, "--tensorboard", "folder")
    if _within(folder, run):
        raise refusal(folder, _RUN_IS_CLOSED, "--tensorboard", "folder")


def _within(path: Path, run: Path) -> bool:
    target = Path(os.path.realpath(path))
    return Path(os.path.realpath(run)) in (target, *target.parents)
