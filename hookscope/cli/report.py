"""`hookscope report`: one self-contained HTML page of a run."""

from pathlib import Path

from hookscope import options
from hookscope.cli.console import consoles, height_of, print_path
from hookscope.cli.exporters import check_tensorboard, print_page
from hookscope.errors import OutputError, UsageError


def report(run: Path, *, option: options.Report) -> int:
    """Write RUN as one self-contained HTML page: tables, plots, feature maps.

    \b
    hookscope report hookscope-runs/activations-demo-cat
    hookscope report hookscope-runs/grads-demo-cat -o gradients.html
    hookscope report out --quiet
    hookscope report runs/a --tensorboard logs/a
    """
    from hookscope.commands.report import report as run_report
    from hookscope.commands.watch.describe import describe_training
    from hookscope.commands.watch.save import save_training_overview
    from hookscope.commands.watch.training_log import is_training, read_training
    from hookscope.reporting.document_text import document_text
    from hookscope.results.runs.reports import default_report_path

    log = read_training(run) if is_training(run) else None
    if option.tensorboard is not None:
        if log is None:
            raise UsageError(
                "--tensorboard is for a watched training. For another run, give it to the command that makes the run."
            )
        check_tensorboard(option.tensorboard, run)
    tables, messages = consoles(json=False)
    tables.quiet = option.quiet
    if log is not None:
        text = document_text(describe_training(log), width=tables.width, full=option.full, height=height_of(tables))
        for part in text:
            tables.print(part)
    page = run_report(run if log is None else log, option.out or default_report_path(run))
    if log is not None:
        try:
            print_path(tables, "Picture", save_training_overview(log, run))
        except OutputError as error:
            messages.print(f"note: {error}", soft_wrap=True)
        if option.tensorboard is not None:
            from hookscope.reporting.tensorboard import write_training

            write_training(option.tensorboard, log)
    print_page(page, tables)
    return 0
