"""`hookscope activations`: run a model over pictures and show what its layers make of them."""

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from hookscope.cli.console import consoles, progress_bar
from hookscope.cli.exporters import choose_exporters
from hookscope.cli.options import (
    AllowMissing,
    AllowUnexpected,
    Arch,
    BatchAxis,
    BatchSize,
    Cmap,
    Crop,
    Device,
    Dtype,
    Edits,
    Full,
    GridsFor,
    Json,
    Key,
    Layer,
    MaxChannels,
    MaxPixels,
    Mean,
    Model,
    ModelArg,
    NamedInputs,
    Ops,
    Out,
    OutputKey,
    Quiet,
    Repeats,
    Report,
    Resize,
    Scale,
    Seed,
    Show,
    Std,
    TensorBoard,
    Trust,
    Verify,
    Weights,
)
from hookscope.cli.running import command_line, last_line, report_all, run_path, show_result, unreported
from hookscope.cli.sections import WRITE
from hookscope.errors import HookscopeError, UsageError
from hookscope.text import strict_json


def activations(
    model: Model,
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[IMAGE]...",
            help="Pictures, tensor files (.npy, .pt, .safetensors), folders or globs; optional with --input.",
        ),
    ] = None,
    layer: Layer = None,
    ops: Ops = False,
    repeats: Repeats = False,
    weights: Weights = "auto",
    arch: Arch = None,
    model_arg: ModelArg = None,
    trust: Trust = False,
    key: Key = None,
    allow_missing: AllowMissing = None,
    allow_unexpected: AllowUnexpected = None,
    resize: Resize = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    max_pixels: MaxPixels = None,
    batch_axis: BatchAxis = None,
    named: NamedInputs = None,
    output_key: OutputKey = None,
    edit: Edits = None,
    batch_size: BatchSize = 8,
    grids: Annotated[
        bool, typer.Option("--grids/--no-grids", help="Draw feature-map grids.", rich_help_panel=WRITE)
    ] = True,
    grids_for: GridsFor = 4,
    max_channels: MaxChannels = None,
    cmap: Cmap = "auto",
    scale: Scale = "channel",
    device: Device = "auto",
    dtype: Dtype = None,
    seed: Seed = 0,
    verify: Verify = True,
    keep_tensors: Annotated[
        bool,
        typer.Option(
            "--save-tensors",
            help="Also write the activations themselves, activations.safetensors.",
            rich_help_panel=WRITE,
        ),
    ] = False,
    show: Show = False,
    tensorboard: TensorBoard = None,
    page: Report = None,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
    full: Full = False,
) -> int:
    """Run MODEL over pictures; write feature-map grids, shapes and activation statistics.

    \b
    hookscope activations demo cat.jpg --layer conv
    hookscope activations resnet34 cat.jpg --layer 'layer[34].*' --layer '!downsample'
    hookscope activations net.py:build photos/ --model-arg width=2 --resize 64 --crop 64
    hookscope activations model.pt cat.jpg --arch resnet18 --layer type:relu --json
    hookscope activations net.py:build --input wave=speech.npy --input rate=16000
    """
    from hookscope import api
    from hookscope.inspection.forward import ForwardError
    from hookscope.render.grids import check_cmap
    from hookscope.render.run_files import save_run
    from hookscope.runs.directory import check_target

    check_cmap(cmap)
    if not images and not named:
        raise UsageError(
            "Missing IMAGE: name a picture, a tensor file or a folder. See `hookscope activations --help`."
        )
    target = run_path("activations", model, out, images or (), named or (), "named")
    check_target(target)
    exporters = choose_exporters(target, show=show, tensorboard=tensorboard, page=page, grids=grids)
    tables, messages = consoles(json=json)
    failures: list[HookscopeError] = []
    with redirect_stdout(sys.stderr if json else sys.stdout), progress_bar(messages, shown=not quiet) as advance:
        try:
            result = api.activations(
                model,
                images or (),
                layer=layer or (),
                ops=ops,
                repeats=repeats,
                weights=weights,
                arch=arch,
                model_arg=model_arg or (),
                trust=trust,
                key=key,
                allow_missing=allow_missing or (),
                allow_unexpected=allow_unexpected or (),
                resize=resize,
                crop=crop,
                mean=mean,
                std=std,
                max_pixels=max_pixels,
                batch_axis=batch_axis,
                input=named or (),
                output_key=output_key,
                edit=edit or (),
                batch_size=batch_size,
                grids_for=grids_for if grids else 0,
                max_channels=max_channels,
                device=device,
                dtype=dtype,
                seed=seed,
                verify=verify,
                save_tensors=keep_tensors,
                on_progress=advance,
                on_error=failures.append,
            )
        except ForwardError as error:
            result = error.inspection
            failures += [error] if unreported(error, failures) else []
    if result.inputs:
        show_result(result, tables, messages, quiet=quiet, full=full)
    saved = None
    if result.inputs and result.failure is None:
        saved = save_run(result, target, cmap=cmap, scale=scale, command=command_line())
        if not quiet:
            tables.print(last_line(saved, len(result.inputs), grids_for), soft_wrap=True)
        exporters.export(saved, result, (tables, messages), json=json, quiet=quiet)
    if json:
        typer.echo(strict_json({**result.to_dict(), "run": saved and str(saved.folder)}), nl=False)
    return report_all(failures)
