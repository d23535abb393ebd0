"""`hookscope history`: a training, followed by its checkpoints."""

import os
import re
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Annotated

import typer

from hookscope import options
from hookscope.cli.console import consoles
from hookscope.cli.exporters import export
from hookscope.cli.options import with_options
from hookscope.cli.run_model import check_early, command_line, run_place, running, show_result
from hookscope.errors import UsageError
from hookscope.text import once_per_file, printable, safe_text, strict_json

_WEIGHTS_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


@with_options
def history(
    files: Annotated[
        str,
        typer.Argument(metavar="FILES", help="Checkpoints of one run: a folder of them, a glob, or several files."),
    ],
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGE",
            help="Pictures, tensor files (.npy, .pt, .safetensors), folders or globs to run each checkpoint on; "
            "without them, only weights are judged.",
        ),
    ] = None,
    *,
    option: options.History,
) -> int:
    """Follow a training by its checkpoints: what changed, and which of FILES is the first to break a rule.

    Files are sorted by the epochs or steps that they store, else in natural order of names. The exit code is 0 if no
    file fails a rule and 1 if one does; other codes mean that a file could not be read or run.

    \b
    hookscope history 'ckpt/epoch_*.pt'
    hookscope history runs/ckpt --key ema --bisect
    hookscope history 'ckpt/*.pt' photos/ --arch resnet34 --report history.html
    hookscope history 'ckpt/*.safetensors' --arch net.py:build --json
    """
    from hookscope import commands
    from hookscope.render.history_files import save_history

    images = images or []
    several: str | list[str] = files
    if os.path.isfile(files):  # noqa: PTH113 never raises
        further = [*takewhile(_may_hold_weights, images)]  # a glob that the shell has expanded
        if not further:
            raise UsageError(
                f"A history takes several files, and '{printable(files)}' is one: name more, a folder, or a glob."
            )
        several, images = [files, *further], images[len(further) :]
    check_early(option, images)
    folder, stem = _place_of(several)
    place = run_place("history", [folder], option, images, stem)
    tables, messages = consoles(json=option.json)
    with running(option, messages, of="files") as advance:
        result = commands.history(several, images, option=option, on_progress=advance)
    show_result(result, tables, messages, option)
    for error in once_per_file((PurePath(each.name).name, each.error) for each in result.unreadable):
        typer.echo(f"hookscope: error: {safe_text(error)}", err=True)
    saved = save_history(result, place.folder, command=command_line(), numbered=option.out is None)
    place.print_saved(tables, option, saved.last_lines())
    export(saved.folder, (tables, messages), option, show=False)
    if option.json:
        typer.echo(strict_json({**result.to_dict(), "run": str(saved.folder)}), nl=False)
    return result.exit_code


def _may_hold_weights(name: str) -> bool:
    return name.lower().endswith(_WEIGHTS_SUFFIXES)


def _place_of(files: str | list[str]) -> tuple[str, str]:
    """Return for the name of the run directory the folder of the files, and what their names begin with."""
    if not isinstance(files, str):
        folder, names = Path(files[0]).parent, [Path(each).name for each in files]
        same = takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False))
        files = str(folder / f"{''.join(letters[0] for letters in same)}*")
    path = Path(files)
    if os.path.isdir(files):  # noqa: PTH112 never raises
        return path.resolve().name or "files", "weights"
    stem = re.split(r"[*?\[]", path.name)[0].rstrip("_-.")
    return path.parent.resolve().name or "files", stem or "weights"
