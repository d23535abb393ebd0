"""Draw a document as one picture: the answer, findings on a time line, charts over steps and depth, maps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw

from hookscope.reporting.axes import placed_names
from hookscope.reporting.columns import number_text
from hookscope.reporting.document import (
    Bars,
    ChannelSearch,
    DepthChart,
    Document,
    Findings,
    HeatMaps,
    Level,
    Listing,
    Maps,
    PhotographMaps,
    Pictures,
    SmallMaps,
    StepCharts,
)
from hookscope.reporting.document_text import finding_line
from hookscope.reporting.lettering import line_height, text_width, write_line
from hookscope.reporting.overviews.charts import Chart
from hookscope.reporting.overviews.maps import MOST_STAGES, map_columns, small_maps
from hookscope.reporting.overviews.over_photograph import map_blocks
from hookscope.reporting.overviews.sheet import (
    AMBER,
    DIM,
    GREEN,
    INK,
    INNER,
    MARGIN,
    NAME,
    RED,
    SMALL,
    TEXT,
    TITLE,
    Block,
    Cell,
    Colour,
    Line,
    cell_row,
    column_width,
    draw_scale,
    draw_sheet,
    fitting,
    in_font,
    text_block,
    write,
)
from hookscope.reporting.palettes import BACKGROUND, colour_levels
from hookscope.reporting.plots import depth_plot, step_plot
from hookscope.reporting.steps import HeatMap
from hookscope.results.survey import CropSheet
from hookscope.text import counted, layer_words, percent_text

_MOST_FINDINGS, _MOST_LINES, _MOST_PICTURES, _MOST_WARNINGS = 8, 3, 3, 6

# Pixels.
_INPUT = 200  # a side, beside the answer
_TALLEST = 190  # pixels of pictures side by side
_NAMES, _WORDS = 330, 200  # left of bars or a heat map, for the names; right of bars, for words
_BAR, _STEP = 12, line_height(SMALL) + 8  # the height of a bar, and from one to the next
_MOST_ROWS = 36  # in a heat map
_ROW = 17
_SCALE = 200  # width of a colour bar

_LEGEND_OF_CROPS = (
    "Left: the inputs of one half of the data that excite the channel most; right: those of the other half. If alike, "
    "that is what it responds to. Grey is outside of the input."
)

_GROUND = (84, 91, 100)
_COLOURS: Mapping[Level, Colour] = {"fail": RED, "warn": AMBER, "good": GREEN, "dim": DIM, "": INK}


def draw_document(document: Document, images: Mapping[str, Image.Image] | None = None) -> Image.Image:
    """Draw a document, 1,200 pixels wide; `images` has pictures of the run by file, and the first line of crops."""
    headline, *sentences = document.answer
    answer: list[Line] = [(headline, NAME, _COLOURS[document.level])]
    answer += [(sentence, TEXT, INK) for sentence in sentences]
    heading = [(document.title, TITLE, INK)] + [(document.subtitle, SMALL, DIM)] * bool(document.subtitle)
    heading += [(line, TEXT, _COLOURS[level or "dim"]) for line, level in document.about]
    picture = document.input(_INPUT, _INPUT) if document.input else None
    drawn = [part for part in document.parts if type(part) in _BLOCKS]
    blocks = [block for part in drawn for block in _BLOCKS[type(part)](part, images or {})]
    warnings: list[Line] = [(line, TEXT, AMBER) for line in document.warnings[:_MOST_WARNINGS]]
    return draw_sheet([text_block(heading), text_block(answer, picture), *blocks, text_block(warnings)])


def _step_charts(part: StepCharts) -> list[Block]:
    plots = [plot for chart in part.charts if not chart.is_extra and (plot := step_plot(part, chart))]
    return [Chart(plot, has_names=plot is plots[-1]).block for plot in plots]


def _heat_maps(part: HeatMaps) -> list[Block]:
    maps = [heat for heat in part.maps(_MOST_ROWS, INNER - _NAMES) if not part.drawn or heat.key in part.drawn]
    maps = [heat for heat in maps if heat.values.any()]
    return [text_block([(part.legend, SMALL, DIM)]), *map(_heat_block, maps)] if maps else []


def _maps(part: Maps) -> list[Block]:
    more = _more(len(part.maps) - MOST_STAGES, "output")
    return [*map_columns(part), text_block([(part.legend, SMALL, DIM), *more])]


def _finding_lines(part: Findings) -> Block:
    lines: list[Line] = [
        (finding_line(finding), TEXT, _COLOURS[finding.level]) for finding in part.first(_MOST_FINDINGS)
    ]
    return text_block([*lines, *_more(len(part.findings) - _MOST_FINDINGS, "finding")])


def _listing(part: Listing) -> list[Block]:
    lines: list[Line] = [(line, TEXT, INK) for line in part.lines[:_MOST_LINES]]
    return [text_block([(part.title, NAME, INK), *lines, *_more(len(part.lines) - _MOST_LINES, "line")])]


def _more(count: int, noun: str) -> list[Line]:
    return [(f"and {counted(count, f'more {noun}')}", SMALL, DIM)] if count > 0 else []


def _time_line(part: Findings) -> Block:
    findings = part.first(_MOST_FINDINGS)

    def draw(image: Image.Image, top: int) -> None:
        for place, finding in enumerate(findings):
            where = layer_words(finding.where) if finding.where else ""
            line = (f"{finding.rule}  {where}", SMALL, _COLOURS[finding.level])
            _draw_bar(image, top + place * _STEP, line, finding.spans, finding.level, MARGIN + INNER)
        pen, top = ImageDraw.Draw(image), top + len(findings) * _STEP
        write(pen, _more(len(part.findings) - _MOST_FINDINGS, "finding"), top, MARGIN, _NAMES)
        for share, end in enumerate(part.ends):
            words = fitting(end, SMALL, INNER // 3)
            write_line(pen, words, SMALL, DIM, top, MARGIN + _NAMES + share * (INNER - _NAMES), share)

    return Block(len(findings) * _STEP + line_height(SMALL), draw)


def _bars(part: Bars) -> list[Block]:
    right = MARGIN + INNER - _WORDS

    def draw(image: Image.Image, top: int) -> None:
        for name, level, share, words in part.bars:
            _draw_bar(image, top, (name, SMALL, INK), [(0, 1000 * share)], level, right)
            shown = fitting(words, SMALL, _WORDS - 12)
            write_line(ImageDraw.Draw(image), shown, SMALL, INK, top, right + 12)
            top += _STEP

    heading = text_block([(part.title, NAME, INK), (part.legend, SMALL, DIM)])
    return [heading, Block(len(part.bars) * _STEP, draw)]


def _draw_bar(
    image: Image.Image, top: int, name: Line, spans: Sequence[tuple[float, float]], level: Level, right: int
) -> None:
    """Draw a name, and spans, in thousandths, of a ground that ends at `right`."""
    pen, left = ImageDraw.Draw(image), MARGIN + _NAMES
    write(pen, [(fitting(name[0], SMALL, _NAMES - 16), *name[1:])], top, MARGIN, _NAMES)
    upper, unit = top + (line_height(SMALL) - _BAR) // 2, (right - left) / 1000
    pen.rectangle([left, upper, right, upper + _BAR], _GROUND)
    for start, length in spans:
        begin = left + start * unit
        pen.rectangle([begin, upper, begin + max(3, length * unit), upper + _BAR], _COLOURS[level])


def _heat_block(heat: HeatMap) -> Block:
    head = line_height(NAME) + 8
    title = heat.title if heat.column_names else f"{heat.title} over measured steps"

    def draw(image: Image.Image, top: int) -> None:
        pen = ImageDraw.Draw(image)
        write_line(pen, in_font(title), NAME, INK, top, MARGIN)
        if heat.scale is not None:
            ends = [(percent_text if heat.share else number_text)(end) for end in heat.scale]
            draw_scale(image, colour_levels("viridis", _SCALE), ends, top, MARGIN + INNER - _SCALE, _SCALE)
        size = (INNER - _NAMES, _ROW * len(heat.names))
        picture = heat.picture(BACKGROUND + 1).convert("RGB").resize(size, Image.Resampling.NEAREST)
        image.paste(picture, (MARGIN + _NAMES, top + head))
        for row, name in enumerate(heat.names):
            words = [(fitting(name, SMALL, _NAMES - 16), SMALL, INK)]
            write(pen, words, top + head + row * _ROW - 1, MARGIN, _NAMES)
        below = top + head + size[1] + 4
        _write_columns(pen, heat, below)
        if heat.left_out:
            write(pen, [(f"{counted(heat.left_out, 'more row')}", SMALL, DIM)], below, MARGIN, _NAMES)

    return Block(head + _ROW * len(heat.names) + 4 + line_height(SMALL), draw)


def _write_columns(pen: ImageDraw.ImageDraw, heat: HeatMap, top: int) -> None:
    """Write the first and the last step, or the names of the last column and of others that do not overlap."""
    first, final = heat.columns[0][0], heat.columns[-1][1]
    names = heat.column_names or (f"step {first:,}", *([f"{final:,}"] if final > first else []))
    *others, last = [fitting(name, SMALL, INNER // 4) for name in names]
    left, right = MARGIN + _NAMES, MARGIN + INNER
    begins = [(left + (right - left) * place / len(heat.columns), name) for place, name in enumerate(others)]
    for _, at, name in placed_names([(right, last), *begins], lambda name: text_width([name], SMALL), left, right, 10):
        write_line(pen, name, SMALL, DIM, top, at)


def _pictures(part: Pictures, images: Mapping[str, Image.Image]) -> list[Block]:
    heading = text_block([(part.title, NAME, INK), (part.legend, SMALL, DIM)])
    if part.across > 1:
        width = column_width(part.across)
        cells = [
            Cell(
                _resized(images[picture.file], width) if picture.file in images else None,
                [
                    *((fitting(line, TEXT, width), TEXT, INK) for line in picture.lines),
                    (fitting(picture.name, SMALL, width), SMALL, DIM),
                ],
            )
            for picture in part.pictures
        ]
        rows = range(0, len(cells), part.across)
        return [heading, *(cell_row(cells[row : row + part.across], part.across) for row in rows)]
    shown = [picture for picture in part.pictures if picture.file in images][:_MOST_PICTURES]
    blocks = [_captioned([picture.name, *picture.lines], images[picture.file]) for picture in shown]
    return [heading, *blocks] if blocks else []


def _resized(picture: Image.Image, width: int) -> Image.Image:
    """Resize a picture to its place; pixels of a small picture become squares."""
    ratio = min(width / picture.width, _TALLEST / picture.height)
    size = (max(1, round(picture.width * ratio)), max(1, round(picture.height * ratio)))
    return picture.resize(size, Image.Resampling.NEAREST if ratio > 1 else Image.Resampling.LANCZOS)


def _crops(part: ChannelSearch, images: Mapping[str, Image.Image]) -> list[Block]:
    """Draw the crops of a few channels over depth; crops of whole pictures only if others are too few."""
    sheets = [sheet for sheet in part.sheets if sheet.path in images]
    parts = [sheet for sheet in sheets if not sheet.is_whole]
    sheets = parts if len(parts) >= _MOST_PICTURES else sheets
    if len(sheets) > _MOST_PICTURES:
        places = [round((at + 0.5) * len(sheets) / _MOST_PICTURES - 0.5) for at in range(_MOST_PICTURES)]
        sheets = [sheets[place] for place in places]
    blocks = [_captioned([_channel_words(part, sheet)], _resized(images[sheet.path], INNER)) for sheet in sheets]
    title = f"What excites {counted(len(sheets), 'channel')}"
    return [text_block([(title, NAME, INK), (_LEGEND_OF_CROPS, SMALL, DIM)]), *blocks] if blocks else []


def _channel_words(part: ChannelSearch, sheet: CropSheet) -> str:
    row = part.rows[sheet.row]
    channel = row.channels[sheet.channels[0]]
    words = f"{layer_words(row.label)}, channel {channel.channel}"
    if channel.best_class and channel.selectivity is not None:
        words += f", most for {channel.best_class} (selectivity {number_text(channel.selectivity)})"
    return words


def _captioned(lines: Sequence[str], picture: Image.Image) -> Block:
    shown = picture
    if picture.width > INNER:
        shown = picture.resize((INNER, max(1, picture.height * INNER // picture.width)), Image.Resampling.BOX)

    heading: list[Line] = [(fitting(line, TEXT, INNER), TEXT, INK) for line in lines]
    return cell_row([Cell(shown, heading=heading)], 1)


_BLOCKS: Mapping[type, Callable[[Any, Mapping[str, Image.Image]], list[Block]]] = {
    Findings: lambda part, _: [_time_line(part) if part.ends else _finding_lines(part)],
    StepCharts: lambda part, _: _step_charts(part),
    DepthChart: lambda part, _: [Chart(plot).block] if not part.is_extra and (plot := depth_plot(part)) else [],
    Bars: lambda part, _: _bars(part),
    HeatMaps: lambda part, _: _heat_maps(part),
    Maps: lambda part, _: _maps(part),
    PhotographMaps: lambda part, _: [block for mapped in part.inputs for block in map_blocks(mapped)],
    SmallMaps: lambda part, _: [small_maps(part)],
    Listing: lambda part, _: _listing(part),
    Pictures: _pictures,
    ChannelSearch: _crops,
}
