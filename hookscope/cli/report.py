"""`hookscope report`: one self-contained HTML page of a run."""

from pathlib import Path
from typing import Annotated

import typer

from hookscope.cli import options
from hookscope.cli import sections as under
from hookscope.cli.console import consoles
from hookscope.cli.exporters import check_exports, page_line
from hookscope.errors import OutputError, UsageError
from hookscope.text import safe_text


def report(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Run directory of `activations`, `grads`, `attribute`, `attention`, `diff`, `history` or `survey`, or "
            "the folder of a watched training.",
        ),
    ],
    out: Annotated[
        Path | None,
        under.write("--out", "-o", metavar="FILE", help="HTML file to write; default: RUN.html next to RUN."),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        under.write(
            "--tensorboard",
            metavar="DIR",
            help="Also write the scalars of a watched training for TensorBoard, at their steps; one DIR per run. "
            "Needs hookscope[tensorboard].",
        ),
    ] = None,
    quiet: options.Quiet = False,
    full: options.Full = False,
) -> int:
    """Write RUN as one self-contained HTML page: tables, plots, feature maps.

    \b
    hookscope report hookscope-runs/activations-demo-cat
    hookscope report hookscope-runs/grads-demo-cat -o gradients.html
    hookscope report out --quiet
    hookscope report runs/a --tensorboard logs/a
    """
    from hookscope import api
    from hookscope.results.runs.training_log import is_training

    if is_training(run):
        return _report_training(run, out, tensorboard, quiet=quiet, full=full)
    if tensorboard is not None:
        raise UsageError(
            "--tensorboard is for a watched training. For another run, give it to the command that makes the run."
        )
    page = api.report(run, out)
    if not quiet:
        tables, _ = consoles(json=False)
        tables.print(page_line(page), soft_wrap=True)
    return 0


def _report_training(run: Path, out: Path | None, tensorboard: Path | None, *, quiet: bool, full: bool) -> int:
    from hookscope import api
    from hookscope.render.training_files import save_training_overview
    from hookscope.render.training_text import training_summary
    from hookscope.results.runs.reports import default_report_path
    from hookscope.results.runs.training_log import read_training

    check_exports(run, show=False, tensorboard=tensorboard, page=None)
    log = read_training(run)
    tables, messages = consoles(json=False)
    if not quiet:
        for part in training_summary(log, width=tables.width, full=full):
            tables.print(part)
    page = api.report(log, default_report_path(run) if out is None else out)
    try:
        overview = save_training_overview(log, run)
    except OutputError as error:
        messages.print(f"note: {error}", soft_wrap=True)
    else:
        if not quiet:
            tables.print(f"Picture: {safe_text(str(overview))}", soft_wrap=True)
    if tensorboard is not None:
        from hookscope.cli.tensorboard import write_training

        write_training(tensorboard, log)
    if not quiet:
        tables.print(page_line(page), soft_wrap=True)
    return 0
