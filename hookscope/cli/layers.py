"""`hookscope layers`: the module tree, and what a pattern would select."""

import sys
from contextlib import redirect_stdout

import typer

from hookscope import options
from hookscope.cli.console import consoles, report
from hookscope.cli.options import Model, with_options
from hookscope.errors import ModelError


@with_options
def layers(model: Model, *, option: options.Layers) -> int:
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
    from hookscope import commands
    from hookscope.render.conversion import summary
    from hookscope.render.layer_columns import module_columns, module_rows
    from hookscope.render.tables import csv_text
    from hookscope.render.terminal import failure_panel, warnings_panel
    from hookscope.results.runs.atomic import check_writable, write_whole

    if option.csv is not None:
        check_writable(option.csv, "--csv")
    tables, messages = consoles(json=option.json)
    with redirect_stdout(sys.stderr if option.json else sys.stdout):  # a model may print
        table = commands.layers(model, option=option)
    if option.csv is not None:
        text = csv_text(module_columns(table.rows, table.cost), module_rows(table.rows, table.cost))
        write_whole(option.csv, text, "--csv")
    if table.warnings:
        messages.print(warnings_panel(table.warnings))
    if option.json:
        typer.echo(table.to_json(), nl=False)
    else:
        tables.print(summary(table, width=tables.width))
    if table.failure is None:
        return 0
    messages.print(failure_panel(table.failure))
    listed = f"{table.model.name} raised in a forward pass; the shapes up to there are listed"
    return report(ModelError(f"{listed}{table.failure.remedy_in_arguments}."))
