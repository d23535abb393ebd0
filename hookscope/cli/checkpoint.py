"""`hookscope checkpoint`: what a weights file holds."""

from typing import Annotated

import typer

from hookscope import options
from hookscope.cli.console import consoles
from hookscope.cli.options import with_options


@with_options
def checkpoint(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A weights file, the index of a sharded one, or the folder of a distributed one."
        ),
    ],
    *,
    option: options.Checkpoint,
) -> int:
    """List the contents of FILE without running anything from it: all sets of weights, statistics of each tensor.

    \b
    hookscope checkpoint model.safetensors
    hookscope checkpoint training.ckpt --key ema --full
    hookscope checkpoint model.pt --json
    """
    from hookscope import commands
    from hookscope.render.conversion import summary
    from hookscope.render.terminal import warnings_panel

    contents = commands.checkpoint(file, option=option)
    tables, messages = consoles(json=option.json)
    if contents.warnings:
        messages.print(warnings_panel(contents.warnings))
    if option.json:
        typer.echo(contents.to_json(), nl=False)
    else:
        tables.print(summary(contents, width=tables.width, full=option.full))
    return 0
