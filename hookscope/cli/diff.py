"""`hookscope diff`: how two models differ, and where the difference begins."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hookscope.cli import options
from hookscope.cli import sections as under
from hookscope.cli.ci_output import (
    check_ci_files,
    chosen_format,
    ci_writers,
    print_annotations,
    step_summary,
    write_each,
)
from hookscope.cli.console import consoles, progress_bar
from hookscope.cli.exporters import check_exports, page_line
from hookscope.cli.run_model import (
    arguments_of,
    check_early,
    command_line,
    print_saved,
    report_all,
    run_path,
    show_result,
)
from hookscope.errors import EXIT_CHECK_FAILED, EXIT_DONE, HookscopeError, UnfitInputError, most_severe
from hookscope.text import strict_json

if TYPE_CHECKING:
    from hookscope.results.differences import Differences

Format = Literal["text", "github", "markdown"]


def diff(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="The reference: a model, as MODEL of `activations`, or a run directory."),
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="The other model or run, or 'same': A again, with the options …-b.")
    ],
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGE",
            help="Pictures, tensor files (.npy, .pt, .safetensors), folders or globs; none: compare weights only.",
        ),
    ] = None,
    layer: options.Layer = None,
    ops: options.Ops = False,
    map: Annotated[  # noqa: A002 - the name of the option
        list[str] | None,
        under.layers("--map", metavar="A=B", help="Layers that belong together: 'encoder.*=backbone.*'; repeatable."),
    ] = None,
    reference: Annotated[
        Literal["float64"] | None,
        under.compares(
            help="Also run A's weights in float64, and measure the errors of A and B against it: is B worse?"
        ),
    ] = None,
    shadow: Annotated[
        bool,
        under.compares("--shadow", help="Also run each layer of B on A's input: how much the layer itself adds."),
    ] = False,
    grads: Annotated[
        bool,
        under.compares(
            "--grads",
            help="Also compare gradients of outputs and parameters (summed over batches), and name the first to "
            "differ; keeps all gradients of a batch, beyond 2 GiB in a temporary file.",
        ),
    ] = False,
    loss: Annotated[
        str | None, under.compares(metavar="LOSS", help="Loss that --grads differentiates, as --loss of `grads`.")
    ] = None,
    target: Annotated[
        str | None,
        under.compares(
            metavar="TARGET", help="As --target of `grads`; the default is computed from each side's own output."
        ),
    ] = None,
    fail_over: Annotated[
        list[str] | None,
        under.compares(
            "--fail-over",
            metavar="CONDITION",
            help="Exit with 1 if a row or the output exceeds this limit: 'rel>1e-3', 'layer4*:cosine<0.99', "
            "'output:kl>0.01', 'top1<1'. Measures: rel, cosine, sqnr, max, ulps, input, added, error; of the output "
            "kl, top1, top5. Repeatable.",
        ),
    ] = None,
    weights: options.Weights = "auto",
    weights_b: Annotated[
        str | None, under.other("--weights-b", metavar="NAME", help="Weights of B, as --weights. Default: A's.")
    ] = None,
    arch: options.Arch = None,
    model_arg: options.ModelArg = None,
    trust: options.Trust = False,
    key: options.Key = None,
    allow_missing: options.AllowMissing = None,
    allow_unexpected: options.AllowUnexpected = None,
    input_shape: options.InputShape = None,
    resize: options.Resize = None,
    crop: options.Crop = None,
    mean: options.Mean = None,
    std: options.Std = None,
    max_pixels: options.MaxPixels = None,
    batch_axis: options.BatchAxis = None,
    input: options.NamedInputs = None,  # noqa: A002 - the name of the option
    input_b: Annotated[
        list[str] | None,
        under.other(
            "--input-b",
            metavar="IMAGE",
            help="Input of B instead of IMAGE, such as a padded or cropped picture; repeatable, one per IMAGE.",
        ),
    ] = None,
    output_key: options.OutputKey = None,
    classes: options.Classes = None,
    multi_label: options.MultiLabel = False,
    batch_size: options.BatchSize = 8,
    device: options.Device = "auto",
    device_b: Annotated[
        str | None, under.other("--device-b", metavar="DEVICE", help="Device of B, as --device. Default: A's.")
    ] = None,
    dtype: options.Dtype = None,
    dtype_b: Annotated[
        Literal["float32", "float64", "float16", "bfloat16"] | None,
        under.other("--dtype-b", help="Run B in this dtype. Default: A's."),
    ] = None,
    autocast_b: Annotated[
        Literal["bfloat16", "float16"] | None, under.other("--autocast-b", help="Run B under autocast to this dtype.")
    ] = None,
    mode_b: Annotated[
        Literal["eval", "train"],
        under.other("--mode-b", help="Run B with batch statistics and dropout as in training."),
    ] = "eval",
    threads_b: Annotated[
        int | None, under.other("--threads-b", min=1, metavar="N", help="Threads that B computes with on the CPU.")
    ] = None,
    compile_b: Annotated[
        bool,
        under.other("--compile-b", help="Run B through torch.compile: the output compiled whole, rows block by block."),
    ] = False,
    edit_b: Annotated[
        list[str] | None,
        under.other("--edit-b", metavar="EDIT", help="Change B, as --edit of `activations`; repeatable."),
    ] = None,
    seed: options.Seed = 0,
    out: options.Out = None,
    junit: Annotated[
        Path | None, under.write(metavar="FILE", help="Also write the conditions of --fail-over as JUnit XML.")
    ] = None,
    report_format: Annotated[
        Format | None, under.show("--format", help="Format on stdout; default: github in GitHub Actions, else text.")
    ] = None,
    page: options.Report = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    full: options.Full = False,
) -> int:
    """Run A and B side by side on the same IMAGEs; report where they begin to differ and how the difference grows.

    \b
    hookscope diff old.pt new.pt cat.jpg
    hookscope diff resnet34 same cat.jpg --dtype-b bfloat16 --reference float64
    hookscope diff resnet50 timm:resnet50 photos/ --shadow
    hookscope diff resnet34 same cat.jpg --input-b cropped.jpg
    hookscope diff a.pt b.pt photos/ --fail-over 'rel>1e-3' --fail-over 'top1<1'
    hookscope diff a.pt b.safetensors
    hookscope diff hookscope-runs/before hookscope-runs/after
    """
    from hookscope import api
    from hookscope.render.difference_files import save_differences
    from hookscope.results.runs.directory import check_target, command_of

    given = dict(locals())
    chosen = chosen_format(report_format)
    summary = step_summary(chosen)
    has_inputs = bool(images or input or input_shape)
    check_early(given)
    otherwise = ("inputs" if input else "noise") if has_inputs else Path(b).stem
    folder = run_path("diff", [a, b] if has_inputs else [a], out, images or (), input or (), otherwise)
    replaced = command_of(folder)
    check_target(folder, "--out")
    check_exports(folder, show=False, tensorboard=None, page=page)
    check_ci_files(junit, summary)
    tables, messages = consoles(json=json or chosen == "markdown")
    failures: list[HookscopeError] = []
    with redirect_stdout(sys.stderr if json else sys.stdout), progress_bar(messages, shown=not quiet) as advance:
        try:
            result = api.diff(**arguments_of(api.diff, given), on_progress=advance, on_error=failures.append)
        except HookscopeError as error:
            said = {each.reason if isinstance(each, UnfitInputError) else str(each) for each in failures}
            return report_all([*failures, *([] if str(error) in said else [error])])
    show_result(result, tables, messages, quiet=quiet, full=full)
    saved = save_differences(result, folder, command=command_line(), numbered=out is None)
    if not quiet:
        print_saved(tables, saved.last_lines, replaced)
    if page is not None:
        written = api.report(saved.folder, page)
        if not quiet:
            tables.print(page_line(written), soft_wrap=True)
    failures += _write_for_ci(result, fail_over or (), chosen, junit, summary)
    if json:
        typer.echo(strict_json({**result.to_dict(), "run": str(saved.folder)}), nl=False)
    return most_severe([report_all(failures), EXIT_CHECK_FAILED if result.exceeded else EXIT_DONE])


def _write_for_ci(
    result: "Differences", conditions: Sequence[str], chosen: str, junit: Path | None, summary: Path | None
) -> list[HookscopeError]:
    """Write the conditions for CI; return what could not be written."""
    from hookscope.render.differences_text import differences_as_check
    from hookscope.render.github import checks_to_markdown

    checked = [differences_as_check(result, tuple(conditions))]
    if chosen == "markdown":
        typer.echo(checks_to_markdown(checked), nl=False)
    if chosen == "github":
        print_annotations(checked)
    return write_each(ci_writers(checked, junit, summary))
