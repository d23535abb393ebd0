"""`--show`: the overview in the terminal, by its own image protocol (kitty's, Sixel) or as half blocks.

The library asks the terminal what it can draw, and it does so while it is imported: it writes an escape sequence to
stdout and reads the answer from stdin. So it is imported for a terminal only, and after everything else is done.
"""

import logging
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hookscope.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

# Our choice: how large a preview is.
_MOST_COLUMNS = 100
_MOST_LINES = 40

_NOTHING_SHOWN = "--show shows nothing here: it needs a terminal with colours on stdin and stdout, and no --json."


def check_preview() -> None:
    """Refuse `--show` where nothing could be shown, before a model is run for nothing."""
    if find_spec("textual_image") is None:
        raise UsageError("--show needs one more package: pip install 'hookscope[show]'")


def show_picture(path: Path, tables: "Console", messages: "Console", *, json: bool) -> None:
    """Draw a PNG file where stdin and stdout are a terminal with colours.

    Anywhere else nothing is drawn, and a line on stderr says so: a file or a pipe gets no escape sequences.
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
    """Tell whether a terminal can be asked: one that answers to this process, not one of no size, as some pipes are."""
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
