"""`hookscope models`: the names that MODEL accepts."""

from typing import Annotated

import typer


def models(
    pattern: Annotated[
        str | None, typer.Argument(metavar="[PATTERN]", help="A part of a name, or a glob such as 'resnet*'.")
    ] = None,
) -> int:
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
