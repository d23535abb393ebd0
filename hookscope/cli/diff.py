"""`hookscope diff`: how two models differ, and where the difference begins."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hookscope import options
from hookscope.cli.ci_output import (
    check_ci_files,
    chosen_format,
    ci_writers,
    print_annotations,
    step_summary,
    write_each,
)
from hookscope.cli.console import consoles
from hookscope.cli.exporters import export
from hookscope.cli.options import with_options
from hookscope.cli.run_model import check_early, command_line, report_all, run_place, running, show_result
from hookscope.errors import EXIT_CHECK_FAILED, EXIT_DONE, HookscopeError, UnfitInputError, most_severe
from hookscope.text import strict_json

if TYPE_CHECKING:
    from hookscope.results.differences import Differences


@with_options
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
    *,
    option: options.Diff,
) -> int:
    """Run A, then B, on the same IMAGEs; report where they begin to differ and how the difference grows.

    \b
    hookscope diff old.pt new.pt cat.jpg
    hookscope diff resnet34 same cat.jpg --dtype-b bfloat16 --reference float64
    hookscope diff resnet50 timm:resnet50 photos/ --shadow
    hookscope diff resnet34 same cat.jpg --input-b cropped.jpg
    hookscope diff a.pt b.pt photos/ --fail-over 'rel>1e-3' --fail-over 'top1<1'
    hookscope diff a.pt b.safetensors
    hookscope diff hookscope-runs/before hookscope-runs/after
    """
    from hookscope import commands
    from hookscope.render.difference_files import save_differences

    chosen = chosen_format(option.report_format)
    summary = step_summary(chosen)
    images = images or []
    has_inputs = bool(images or option.input or option.input_shape)
    check_early(option, images, a, b)
    otherwise = ("inputs" if option.input else "noise") if has_inputs else Path(b).stem
    place = run_place("diff", [a, b] if has_inputs else [a], option, images, otherwise)
    check_ci_files(option.junit, summary)
    tables, messages = consoles(json=option.json or chosen == "markdown")
    failures: list[HookscopeError] = []
    with running(option, messages) as advance:
        try:
            result = commands.diff(a, b, images, option=option, on_progress=advance, on_error=failures.append)
        except HookscopeError as error:
            said = {each.reason if isinstance(each, UnfitInputError) else str(each) for each in failures}
            return report_all([*failures, *([] if str(error) in said else [error])])
    show_result(result, tables, messages, option)
    saved = save_differences(result, place.folder, command=command_line(), numbered=option.out is None)
    place.print_saved(tables, option, saved.last_lines())
    export(saved.folder, (tables, messages), option, show=False)
    failures += _write_for_ci(result, option, chosen, summary)
    if option.json:
        typer.echo(strict_json({**result.to_dict(), "run": str(saved.folder)}), nl=False)
    return most_severe([report_all(failures), EXIT_CHECK_FAILED if result.exceeded else EXIT_DONE])


def _write_for_ci(
    result: "Differences", option: options.Diff, chosen: str, summary: Path | None
) -> list[HookscopeError]:
    """Write the conditions for CI; return what could not be written."""
    from hookscope.render.differences_text import differences_as_check
    from hookscope.render.github import checks_to_markdown

    checked = [differences_as_check(result, tuple(option.fail_over))]
    if chosen == "markdown":
        typer.echo(checks_to_markdown(checked), nl=False)
    if chosen == "github":
        print_annotations(checked)
    return write_each(ci_writers(checked, option.junit, summary))
