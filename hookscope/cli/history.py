"""`hookscope history`: a training, followed by its checkpoints."""

import os
import re
import sys
from contextlib import redirect_stdout
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Annotated

import typer

from hookscope.cli import options
from hookscope.cli import sections as under
from hookscope.cli.console import consoles, progress_bar
from hookscope.cli.exporters import check_exports, page_line
from hookscope.cli.run_model import arguments_of, check_early, command_line, print_saved, run_path, show_result
from hookscope.errors import UsageError
from hookscope.text import once_per_file, printable, safe_text, strict_json

_WEIGHTS_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


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
    arch: Annotated[
        str | None,
        under.model(
            metavar="MODEL",
            help="Network of the checkpoints, to run it and to judge by all rules; none: judge the stored values only. "
            "Default: none, or inferred if IMAGEs are given.",
        ),
    ] = None,
    model_arg: options.ModelArg = None,
    key: options.Key = None,
    allow_missing: options.AllowMissing = None,
    allow_unexpected: options.AllowUnexpected = None,
    allow_global: Annotated[
        list[str] | None,
        under.model(
            "--allow-global",
            metavar="NAME",
            help="Class or function, as a glob (vendornet.*), that a pickle may name besides plain data; it is "
            "skipped, never imported; repeatable.",
        ),
    ] = None,
    output_key: options.OutputKey = None,
    classes: options.Classes = None,
    input_shape: options.InputShape = None,
    resize: options.Resize = None,
    crop: options.Crop = None,
    mean: options.Mean = None,
    std: options.Std = None,
    max_pixels: options.MaxPixels = None,
    batch_axis: options.BatchAxis = None,
    input: options.NamedInputs = None,  # noqa: A002 - the name of the option
    config: Annotated[
        Path | None,
        under.rules(metavar="FILE", help="Settings; default: hookscope.toml, or [tool.hookscope] of pyproject.toml."),
    ] = None,
    select: Annotated[
        list[str] | None, under.rules(metavar="RULE", help="Apply only this rule of `check`, or glob; repeatable.")
    ] = None,
    ignore: Annotated[list[str] | None, under.rules(metavar="RULE", help="Skip this rule or glob; repeatable.")] = None,
    limit: Annotated[
        list[str] | None,
        under.rules("--limit", metavar="RULE.LIMIT=VALUE", help="Limit of a rule, as for `check`; repeatable."),
    ] = None,
    bisect: Annotated[
        bool,
        under.rules(
            "--bisect",
            help="Read the first and the last file, then only as many as it takes to find the first file with each "
            "verdict of the last; assumes that verdicts stay.",
        ),
    ] = False,
    device: Annotated[str, under.run(metavar="DEVICE", help="auto, cpu, cuda, cuda:1 or mps.")] = "cpu",
    page: options.Report = None,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    full: options.Full = False,
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
    from hookscope import api
    from hookscope.render.history_files import save_history
    from hookscope.results.runs.directory import check_target, command_of

    given = dict(locals())
    if os.path.isfile(files):  # noqa: PTH113 never raises
        further = [*takewhile(_may_hold_weights, images or ())]  # a glob that the shell has expanded
        if not further:
            raise UsageError(
                f"A history takes several files, and '{printable(files)}' is one: name more, a folder, or a glob."
            )
        images = (images or [])[len(further) :] or None
        given |= {"files": [files, *further], "images": images}
    check_early(given)
    place, stem = _place_of(given["files"])
    folder = run_path("history", [place], out, images or (), input or (), stem)
    replaced = command_of(folder)
    check_target(folder, "--out")
    check_exports(folder, show=False, tensorboard=None, page=page)
    tables, messages = consoles(json=json)
    with (
        redirect_stdout(sys.stderr if json else sys.stdout),
        progress_bar(messages, shown=not quiet, of="files") as advance,
    ):
        result = api.history(**arguments_of(api.history, given), on_progress=advance)
    show_result(result, tables, messages, quiet=quiet, full=full)
    for error in once_per_file((PurePath(each.name).name, each.error) for each in result.unreadable):
        typer.echo(f"hookscope: error: {safe_text(error)}", err=True)
    saved = save_history(result, folder, command=command_line(), numbered=out is None)
    if not quiet:
        print_saved(tables, saved.last_lines, replaced)
    if page is not None:
        written = api.report(saved.folder, page)
        if not quiet:
            tables.print(page_line(written), soft_wrap=True)
    if json:
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
