"""What the commands that run a model share: arguments, the run directory, what is printed, and the exit code."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from hookscope import options
from hookscope.cli.console import consoles, progress_bar, report
from hookscope.cli.exporters import check_exports, export
from hookscope.errors import (
    EXIT_CHECK_FAILED,
    EXIT_DONE,
    HookscopeError,
    ImageError,
    UnfitInputError,
    UsageError,
    most_severe,
)
from hookscope.text import counted, printable, strict_json

if TYPE_CHECKING:
    from rich.console import Console

    from hookscope.results.activations import Activations
    from hookscope.results.attention import Attention
    from hookscope.results.attributions import Attributions
    from hookscope.results.differences import Differences
    from hookscope.results.findings import Finding
    from hookscope.results.gradients import Gradients
    from hookscope.results.history import History
    from hookscope.results.runs.directory import SavedRun
    from hookscope.results.survey import Survey

# With more grids, a hint names the options for fewer.
_MANY_GRIDS = 20


def run_model(
    function: "Callable[..., Activations | Gradients | Attributions | Attention]",
    model: str,
    images: Sequence[str],
    option: "options.Activations | options.Grads | options.Attribute | options.Attention",
    *,
    takes_noise: bool = False,
) -> int:
    """Run a model as a command's options say, show what was seen, write it, and return the exit code.

    `function` is that of `hookscope.commands` with the command's name; with `takes_noise` it needs no input.
    """
    verb = function.__name__
    if not (takes_noise or images or option.input or option.input_shape):
        raise UsageError(
            "Missing IMAGE: name a picture, a tensor file or a folder, or give --input-shape for noise. "
            f"See `hookscope {verb} --help`."
        )
    check_early(option, images, model)
    otherwise = "noise" if takes_noise or (option.input_shape and not option.input) else "named"
    place = run_place(verb, [model], option, images, otherwise)
    tables, messages = consoles(json=option.json)
    failures: list[HookscopeError] = []
    drawn = option if isinstance(option, options.GridOptions) else None
    asked = replace(drawn, grids_for=0) if drawn and not drawn.grids else option
    with running(option, messages, shown=not takes_noise or bool(images)) as advance:
        from hookscope.inspection.backward import PassError
        from hookscope.inspection.forward import ForwardError
        from hookscope.render.grids import check_cmap

        if drawn:
            check_cmap(drawn.cmap)
        try:
            result = function(model, images, option=asked, on_progress=advance, on_error=failures.append)
        except (ForwardError, PassError) as error:
            result = error.inspection
            if all(getattr(each, "reason", None) != str(error) for each in failures):  # not reported for single inputs
                failures.append(error)
    if result.inputs:
        show_result(result, tables, messages, option)
    folder = _save(result, place, (tables, messages), option) if result.inputs and result.provenance else None
    if option.json:
        typer.echo(strict_json({**result.to_dict(), "run": folder and str(folder)}), nl=False)
    failed = isinstance(option, options.Grads) and _fails(getattr(result, "verdicts", ()), option.fail_on)
    return most_severe([report_all(failures), EXIT_CHECK_FAILED if failed else EXIT_DONE])


def _save(
    result: "Activations | Gradients | Attributions | Attention",
    place: "RunPlace",
    consoles: "tuple[Console, Console]",
    option: "options.Activations | options.Grads | options.Attribute | options.Attention",
) -> Path:
    """Write a run and its exports; return its folder. Consoles are those for tables and for messages."""
    from hookscope.render.run_files import save_result
    from hookscope.render.terminal import note_lines

    drawn = option if isinstance(option, options.GridOptions) else None
    save = {"cmap": drawn.cmap, "scale": drawn.scale} if drawn else {}
    saved = save_result(result, place.folder, **save, command=command_line(), numbered=option.out is None)
    if not option.quiet:
        consoles[0].print(note_lines(saved.remarks))
    place.print_saved(consoles[0], option, last_lines(saved, len(result.inputs), drawn))
    if drawn and drawn.tensorboard is not None:
        from hookscope.cli.tensorboard import write_run

        write_run(drawn.tensorboard, cast("Any", result), [saved.folder / grid.path for grid in saved.grids])
    export(saved.folder, consoles, option, show=option.show)
    return saved.folder


def _fails(verdicts: "Sequence[Finding]", level: str | None) -> bool:
    levels = {"fail": ("fail",), "warn": ("fail", "warn")}.get(level or "", ())
    return any(each.level in levels for each in verdicts)


@contextmanager
def running(
    option: options.OutputOptions, messages: "Console", *, shown: bool = True, of: str = "inputs"
) -> "Iterator[Callable[[int, int], None]]":
    """Show progress while a model runs, which may print to stdout; with --json that goes to stderr."""
    with (
        redirect_stdout(sys.stderr if option.json else sys.stdout),
        progress_bar(messages, shown=shown and not option.quiet, of=of) as advance,
    ):
        yield advance


def check_early(option: options.PictureOptions, images: Sequence[str], *models: str) -> None:
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

    for name in models:
        refuse_by_form(name)
    # The others depend on how many channels there are.
    preprocessing_from_options(Preprocessing(), options.taken(options.PictureOptions, option, mean=None, std=None))
    if isinstance(option, options.NoiseOption) and option.input_shape is not None:
        parse_noise_shapes(option.input_shape)
    unreadable: list[HookscopeError] = []
    paths = find_inputs(images)
    for path in paths:
        try:
            check_input_file(path, repr(str(path)), arguments=isinstance(option, options.NamedInputs))
        except ImageError as error:
            unreadable.append(error)
    if unreadable and len(unreadable) == len(paths):  # else the others are finished
        raise unreadable[0]


def command_line() -> str:
    """Return the command as it was given, for `run.json`."""
    return shlex.join(["hookscope", *sys.argv[1:]])


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The folder that a run goes to, and the command of the run that it takes the place of."""

    folder: Path
    replaced: str | None

    def print_saved(self, tables: "Console", option: options.LinesOptions, last: str) -> None:
        """Print the last lines, and one about a run of another command that this one took the place of."""
        if option.quiet:
            return
        tables.print(last, soft_wrap=True)
        if self.replaced not in (None, command_line()):
            by = f" of `{printable(self.replaced)}`" if self.replaced else ""
            tables.print(f"It replaced an earlier run{by}.", soft_wrap=True, markup=False, highlight=False)


def run_place(
    verb: str, models: Sequence[str], option: options.OutputOptions, images: Sequence[str], otherwise: str
) -> RunPlace:
    """Return where a run goes: --out, or a folder named after command, models and first input, else `otherwise`.

    A folder of inputs gives its own name. Where such a folder holds a run of another command, a number is appended.
    Raises OutputError for a place that cannot be written, before a model is run for nothing.
    """
    from hookscope.inputs.find_files import find_inputs
    from hookscope.results.runs.directory import check_target, command_of, default_run_path, free_run_path

    folder = option.out
    paths = find_inputs(images) if images else []
    if folder is None:
        named = option.input if isinstance(option, options.NamedInputs) else ()
        values = [value for _, _, value in (text.partition("=") for text in named)]
        by_name = [Path(value) for value in values if os.path.isfile(value)]  # noqa: PTH113 never raises
        first = next((path.stem for path in [*paths, *by_name]), otherwise)
        if images and os.path.isdir(images[0]):  # noqa: PTH112 never raises
            first = Path(images[0]).resolve().name
        folder = default_run_path(verb, *(Path(model).name for model in models), first)
        folder = free_run_path(folder, command_line())
    check_target(folder, "--out")
    check_exports(folder, option)
    return RunPlace(folder, command_of(folder))


def show_result(
    result: "Activations | Gradients | Attributions | Attention | Differences | History | Survey",
    tables: "Console",
    messages: "Console",
    option: options.LinesOptions,
) -> None:
    """Print a result for people: warnings to stderr first, so that they are seen before any number."""
    from hookscope.render import conversion, terminal
    from hookscope.results.activations import Activations
    from hookscope.results.gradients import Gradients

    if warnings := conversion.warnings_of(result):
        messages.print(terminal.warnings_panel(warnings))
    if not option.quiet:
        tables.print(conversion.summary(result, width=tables.width, full=option.full))
    elif isinstance(result, Activations | Gradients):
        tables.print(terminal.findings_panel(result.verdicts))


def last_lines(saved: "SavedRun", input_count: int, drawn: "options.GridOptions | None") -> str:
    """Return which files were written, and how to have fewer grids."""
    if drawn is None:
        return saved.last_lines()
    of = f" for the first {drawn.grids_for} of {input_count} inputs (--grids-for)"
    cut, count = of if drawn.grids_for < input_count else "", len(saved.grids)
    grids = [f"{counted(count, 'grid')}{cut}"] if count else []
    none = "" if "gradients.csv" in saved.listed else ", none with --no-grids"
    hint = f" (fewer with --layer{none})" if count > _MANY_GRIDS else ""
    return saved.last_lines(*grids, hint=hint)


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
