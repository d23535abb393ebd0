"""Norms of tokens as a picture: those of patches over the photograph, class token and registers as cells beside it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.render.columns import number_text
from hookscope.render.lettering import font, line_height
from hookscope.render.overlays import ColourScale, bar, colour_scale, shrunk
from hookscope.render.overviews.activations import model_line
from hookscope.render.overviews.over_photograph import BAR, Cell, cell_row, input_cell, map_pixels
from hookscope.render.overviews.sheet import (
    DIM,
    GAP,
    INK,
    INNER,
    NAME,
    PAPER,
    RED,
    SMALL,
    TEXT,
    TITLE,
    Line,
    draw_sheet,
    text_block,
)
from hookscope.results.activations import Activations
from hookscope.results.inputs import Photograph
from hookscope.results.token_norms import DEVIATIONS, LEAST_RATIO, TokenMap

_COLUMNS = 3
_TALLEST = 320  # pixels, of a photograph
_BESIDE = 140  # pixels, for the cells of tokens in front of the grid
_CELL = 18
_STEP = 34


def draw_token_norms(result: Activations, photographs: Sequence[Photograph]) -> Image.Image:
    """Draw the norms of a run's tokens, 1,200 pixels wide; `photographs` are those of the first inputs."""
    rows: list[list[Cell]] = []
    footing: list[Line] = []
    for index, photograph in enumerate(photographs):
        maps = [each for each in result.token_maps if each.input_index == index]
        if not maps:
            continue
        small = _fitted(photograph)
        cells = [input_cell(result.inputs[index], small), *(_map_cell(each, small) for each in maps)]
        rows += [cells[start : start + _COLUMNS] for start in range(0, len(cells), _COLUMNS)]
        footing += [(photograph.remark, TEXT, DIM)] if photograph.remark else []
    limit = f"{LEAST_RATIO:.0f} times the median and {DEVIATIONS:.0f} robust standard deviations above it"
    heading: list[Line] = [
        (f"Token norms of {result.model.name}", TITLE, INK),
        model_line(result.model, "L2 norm over channels", "each map has its own scale, from 0"),
        (f"high: beyond {limit}", TEXT, DIM),
    ]
    return draw_sheet([text_block(heading), *(cell_row(row, _COLUMNS) for row in rows), text_block(footing)])


def _fitted(photograph: Photograph) -> Photograph:
    width = (INNER - (_COLUMNS - 1) * GAP) // _COLUMNS - _BESIDE
    tall, wide = photograph.pixels.shape[:2]
    ratio = min(width / wide, _TALLEST / tall)
    return shrunk(photograph, max(1, round(tall * ratio)), max(1, round(wide * ratio)))


def _map_cell(each: TokenMap, photograph: Photograph) -> Cell:
    scale = colour_scale(each)
    pixels = map_pixels(each, photograph)
    high = each.high
    longest = "; ".join([*high[:2], *([f"{len(high) - 2} more"] if len(high) > 2 else [])])
    words = f"{len(high)} of {len(each.norms)} high: {longest}" if high else "no token is high"
    lines: list[Line] = [
        (each.label or "(model)", NAME, INK),
        (words, TEXT, RED if high else DIM),
        (f"median {number_text(each.median)}, limit {number_text(each.limit)}", TEXT, DIM),
    ]
    return Cell(_with_prefix(pixels, each, scale), lines, bar(scale, 240, BAR), scale.labels)


def _with_prefix(pixels: NDArray[np.uint8], each: TokenMap, scale: ColourScale) -> NDArray[np.uint8]:
    """Return a map with the tokens in front of the grid at its right, in the colours of the map."""
    if not each.prefix:
        return pixels
    height = max(len(pixels), len(each.prefix) * _STEP)
    image = Image.new("RGB", (pixels.shape[1] + _BESIDE, height), PAPER)
    image.paste(Image.fromarray(pixels), (0, 0))
    pen = ImageDraw.Draw(image)
    left = pixels.shape[1] + 10
    colours = bar(scale, 256, 1)[0]
    for place, (name, norm) in enumerate(each.prefix_norms):
        top = place * _STEP
        level = min(round(255 * norm / scale.top), 255) if scale.top else 0
        pen.rectangle([left, top, left + _CELL, top + _CELL], fill=tuple(map(int, colours[level])), outline=DIM)
        pen.text((left + _CELL + 6, top - 2), name, DIM, font(SMALL))
        colour = RED if norm > each.limit else INK
        pen.text((left + _CELL + 6, top - 2 + line_height(SMALL)), number_text(norm), colour, font(SMALL))
    return np.asarray(image)
