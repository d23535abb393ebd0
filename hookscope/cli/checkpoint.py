"""`hookscope checkpoint`: what a weights file holds."""

from typing import Annotated

import typer

from hookscope.cli import sections as under
from hookscope.cli.console import consoles
from hookscope.cli.options import Json, Key


def checkpoint(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A weights file, the index of a sharded one, or the folder of a distributed one."
        ),
    ],
    key: Key = None,
    json: Json = False,
    full: Annotated[bool, under.show("--full", help="Show every tensor, the optimiser's too.")] = False,
) -> int:
    """List the contents of FILE without running anything from it: all sets of weights, statistics of each tensor.

    \b
    hookscope checkpoint model.safetensors
    hookscope checkpoint training.ckpt --key ema --full
    hookscope checkpoint model.pt --json
    """
    from hookscope import api
    from hookscope.render.conversion import summary
    from hookscope.render.terminal import warnings_panel

    contents = api.checkpoint(file, key=key)
    tables, messages = consoles(json=json)
    if contents.warnings:
        messages.print(warnings_panel(contents.warnings))
    if json:
        typer.echo(contents.to_json(), nl=False)
    else:
        tables.print(summary(contents, width=tables.width, full=full))
    return 0
