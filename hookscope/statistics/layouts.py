"""Find the input's grid in a layer's output by its shape: a map, channels first or last, or a sequence of tokens."""

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

# Most tokens in front of the grid: class token, distillation token, registers (DINOv2 has 4). There are also at most
# half as many of them as places in the grid.
MAX_EXTRA_TOKENS = 8
# A pyramid halves its first grid at most this often.
MAX_HALVINGS = 5


@dataclass(frozen=True, slots=True)
class Layout:
    """The input's grid in a layer's output.

    Attributes:
        grid: (l,), (h, w) or (d, h, w).
        channel_axis: Channel axis of the output, including the batch axis.
        prefix: Tokens in front of the grid; None if the output is no sequence.
        windows: The windows that the grid was cut into, for an output (N * windows, tokens, C).
        suffix: Tokens behind the grid.
    """

    grid: tuple[int, ...]
    channel_axis: int
    prefix: int | None = None
    windows: Windows | None = None
    suffix: int = 0

    @property
    def others(self) -> str:
        """The tokens outside of the grid, for a message; "" if there are none."""
        return "a token outside of the grid" if self.suffix else "the class token" if self.prefix else ""

    def maps(self, values: Tensor) -> Tensor:
        """Return an output, or its gradient, as (N, C, *grid)."""
        if self.windows is not None:
            return self.windows.put_back(values, self.grid).movedim(-1, 1)
        if self.prefix is None:
            return values.movedim(self.channel_axis, 1)
        tokens = values[:, self.prefix : values.shape[1] - self.suffix]
        return tokens.reshape(len(tokens), *self.grid, -1).movedim(-1, 1)


# Fewer tokens than 2 x 2 are no grid: some layers process class tokens alone.
_MIN_GRID = 4

_SEQUENCE_AXES = 3  # (N, T, D)
_FLAT = "has no spatial extent: maps need a grid of more than one place"

_TOKENS = re.compile(
    r"\s*(?:prefix\s*=\s*(?P<prefix>\d{1,4})\s*,\s*)?grid\s*=\s*(?P<grid>\d{1,5}(?:x\d{1,5}){0,2})\s*"
    r"(?:,\s*suffix\s*=\s*(?P<suffix>\d{1,4})\s*)?"
)


def parse_tokens(text: str) -> Layout:
    """Parse `--tokens`: "prefix=1,grid=14x14", height first; "grid=7x7", "grid=7x7,suffix=12"; for a signal "grid=49".

    Raises:
        UsageError: If the text has none of these forms.
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
    """Return how many tokens a network puts in front of the grid, for timm and torchvision; None if unknown."""
    for module in network.modules():
        count = attribute_of(module, "num_prefix_tokens")
        if isinstance(count, int):
            return count
        kind = type(module)
        if f"{kind.__module__}.{kind.__qualname__}" == "torchvision.models.vision_transformer.VisionTransformer":
            return 1
    return None


def class_token_count(network: nn.Module) -> int:
    """Return how many of the tokens in front of the grid are class tokens: from timm's attributes, else 1."""
    for module in network.modules():
        if isinstance(attribute_of(module, "num_prefix_tokens"), int):
            has_class = attribute_of(module, "has_class_token", attribute_of(module, "cls_token") is not None)
            return int(bool(has_class))
    return 1


def prefix_names(network: nn.Module, count: int) -> tuple[str, ...]:
    """Return a name for each of `count` tokens in front of the grid: "class token", "register 1"."""
    names = ["class token"] * min(class_token_count(network), count)
    attributes = ("dist_token", "distillation_token")  # timm's name, and transformers'
    modules = network.modules() if len(names) < count else ()
    if any(attribute_of(module, name) is not None for module in modules for name in attributes):
        names.append("distillation token")
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
    """Return the input's layout in an output, or the reason why it has none, in words.

    Args:
        shape: Shape of the output.
        count: Inputs in the batch.
        channel_axis: As `statistics.channel_axis.AxisReader` gave it.
        grids: Sizes of maps that convolutions returned in the same pass, later sizes preferred.
        axes: Axes of place of the input: 1 for signals, 2 for pictures, 3 for volumes and clips.
        prefix: Tokens in front of the grid; None if the network does not show it.
        tokens: The user's `--tokens`.
        size: (h, w) of the pictures. Without convolutions, a network of known prefix cuts them into square patches.
    """
    if shape and shape[0] != count:
        return f"does not count {counted(count, 'input')} on its first axis"
    if not shape or channel_axis is None:
        return _FLAT
    is_sequence = len(shape) == _SEQUENCE_AXES and (channel_axis != 1 or (tokens is not None and axes > 1))
    if is_sequence:
        return _of_tokens(shape[1], grids, axes, prefix, tokens, size)
    grid = tuple(size for axis, size in enumerate(shape) if axis not in (0, channel_axis))
    if math.prod(grid) > 1 and len(grid) != axes:
        return f"has {counted(len(grid), 'axis', 'axes')} of place where the input has {axes}"
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
    """Return the layout of tokens on the grid of an earlier convolution, or on a halved one.

    Maps of one row or column count only if there are no others, because convolutions over sequences also make them.
    """
    grids = [grid for grid in grids if min(grid[-2:]) > 1] or grids
    for halvings in range(MAX_HALVINGS + 1):  # unhalved grids come first
        for grid in reversed(grids):
            frames, sides = grid[:-2], grid[-2:]  # networks over clips do not halve frames
            # Networks round odd sizes up or down.
            for halved in {
                tuple([size >> halvings for size in sides]),
                tuple([-(-size >> halvings) for size in sides]),
            }:
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
    """Return the reason for tokens on an unknown grid."""
    return f"has {length} tokens whose grid is not known; for patches give {arg('tokens')} prefix=1,grid={example}"


def square_patches(count: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return the grid (h, w) of `count` square patches that fill a picture (h, w); None if they cannot."""
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
    """Return the layout of windows in an output (count * windows, tokens, C); None without windows, or if padded.

    The shift is read from the block during the pass: a map of a single window is not shifted.

    Args:
        blocks: The network's blocks that cut maps into windows, by name.
        layer: Dotted name of the layer, or "MODULE:OPERATION".
        shape: Shape of the output.
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
    """Return the (H, W) or (T, H, W) that a token sequence was flattened from; None if no grid fits.

    Without known grids, tokens may be words, and a map of 4 × 4 for a sentence of 16 words would mean nothing.
    """
    layout = _of_known_grid(token_count, grids)
    return None if layout is None or min(layout.grid) < 2 else layout.grid
