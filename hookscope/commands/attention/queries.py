"""The query whose attention is drawn: the class token, a register, the patch under a pixel, or the mean of all."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hookscope.commands.attention.places import Places
from hookscope.errors import UsageError
from hookscope.parameters import arg
from hookscope.results.concentration import Extent
from hookscope.results.inputs import InputRecord
from hookscope.text import safe_text

MEAN = "mean of queries"
CLASS = "class token"

_REGISTER = re.compile(r"register:(\d{1,3})")
_PIXEL = re.compile(r"(\d{1,7}(?:\.\d{1,6})?)\s*,\s*(\d{1,7}(?:\.\d{1,6})?)")


@dataclass(frozen=True, slots=True)
class Query:
    """One `--query`.

    Attributes:
        text: As it was given.
        register: Its number from 1; 0 for another query.
        pixel: (x, y) on the upright photograph; None for another query.
    """

    text: str
    register: int = 0
    pixel: tuple[float, float] | None = None


def read_queries(texts: Sequence[str]) -> list[Query]:
    """Read `--query`; the default is the class token in blocks that have one, and the mean over queries in others.

    Raises:
        UsageError: If one is of no known form.
    """
    if not texts:
        return [Query("auto")]
    return [_read(text) for text in dict.fromkeys(map(str.strip, texts))]


def _read(text: str) -> Query:
    if text in ("cls", "mean"):
        return Query(text)
    if (match := _REGISTER.fullmatch(text)) is not None and int(match[1]):
        return Query(text, register=int(match[1]))
    if (match := _PIXEL.fullmatch(text)) is not None:
        return Query(text, pixel=(float(match[1]), float(match[2])))
    raise UsageError(
        f"{arg('query')} '{safe_text(text)}' is not possible: give cls, register:1, mean, or the x,y of a pixel "
        "(120,80)."
    )


@dataclass(frozen=True, slots=True)
class Chosen:
    """A query in one block, of one input.

    Attributes:
        label: "class token", "patch 3,7".
        token: Its index among the queries of its window; None for the mean.
        window: The window that it is in.
        box: A patch, (left, top, right, bottom) as shares of the network's input; None for other queries.
    """

    label: str
    token: int | None
    window: int = 0
    box: tuple[float, float, float, float] | None = None


def chosen_in(
    query: Query,
    record: InputRecord,
    queries: Places | None,
    keys: Places | None,
    count: int,
    class_count: int,
    extent_of: Callable[[tuple[int, int]], Extent],
) -> Chosen | None:
    """Return a query's place in a block; None where the block has no such query.

    In a block with a single query, such as a pooling layer, that query stands for the class token. `count` counts
    queries, `class_count` class tokens in front of the grid, 0 or 1; `extent_of` returns the area that a grid fills.

    Raises:
        UsageError: If the pixel lies outside of what the network sees.
    """
    if query.text == "mean":
        return Chosen(MEAN, None)
    if query.text in ("auto", "cls"):
        if count == 1:
            return Chosen(CLASS if keys is not None and keys.prefix and class_count else "pooling query", 0)
        if queries is not None and queries.prefix and class_count:
            return Chosen(CLASS, 0)
        return Chosen(MEAN, None) if query.text == "auto" else None
    return None if queries is None else _placed(query, record, queries, class_count, extent_of)


def _placed(
    query: Query,
    record: InputRecord,
    queries: Places,
    class_count: int,
    extent_of: Callable[[tuple[int, int]], Extent],
) -> Chosen | None:
    if query.pixel is None:
        token = class_count + query.register - 1
        return Chosen(f"register {query.register}", token) if token < queries.prefix else None
    x, y = _on_input(query.pixel, query, record)
    tall, wide = queries.grid
    top, left, bottom, right = extent_of(queries.grid)  # it may extend beyond the input
    row, column = int((y - top) / (bottom - top) * tall), int((x - left) / (right - left) * wide)
    if row >= tall or column >= wide:
        raise UsageError(
            f"{arg('query')} {query.text} lies in the margin of {safe_text(record.name)} that no patch covers: give a "
            "pixel farther up or to the left."
        )
    cell_height, cell_width = (bottom - top) / tall, (right - left) / wide
    window, token = (int(index) for index in (queries.cells == row * wide + column).nonzero()[0])
    left, top = left + column * cell_width, top + row * cell_height
    return Chosen(f"patch {row},{column}", token, window, (left, top, left + cell_width, top + cell_height))


def _on_input(pixel: tuple[float, float], query: Query, record: InputRecord) -> tuple[float, float]:
    """Return a pixel of the photograph as shares of the network's input."""
    x, y = pixel
    region = record.region
    top, left, bottom, right = 0.0, 0.0, *map(float, record.shape[-2:])
    if region is not None:
        top, left, bottom, right = region.top, region.left, region.bottom, region.right
    # The pixel's centre.
    down, across = (y + 0.5 - top) / (bottom - top), (x + 0.5 - left) / (right - left)
    if not (0 <= down < 1 and 0 <= across < 1):
        least_x, least_y = (max(math.ceil(edge - 0.5), 0) for edge in (left, top))
        most_x, most_y = (math.ceil(edge - 0.5) - 1 for edge in (right, bottom))
        raise UsageError(
            f"{arg('query')} {query.text} lies outside of what the network sees of {safe_text(record.name)}: x "
            f"from {least_x} to {most_x}, y from {least_y} to {most_y}."
        )
    return across, down
