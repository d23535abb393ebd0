"""What a shell completes: names of networks, and of layers in a network named before."""

from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO

import typer


def complete_model(incomplete: str) -> list[str]:
    """Return the names that begin so; where there is none, shells offer files."""
    from hookscope.models.names import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def complete_layer(context: typer.Context, incomplete: str) -> list[str]:
    """Return layers, and types of layers, that begin so, of a network whose name has been typed before.

    Files are left alone: to build the network of `net.py:build`, or to read a weights file, would run code or take long
    for a completion.
    """
    from hookscope.models.names import model_names

    # MODEL is usually parsed. While the option that is completed lacks its value, parsing ends there, and MODEL is the
    # first of the arguments that are left over.
    model = context.params.get("model") or next(iter(context.args), None)
    if model not in model_names():
        return []
    said = StringIO()
    with suppress(Exception), redirect_stdout(said), redirect_stderr(said):
        return sorted({name for name in _patterns(str(model)) if name.startswith(incomplete)})
    return []


def _patterns(model: str) -> Iterator[str]:
    from hookscope.commands.layers import layers as run_layers
    from hookscope.options import Layers

    for row in run_layers(model, option=Layers()).rows:
        if row.layer:  # the whole model has none
            yield row.layer
        yield f"type:{row.kind.lower()}"
