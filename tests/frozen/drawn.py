"""The texts that a command draws into its pictures."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from matplotlib.text import Text
from PIL.ImageDraw import ImageDraw


@contextmanager
def drawing_recorded(path: str) -> Iterator[None]:
    """Write the different texts that are drawn into a file, sorted: threads draw them. A number is #."""
    texts: set[str] = set()
    draw, draw_plot = ImageDraw.text, Text.draw

    def recorded(pen: Any, xy: Any, text: Any, *args: Any, **options: Any) -> None:
        texts.add(str(text))
        draw(pen, xy, text, *args, **options)

    def recorded_plot(text: Any, *args: Any, **options: Any) -> None:
        texts.add(text.get_text())
        draw_plot(text, *args, **options)

    try:
        with patch.object(ImageDraw, "text", recorded), patch.object(Text, "draw", recorded_plot):
            yield
    finally:
        if path:
            masked = {re.sub(r"[-\u2212]?\d[\d.,]*(?:e[-+]?\d+)?", "#", text) for text in texts}
            Path(path).write_text("".join(f"{text}\n" for text in sorted(masked)), "utf-8")
