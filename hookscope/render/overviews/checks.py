"""What a check found, in one picture: findings in words, wrong pictures, layers that fail, all layers over depth."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.render.check_report import accuracy_line, level_counts, readable, untold_error, verdict
from hookscope.render.columns import probability_text
from hookscope.render.lettering import line_height
from hookscope.render.overviews.activations import depth_blocks, finding_lines, model_line
from hookscope.render.overviews.maps import MAP_KEY, MOST_STAGES, MapColumns
from hookscope.render.overviews.sheet import (
    DIM,
    GAP,
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
    Line,
    draw_sheet,
    fitting,
    framed,
    text_block,
    write,
)
from hookscope.results.accuracy import WrongPicture
from hookscope.results.activations import MapSummary
from hookscope.results.check import CheckReport, OverviewParts
from hookscope.text import counted

# Wrong pictures in a row, and how high one is drawn at most, in pixels.
_ACROSS = 4
_TALLEST = 190


def draw_check(report: CheckReport) -> Image.Image:
    """Draw the overview of a check, 1,200 pixels wide."""
    report, parts = readable(report), report.overview_parts or OverviewParts()
    labels = {row.label for row in parts.failing}
    ground = [place for place, row in enumerate(parts.rows) if row.label in labels]
    blocks = [text_block(_heading(report)), text_block(_words(report)), *_wrong_pictures(report, parts.pictures)]
    return draw_sheet([*blocks, *_maps(parts.summaries), *depth_blocks(parts.rows, ground=ground)])


def _heading(report: CheckReport) -> list[Line]:
    words = ": ".join(filter(None, (verdict(report), level_counts(report.findings))))
    heading = [(f"{report.checkpoint} {words}", TITLE, GREEN if report.passed else RED)]
    return heading if report.model is None else [*heading, model_line(report.model)]


def _words(report: CheckReport) -> list[Line]:
    error, accuracy = untold_error(report), accuracy_line(report)
    lines = [(error, TEXT, RED)] if error else []
    if report.findings or not error:
        lines += finding_lines(report.findings, "No rule objects to it.")
    return [*lines, (accuracy, TEXT, INK)] if accuracy else lines


def _wrong_pictures(report: CheckReport, pictures: Sequence[NDArray[np.uint8] | None]) -> list[Block]:
    if report.accuracy is None or not report.accuracy.worst:
        return []
    worst, multi_label = report.accuracy.worst, report.accuracy.multi_label
    width = (INNER - (_ACROSS - 1) * GAP) // _ACROSS
    cells = [(_fitted(pixels, width), each) for each, pixels in zip_longest(worst, pictures)]
    rows = [_picture_row(cells[start : start + _ACROSS], width, multi_label) for start in range(0, len(cells), _ACROSS)]
    of = (
        "probability of a label wrongly given, and of one missed"
        if multi_label
        else "softmax that it gives to the class"
    )
    heading = [
        ("Wrong pictures, most confident first", NAME, INK),
        (f"As the network got them; in brackets, the {of}.", SMALL, DIM),
    ]
    return [text_block(heading), *rows]


def _fitted(pixels: NDArray[np.uint8] | None, width: int) -> Image.Image | None:
    """Return a picture as large as its place; of a small one each pixel is a square."""
    if pixels is None:
        return None
    picture = Image.fromarray(pixels).convert("RGB")
    ratio = min(width / picture.width, _TALLEST / picture.height)
    size = (max(1, round(picture.width * ratio)), max(1, round(picture.height * ratio)))
    return picture.resize(size, Image.Resampling.NEAREST if ratio > 1 else Image.Resampling.LANCZOS)


def _picture_row(cells: Sequence[tuple[Image.Image | None, WrongPicture]], width: int, multi_label: bool) -> Block:
    above = max((picture.height + 6 for picture, _ in cells if picture), default=0)

    def draw(image: Image.Image, top: int) -> None:
        pen = ImageDraw.Draw(image)
        for place, (picture, wrong) in enumerate(cells):
            left = MARGIN + place * (width + GAP)
            if picture:
                framed(image, picture, left, top)
            lines = [
                (fitting(text, size, width), size, colour) for text, size, colour in _wrong_lines(wrong, multi_label)
            ]
            write(pen, lines, top + above, left, width)

    return Block(above + 2 * line_height(TEXT) + line_height(SMALL), draw)


def _wrong_lines(wrong: WrongPicture, multi_label: bool) -> list[Line]:
    label = f"{wrong.label}{_in_brackets(wrong.label_probability)}"
    if wrong.probability is None and wrong.label_probability is None:
        taken = "scores with NaN"
    else:
        taken = f"{'given' if multi_label else 'taken for'} {wrong.taken_for}{_in_brackets(wrong.probability)}"
    name = PurePath(wrong.name).name or wrong.name
    return [(f"labelled {label}", TEXT, INK), (taken, TEXT, RED), (name, SMALL, DIM)]


def _in_brackets(probability: float | None) -> str:
    return "" if probability is None else f" ({probability_text(probability)})"


def _maps(summaries: Sequence[MapSummary]) -> list[Block]:
    if not summaries:
        return []
    columns = MapColumns(summaries[:MOST_STAGES], MARGIN)
    left_out = len(summaries) - len(columns.summaries)
    more = f"{counted(left_out, 'more failing output')} with maps: see the grids. " if left_out else ""
    return [Block(columns.height, columns.draw), text_block([(f"{more}{MAP_KEY}", SMALL, DIM)])]
