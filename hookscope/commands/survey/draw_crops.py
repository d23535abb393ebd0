"""What excites channels: the parts of inputs that their strongest positions see, a line of crops for each channel."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from hookscope.reporting.overviews.sheet import PAPER
from hookscope.results.survey import Box, ChannelPlace, CropSheet, Survey, SurveyChannel, SurveyRow
from hookscope.text import slug

TILE, GAP = 48, 2
HALVES_GAP = 4 * GAP
SCALE = 2
"""Sheets are drawn this many times as large as their files, for the overview."""

# Channels drawn by default: of all layers, and of one layer.
_MOST_CHANNELS, _MOST_OF_A_LAYER = 128, 16
# A JPEG file is at most 65,500 pixels high and wide; a line has crops of both halves.
_MOST_LINES = 65_500 // (TILE + GAP)
_MOST_COLUMNS = (_MOST_LINES - 1) // 2
# Pixels of sheets in memory at a time.
_SHEET_PIXELS = 2**25
_GROUND = (200, 200, 200)
_MAP_AXES = 2


@dataclass(slots=True)
class _Sheet:
    row: SurveyRow
    channels: list[SurveyChannel]
    columns: int
    is_whole: bool = True
    image: Image.Image | None = None

    @property
    def size(self) -> tuple[int, int]:
        width = 2 * (self.columns * (TILE + GAP) - GAP) + HALVES_GAP
        return SCALE * width, SCALE * (len(self.channels) * (TILE + GAP) - GAP)

    def paste(self, line: int, column: int, tile: Image.Image) -> None:
        self.image = self.image or Image.new("RGB", self.size, PAPER)
        left = column * (TILE + GAP) + (HALVES_GAP - GAP) * (column >= self.columns)
        self.image.paste(tile, (SCALE * left, SCALE * line * (TILE + GAP)))


class _CropPosition(NamedTuple):
    sheet: _Sheet
    line: int
    column: int
    place: ChannelPlace
    box: Box | None = None


def crop_sheets(result: Survey, per_row: int | None) -> Iterator[tuple[CropSheet, Image.Image]]:
    """Yield a picture for each row that has inputs to show, larger by `SCALE`: see `CropSheet`.

    `per_row` is the number of channels drawn for each row; None for 128 in all, 16 of a row at most.
    """
    rows = [row for row in result.rows if _varying(row).any()]
    if result.pictures is None or not rows or per_row == 0:
        return
    count = min(per_row or min(_MOST_OF_A_LAYER, max(1, _MOST_CHANNELS // len(rows))), _MOST_LINES)
    group: list[_Sheet] = []
    for row in rows:
        channels = telling_channels(row, count)
        columns = min(_MOST_COLUMNS, max(len(half) for channel in channels for half in channel.halves))
        sheet = _Sheet(row, channels, columns)
        if group and sum(math.prod(drawn.size) for drawn in (*group, sheet)) > _SHEET_PIXELS:
            yield from _drawn(group, result)
            group = []
        group.append(sheet)
    yield from _drawn(group, result)


def _varying(row: SurveyRow) -> NDArray[np.bool_]:
    """Return which channels have inputs that excite them: no input does so with a constant."""
    arrays = row.channels.arrays
    return np.zeros(0, np.bool_) if arrays is None else (arrays.top_inputs >= 0).any((0, 2)) & (arrays.max > arrays.min)


def telling_channels(row: SurveyRow, count: int) -> list[SurveyChannel]:
    """Return the most selective channels, then the channels with the sharpest peaks, in order of their numbers."""
    arrays = row.channels.arrays
    if arrays is None:
        return []
    spread = np.where(arrays.std > 0, arrays.std, np.inf)
    peak = np.nan_to_num((arrays.max - arrays.mean) / spread)
    varying = _varying(row)
    order = np.lexsort((-peak, -np.nan_to_num(arrays.selectivity, nan=-1.0), ~varying))
    return [row.channels[index] for index in sorted(order[: min(count, int(varying.sum()))].tolist())]


def _drawn(sheets: Sequence[_Sheet], result: Survey) -> Iterator[tuple[CropSheet, Image.Image]]:
    wanted: dict[str, list[_CropPosition]] = {}
    for sheet in sheets:
        positions = [*_positions(sheet)]
        # Positions of a map without a closed-form receptive field.
        places = [position.place for position in positions if len(position.place.position) == _MAP_AXES]
        boxes: Mapping[ChannelPlace, Box] = {}
        if result.supports is not None and sheet.row.receptive_field is None and places:
            boxes = result.supports(sheet.row, places)
        for position in positions:
            wanted.setdefault(position.place.input, []).append(position._replace(box=boxes.get(position.place)))
    for name, pixels in result.pictures([*wanted]) if result.pictures is not None else ():
        picture = Image.fromarray(pixels).convert("RGB")
        whole = (0, 0, picture.height, picture.width)
        for sheet, line, column, place, support in wanted.get(name, ()):
            box = support or crop_box(sheet.row, place.position, whole[2:]) or whole
            sheet.is_whole = sheet.is_whole and box == whole
            sheet.paste(line, column, _cropped(picture, box))
    for sheet in sheets:
        if sheet.image is not None:
            name = f"crops/{sheet.row.index:04d}-{slug(sheet.row.label, 60)}.jpg"
            channels = tuple(channel.channel for channel in sheet.channels)
            yield CropSheet(sheet.row.index, name, channels, TILE, sheet.columns, GAP, sheet.is_whole), sheet.image
            sheet.image = None


def _positions(sheet: _Sheet) -> Iterator[_CropPosition]:
    for line, channel in enumerate(sheet.channels):
        for half, listed in enumerate(channel.halves):
            for column, top in enumerate(listed[: sheet.columns]):
                place = ChannelPlace(top.input, channel.channel, top.position)
                yield _CropPosition(sheet, line, half * sheet.columns + column, place)


def crop_box(row: SurveyRow, position: tuple[int, ...], size: tuple[int, int]) -> Box | None:
    """Return the box that a position of a row sees in a picture (H, W): top, left, bottom, right, in whole pixels.

    Edges may lie outside the picture. None for the whole picture: the receptive field is unknown, or as large.
    """
    field = row.receptive_field
    if field is None or len(field.size) != _MAP_AXES or len(position) != _MAP_AXES:
        return None
    edges = []
    for at, length, step, centre in zip(position, field.size, field.stride, field.centre, strict=True):
        middle = centre + at * step
        edges.append((math.floor(middle - (length - 1) / 2), math.ceil(middle + (length - 1) / 2) + 1))
    if all(high - low >= whole for (low, high), whole in zip(edges, size, strict=True)):
        return None
    (top, bottom), (left, right) = edges
    return top, left, bottom, right


def _cropped(picture: Image.Image, box: Box) -> Image.Image:
    top, left, bottom, right = box
    seen = Image.new("RGB", (right - left, bottom - top), _GROUND)
    seen.paste(picture, (-left, -top))
    return square_tile(seen, SCALE * TILE, _GROUND)


def square_tile(picture: Image.Image, side: int, ground: tuple[int, int, int]) -> Image.Image:
    """Return a picture scaled to a square of `side` pixels, with margins where it is not square."""
    how = Image.Resampling.NEAREST if max(picture.size) < side else Image.Resampling.BOX
    return ImageOps.pad(picture.convert("RGB"), (side, side), how, color=ground)
