"""What the commands that run a model share: arguments, the run directory, what is printed, and the exit code."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer

from hookscope.cli.console import consoles, progress_bar, report
from hookscope.cli.exporters import check_exports, export
from hookscope.errors import EXIT_CHECK_FAILED, EXIT_DONE, HookscopeError, ImageError, UnfitInputError, most_severe
from hookscope.text import counted, printable, strict_json

if TYPE_CHECKING:
    from rich.console import Console

    from hookscope.render.attention_files import SavedAttention
    from hookscope.render.attribution_files import SavedAttributions
    from hookscope.render.run_files import SavedRun
    from hookscope.results.activations import Activations
    from hookscope.results.attention import Attention
    from hookscope.results.attributions import Attributions
    from hookscope.results.differences import Differences
    from hookscope.results.gradients import Gradients
    from hookscope.results.history import History
    from hookscope.results.survey import Survey

# With more grids, a hint names the options for fewer.
_MANY_GRIDS = 20


def arguments_of(function: Callable[..., object], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a command's arguments that a function takes under the same names; None is its default."""
    return {name: given[name] for name in signature(function).parameters if given.get(name) is not None}


def run_model(
    function: "Callable[..., Activations | Gradients | Attributions | Attention]",
    given: Mapping[str, Any],
    *,
    otherwise: str,
    has_progress: bool,
) -> int:
    """Run a model as a command's arguments say, show what was seen, write it, and return the exit code.

    `function` is that of `hookscope.api` with the command's name; a run directory is named after `otherwise` where no
    input is a file; `has_progress` tells whether a progress bar is of use.
    """
    from hookscope.results.runs.directory import check_target, command_of

    option = SimpleNamespace(**{"tensorboard": None, **given})
    images, named = option.images or (), option.input or ()
    check_early(given)
    target = run_path(function.__name__, [option.model], option.out, images, named, otherwise)
    replaced = command_of(target)
    check_target(target, "--out")
    grids = given.get("grids", True)
    check_exports(target, show=option.show, tensorboard=option.tensorboard, page=option.page)
    tables, messages = consoles(json=option.json)
    failures: list[HookscopeError] = []
    arguments = arguments_of(function, given)
    if "grids" in given:
        arguments["grids_for"] = option.grids_for if grids else 0
    shown = has_progress and not option.quiet
    with redirect_stdout(sys.stderr if option.json else sys.stdout), progress_bar(messages, shown=shown) as advance:
        from hookscope.inspection.backward import PassError
        from hookscope.inspection.forward import ForwardError
        from hookscope.render.grids import check_cmap
        from hookscope.render.run_files import save_result
        from hookscope.render.terminal import note_lines

        check_cmap(given.get("cmap", "auto"))
        try:
            result = function(**arguments, on_progress=advance, on_error=failures.append)
        except (ForwardError, PassError) as error:
            result = error.inspection
            if all(getattr(each, "reason", None) != str(error) for each in failures):  # not reported for single inputs
                failures.append(error)
    if result.inputs:
        show_result(result, tables, messages, quiet=option.quiet, full=option.full)
    saved = None
    if result.inputs and result.provenance is not None:
        save = {name: given[name] for name in ("cmap", "scale") if name in given}
        saved = save_result(result, target, **save, command=command_line(), numbered=option.out is None)
        if not option.quiet:
            tables.print(note_lines(getattr(saved, "remarks", ())))
            print_saved(tables, last_lines(saved, len(result.inputs), given.get("grids_for", 0)), replaced)
        export(saved, result, (tables, messages), option)
    if option.json:
        typer.echo(strict_json({**result.to_dict(), "run": saved and str(saved.folder)}), nl=False)
    levels = {"fail": ("fail",), "warn": ("fail", "warn")}.get(given.get("fail_on") or "", ())
    failed = any(each.level in levels for each in getattr(result, "verdicts", ()))
    return most_severe([report_all(failures), EXIT_CHECK_FAILED if failed else EXIT_DONE])


def check_early(given: Mapping[str, Any]) -> None:
    """Refuse what needs no network to be refused, before torch is loaded, which takes seconds.

    Raises:
        UsageError: If MODEL or an option on preparing inputs cannot be right.
        ImageError: If none of the inputs can be read.
        NothingMatchedError: If a folder or a glob holds no input.
    """
    from hookscope.inputs.find_files import check_input_file, find_inputs
    from hookscope.inputs.preprocessing_options import preprocessing_from_options
    from hookscope.models.names import refuse_by_form
    from hookscope.results.inputs import Preprocessing
    from hookscope.results.noise_shapes import parse_noise_shapes

    for name in ("model", "a", "b"):
        refuse_by_form(given.get(name) or "")
    checked = ("resize", "crop", "max_pixels", "batch_axis")  # the others depend on how many channels there are
    preprocessing_from_options(Preprocessing(), **{name: given.get(name) for name in checked})
    if given.get("input_shape"):
        parse_noise_shapes(given["input_shape"])
    unreadable: list[HookscopeError] = []
    paths = find_inputs(given.get("images") or ())
    for path in paths:
        try:
            check_input_file(path, repr(str(path)), arguments="input" in given)
        except ImageError as error:
            unreadable.append(error)
    if unreadable and len(unreadable) == len(paths):  # else the others are finished
        raise unreadable[0]


def command_line() -> str:
    """Return the command as it was given, for `run.json`."""
    return shlex.join(["hookscope", *sys.argv[1:]])


def run_path(
    verb: str, models: Sequence[str], out: Path | None, images: Sequence[str], named: Sequence[str], otherwise: str
) -> Path:
    """Return where a run goes: `out`, or a folder named after command, models and first input, else `otherwise`.

    A folder of inputs gives its own name. Where such a folder holds a run of another command, a number is appended.
    """
    from hookscope.inputs.find_files import find_inputs
    from hookscope.results.runs.directory import default_run_path, free_run_path

    paths = find_inputs(images) if images else []
    if out is not None:
        return out
    values = [value for _, _, value in (text.partition("=") for text in named)]
    by_name = [Path(value) for value in values if os.path.isfile(value)]  # noqa: PTH113 never raises
    first = next((path.stem for path in [*paths, *by_name]), otherwise)
    if images and os.path.isdir(images[0]):  # noqa: PTH112 never raises
        first = Path(images[0]).resolve().name
    return free_run_path(default_run_path(verb, *(Path(model).name for model in models), first), command_line())


def print_saved(tables: "Console", last: str, replaced: str | None) -> None:
    """Print the last lines, and one about a run of another command that this one took the place of."""
    tables.print(last, soft_wrap=True)
    if replaced not in (None, command_line()):
        by = f" of `{printable(replaced)}`" if replaced else ""
        tables.print(f"It replaced an earlier run{by}.", soft_wrap=True, markup=False, highlight=False)


def show_result(
    result: "Activations | Gradients | Attributions | Attention | Differences | History | Survey",
    tables: "Console",
    messages: "Console",
    *,
    quiet: bool,
    full: bool,
) -> None:
    """Print a result for people: warnings to stderr first, so that they are seen before any number."""
    from hookscope.render import conversion, terminal
    from hookscope.results.activations import Activations
    from hookscope.results.gradients import Gradients

    if warnings := conversion.warnings_of(result):
        messages.print(terminal.warnings_panel(warnings))
    if not quiet:
        tables.print(conversion.summary(result, width=tables.width, full=full))
    elif isinstance(result, Activations | Gradients):
        tables.print(terminal.findings_panel(result.verdicts))


def last_lines(saved: "SavedRun | SavedAttributions | SavedAttention", input_count: int, grids_for: int) -> str:
    """Return which files were written, and how to have fewer grids."""
    from hookscope.render.run_files import SavedRun
    from hookscope.results.runs.directory import written_lines

    if not isinstance(saved, SavedRun):
        return saved.last_lines
    cut = f" for the first {grids_for} of {input_count} inputs (--grids-for)" if grids_for < input_count else ""
    count = len(saved.grids)
    grids = [f"{counted(count, 'grid')}{cut}"] if count else []
    none = "" if "gradients.csv" in saved.files else ", none with --no-grids"
    hint = f" (fewer with --layer{none})" if count > _MANY_GRIDS else ""
    return written_lines(saved.overview, [*grids, *saved.files], hint)


def report_all(failures: Sequence[HookscopeError]) -> int:
    """Print every failure, one line for all inputs that the model raised on alike; return the most severe exit code."""
    names: dict[str, list[str]] = {}
    lines: dict[object, HookscopeError] = {}
    for failure in failures:
        if isinstance(failure, UnfitInputError):
            names.setdefault(failure.reason, []).extend(failure.names)
            lines[failure.reason] = UnfitInputError(names[failure.reason], failure.reason)
        else:
            lines[id(failure)] = failure
    return most_severe([report(each) for each in lines.values()])
