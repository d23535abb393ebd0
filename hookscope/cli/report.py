"""`hookscope report`: one self-contained HTML page of a run."""

from pathlib import Path
from typing import Annotated

import typer

from hookscope import options
from hookscope.cli.console import consoles, height_of, print_path
from hookscope.cli.exporters import check_tensorboard, print_page
from hookscope.errors import OutputError, UsageError


def report(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Run directory of `activations`, `grads`, `attribute`, `attention`, `diff`, `history` or `survey`, or "
            "the folder of a watched training.",
        ),
    ],
    *,
    option: options.Report,
) -> int:
    """Write RUN as one self-contained HTML page: tables, plots, feature maps.

    \b
    hookscope report hookscope-runs/activations-demo-cat
    hookscope report hookscope-runs/grads-demo-cat -o gradients.html
    hookscope report out --quiet
    hookscope report runs/a --tensorboard logs/a
    """
    from hookscope.commands.report import report as run_report
    from hookscope.commands.watch.training_log import is_training

    if is_training(run):
        return _report_training(run, option)
    if option.tensorboard is not None:
        raise UsageError(
            "--tensorboard is for a watched training. For another run, give it to the command that makes the run."
        )
    page = run_report(run, option.out)
    if not option.quiet:
        print_page(page, consoles(json=False)[0])
    return 0


def _report_training(run: Path, option: options.Report) -> int:
    from hookscope.commands.report import report as run_report
    from hookscope.commands.watch.describe import describe_training
    from hookscope.commands.watch.save import save_training_overview
    from hookscope.commands.watch.training_log import read_training
    from hookscope.reporting.document_text import document_text
    from hookscope.results.runs.reports import default_report_path

    if option.tensorboard is not None:
        check_tensorboard(option.tensorboard, run)
    log = read_training(run)
    tables, messages = consoles(json=False)
    if not option.quiet:
        text = document_text(describe_training(log), width=tables.width, full=option.full, height=height_of(tables))
        for part in text:
            tables.print(part)
    page = run_report(log, default_report_path(run) if option.out is None else option.out)
    try:
        overview = save_training_overview(log, run)
    except OutputError as error:
        messages.print(f"note: {error}", soft_wrap=True)
    else:
        if not option.quiet:
            print_path(tables, "Picture", overview)
    if option.tensorboard is not None:
        from hookscope.cli.tensorboard import write_training

        write_training(option.tensorboard, log)
    if not option.quiet:
        print_page(page, tables)
    return 0
