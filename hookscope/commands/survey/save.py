"""The files of `survey`: the overview, crops, and channels as CSV."""

import math
from operator import itemgetter
from pathlib import Path

from PIL import Image, ImageDraw

from hookscope.commands.survey import columns as survey_columns
from hookscope.commands.survey.columns import TIGHT, channel_rows
from hookscope.commands.survey.describe import describe_survey
from hookscope.commands.survey.describe_failures import wrong_strips
from hookscope.commands.survey.draw_crops import SCALE, crop_sheets
from hookscope.reporting.columns import number_text
from hookscope.reporting.lettering import line_height, write_line
from hookscope.reporting.overviews.charts import BLUE
from hookscope.reporting.overviews.document import draw_document
from hookscope.reporting.overviews.sheet import AMBER, INK, INNER, PAPER, RED, SMALL, fitting
from hookscope.reporting.tables import csv_text, write_tables
from hookscope.results.headroom import FLOAT16, FORMATS
from hookscope.results.runs.directory import OVERVIEW, RunFiles
from hookscope.results.survey import CropSheet, Survey, WrongStrip
from hookscope.text import counted, figure, layer_words

CHANNELS, EMBEDDINGS = "channels.csv", "embeddings.csv"
_LIMIT_BARS = "limit bars"

_MOST_BARS = 10
_GROUND = (84, 91, 100)
_NAMES, _WORDS, _BAR = 330, 200, 12  # pixels: left of the bars, right of them, their height


def write_survey(folder: Path, result: Survey, *, crops: int | None = None) -> RunFiles:
    """Write the files of `hookscope survey`.

    `crops` is the number of channels drawn for each row; None for 128 in all, 0 for none.
    """
    sheets: list[CropSheet] = []
    wrong: list[WrongStrip] = []
    images: dict[str, Image.Image] = {}
    for sheet, picture in crop_sheets(result, crops):
        (folder / "crops").mkdir(exist_ok=True)
        picture.reduce(SCALE).save(folder / sheet.path, quality=85)
        sheets.append(sheet)
        images[sheet.path] = picture.crop((0, 0, picture.width, SCALE * sheet.tile))
    for strip, picture in wrong_strips(result):
        (folder / "wrong").mkdir(exist_ok=True)
        picture.save(folder / strip.path, quality=90)
        wrong.append(strip)
        images[strip.path] = picture
    if bars := _draw_limit_bars(result):
        images[_LIMIT_BARS] = bars
    document = describe_survey(result, crops=sheets, wrong=wrong, limit_bars=_LIMIT_BARS if bars else "")
    draw_document(document, images).save(folder / OVERVIEW, compress_level=6)
    texts = {CHANNELS: csv_text(survey_columns.CHANNELS, channel_rows(result))}
    texts |= {EMBEDDINGS: csv_text(survey_columns.EMBEDDINGS, result.tables)} if result.tables else {}
    drawn = [counted(len(sheets), "sheet") + " of crops"] if sheets else []
    entries = {"overview": OVERVIEW, "crops": tuple(sheets), "wrong": tuple(wrong)}
    return RunFiles([*drawn, *write_tables(folder, texts)], entries)


def _draw_limit_bars(result: Survey) -> Image.Image | None:
    """Draw the largest magnitudes as shares of the limit, on a logarithmic scale from 1; None without any."""
    limit, step, whole = FORMATS[FLOAT16].greatest, line_height(SMALL) + 6, INNER - _NAMES - _WORDS
    peaks = [(peak, layer_words(row.label)) for row in result.rows if (peak := row.activation.max_abs)]
    shown = sorted(peaks, key=itemgetter(0), reverse=True)[:_MOST_BARS]
    if not shown:
        return None
    image = Image.new("RGB", (INNER, len(shown) * step), PAPER)
    pen = ImageDraw.Draw(image)
    for place, (peak, name) in enumerate(shown):
        top, upper = place * step, place * step + (line_height(SMALL) - _BAR) // 2
        words = "above it" if peak > limit else f"{figure(limit / peak, 3)}\N{MULTIPLICATION SIGN} below it"
        share = min(math.log(max(peak, 1.0)) / math.log(limit), 1.0)
        colour = RED if peak > limit else AMBER if peak > limit / TIGHT else BLUE
        write_line(pen, fitting(name, SMALL, _NAMES - 16), SMALL, INK, top, 0)
        pen.rectangle([_NAMES, upper, _NAMES + whole, upper + _BAR], _GROUND)
        pen.rectangle([_NAMES, upper, _NAMES + max(2, round(whole * share)), upper + _BAR], colour)
        text = fitting(f"{number_text(peak, 3)}, {words}", SMALL, _WORDS - 12)
        write_line(pen, text, SMALL, INK, top, _NAMES + whole + 12)
    return image
