"""The run directory of `survey`: the overview, crops, channels as CSV, bins, and all of it as JSON."""

from pathlib import Path

from PIL import Image

from hookscope.errors import UsageError
from hookscope.render import survey_columns
from hookscope.render.overviews.document import draw_document
from hookscope.render.survey import describe_survey
from hookscope.render.survey_columns import channel_rows
from hookscope.render.survey_crops import crop_sheets
from hookscope.render.survey_failures import wrong_strips
from hookscope.render.tables import csv_text
from hookscope.results.runs.directory import OVERVIEW, SavedRun, new_run
from hookscope.results.runs.record import record_of
from hookscope.results.runs.store import write_result
from hookscope.results.survey import CropSheet, Survey, WrongStrip
from hookscope.text import counted

CHANNELS, EMBEDDINGS = "channels.csv", "embeddings.csv"


def save_survey(
    result: Survey, path: str | Path, *, crops: int | None = None, command: str = "", numbered: bool = False
) -> SavedRun:
    """Write a survey as `hookscope survey` does: whole or not at all, and over nothing but an earlier run.

    Args:
        result: The survey.
        path: The run directory.
        crops: Channels of each row whose crops are drawn; None for as many as make 128 of all rows, 0 for none.
        command: The command line.
        numbered: Whether a number is appended to the path rather than a run of another command replaced.

    Raises:
        UsageError: If there is nothing to save.
        OutputError: If something cannot be written.
    """
    provenance = result.provenance
    if provenance is None:
        raise UsageError("This survey was read from a run, so it cannot be saved as another one.")
    with new_run(Path(path), numbered=numbered) as run:
        sheets: list[CropSheet] = []
        wrong: list[WrongStrip] = []
        images: dict[str, Image.Image] = {}
        for sheet, picture in crop_sheets(result, crops):
            (run.path / "crops").mkdir(exist_ok=True)
            picture.save(run.path / sheet.path, quality=85)
            sheets.append(sheet)
            images[sheet.path] = picture.crop((0, 0, picture.width, sheet.tile))
        for strip, picture in wrong_strips(result):
            (run.path / "wrong").mkdir(exist_ok=True)
            picture.save(run.path / strip.path, quality=90)
            wrong.append(strip)
            images[strip.path] = picture
        document = describe_survey(result, crops=sheets, wrong=wrong)
        draw_document(document, images).save(run.path / OVERVIEW, compress_level=6)
        texts = {CHANNELS: csv_text(survey_columns.CHANNELS, channel_rows(result))}
        texts |= {EMBEDDINGS: csv_text(survey_columns.EMBEDDINGS, result.tables)} if result.tables else {}
        for name, text in texts.items():
            (run.path / name).write_text(text, encoding="utf-8")
        stored = write_result(run.path, result)
        pictures = {"overview": OVERVIEW, "crops": tuple(sheets), "wrong": tuple(wrong)}
        folder = run.finish(record_of("survey", command, provenance, **pictures))
    drawn = [counted(len(sheets), "sheet") + " of crops"] if sheets else []
    return SavedRun(folder, (*drawn, *texts, *stored))
