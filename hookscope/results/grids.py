"""The grids in a run directory, and the place of each channel in them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one activation's channels in a grid. Lengths are in pixels of the picture unless said otherwise.

    Attributes:
        left: Left edge of the first tile; `top` is its top edge.
        columns: Tiles in a row.
        count: All tiles, one per channel; a tile holds its frames side by side, one pixel apart.
        frames: Frames in a tile; 1 for everything but clips.
        height: Height of one map in map pixels; `width` likewise.
        down: Pixels per map pixel along the height, `across` along the width.
        gap: Background between tiles.
    """

    left: int
    top: int
    columns: int
    count: int
    frames: int
    height: int
    width: int
    down: int
    across: int
    gap: int

    def fits(self, picture_height: int, picture_width: int) -> bool:
        """Return whether the tiles can lie in a picture of this size."""
        sizes = (self.columns, self.count, self.frames, self.height, self.width, self.down, self.across)
        if min(sizes) < 1 or min(self.left, self.top, self.gap) < 0 or self.columns > self.count:
            return False
        rows = -(-self.count // self.columns)
        bottom = self.top + rows * (self.height * self.down + self.gap) - self.gap
        tile_width = self.frames * (self.width * self.across + 1) - 1
        right = self.left + self.columns * (tile_width + self.gap) - self.gap
        return bottom <= picture_height and right <= picture_width


@dataclass(frozen=True, slots=True)
class Grid:
    """One picture of feature maps in a run directory.

    Attributes:
        path: The PNG file, inside the run directory.
        row: `index` of the row it shows: of an activation, or of a gradient in a run of `grads`.
        caption: Parts of its caption, without the arrangement of the tiles.
        bar: Labels under the colour bar, left to right: two or three, or none without a bar.
        extra_token_count: Tokens outside of the grid, such as a class token.
        tiles: Places of the channels; None for an activation without values.
    """

    path: str
    row: int
    label: str
    input_index: int
    caption: tuple[str, ...]
    bar: tuple[str, ...]
    extra_token_count: int
    tiles: Tiles | None
