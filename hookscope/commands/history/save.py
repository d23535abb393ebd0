"""The files of `history`: the overview; files, tensors and verdicts as CSV."""

from pathlib import Path

from hookscope.commands.history.columns import file_columns, output_columns, tensor_columns, verdict_columns
from hookscope.commands.history.describe import describe_history
from hookscope.reporting.overviews.document import draw_document
from hookscope.reporting.tables import csv_text, write_tables
from hookscope.results.history import History
from hookscope.results.runs.directory import OVERVIEW, RunFiles


def write_history(folder: Path, result: History) -> RunFiles:
    """Write the files of `hookscope history`."""
    draw_document(describe_history(result)).save(folder / OVERVIEW, compress_level=6)
    places = [(verdict, place) for verdict in result.verdicts for place in verdict.places]
    texts = {
        "files.csv": csv_text(file_columns(result), result.files),
        "weights.csv": csv_text(tensor_columns(result), result.rows),
        "verdicts.csv": csv_text(verdict_columns(result), places),
    }
    if result.activations:
        texts["activations.csv"] = csv_text(output_columns(result), result.activations)
    return RunFiles(write_tables(folder, texts), {"overview": OVERVIEW})
