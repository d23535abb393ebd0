"""The run directory of `survey`: the overview, crops, channels as CSV, bins, and all of it as JSON."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import save

from hookscope.errors import UsageError
from hookscope.render import survey_columns
from hookscope.render.overviews.survey import draw_survey
from hookscope.render.survey_columns import channel_rows
from hookscope.render.survey_crops import crop_sheets
from hookscope.render.survey_failures import wrong_strips
from hookscope.render.tables import csv_text
from hookscope.results.runs.directory import OVERVIEW, new_run, written_lines
from hookscope.results.runs.serialize import as_json, provenance_to_dict
from hookscope.results.runs.survey import ARRAYS, BINS, FILE, channel_arrays, survey_to_dict
from hookscope.results.survey import CropSheet, Survey
from hookscope.text import counted, strict_json

CHANNELS, EMBEDDINGS = "channels.csv", "embeddings.csv"


@dataclass(frozen=True, slots=True)
class SavedSurvey:
    """A run directory that was written, and its sheets of crops."""

    folder: Path
    sheets: tuple[CropSheet, ...]

    @property
    def last_lines(self) -> str:
        """The command's last lines."""
        crops = [counted(len(self.sheets), "sheet") + " of crops"] if self.sheets else []
        tables = [EMBEDDINGS] if (self.folder / EMBEDDINGS).exists() else []
        return written_lines(self.folder / OVERVIEW, [*crops, CHANNELS, *tables, ARRAYS, BINS, FILE])


def save_survey(
    result: Survey, path: str | Path, *, crops: int | None = None, command: str = "", numbered: bool = False
) -> SavedSurvey:
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
        strips: list[tuple[CropSheet, Image.Image]] = []  # the first line of each sheet
        for about, picture in crop_sheets(result, crops):
            (run.path / "crops").mkdir(exist_ok=True)
            picture.save(run.path / about.path, quality=85)
            sheets.append(about)
            strips.append((about, picture.crop((0, 0, picture.width, about.tile))))
        wrong = [*wrong_strips(result)]
        for strip, picture in wrong:
            (run.path / "wrong").mkdir(exist_ok=True)
            picture.save(run.path / strip.path, quality=90)
        draw_survey(result, strips, wrong).save(run.path / OVERVIEW, compress_level=6)
        (run.path / BINS).write_bytes(save(_bins(result)))
        (run.path / ARRAYS).write_bytes(save(channel_arrays(result)))
        texts = {
            CHANNELS: csv_text(survey_columns.CHANNELS, channel_rows(result)),
            FILE: strict_json(survey_to_dict(result)),
        }
        texts |= {EMBEDDINGS: csv_text(survey_columns.EMBEDDINGS, result.tables)} if result.tables else {}
        for name, text in texts.items():
            (run.path / name).write_text(text, encoding="utf-8")
        record: dict[str, Any] = {
            "verb": "survey",
            "command": command,
            "overview": OVERVIEW,
            **provenance_to_dict(provenance),
            "inputs": [],
            **_entries(result),
            "crops": [asdict(each) for each in sheets],
            "wrong": [asdict(strip) for strip, _ in wrong],
        }
        folder = run.finish(record)
    return SavedSurvey(folder, tuple(sheets))


def _entries(result: Survey) -> dict[str, Any]:
    """Return what `run.json` has of a survey."""
    names = ("model", "input_count", "classes", "seed", "device", "dtype", "batch_size", "chunk_size", "chunk_count")
    values = {name: as_json(getattr(result, name)) for name in (*names, "resumed_count", "timings")}
    return {**values, "warnings": list(result.warnings), "notes": list(result.notes)}


def _bins(result: Survey) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for row in result.rows:
        if row.activation.distribution is not None:
            keys, counts = row.activation.distribution.binned()
            arrays[f"{row.label} keys"] = np.ascontiguousarray(keys, np.int32)
            arrays[f"{row.label} counts"] = np.ascontiguousarray(counts, np.int64)
    return arrays
