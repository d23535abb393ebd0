"""`hookscope report`: one self-contained HTML page of a run."""

from pathlib import Path
from typing import Annotated

import typer

from hookscope.cli import sections as under
from hookscope.cli.console import consoles
from hookscope.cli.exporters import page_line
from hookscope.cli.options import Quiet


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory of `activations`, `grads`, `attribute` or `diff`.")
    ],
    out: Annotated[
        Path | None,
        under.write("--out", "-o", metavar="FILE", help="HTML file to write; default: RUN.html next to RUN."),
    ] = None,
    quiet: Quiet = False,
) -> int:
    """Write RUN as one self-contained HTML page: tables, plots, feature maps.

    \b
    hookscope report hookscope-runs/activations-demo-cat
    hookscope report hookscope-runs/grads-demo-cat -o gradients.html
    hookscope report out --quiet
    """
    from hookscope import api

    page = api.report(run, out)
    if not quiet:
        tables, _ = consoles(json=False)
        tables.print(page_line(page), soft_wrap=True)
    return 0
