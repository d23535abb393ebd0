"""Write the overview of a watched training into its folder."""

from pathlib import Path

from hookscope.commands.watch.describe import describe_training
from hookscope.errors import OutputError
from hookscope.reporting.overviews.document import draw_document
from hookscope.results.runs.atomic import reason_of, whole_file
from hookscope.results.runs.directory import OVERVIEW
from hookscope.results.training import TrainingLog
from hookscope.text import safe_text


def save_training_overview(log: TrainingLog, folder: Path) -> Path:
    """Write overview.png into the folder of a watched training, in place of an earlier one; return its path.

    Raises:
        OutputError: If it cannot be written.
    """
    path = folder / OVERVIEW
    try:
        with whole_file(path) as file:
            draw_document(describe_training(log)).save(file, "PNG")
    except OSError as error:
        raise OutputError(f"Cannot write '{safe_text(str(path))}': {reason_of(error)}.") from error
    return path
