"""Find windows, cut maps into them, and put them back: Swin cuts row by row after a cyclic shift."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookscope.hooks.attributes import attribute_of


@dataclass(frozen=True, slots=True)
class Windows:
    """How a map was cut.

    Attributes:
        size: (h, w) of a window.
        shift: Rows and columns by which the map was first rolled towards its first row and column.
    """

    size: tuple[int, int]
    shift: tuple[int, int] = (0, 0)

    def put_back(self, values: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Join windows, (N * windows, tokens, C), which fill the grid evenly, to maps (N, h, w, C)."""
        rows, columns = grid[0] // self.size[0], grid[1] // self.size[1]
        parts = values.reshape(-1, rows, columns, *self.size, values.shape[-1])
        return parts.transpose(2, 3).reshape(-1, *grid, values.shape[-1]).roll(self.shift, (1, 2))

    def counts(self, grid: tuple[int, ...]) -> int | None:
        """Return the number of windows in a map of size `grid`; None if they do not fill it evenly."""
        (high, wide), (rows, columns) = self.size, grid
        return None if rows % high or columns % wide else rows // high * (columns // wide)


def cut(cells: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut a map (h, w) into windows, which fill it evenly: (windows, tokens)."""
    rows, columns = cells.shape[0] // size[0], cells.shape[1] // size[1]
    parts = cells.reshape(rows, size[0], columns, size[1]).transpose(1, 2)
    return parts.reshape(rows * columns, size[0] * size[1])


def cuts_windows(module: nn.Module) -> bool:
    """Tell whether a module is a block of Swin: only such blocks have a `shift_size`."""
    return attribute_of(module, "shift_size") is not None


def window_size(modules: Iterable[nn.Module], tokens: int) -> tuple[int, int] | None:
    """Return the size of windows of `tokens` tokens: a module's `window_size` if one fits, else a square."""
    side = math.isqrt(tokens)
    sizes = (pair(attribute_of(module, "window_size")) for module in modules)
    fitting = [size for size in (*sizes, (side, side)) if size is not None and size[0] * size[1] == tokens]
    return fitting[0] if fitting else None


def map_size(inputs: Iterable[Any]) -> tuple[int, int] | None:
    """Return the size of the map that a module was given, (N, H, W, C), or (N, T, C) and (H, W); None if unknown."""
    values = [*inputs]
    tokens = next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
    if tokens is None or tokens.is_nested:
        return None
    if tokens.dim() == 4:
        return tokens.shape[1], tokens.shape[2]
    for value in values:
        size = pair(value) if isinstance(value, tuple | list) else None
        if size is not None and tokens.dim() == 3 and size[0] * size[1] == tokens.size(1):
            return size
    side = math.isqrt(tokens.size(1)) if tokens.dim() == 3 else 0
    return (side, side) if side and side * side == tokens.size(1) else None


def padded_to(size: tuple[int, int], window: tuple[int, int]) -> tuple[int, int]:
    """Return the size of a map after padding until windows fill it."""
    return -(-size[0] // window[0]) * window[0], -(-size[1] // window[1]) * window[1]


def pair(value: Any) -> tuple[int, int] | None:
    """Return a size given as one number or as two; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value) if value >= 0 else None
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(number, int) for number in value):
        return (value[0], value[1])
    return None
