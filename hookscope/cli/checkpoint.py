"""`hookscope checkpoint`: what a weights file holds."""

from pathlib import Path
from typing import Annotated

import typer

from hookscope.cli.console import consoles
from hookscope.cli.options import Json, Key


def checkpoint(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A weights file, or the index of a sharded one.")],
    key: Key = None,
    json: Json = False,
    full: Annotated[bool, typer.Option("--full", help="Show every tensor, the optimiser's, too.")] = False,
) -> int:
    """List what FILE holds without loading a model or running anything: all sets of weights, statistics of each tensor.

    \b
    hookscope checkpoint model.safetensors
    hookscope checkpoint training.ckpt --key ema --full
    hookscope checkpoint model.pt --json
    """
    from hookscope.models.contents import list_contents
    from hookscope.render.contents import contents_report, contents_to_json
    from hookscope.render.terminal import warnings_panel

    contents = list_contents(Path(file), key)
    tables, messages = consoles(json=json)
    if contents.warnings:
        messages.print(warnings_panel(contents.warnings))
    if json:
        typer.echo(contents_to_json(contents), nl=False)
    else:
        tables.print(contents_report(contents, width=tables.width, full=full))
    return 0
