"""The files of `survey`: the overview, crops, and channels as CSV."""

from pathlib import Path

from PIL import Image

from hookscope import options
from hookscope.commands.survey.columns import CHANNELS, EMBEDDINGS, channel_rows
from hookscope.commands.survey.describe import describe_survey
from hookscope.commands.survey.describe_failures import wrong_strips
from hookscope.commands.survey.draw_crops import SCALE, crop_sheets
from hookscope.reporting.overviews.document import draw_document
from hookscope.reporting.tables import csv_text, write_tables
from hookscope.results.runs.directory import OVERVIEW, RunFiles
from hookscope.results.survey import CropSheet, Survey, WrongStrip
from hookscope.text import counted


def write_survey(folder: Path, result: Survey, *, crops: int | None = None) -> RunFiles:
    """Write the files of `hookscope survey`.

    `crops` is the number of channels drawn for each row; None for 128 in all, 0 for none.
    """
    sheets: list[CropSheet] = []
    wrong: list[WrongStrip] = []
    images: dict[str, Image.Image] = {}
    for sheet, picture in crop_sheets(result, options.Survey(crops=crops).crops):
        (folder / "crops").mkdir(exist_ok=True)
        picture.reduce(SCALE).save(folder / sheet.path, quality=85)
        sheets.append(sheet)
        images[sheet.path] = picture.crop((0, 0, picture.width, SCALE * sheet.tile))
    for strip, picture in wrong_strips(result):
        (folder / "wrong").mkdir(exist_ok=True)
        picture.save(folder / strip.path, quality=90)
        wrong.append(strip)
        images[strip.path] = picture
    draw_document(describe_survey(result, crops=sheets, wrong=wrong), images).save(folder / OVERVIEW, compress_level=6)
    texts = {"channels.csv": csv_text(CHANNELS, channel_rows(result))}
    texts |= {"embeddings.csv": csv_text(EMBEDDINGS, result.tables)} if result.tables else {}
    drawn = [counted(len(sheets), "sheet") + " of crops"] if sheets else []
    entries = {"overview": OVERVIEW, "crops": tuple(sheets), "wrong": tuple(wrong)}
    return RunFiles([*drawn, *write_tables(folder, texts)], entries)
