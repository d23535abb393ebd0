"""A run of a command: where it goes, what is printed and written of its result, and the exit code."""

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from hookscope import options
from hookscope.cli.console import consoles, height_of, print_path, progress_bar, report
from hookscope.cli.exporters import check_exports, open_file, print_page, show_picture
from hookscope.errors import EXIT_CHECK_FAILED, HookscopeError, ImageError, UnfitInputError, most_severe
from hookscope.text import counted, printable, strict_json

if TYPE_CHECKING:
    from rich.console import Console

    from hookscope.commands.conversion import RunDirectoryResult
    from hookscope.results.runs.directory import SavedRun

# With more grids, a hint names the options for fewer.
_MANY_GRIDS = 20


@dataclass(frozen=True, slots=True)
class Run:
    """A run under way.

    Attributes:
        option: The options of its command.
        folder: The run directory.
        replaced: Command of the earlier run that this run replaces; None if there is none, "" if it is unknown.
        tables, messages: The consoles; tables are on stderr where JSON takes stdout.
        failures: What is reported at the end.
    """

    option: options.OutputOptions
    folder: Path
    replaced: str | None
    tables: "Console"
    messages: "Console"
    failures: list[HookscopeError] = field(default_factory=list)

    @contextmanager
    def progress(self, *, shown: bool = True, of: str = "inputs") -> Iterator[Callable[[int, int], None]]:
        """Show progress while a model runs, which may print to stdout; with --json that goes to stderr."""
        with (
            redirect_stdout(sys.stderr if self.option.json else sys.stdout),
            progress_bar(self.messages, shown=shown and not self.option.quiet, of=of) as advance,
        ):
            yield advance

    def show(self, result: "RunDirectoryResult") -> None:
        """Print a result for people: warnings to stderr first, so that they are seen before any number."""
        from hookscope.commands import conversion
        from hookscope.reporting import terminal
        from hookscope.reporting.document_text import finding_lines
        from hookscope.results.activations import Activations
        from hookscope.results.gradients import Gradients

        if warnings := conversion.warnings_of(result):
            self.messages.print(terminal.warnings_panel(warnings))
        if not self.option.quiet:
            tables, full = self.tables, self.option.full
            tables.print(conversion.summary(result, width=tables.width, full=full, height=height_of(tables)))
        elif isinstance(result, Activations | Gradients):
            document = conversion.DESCRIPTIONS[type(result)](result, None)
            self.tables.print(*finding_lines(document), sep="\n", end="\n" if result.verdicts else "")

    def save(self, result: "RunDirectoryResult", **further: Any) -> Path:
        """Write the run directory, and what else the options ask for; return the directory."""
        from hookscope.commands.run_files import save_result
        from hookscope.reporting.columns import safe_line
        from hookscope.results.runs.directory import OVERVIEW, RUNS, point_latest

        option, tables = self.option, self.tables
        drawn = option if isinstance(option, options.GridOptions) else None
        further |= {"cmap": drawn.cmap, "scale": drawn.scale} if drawn else {}
        saved = save_result(result, self.folder, **further, command=command_line(), numbered=option.out is None)
        if saved.folder.parent == RUNS:
            point_latest(saved.folder)
        if not option.quiet:
            for remark in saved.remarks:
                tables.print(safe_line(f"note: {remark}", style="dim"))
            print_path(tables, "Picture", saved.folder / OVERVIEW)
            files = files_line(saved, len(cast("Any", result).inputs), drawn) if drawn else saved.files_line()
            tables.print(files, soft_wrap=True)
            if self.replaced not in (None, command_line()):
                by = f" of `{printable(self.replaced)}`" if self.replaced else ""
                tables.print(f"It replaced an earlier run{by}.", soft_wrap=True, markup=False, highlight=False)
        if isinstance(option, options.TensorBoardOption) and option.tensorboard is not None:
            from hookscope.reporting.tensorboard import write_run

            write_run(option.tensorboard, cast("Any", result), [saved.folder / grid.path for grid in saved.grids])
        if option.page is not None:
            from hookscope.commands.report import report as write_page

            page = write_page(saved.folder, option.page)
            if not option.quiet:
                print_page(page, tables)
        if option.open:
            open_file(option.page or saved.folder / OVERVIEW, self.messages)
        if isinstance(option, options.ShowOption) and option.show:
            show_picture(saved.folder / OVERVIEW, tables, self.messages, json=option.json)
        return saved.folder

    def end(self, result: "RunDirectoryResult", folder: Path | None, *exit_codes: int) -> int:
        """Print the result as JSON and the failures; return the most severe exit code."""
        if self.option.json:
            typer.echo(strict_json({**result.to_dict(), "run": folder and str(folder)}), nl=False)
        if isinstance(self.option, options.StrictOption) and self.option.strict and _has_problem(result):
            exit_codes = (*exit_codes, EXIT_CHECK_FAILED)
        return most_severe([report_all(self.failures), *exit_codes])


def _has_problem(result: Any) -> bool:
    """Tell whether a result has a problem that `--strict` turns into exit code 1."""
    import numpy as np

    from hookscope.results.attention import Attention
    from hookscope.results.attributions import Attributions
    from hookscope.results.survey import Survey

    if isinstance(result, Attributions | Attention) and not all(np.isfinite(item.values).all() for item in result.maps):
        return True
    if isinstance(result, Attributions):
        scores = [heat_map.target.score for heat_map in result.maps]
        return not np.isfinite(scores).all() or any(check.passed is False for check in result.sanity)
    if isinstance(result, Survey):
        spoilt = any(row.activation.nan_count or row.activation.inf_count for row in result.rows)
        return spoilt or bool(result.nonfinite_inputs) or bool(result.dead_count and result.can_call_dead)
    return bool(result.unseen if isinstance(result, Attention) else result.verdicts)


def start_run(
    verb: str,
    models: Sequence[str],
    option: options.OutputOptions,
    images: Sequence[str] = (),
    otherwise: str = "",
    *,
    takes_stdout: bool = False,
) -> Run:
    """Choose where a run goes: --out, or a folder named after command, models and first input, else `otherwise`.

    A folder of inputs gives its own name. If such a folder holds a run of another command, a number is appended.
    `takes_stdout`: tables go to stderr, as with --json. Raises OutputError for a place that cannot be written, before a
    model is run for nothing.
    """
    from hookscope.inputs.find_files import find_inputs
    from hookscope.results.runs.directory import check_target, command_of, default_run_path, free_run_path

    folder = option.out
    if folder is None:
        named = option.input if isinstance(option, options.NamedInputs) else ()
        values = [value for _, _, value in (text.partition("=") for text in named)]
        by_name = [Path(value) for value in values if os.path.isfile(value)]  # noqa: PTH113 never raises
        paths = [*(find_inputs(images) if images else ()), *by_name]
        first = next((path.stem for path in paths), otherwise)
        if images and os.path.isdir(images[0]):  # noqa: PTH112 never raises
            first = Path(images[0]).resolve().name
        folder = default_run_path(verb, *(Path(model).name for model in models), first)
        folder = free_run_path(folder, command_line())
    check_target(folder, "--out")
    check_exports(folder, option)
    return Run(option, folder, command_of(folder), *consoles(json=option.json or takes_stdout))


def check_early(option: options.PictureOptions, images: Sequence[str], *models: str) -> None:
    """Refuse what needs no network to be refused, before torch is loaded, which takes seconds.

    Raises:
        UsageError: If MODEL or an option on preparing inputs cannot be right.
        ImageError: If none of the inputs can be read.
        NothingMatchedError: If a folder or a glob holds no input.
    """
    from hookscope.inputs.find_files import check_input_file, find_inputs
    from hookscope.inputs.preprocessing_options import preprocessing_from_options
    from hookscope.models.names import check_model, parse_model
    from hookscope.results.inputs import Preprocessing
    from hookscope.results.noise_shapes import parse_noise_shapes

    for name in models:
        parse_model(name)
    # The others depend on how many channels there are.
    preprocessing_from_options(Preprocessing(), options.taken(options.PictureOptions, option, mean=None, std=None))
    if isinstance(option, options.NoiseOption) and option.input_shape is not None:
        parse_noise_shapes(option.input_shape)
    unreadable: list[HookscopeError] = []
    try:
        paths = find_inputs(images)
        for path in paths:
            try:
                check_input_file(path, repr(str(path)), arguments=isinstance(option, options.NamedInputs))
            except ImageError as error:
                unreadable.append(error)
        if unreadable and len(unreadable) == len(paths):  # else the others are finished
            raise unreadable[0]
    except HookscopeError:
        for name in models:  # people hear of MODEL first
            check_model(name)
        raise


def command_line() -> str:
    """Return the command as it was given, for `run.json`."""
    return shlex.join(["hookscope", *sys.argv[1:]])


def files_line(saved: "SavedRun", input_count: int, drawn: options.GridOptions) -> str:
    """Return which files were written, and how to have fewer grids."""
    of = f" for the first {drawn.grids_for} of {input_count} inputs (--grids-for)"
    cut, count = of if drawn.grids_for < input_count else "", len(saved.grids)
    grids = [f"{counted(count, 'grid')}{cut}"] if count else []
    none = "" if "gradients.csv" in saved.listed else ", none with --no-grids"
    hint = f" (fewer with --layer{none})" if count > _MANY_GRIDS else ""
    return saved.files_line(*grids, hint=hint)


def report_all(failures: Iterable[HookscopeError]) -> int:
    """Print every failure, one line for all inputs that the model raised on alike; return the most severe exit code."""
    names: dict[str, list[str]] = {}
    lines: dict[object, HookscopeError] = {}
    for failure in failures:
        if isinstance(failure, UnfitInputError):
            names.setdefault(failure.reason, []).extend(failure.names)
            lines[failure.reason] = UnfitInputError(names[failure.reason], failure.reason)
        else:
            lines[id(failure)] = failure
    return most_severe([report(line) for line in lines.values()])
