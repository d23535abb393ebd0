"""What excites channels: the parts of inputs that their strongest positions see, a line of crops for each channel."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.reporting.overviews.sheet import PAPER
from hookscope.results.survey import Box, ChannelPlace, CropSheet, Survey, SurveyChannel, SurveyRow, TopInput
from hookscope.text import slug

TILE, GAP = 48, 2
HALVES_GAP = 4 * GAP

# Channels that are drawn where it is not said of how many of each layer: of all layers, and of one.
_MOST_CHANNELS, _MOST_OF_A_LAYER = 128, 16
# Sheets in memory at a time.
_SHEET_BYTES = 2**26
_GROUND = 200
_MAP_AXES = 2


class _CropPosition(NamedTuple):
    """Where a crop goes: the sheet, its line and column."""

    sheet: int
    line: int
    column: int
    top: TopInput


@dataclass(slots=True)
class _Sheet:
    row: SurveyRow
    channels: list[SurveyChannel]
    columns: int
    pixels: NDArray[np.uint8]
    is_whole: bool = True
    is_drawn: bool = False


def crop_sheets(result: Survey, per_row: int | None) -> Iterator[tuple[CropSheet, Image.Image]]:
    """Yield a picture for each row that has inputs to show: see `CropSheet`.

    Args:
        result: The survey; its pictures are read here.
        per_row: Channels of each row; None for as many as make 128 of all rows, 16 of one at most.
    """
    rows = [row for row in result.rows if _has_tops(row)]
    if result.pictures is None or not rows or per_row == 0:
        return
    count = per_row or min(_MOST_OF_A_LAYER, max(1, _MOST_CHANNELS // len(rows)))
    chosen = [(row, telling_channels(row, count)) for row in rows]
    group: list[_Sheet] = []
    size = 0
    for row, channels in chosen:
        columns = max((len(half) for channel in channels for half in channel.halves), default=0)
        if not columns:
            continue
        sheet = _Sheet(row, channels, columns, _canvas(len(channels), columns))
        if group and size + sheet.pixels.nbytes > _SHEET_BYTES:
            yield from _drawn(group, result)
            group, size = [], 0
        group.append(sheet)
        size += sheet.pixels.nbytes
    yield from _drawn(group, result)


def _has_tops(row: SurveyRow) -> bool:
    arrays = row.channels.arrays
    return arrays is not None and bool(((arrays.top_inputs >= 0).any((0, 2)) & ~arrays.is_dead).any())


def telling_channels(row: SurveyRow, count: int) -> list[SurveyChannel]:
    """Return the channels that say most, in their order: the most selective, else those with the sharpest peaks."""
    arrays = row.channels.arrays
    if arrays is None:
        return []
    spread = np.where(arrays.std > 0, arrays.std, np.inf)
    peak = np.nan_to_num((arrays.max - arrays.mean) / spread)
    alive = (arrays.top_inputs >= 0).any((0, 2)) & ~arrays.is_dead
    order = np.lexsort((-peak, -np.nan_to_num(arrays.selectivity, nan=-1.0), ~alive))
    return [row.channels[index] for index in sorted(order[: min(count, int(alive.sum()))].tolist())]


def _canvas(lines: int, columns: int) -> NDArray[np.uint8]:
    width = 2 * (columns * (TILE + GAP) - GAP) + HALVES_GAP
    return np.full((lines * (TILE + GAP) - GAP, width, 3), PAPER, np.uint8)


def _drawn(sheets: Sequence[_Sheet], result: Survey) -> Iterator[tuple[CropSheet, Image.Image]]:
    wanted: dict[str, list[_CropPosition]] = {}
    for number, sheet in enumerate(sheets):
        for line, channel in enumerate(sheet.channels):
            for half, listed in enumerate(channel.halves):
                for column, top in enumerate(listed):
                    place = _CropPosition(number, line, half * sheet.columns + column, top)
                    wanted.setdefault(top.input, []).append(place)
    supports = [_supports(sheet, result) for sheet in sheets]
    for name, pixels in result.pictures([*wanted]) if result.pictures is not None else ():
        picture = Image.fromarray(pixels).convert("RGB")
        for place in wanted.get(name, ()):
            sheet = sheets[place.sheet]
            number = sheet.channels[place.line].channel
            box = supports[place.sheet].get(ChannelPlace(name, number, place.top.position))
            box = box or crop_box(sheet.row, place.top.position, (picture.height, picture.width))
            box = None if box == (0, 0, picture.height, picture.width) else box
            sheet.is_whole = sheet.is_whole and box is None
            _paste(sheet, place, _cropped(picture, box))
    for number, sheet in enumerate(sheets):
        if sheet.is_drawn:
            name = f"crops/{sheet.row.index:04d}-{slug(sheet.row.label, 60)}.jpg"
            channels = tuple(survey_channel.channel for survey_channel in sheet.channels)
            about = CropSheet(sheet.row.index, name, channels, TILE, sheet.columns, GAP, sheet.is_whole)
            yield about, Image.fromarray(sheet.pixels)
        sheets[number].pixels = np.zeros((0, 0, 3), np.uint8)


def _supports(sheet: _Sheet, result: Survey) -> Mapping[ChannelPlace, Box]:
    """Return what the positions to be drawn depend on, if they are of a map and no closed form tells."""
    if result.supports is None or sheet.row.receptive_field is not None:
        return {}
    places = [
        ChannelPlace(top.input, channel.channel, top.position)
        for channel in sheet.channels
        for half in channel.halves
        for top in half
        if len(top.position) == _MAP_AXES
    ]
    return result.supports(sheet.row, places) if places else {}


def crop_box(row: SurveyRow, position: tuple[int, ...], size: tuple[int, int]) -> tuple[int, int, int, int] | None:
    """Return what a position of a row sees of a picture of a size (H, W): top, left, bottom, right, in whole pixels.

    Edges may lie outside the picture. None for all of it: where the receptive field is not known, or as large.
    """
    field = row.receptive_field
    if field is None or len(field.size) != 2 or len(position) != 2:
        return None
    edges = []
    for at, length, step, centre in zip(position, field.size, field.stride, field.centre, strict=True):
        middle = centre + at * step
        edges.append((math.floor(middle - (length - 1) / 2), math.ceil(middle + (length - 1) / 2) + 1))
    if all(low <= 0 and high >= whole for (low, high), whole in zip(edges, size, strict=True)):
        return None
    if all(high - low >= whole for (low, high), whole in zip(edges, size, strict=True)):
        return None
    (top, bottom), (left, right) = edges
    return top, left, bottom, right


def _cropped(picture: Image.Image, box: tuple[int, int, int, int] | None) -> Image.Image:
    if box is None:
        box = (0, 0, picture.height, picture.width)
    top, left, bottom, right = box
    side = max(bottom - top, right - left)
    square = Image.new("RGB", (side, side), (_GROUND,) * 3)
    inside = picture.crop((max(0, left), max(0, top), min(picture.width, right), min(picture.height, bottom)))
    across, down = (side - (right - left)) // 2, (side - (bottom - top)) // 2
    square.paste(inside, (across + max(0, -left), down + max(0, -top)))
    return square.resize((TILE, TILE), Image.Resampling.NEAREST if side < TILE else Image.Resampling.BOX)


def _paste(sheet: _Sheet, place: _CropPosition, tile: Image.Image) -> None:
    top = place.line * (TILE + GAP)
    left = place.column * (TILE + GAP) + (HALVES_GAP - GAP) * (place.column >= sheet.columns)
    sheet.pixels[top : top + TILE, left : left + TILE] = np.asarray(tile)
    sheet.is_drawn = True
