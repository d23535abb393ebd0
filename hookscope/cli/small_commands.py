"""The small commands: they list modules, the contents of a file and names of models, and write the page of a run."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hookscope import options
from hookscope.cli.console import consoles, height_of, print_path
from hookscope.cli.console import report as report_error
from hookscope.cli.exporters import check_tensorboard, print_page
from hookscope.errors import ModelError, OutputError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from hookscope.results.contents import CheckpointContents
    from hookscope.results.network import ModuleTable


def layers(model: str, *, option: options.Layers) -> int:
    """List MODEL's modules with types, parameters and shapes, and mark those that the patterns select.

    Shapes come from a forward pass on the meta device, which computes nothing; where that fails, from a real one.
    --cost runs the network for real.

    \b
    hookscope layers resnet34
    hookscope layers resnet34 --layer conv --layer '!downsample'
    hookscope layers resnet152 --cost --depth 2
    hookscope layers densenet121 --ops --layer op:cat
    hookscope layers net.py:build --input-shape 1,3,32,32
    hookscope layers net.py:build --input-shape 'tokens=4,20:int64<1000' --input-shape meta=4,5
    """
    from hookscope.commands.layers import layers as run_layers
    from hookscope.reporting.modules import module_table_of
    from hookscope.reporting.tables import csv_text
    from hookscope.reporting.terminal import failure_panel
    from hookscope.results.runs.atomic import check_text_target, write_whole

    if option.csv is not None:
        check_text_target(option.csv, "--csv")
    with redirect_stdout(sys.stderr if option.json else sys.stdout):  # a model may print
        table = run_layers(model, option=option)
    if option.csv is not None:
        write_whole(option.csv, csv_text(*module_table_of(table)), "--csv")
    messages = _print(table, json=option.json)
    if table.failure is None:
        return 0
    messages.print(failure_panel(table.failure))
    problem = f"{table.model.name} raised in a forward pass; the shapes up to there are listed"
    return report_error(ModelError(f"{problem}{table.failure.remedy(files=False)}."))


def checkpoint(file: str, *, option: options.Checkpoint) -> int:
    """List the contents of FILE without running anything from it: all sets of weights, statistics of each tensor.

    \b
    hookscope checkpoint model.safetensors
    hookscope checkpoint training.ckpt --key ema --full
    hookscope checkpoint model.pt --json
    """
    from hookscope.commands.checkpoint import checkpoint as run_checkpoint

    _print(run_checkpoint(file, option=option), json=option.json, full=option.full)
    return 0


def _print(result: "ModuleTable | CheckpointContents", *, json: bool, full: bool = False) -> "Console":
    from hookscope.commands.conversion import summary
    from hookscope.reporting.terminal import warnings_panel

    tables, messages = consoles(json=json)
    if result.warnings:
        messages.print(warnings_panel(result.warnings))
    if json:
        typer.echo(result.to_json(), nl=False)
    else:
        tables.print(summary(result, width=tables.width, full=full, height=height_of(tables)))
    return messages


def models(pattern: str | None = None) -> int:
    """List the names that MODEL accepts, one per line.

    \b
    hookscope models
    hookscope models mobilenet
    hookscope models 'vit_?_16'
    """
    from hookscope.models.names import model_names

    typer.echo("\n".join(model_names(pattern)))
    return 0


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
    from hookscope.reporting.document_text import printed
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
        document = describe_training(log)
        tables.print(printed(document, width=tables.width, full=option.full, height=height_of(tables)))
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
