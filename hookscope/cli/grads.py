"""`hookscope grads`: run a model forward and backward and show where gradients go."""

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Annotated, Any, Literal

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
    InputShape,
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
from hookscope.cli.sections import GRADIENTS, RUN, WRITE, SectionedCommand
from hookscope.errors import HookscopeError
from hookscope.text import strict_json

_TENSORS = "gradients.safetensors"


class GradsCommand(SectionedCommand):
    """Ends its help with the rules, which are only loaded then."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write each rule with its meaning and its limits."""
        from hookscope.checks.rules import GRADS_RULES, RULES

        paragraphs = ["Verdicts; `hookscope check --explain RULE` says more about each:"]
        for name in GRADS_RULES:
            rule = RULES[name]
            limits = (f" Limit {each.grads_name}={each.default:g}: {each.meaning}." for each in rule.limits.values())
            paragraphs.append(f"{name}: {rule.meaning}{''.join(limits)}")
        self.epilog = "\n\n".join(paragraphs)
        super().format_epilog(ctx, formatter)


def grads(
    model: Model,
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[IMAGE]...",
            help="Pictures, tensor files, folders or globs; default: seeded noise.",
        ),
    ] = None,
    loss: Annotated[
        str,
        typer.Option(
            metavar="LOSS",
            help="ce, bce, mse, l1, huber, nll, sum, logit, projection (a seeded random projection of all outputs), or "
            "file.py:function.",
            rich_help_panel=GRADIENTS,
        ),
    ] = "projection",
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="A class index or name, or one per input separated by commas; zeros, noise, self (the input), or a "
            "tensor file. Default: the argmax of the output for classification losses, 0.5 for bce, noise for mse, "
            "l1 and huber.",
            rich_help_panel=GRADIENTS,
        ),
    ] = None,
    output_key: OutputKey = None,
    layer: Layer = None,
    ops: Ops = False,
    repeats: Repeats = False,
    with_inputs: Annotated[
        bool,
        typer.Option(
            "--inputs", help="Also report grad_input: the gradient through each layer alone.", rich_help_panel=GRADIENTS
        ),
    ] = False,
    mode: Annotated[
        Literal["eval", "train"],
        typer.Option(help="train: batch statistics and dropout as in training.", rich_help_panel=GRADIENTS),
    ] = "eval",
    weights: Weights = "auto",
    arch: Arch = None,
    model_arg: ModelArg = None,
    trust: Trust = False,
    key: Key = None,
    allow_missing: AllowMissing = None,
    allow_unexpected: AllowUnexpected = None,
    input_shape: InputShape = None,
    resize: Resize = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    max_pixels: MaxPixels = None,
    batch_axis: BatchAxis = None,
    named: NamedInputs = None,
    batch_size: BatchSize = 8,
    per_image: Annotated[
        bool,
        typer.Option(
            "--per-image",
            help="Also differentiate each picture separately; show its gradient norms and their spread.",
            rich_help_panel=GRADIENTS,
        ),
    ] = False,
    edit: Edits = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=VALUE",
            help="Threshold of a rule, such as vanishing=1e-6; repeatable.",
            rich_help_panel=GRADIENTS,
        ),
    ] = None,
    grids: Annotated[
        bool, typer.Option("--grids/--no-grids", help="Draw gradients of outputs as grids.", rich_help_panel=WRITE)
    ] = False,
    grids_for: GridsFor = 4,
    max_channels: MaxChannels = None,
    cmap: Cmap = "auto",
    scale: Scale = "channel",
    histogram: Annotated[
        list[str] | None,
        typer.Option(
            "--histogram",
            metavar="LABEL",
            help="Layers to draw histograms for, at most twelve; default: twelve spread over depth.",
            rich_help_panel=WRITE,
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = None,
    autocast: Annotated[
        Literal["bfloat16", "float16"] | None,
        typer.Option(help="Run forward pass and loss under autocast.", rich_help_panel=RUN),
    ] = None,
    seed: Seed = 0,
    verify: Verify = True,
    keep_tensors: Annotated[
        bool,
        typer.Option("--save-tensors", help=f"Also write the gradients themselves, {_TENSORS}.", rich_help_panel=WRITE),
    ] = False,
    show: Show = False,
    tensorboard: TensorBoard = None,
    page: Report = None,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
    full: Full = False,
) -> int:
    """Run MODEL forward and backward; write gradients of layers and parameters, plots, and verdicts.

    \b
    hookscope grads model.pt --loss mse
    hookscope grads resnet34 cat.jpg --loss ce --target 281 --layer conv
    hookscope grads net.py:build photos/ --mode train --per-image
    hookscope grads demo cat.jpg --loss logit --edit 'relu:grad:clamp(min=0)'
    """
    from hookscope import api
    from hookscope.checks.rules import limits_from_text
    from hookscope.inspection.backward import PassError
    from hookscope.render.grids import check_cmap
    from hookscope.render.run_files import check_histograms, save_run
    from hookscope.runs.directory import check_target

    check_cmap(cmap)
    limits_from_text(limit or ())
    run = run_path("grads", model, out, images or (), named or (), "noise")
    check_target(run)
    exporters = choose_exporters(run, show=show, tensorboard=tensorboard, page=page, grids=grids)
    tables, messages = consoles(json=json)
    failures: list[HookscopeError] = []
    shown = not quiet and bool(images)
    with redirect_stdout(sys.stderr if json else sys.stdout), progress_bar(messages, shown=shown) as advance:
        try:
            result = api.grads(
                model,
                images or (),
                loss=loss,
                target=target,
                output_key=output_key,
                layer=layer or (),
                ops=ops,
                repeats=repeats,
                inputs=with_inputs,
                mode=mode,
                weights=weights,
                arch=arch,
                model_arg=model_arg or (),
                trust=trust,
                key=key,
                allow_missing=allow_missing or (),
                allow_unexpected=allow_unexpected or (),
                input_shape=input_shape,
                resize=resize,
                crop=crop,
                mean=mean,
                std=std,
                max_pixels=max_pixels,
                batch_axis=batch_axis,
                input=named or (),
                batch_size=batch_size,
                per_image=per_image,
                edit=edit or (),
                limit=limit or (),
                grids_for=grids_for if grids else 0,
                max_channels=max_channels,
                device=device,
                dtype=dtype,
                autocast=autocast,
                seed=seed,
                verify=verify,
                save_tensors=keep_tensors,
                on_progress=advance,
                on_error=failures.append,
            )
            check_histograms(histogram or (), result)
        except PassError as error:
            result = error.inspection
            failures += [error] if unreported(error, failures) else []
    if result.inputs:
        show_result(result, tables, messages, quiet=quiet, full=full)
    saved = None
    if result.inputs and result.provenance is not None:
        saved = save_run(result, run, cmap=cmap, scale=scale, histogram=histogram or (), command=command_line())
        if not quiet:
            tables.print(last_line(saved, len(result.inputs), grids_for), soft_wrap=True)
        exporters.export(saved, result, (tables, messages), json=json, quiet=quiet)
    if json:
        alone = [asdict(each) for each in result.inputs_alone]
        document = {**result.to_dict(), "run": saved and str(saved.folder), "inputs_alone": alone}
        typer.echo(strict_json(document), nl=False)
    return report_all(failures)
