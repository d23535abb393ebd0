"""Where the input lies in a layer's output, by its shape: maps, channels first or last, or a sequence of tokens."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.hooks.attributes import attribute_of
from hookscope.parameters import arg
from hookscope.statistics.windows import Windows, pair, window_size
from hookscope.text import counted, safe_text

# Tokens in front of the grid: the class token, a distillation token, registers (DINOv2 has 4); half as many as the grid
# has.
MAX_EXTRA_TOKENS = 8
# A pyramid halves its grid at most this often below the first one seen.
MAX_HALVINGS = 5


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the input lies in a layer's output.

    Attributes:
        grid: (l,), (h, w) or (d, h, w).
        channel_axis: Of the output, batch axis counted.
        prefix: Tokens in front of the grid; None if the output is no sequence.
        windows: How the grid was cut, of an output (N * windows, tokens, C).
        suffix: Tokens behind the grid.
    """

    grid: tuple[int, ...]
    channel_axis: int
    prefix: int | None = None
    windows: Windows | None = None
    suffix: int = 0

    @property
    def others(self) -> str:
        """What the output has beside the tokens of the grid, for a message; "" for nothing."""
        return "a token outside of the grid" if self.suffix else "the class token" if self.prefix else ""

    def maps(self, values: Tensor) -> Tensor:
        """Return an output, or its gradient, as (N, C, *grid)."""
        if self.windows is not None:
            return self.windows.put_back(values, self.grid).movedim(-1, 1)
        if self.prefix is None:
            return values.movedim(self.channel_axis, 1)
        tokens = values[:, self.prefix : values.shape[1] - self.suffix]
        return tokens.reshape(len(tokens), *self.grid, -1).movedim(-1, 1)


# Fewer tokens than 2 x 2 are no grid: class tokens have layers for themselves.
_MIN_GRID = 4

_SEQUENCE_AXES = 3  # (N, T, D)
_FLAT = "has no spatial extent: maps need a grid of more than one place"

_TOKENS = re.compile(
    r"\s*(?:prefix\s*=\s*(?P<prefix>\d{1,4})\s*,\s*)?grid\s*=\s*(?P<grid>\d{1,5}(?:x\d{1,5}){0,2})\s*"
    r"(?:,\s*suffix\s*=\s*(?P<suffix>\d{1,4})\s*)?"
)


def parse_tokens(text: str) -> Layout:
    """Read `--tokens`: "prefix=1,grid=14x14", height first; "grid=7x7" or "grid=7x7,suffix=12"; of a signal "grid=49".

    Raises:
        UsageError: If it is none of these.
    """
    match = _TOKENS.fullmatch(text)
    grid = tuple(map(int, match["grid"].split("x"))) if match else ()
    if match is None or not all(grid):
        raise UsageError(
            f"{arg('tokens')} '{safe_text(text)}' is not of the form prefix=1,grid=14x14 (height x width). For "
            "tokens behind the grid add suffix=12."
        )
    return Layout(grid, 2, int(match["prefix"] or 0), suffix=int(match["suffix"] or 0))


def known_prefix(network: nn.Module) -> int | None:
    """Return how many tokens a network puts in front of the grid: in timm an attribute, in torchvision 1."""
    for module in network.modules():
        count = attribute_of(module, "num_prefix_tokens")
        if isinstance(count, int):
            return count
        kind = type(module)
        if f"{kind.__module__}.{kind.__qualname__}" == "torchvision.models.vision_transformer.VisionTransformer":
            return 1
    return None


def class_token_count(network: nn.Module) -> int:
    """Return how many of the tokens in front of the grid are class tokens: as timm's attributes have it, else 1."""
    for module in network.modules():
        if isinstance(attribute_of(module, "num_prefix_tokens"), int):
            has_class = attribute_of(module, "has_class_token", attribute_of(module, "cls_token") is not None)
            return int(bool(has_class))
    return 1


def prefix_names(network: nn.Module, count: int) -> tuple[str, ...]:
    """Return a name for each of so many tokens in front of the grid: "class token", "register 1"."""
    names = ["class token"] * min(class_token_count(network), count)
    attributes = ("dist_token", "distillation_token")  # timm's name, and transformers'
    distilled = any(attribute_of(module, name) is not None for module in network.modules() for name in attributes)
    names += ["distillation token"] * (distilled and len(names) < count)
    return (*names, *(f"register {number}" for number in range(1, count - len(names) + 1)))


def layout_of(
    shape: Sequence[int],
    count: int,
    channel_axis: int | None,
    grids: Sequence[tuple[int, ...]],
    *,
    axes: int = 2,
    prefix: int | None = None,
    tokens: Layout | None = None,
    size: tuple[int, int] | None = None,
) -> Layout | str:
    """Return where the input lies in an output, or in words why it has no place there.

    Args:
        shape: Of the output.
        count: Inputs in the batch.
        channel_axis: As `statistics.channel_axis.AxisReader` gave it.
        grids: Sizes of maps that convolutions returned in the same pass, later ones preferred.
        axes: How many axes of place the input has: 1 for signals, 2 for pictures, 3 for volumes and clips.
        prefix: Tokens in front of the grid, if that is known of the network.
        tokens: The user's `--tokens`.
        size: (h, w) of the pictures; without convolutions, a network of known prefix cuts them into square patches.
    """
    if shape and shape[0] != count:
        return f"does not count {counted(count, 'input')} on its first axis"
    if not shape or channel_axis is None:
        return _FLAT
    is_sequence = len(shape) == _SEQUENCE_AXES and (channel_axis != 1 or (tokens is not None and axes > 1))
    if is_sequence:
        return _of_tokens(shape[1], grids, axes, prefix, tokens, size)
    if len(shape) != axes + 2:
        return _FLAT
    grid = tuple(size for axis, size in enumerate(shape) if axis not in (0, channel_axis))
    return Layout(grid, channel_axis) if math.prod(grid) > 1 else _FLAT


def _of_tokens(
    length: int,
    grids: Sequence[tuple[int, ...]],
    axes: int,
    prefix: int | None,
    tokens: Layout | None,
    size: tuple[int, int] | None,
) -> Layout | str:
    if tokens is not None:
        front = tokens.prefix or 0
        grid = "x".join(map(str, tokens.grid)) + (f" + {tokens.suffix}" if tokens.suffix else "")
        fits = length == front + math.prod(tokens.grid) + tokens.suffix
        return tokens if fits else f"has {length} tokens, not the {front} + {grid} of {arg('tokens')}"
    if length - (prefix or 0) < (2 if axes == 1 else _MIN_GRID):
        return _FLAT
    return _of_known_grid(length, grids, prefix) or _of_unknown_grid(length, axes, prefix, size)


def _of_known_grid(length: int, grids: Sequence[tuple[int, ...]], prefix: int | None = None) -> Layout | None:
    """Return the layout of tokens on the grid of an earlier convolution, or on one that follows from it by halving.

    A map of one row or column counts only if there are no others: convolutions over sequences have such maps, too.
    """
    grids = [grid for grid in grids if min(grid[-2:]) > 1] or grids
    for halvings in range(MAX_HALVINGS + 1):  # a grid as it was seen comes before halved ones
        for grid in reversed(grids):
            frames, sides = grid[:-2], grid[-2:]  # networks over clips keep their frames
            # Where a size is odd, networks round up or down.
            for halved in {tuple(size >> halvings for size in sides), tuple(-(-size >> halvings) for size in sides)}:
                area = math.prod((*frames, *halved))
                in_front = (
                    range(min(MAX_EXTRA_TOKENS, area // 2) + 1) if prefix is None and not halvings else (0, prefix)
                )
                if area >= _MIN_GRID and length - area in in_front:
                    return Layout((*frames, *halved), 2, length - area)
    return None


def _of_unknown_grid(length: int, axes: int, prefix: int | None, size: tuple[int, int] | None) -> Layout | str:
    if axes == 1:  # the steps of a recurrent layer, or tokens of a signal
        return Layout((length - (prefix or 0),), 2, prefix or 0)
    grid = square_patches(length - prefix, size) if axes == 2 and prefix is not None and size is not None else None
    if grid is not None:
        return Layout(grid, 2, prefix)
    example = "HEIGHTxWIDTH" if axes == 2 else "DEPTHxHEIGHTxWIDTH"
    return unknown_grid(length, example)


def unknown_grid(length: int, example: str = "HEIGHTxWIDTH") -> str:
    """Return the reason for tokens whose places are not known."""
    return f"has {length} tokens whose grid is not known; for patches give {arg('tokens')} prefix=1,grid={example}"


def square_patches(count: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return the grid (h, w) of as many square patches as fill a picture (h, w); None without one."""
    if count < _MIN_GRID:
        return None
    side = math.isqrt(size[0] * size[1] // count)
    grid = size[0] // max(side, 1), size[1] // max(side, 1)
    return grid if side and (grid[0] * side, grid[1] * side) == size and grid[0] * grid[1] == count else None


def windows_of(
    blocks: Mapping[str, nn.Module],
    layer: str,
    shape: Sequence[int],
    count: int,
    channel_axis: int | None,
    grids: Sequence[tuple[int, ...]],
) -> Layout | None:
    """Return where windows lie in an output (count * windows, tokens, C); None if it holds none, or padded ones.

    How a block shifts its map is read from it now: a map that is one window is not shifted.

    Args:
        blocks: The network's blocks that cut maps into windows, by name.
        layer: Dotted name of the layer, or "MODULE:OPERATION".
        shape: Of the output.
        count: Inputs in the batch.
        channel_axis: As `statistics.channel_axis.AxisReader` gave it.
        grids: As in `layout_of`; without any, the map is a square.
    """
    if len(shape) != _SEQUENCE_AXES or channel_axis == 1 or shape[0] <= count or shape[0] % count:
        return None
    block = next((part for name, part in blocks.items() if layer.startswith(f"{name}.")), None)
    shift = None if block is None else pair(block.shift_size)
    size = None if block is None else window_size([block], shape[1])
    if shift is None or size is None:
        return None
    windows = Windows(size, shift)
    side = math.isqrt(shape[0] // count * shape[1])
    for halvings in range(MAX_HALVINGS + 1):
        for grid in reversed(grids or [(side, side)]):
            halved = tuple(side >> halvings for side in grid)
            if len(halved) == len(size) and windows.counts(halved) == shape[0] // count:
                return Layout(halved, 2, None, windows)
    return None


def token_grid(token_count: int, grids: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the (H, W) or (T, H, W) that a token sequence was flattened from, None if nothing fits.

    Without any known grid they are words: of a sentence of 16, a map of 4 × 4 would mean nothing.
    """
    layout = _of_known_grid(token_count, grids)
    return None if layout is None or min(layout.grid) < 2 else layout.grid
