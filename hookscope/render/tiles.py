"""Where the tiles of a grid lie, as text inside its PNG file: a reader can cut out one channel without guessing."""

import json
from dataclasses import asdict, dataclass, fields

KEY = "hookscope-tiles"
"""Keyword of the PNG text chunk."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the channels of one activation lie in a grid. Lengths are in pixels of the picture unless said otherwise.

    Attributes:
        left: Left edge of the first tile.
        top: Its top edge.
        columns: Tiles in a row.
        count: Tiles in all, one a channel; a tile holds its frames side by side, one pixel apart.
        frames: Frames in a tile; 1 for everything but clips.
        height: Of one map, in map pixels.
        width: Of one map, in map pixels.
        down: Pixels per map pixel along the height.
        across: Pixels per map pixel along the width.
        gap: Background between tiles.
        caption: What the caption says, in parts.
        bar: What stands under the colour bar, left to right: two or three labels, or none without a bar.
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
    caption: tuple[str, ...] = ()
    bar: tuple[str, ...] = ()

    def fits(self, picture_height: int, picture_width: int) -> bool:
        """Tell whether the tiles can lie in a picture of this size."""
        sizes = (self.columns, self.count, self.frames, self.height, self.width, self.down, self.across)
        if min(sizes) < 1 or min(self.left, self.top, self.gap) < 0 or self.columns > self.count:
            return False
        rows = -(-self.count // self.columns)
        bottom = self.top + rows * (self.height * self.down + self.gap) - self.gap
        tile_width = self.frames * (self.width * self.across + 1) - 1
        right = self.left + self.columns * (tile_width + self.gap) - self.gap
        return bottom <= picture_height and right <= picture_width


def tiles_text(tiles: Tiles) -> str:
    """Return `tiles` as ASCII text for the chunk."""
    return json.dumps(asdict(tiles))


def tiles_from_text(text: str) -> Tiles | None:
    """Return what `tiles_text` wrote; None for text that it cannot have written."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or read.keys() != {field.name for field in fields(Tiles)}:
        return None
    words = {name: read.pop(name) for name in ("caption", "bar")}
    lists = all(isinstance(each, list) and all(isinstance(word, str) for word in each) for each in words.values())
    if not lists or not all(type(value) is int for value in read.values()):
        return None
    return Tiles(**read, caption=tuple(words["caption"]), bar=tuple(words["bar"]))
