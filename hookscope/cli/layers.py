"""`hookscope layers`: the module tree, and what a pattern would select."""

import sys
from contextlib import redirect_stdout

import typer

from hookscope.cli import options
from hookscope.cli.console import consoles, report
from hookscope.cli.run_model import arguments_of
from hookscope.errors import ModelError


def layers(
    model: options.Model,
    layer: options.Layer = None,
    ops: options.Ops = False,
    weights: options.Weights = "auto",
    arch: options.Arch = None,
    model_arg: options.ModelArg = None,
    trust: options.Trust = False,
    key: options.Key = None,
    allow_missing: options.AllowMissing = None,
    allow_unexpected: options.AllowUnexpected = None,
    input_shape: options.InputShape = None,
    input: options.NamedInputs = None,  # noqa: A002 - the name of the option
    cost: options.Cost = False,
    depth: options.Depth = None,
    csv: options.Csv = None,
    json: options.Json = False,
) -> int:
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
    from hookscope import api
    from hookscope.render.conversion import summary
    from hookscope.render.layer_columns import module_columns, module_rows
    from hookscope.render.tables import csv_text
    from hookscope.render.terminal import failure_panel, warnings_panel
    from hookscope.results.runs.atomic import check_writable, write_whole

    if csv is not None:
        check_writable(csv, "--csv")
    tables, messages = consoles(json=json)
    with redirect_stdout(sys.stderr if json else sys.stdout):  # a model may print
        table = api.layers(**arguments_of(api.layers, locals()))
    if csv is not None:
        text = csv_text(module_columns(table.rows, table.cost), module_rows(table.rows, table.cost))
        write_whole(csv, text, "--csv")
    if table.warnings:
        messages.print(warnings_panel(table.warnings))
    if json:
        typer.echo(table.to_json(), nl=False)
    else:
        tables.print(summary(table, width=tables.width))
    if table.failure is None:
        return 0
    messages.print(failure_panel(table.failure))
    listed = f"{table.model.name} raised in a forward pass; the shapes up to there are listed"
    return report(ModelError(f"{listed}{table.failure.remedy_in_arguments}."))
