"""What `report` does, for the command line and for Python."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hookscope.errors import OutputError, UsageError
from hookscope.options import File, of_kind

if TYPE_CHECKING:
    from hookscope.results.activations import Activations
    from hookscope.results.attention import Attention
    from hookscope.results.attributions import Attributions
    from hookscope.results.differences import Differences
    from hookscope.results.gradients import Gradients
    from hookscope.results.history import History
    from hookscope.results.survey import Survey
    from hookscope.results.training import TrainingLog


def report(
    run: str | Path | Activations | Gradients | Attributions | Attention | Differences | History | Survey | TrainingLog,
    out: str | Path | None = None,
) -> Path:
    """Write one self-contained HTML page of a run.

    For the folder of a watched training, RUN/overview.png is written too if the folder is writable, because nothing is
    drawn while it trains.

    Args:
        run: A run directory, the folder of a watched training, or a result.
        out: The HTML file; None for RUN.html next to the run directory.

    Returns:
        The file that was written.

    Raises:
        InputError: If `run` is not a run that can be read.
        OutputError: If the page cannot be written.
        UsageError: If `run` is a result and `out` is None.
    """
    from hookscope.commands.conversion import DESCRIPTIONS
    from hookscope.commands.watch.describe import describe_training
    from hookscope.commands.watch.save import save_training_overview
    from hookscope.commands.watch.training_log import is_training, read_training
    from hookscope.reporting.html.document import document_html
    from hookscope.results.renderers import RunResult
    from hookscope.results.runs.directory import followed
    from hookscope.results.runs.reading import read_run
    from hookscope.results.runs.reports import check_report_target, default_report_path, write_report
    from hookscope.results.training import TrainingLog

    if not isinstance(run, str | Path):
        if not isinstance(run, RunResult | TrainingLog):
            raise UsageError(f"There is no page of type {type(run).__name__}: give a run directory, or a run's result.")
        if out is None:
            raise UsageError("The page of a result needs a file name: give out.")
        target = Path(of_kind("out", File, out))
        if isinstance(run, TrainingLog):
            write_report(target, document_html(describe_training(run)))
            return target
        with TemporaryDirectory() as folder:
            return report(run.save(Path(folder) / "run"), target)
    target = default_report_path(Path(run)) if out is None else Path(of_kind("out", File, out))
    check_report_target(target)
    if is_training(Path(run)):
        log = read_training(Path(run))
        with suppress(OutputError):  # the folder is on a read-only disk
            save_training_overview(log, Path(run))
        return report(log, target)
    stored = read_run(followed(Path(run)))
    write_report(target, document_html(DESCRIPTIONS[type(stored.result)](stored.result, stored.record), stored))
    return target
