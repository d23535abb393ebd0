"""The commands that list something: modules, the contents of a file, names of models."""

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import typer

from hookscope import options
from hookscope.cli.console import consoles, height_of, report
from hookscope.errors import ModelError

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
    from hookscope.reporting.modules import module_columns, module_rows
    from hookscope.reporting.tables import csv_text
    from hookscope.reporting.terminal import failure_panel
    from hookscope.results.runs.atomic import check_writable, write_whole

    if option.csv is not None:
        check_writable(option.csv, "--csv")
    with redirect_stdout(sys.stderr if option.json else sys.stdout):  # a model may print
        table = run_layers(model, option=option)
    if option.csv is not None:
        text = csv_text(module_columns(table.rows, table.cost), module_rows(table.rows, table.cost))
        write_whole(option.csv, text, "--csv")
    messages = _print(table, json=option.json)
    if table.failure is None:
        return 0
    messages.print(failure_panel(table.failure))
    listed = f"{table.model.name} raised in a forward pass; the shapes up to there are listed"
    return report(ModelError(f"{listed}{table.failure.remedy_in_arguments}."))


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

    for name in model_names(pattern):
        typer.echo(name)
    return 0
