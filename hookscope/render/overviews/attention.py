"""One picture of a transformer's attention: maps over the photograph, every head of every block, and their numbers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from PIL import Image, ImageDraw

from hookscope.render.columns import scale_text
from hookscope.render.lettering import font, line_height
from hookscope.render.overlays import bar, colour_scale, shrunk
from hookscope.render.overviews.charts import BLUE
from hookscope.render.overviews.maps import coloured
from hookscope.render.overviews.over_photograph import BAR, Cell, cell_row, input_cell, map_pixels
from hookscope.render.overviews.sheet import (
    AMBER,
    DIM,
    GAP,
    INK,
    INNER,
    LINE,
    MARGIN,
    NAME,
    PAPER,
    RED,
    SMALL,
    TEXT,
    TITLE,
    Block,
    Colour,
    Line,
    draw_sheet,
    fitting,
    text_block,
    write,
)
from hookscope.results.attention import Attention, AttentionMap, HeadMaps, HeadRow
from hookscope.results.inputs import Photograph

_TALLEST = 420  # of a picture in it
_MOST_MAPS = 11
_MOST_BLOCKS = 24  # of which heads are shown: the first, the last, and evenly between
_MOST_HEADS = 24
_LEAST_WEIGHT = 0.001  # on places of the picture: a head with less is drawn as 0, not by its own scale
_NAMES = 150  # pixels for the names of blocks
_LARGEST_HEAD = 84
_TWO_LINES = 40  # a head drawn higher has room for the name of its block
_PANEL_HEIGHT = 130
_DOT = 3


def draw_attention(result: Attention, index: int, photograph: Photograph) -> Image.Image:
    """Draw one input of a result, 1,200 pixels wide."""
    maps = [each for each in result.maps if each.input_index == index][:_MOST_MAPS]
    wide = photograph.region.width / photograph.region.height
    columns = 1 if wide > 2.2 else min(len(maps) + 1, 2 if wide > 1.6 else 3 if wide > 1.1 else 4)
    columns = max(columns, 2 if wide <= 2.2 else 1)
    width = (INNER - (columns - 1) * GAP) // columns
    ratio = min(width / photograph.region.width, _TALLEST / photograph.region.height)
    height, width = (max(1, round(side * ratio)) for side in photograph.pixels.shape[:2])
    small = shrunk(photograph, height, width)
    picture = input_cell(result.inputs[index], small)
    if photograph.remark and not maps:  # nothing is drawn over the grey that stands for the input
        picture = replace(picture, pixels=np.full((1, width, 3), PAPER, np.uint8))
    cells = [picture, *(_map_cell(each, small) for each in maps)]
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    queries = dict.fromkeys(each.query for each in result.head_maps if each.input_index == index)
    own = [each for each in result.head_maps if each.input_index == index]
    of_query = ([each for each in own if each.query == query] for query in queries)
    below = [*map(partial(_heads_block, result), of_query), _numbers_block(result)]
    remarks = [photograph.remark] if photograph.remark and maps else []
    footing = [(sentence, TEXT, DIM) for sentence in (*remarks, *result.notes[-2:])]
    pictures = [cell_row(row, columns) for row in rows]
    numbers = [block for block in below if block is not None]
    return draw_sheet([text_block(_heading(result)), *pictures, *numbers, text_block(footing)])


def _heading(result: Attention) -> Sequence[Line]:
    model = result.model
    weights = "random weights: nothing here was learned" if model.random else f"weights: {model.weights}"
    census: Line = (result.census, TEXT, AMBER if result.unseen else INK)
    return (
        (f"What the attention of {model.name} looks at", TITLE, INK),
        census,
        (f"{weights}   ·   each map has its own scale, from 0", TEXT, DIM),
    )


def _map_cell(each: AttentionMap, photograph: Photograph) -> Cell:
    scale = colour_scale(each)
    heads = "mean over heads" if each.head is None else f"head {each.head}"
    if each.block == "rollout":
        heads = "through all blocks"
    rest = f"   ·   {each.elsewhere:.0%} on other tokens" if each.elsewhere >= 0.005 else ""
    lines = [(each.query, NAME, INK), (f"{each.block}, {heads}{rest}", TEXT, DIM)]
    pixels = map_pixels(each, photograph)
    if not scale.top:
        return Cell(pixels, [*lines, ("the map is 0 everywhere", TEXT, DIM)])
    return Cell(pixels, lines, bar(scale, 240, BAR), scale.labels)


# --- Heads ---


def spread(count: int, most: int) -> list[int]:
    """Return positions spread evenly over so many, the first and the last among them."""
    if count <= most:
        return [*range(count)]
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def _heads_block(result: Attention, maps: Sequence[HeadMaps]) -> Block | None:
    """Return small maps of every head: a row for each block, a column for each head."""
    shown = [maps[place] for place in spread(len(maps), _MOST_BLOCKS)]
    if not shown:
        return None
    columns = min(_MOST_HEADS, max(len(each.values) for each in shown))
    pitch = min(_LARGEST_HEAD, (INNER - _NAMES) // columns)
    side = pitch - 4
    sizes = [_drawn_size(each.values.shape[1:], side) for each in shown]
    flagged = {(each.index, each.head) for each in result.rows if each.is_one_token}
    some = "every block" if len(maps) == len(result.blocks) else f"{len(maps)} of {len(result.blocks)} blocks"
    skipped = f"   ·   {len(shown)} of them" if len(shown) < len(maps) else ""
    title = f"Every head of {some}: {maps[0].query}{skipped}"
    head_height = line_height(NAME) + line_height(SMALL) + 6
    marks = "red: one token has more than 90% of the weight, whatever the query" if flagged else ""

    def draw(image: Image.Image, top: int) -> None:
        pen = ImageDraw.Draw(image)
        write(pen, [(title, NAME, INK)], top, MARGIN, INNER)
        about = (f"head 0 to {columns - 1}, from the left   {marks}", SMALL, DIM)
        write(pen, [about], top + line_height(NAME), MARGIN, INNER)
        at = top + head_height
        for each, (height, width) in zip(shown, sizes, strict=True):
            short = fitting(_short(result.blocks[each.index].label), SMALL, _NAMES - 10)
            lines = [(f"block {each.index}", SMALL, INK), (short, SMALL, DIM)]
            write(pen, lines[: 1 + (height > _TWO_LINES)], at, MARGIN, _NAMES)
            for head in range(min(columns, len(each.values))):
                left = MARGIN + _NAMES + head * pitch
                values = each.values[head]
                shown_values = values if float(np.nansum(values)) > _LEAST_WEIGHT else np.zeros_like(values)
                pixels = Image.fromarray(coloured(shown_values))
                larger = pixels.width <= width and pixels.height <= height
                way = Image.Resampling.NEAREST if larger else Image.Resampling.BOX
                image.paste(pixels.resize((width, height), way), (left, at))
                if (each.index, head) in flagged:
                    pen.rectangle([left - 2, at - 2, left + width + 1, at + height + 1], outline=RED, width=2)
            at += max(height, line_height(SMALL)) + 4

    total = head_height + sum(max(height, line_height(SMALL)) + 4 for height, _ in sizes)
    return Block(total, draw)


def _short(label: str) -> str:
    """Return the last parts of a name, which tell blocks apart: "encoder_layer_3.self_attention"."""
    parts = label.split(".")
    numbered = [place for place, part in enumerate(parts) if any(map(str.isdigit, part))]
    return ".".join(parts[numbered[-1] if numbered else 0 :])


def _drawn_size(shape: Sequence[int], side: int) -> tuple[int, int]:
    largest = max(shape)
    return max(1, round(side * shape[0] / largest)), max(1, round(side * shape[1] / largest))


# --- Numbers ---


def _numbers_block(result: Attention) -> Block | None:
    """Return a panel for each number: a dot for each head over the blocks."""
    panels: list[tuple[str, Sequence[float | None]]] = [
        ("entropy, nats", [each.entropy for each in result.rows]),
        ("mean distance, patches", [each.distance for each in result.rows]),
        ("share on class token and registers", [_prefix_share(each) for each in result.rows]),
    ]
    known = [(title, values) for title, values in panels if any(each is not None for each in values)]
    if not known or len(result.blocks) < 2:
        return None
    width = (INNER - (len(known) - 1) * GAP) // len(known)

    def draw(image: Image.Image, top: int) -> None:
        for place, (title, values) in enumerate(known):
            _draw_panel(image, result, title, values, top, MARGIN + place * (width + GAP), width)

    return Block(line_height(SMALL) * 2 + _PANEL_HEIGHT + 10, draw)


def _prefix_share(row: HeadRow) -> float | None:
    shares = [each for each in (row.class_share, row.register_share) if each is not None]
    return sum(shares) if shares else None


def _draw_panel(
    image: Image.Image,
    result: Attention,
    title: str,
    values: Sequence[float | None],
    top: int,
    left: int,
    width: int,
) -> None:
    pen, drawn = ImageDraw.Draw(image), font(SMALL)
    finite = [each for each in values if each is not None and math.isfinite(each)]
    highest = max(finite, default=0.0) or 1.0
    write(pen, [(title, SMALL, INK)], top, left, width)
    edge = top + line_height(SMALL) + 4
    bottom = edge + _PANEL_HEIGHT
    label = scale_text(highest)
    margin = round(drawn.getlength(label)) + 8
    pen.text((left, edge - 4), label, DIM, drawn)
    pen.text((left, bottom - line_height(SMALL) + 4), "0", DIM, drawn)
    pen.line([left + margin, bottom, left + width, bottom], fill=LINE)
    pen.line([left + margin, edge, left + margin, bottom], fill=LINE)
    step = (width - margin) / len(result.blocks)
    for row, value in zip(result.rows, values, strict=True):
        if value is None or not math.isfinite(value):
            continue
        x = left + margin + step * (row.index + 0.5)
        y = bottom - value / highest * (_PANEL_HEIGHT - _DOT)
        colour: Colour = RED if row.is_one_token else BLUE
        pen.ellipse([x - _DOT, y - _DOT, x + _DOT, y + _DOT], fill=colour)
    ends = ("block 0", f"{len(result.blocks) - 1}")
    pen.text((left + margin, bottom + 3), ends[0], DIM, drawn)
    pen.text((left + width - drawn.getlength(ends[1]), bottom + 3), ends[1], DIM, drawn)
