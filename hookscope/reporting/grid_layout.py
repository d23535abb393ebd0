"""How the channels of an activation lie on the canvas of a grid: columns, enlargement and gaps."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hookscope.reporting.palettes import BACKGROUND, Indices

# A grid fills a page 960 pixels wide where it can, the shorter side of a tile is never under 32 (so a 7x7 map is
# readable), and no tile is enlarged beyond 160.
_PAGE_WIDTH = 960
_TILE_MIN = 32
_TILE_MAX = 160
_CELL_MIN = 4
_CELL_MAX = 32

# A grid stays within what viewers open and what Pillow reads back without its decompression-bomb warning (89 million).
MAX_SIDE = 16_384
MAX_PIXELS = 64_000_000


@dataclass(frozen=True, slots=True)
class Layout:
    """How the tiles of (C, T, H, W) lie on the canvas."""

    columns: int  # tiles beside each other
    down: int  # canvas pixels per map pixel along H
    across: int  # the same along W
    gap: int  # background pixels between tiles; the frames inside a tile are one apart
    stride: int = 1  # map pixels averaged into one, along H and along W

    def pitch(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return height and width in pixels of one tile with its gap."""
        _, frames, height, width = shape
        tile_height = -(-height // self.stride) * self.down
        tile_width = frames * (-(-width // self.stride) * self.across + 1) - 1
        return tile_height + self.gap, tile_width + self.gap

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Tell whether the whole grid keeps to the limits."""
        pitch_height, pitch_width = self.pitch(shape)
        height, width = -(-shape[0] // self.columns) * pitch_height, self.columns * pitch_width
        return max(height, width) <= MAX_SIDE and height * width <= MAX_PIXELS


def plan(shape: tuple[int, ...], *, single: bool) -> Layout:
    """Choose the layout for (C, T, H, W): near-square, filling a page, within the limits.

    A map far longer than wide (a signal of shape 1 x W) is enlarged less along its long side, to be seen at all.
    """
    count, frames, height, width = shape
    if 0 in shape:
        return Layout(1, 1, 1, 0)
    if single:  # a strip is twice as wide as it is high, or one row
        columns = count if count * _CELL_MAX <= 2 * _PAGE_WIDTH else _columns(count, 0.5)
        pitch = min(max(_PAGE_WIDTH // columns, _CELL_MIN), _CELL_MAX)
        gap = 1 if pitch >= 8 else 0
        return Layout(columns, pitch - gap, pitch - gap, gap)

    def laid_out(factor: int, stride: int) -> Layout:
        sides = -(-height // stride), -(-width // stride)
        down, across = (min(factor, max(1, 8 * _TILE_MIN // side)) for side in sides)
        row = Layout(count, down, across, 2 if frames == 1 else 6, stride)
        tile_height, tile_width = (pitch - row.gap for pitch in row.pitch(shape))
        return replace(row, columns=_columns(count, tile_width / tile_height))

    factor = max(1, -(-_TILE_MIN // min(height, width)))
    rough = laid_out(factor, 1)
    page_factor = (_PAGE_WIDTH // rough.columns - rough.gap) // frames // width
    factor = max(factor, min(page_factor, _TILE_MAX // max(height, width)))
    stride = 1
    while not (plan := laid_out(factor, stride)).fits(shape) and stride < max(height, width):
        if factor > 1:
            factor -= 1
        else:
            stride += max(1, stride // 4)
            factor = max(1, -(-_TILE_MIN // -(-min(height, width) // stride)))
    return plan


def _columns(count: int, tile_aspect: float) -> int:
    """Return the number of tiles in a row: 8 for 64 square tiles, 16 for 128. `tile_aspect` is width / height."""
    square = math.sqrt(count / tile_aspect)
    candidates = range(max(1, math.ceil(square - 1e-9)), math.floor(square * 1.5) + 1)
    full = next((columns for columns in candidates if count % columns == 0), None)
    if full is not None:
        return full
    return count if count <= 2 * square else max(1, math.ceil(square))


def compose(levels: NDArray[np.uint8], layout: Layout) -> Indices:
    """Lay (C, T, H, W) out, enlarged by nearest neighbour."""
    count, frames, height, width = levels.shape
    rows, columns = -(-count // layout.columns), layout.columns
    padded = np.full((rows * columns, frames, height, width), BACKGROUND, np.uint8)
    padded[:count] = levels
    stretched = padded.repeat(layout.across, axis=3)
    frame_width = stretched.shape[3]
    # Across first, for one canvas row per map row; a last column of background parts the frames.
    framed = np.full((rows, height, columns, frames, frame_width + 1), BACKGROUND, np.uint8)
    framed[..., :frame_width] = stretched.reshape(rows, columns, frames, height, frame_width).transpose(0, 3, 1, 2, 4)
    tile_width = frames * (frame_width + 1) - 1
    lines = np.full((rows, height, columns, tile_width + layout.gap), BACKGROUND, np.uint8)
    lines[..., :tile_width] = framed.reshape(rows, height, columns, tile_width + 1)[..., :tile_width]
    # Then down: whole rows are copied.
    tile_height = height * layout.down
    canvas = np.full((rows, tile_height + layout.gap, lines[0, 0].size), BACKGROUND, np.uint8)
    canvas[:, :tile_height] = lines.reshape(rows, height, -1).repeat(layout.down, axis=1)
    return canvas.reshape(rows * (tile_height + layout.gap), -1)[
        : rows * (tile_height + layout.gap) - layout.gap, : lines[0, 0].size - layout.gap
    ]
