"""The run directory of `history`: the overview, files, tensors and verdicts as CSV, and all of it as JSON."""

from pathlib import Path

from hookscope.errors import UsageError
from hookscope.render.history import describe_history
from hookscope.render.history_columns import file_columns, output_columns, tensor_columns, verdict_columns
from hookscope.render.overviews.document import draw_document
from hookscope.render.tables import csv_text
from hookscope.results.history import History
from hookscope.results.runs.directory import OVERVIEW, SavedRun, new_run
from hookscope.results.runs.record import record_of
from hookscope.results.runs.store import write_result


def save_history(result: History, path: str | Path, *, command: str = "", numbered: bool = False) -> SavedRun:
    """Write a result as `hookscope history` does: whole or not at all, and over nothing but an earlier run.

    If `numbered`, a number is appended to the path rather than a run of another command replaced.

    Raises:
        UsageError: If there is nothing to save.
        OutputError: If something cannot be written.
    """
    provenance = result.provenance
    if provenance is None:
        raise UsageError("This history was read from a run, so it cannot be saved as another one.")
    with new_run(Path(path), numbered=numbered) as run:
        draw_document(describe_history(result)).save(run.path / OVERVIEW, compress_level=6)
        texts = _tables(result)
        for name, text in texts.items():
            (run.path / name).write_text(text, encoding="utf-8")
        stored = write_result(run.path, result)
        folder = run.finish(record_of("history", command, provenance, overview=OVERVIEW))
    return SavedRun(folder, (*texts, *stored))


def _tables(result: History) -> dict[str, str]:
    places = [(verdict, place) for verdict in result.verdicts for place in verdict.places]
    texts = {
        "files.csv": csv_text(file_columns(result), result.files),
        "weights.csv": csv_text(tensor_columns(result), result.rows),
        "verdicts.csv": csv_text(verdict_columns(result), places),
    }
    outputs = {"activations.csv": csv_text(output_columns(result), result.activations)} if result.activations else {}
    return texts | outputs
