"""Where the picture lies in what a layer returns: maps, channels first or last, or a sequence of tokens."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.statistics.channel_axis import MAX_EXTRA_TOKENS, MAX_HALVINGS
from hookscope.text import safe_text


@dataclass(frozen=True, slots=True)
class Tokens:
    """How tokens lie on the picture: `prefix` of them belong to no place, then come the rows of a grid (h, w)."""

    prefix: int
    grid: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the picture lies in a layer's output.

    Attributes:
        grid: (h, w).
        channel_axis: Of the output, batch axis counted.
        prefix: Tokens in front of the grid; None if the output is no sequence.
    """

    grid: tuple[int, int]
    channel_axis: int
    prefix: int | None = None

    def maps(self, values: Tensor) -> Tensor:
        """Return an output, or its gradient, as (N, C, h, w)."""
        if self.prefix is None:
            return values.movedim(self.channel_axis, 1)
        tokens = values[:, self.prefix :]
        return tokens.reshape(len(tokens), *self.grid, -1).permute(0, 3, 1, 2)


# Fewer tokens than 2 x 2 are no grid: class tokens have layers for themselves. Our choice.
_MIN_GRID = 4

_FLAT = "has no spatial extent: maps need a grid of more than one place"

_TOKENS = re.compile(
    r"\s*(?:prefix\s*=\s*(?P<prefix>\d{1,4})\s*,\s*)?grid\s*=\s*(?P<height>\d{1,5})x(?P<width>\d{1,5})\s*"
)


def parse_tokens(text: str) -> Tokens:
    """Read `--tokens`: "prefix=1,grid=14x14", height first; without a prefix "grid=7x7".

    Raises:
        UsageError: If it is neither.
    """
    found = _TOKENS.fullmatch(text)
    if found is None or not int(found["height"]) or not int(found["width"]):
        raise UsageError(f"--tokens '{safe_text(text)}' is not of the form prefix=1,grid=14x14 (height x width).")
    return Tokens(int(found["prefix"] or 0), (int(found["height"]), int(found["width"])))


def known_prefix(network: nn.Module) -> int | None:
    """Return how many tokens a network is known to put in front of the grid: timm says it, torchvision has one."""
    for module in network.modules():
        count = getattr(module, "num_prefix_tokens", None)
        if isinstance(count, int):
            return count
        kind = type(module)
        if f"{kind.__module__}.{kind.__qualname__}" == "torchvision.models.vision_transformer.VisionTransformer":
            return 1
    return None


def layout_of(
    shape: Sequence[int],
    count: int,
    channel_axis: int | None,
    grids: Sequence[tuple[int, int]],
    *,
    prefix: int | None = None,
    given: Tokens | None = None,
) -> Layout | str:
    """Return where the picture lies in an output, or in words why it has no place there.

    Args:
        shape: Of the output.
        count: Inputs in the batch.
        channel_axis: As `statistics.channel_axis.AxisReader` gave it.
        grids: Sizes of maps that convolutions returned in the same pass, (h, w), later ones preferred.
        prefix: Tokens in front of the grid, if that is known of the network.
        given: What the user said of sequences.
    """
    if not shape or shape[0] != count or channel_axis is None or len(shape) not in (3, 4):
        return _FLAT
    if len(shape) == 4:
        height, width = (size for axis, size in enumerate(shape) if axis not in (0, channel_axis))
        return Layout((height, width), channel_axis) if height * width > 1 else _FLAT
    return _FLAT if channel_axis == 1 and given is None else _of_tokens(shape[1], grids, prefix, given)


def _of_tokens(length: int, grids: Sequence[tuple[int, int]], prefix: int | None, given: Tokens | None) -> Layout | str:
    if given is not None:
        height, width = given.grid
        if length == given.prefix + height * width:
            return Layout(given.grid, 2, given.prefix)
        return f"has {length} tokens, not the {given.prefix} + {height}x{width} of --tokens"
    if length - (prefix or 0) < _MIN_GRID:
        return _FLAT
    for halvings in range(MAX_HALVINGS + 1):
        expected = range(MAX_EXTRA_TOKENS + 1) if prefix is None and not halvings else (0, prefix)
        for grid in reversed(grids):
            # Where a size is odd, networks round up or down.
            for height, width in {
                tuple(size >> halvings for size in grid),
                tuple(-(-size >> halvings) for size in grid),
            }:
                extra = length - height * width
                if height * width >= _MIN_GRID and extra in expected:
                    return Layout((height, width), 2, extra)
    side = math.isqrt(max(length - (prefix or 0), 0))
    if prefix is not None and side * side == length - prefix:
        return Layout((side, side), 2, prefix)
    return f"has {length} tokens whose grid is not known: give --tokens prefix=1,grid=HEIGHTxWIDTH"
