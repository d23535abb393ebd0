"""What `activations` and `grads` share: where the run goes, what is printed, and the exit code."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hookscope.cli.console import report
from hookscope.errors import HookscopeError, ModelError, UnfitInputError, gravest
from hookscope.text import safe_text

if TYPE_CHECKING:
    from rich.console import Console

    from hookscope.render.run_files import SavedRun
    from hookscope.results.activations import Activations
    from hookscope.results.gradients import Gradients


def run_path(
    verb: str, model: str, out: Path | None, images: Sequence[str], named: Sequence[str], otherwise: str
) -> Path:
    """Return where a run goes: `--out`, or a folder named after command, model and first input.

    Args:
        verb: The command.
        model: MODEL.
        out: As given with `--out`.
        images: Files, folders and globs.
        named: As given with `--input`.
        otherwise: The name where no input is a file.

    Raises:
        NothingMatchedError: If a folder or a glob holds no input.
    """
    from hookscope.inputs.finding import find_inputs
    from hookscope.runs.directory import default_run_path

    paths = find_inputs(images) if images else []
    values = [value for _, _, value in (text.partition("=") for text in named)]
    by_name = [Path(value) for value in values if os.path.isfile(value)]  # noqa: PTH113 never raises
    first = next((path.name for path in [*paths, *by_name]), otherwise)
    return out or default_run_path(verb, Path(model).name, first)


def show_result(
    result: "Activations | Gradients", tables: "Console", messages: "Console", *, quiet: bool, full: bool
) -> None:
    """Print a result for people: warnings to stderr first, so that they are seen before any number."""
    from hookscope.render import conversion, gradient_tables, terminal
    from hookscope.results.gradients import Gradients

    if result.warnings:
        messages.print(terminal.warnings_panel(result.warnings))
    if not quiet:
        tables.print(conversion.summary(result, width=tables.width, full=full))
    elif isinstance(result, Gradients) and result.verdicts:
        tables.print(gradient_tables.verdicts_panel(result))
    if result.failure is not None:
        messages.print(terminal.failure_panel(result.failure))


def last_line(saved: "SavedRun", input_count: int, grids_for: int) -> str:
    """Say what a run directory holds and where it is."""
    cut = f" for the first {grids_for} of {input_count} inputs (--grids-for)" if grids_for < input_count else ""
    count = len(saved.grids)
    grids = [f"{count} grid{'s' if count != 1 else ''}{cut}"] if count else []
    return f"{', '.join([*grids, *saved.files])} and run.json are in {safe_text(str(saved.folder))}"


def command_line() -> str:
    """Return the command as it could be typed again."""
    return shlex.join(["hookscope", *sys.argv[1:]])


def unreported(error: ModelError, failures: Sequence[HookscopeError]) -> bool:
    """Tell whether an error that ended a run is none of those that were reported for single inputs."""
    return all(getattr(each, "reason", None) != str(error) for each in failures)


def report_all(failures: Sequence[HookscopeError]) -> int:
    """Print every failure, one line for all inputs that the model raised on alike; return the gravest exit code."""
    lines: list[HookscopeError] = []
    names: dict[str, list[str]] = {}
    for failure in failures:
        if isinstance(failure, UnfitInputError) and failure.names:
            if failure.reason not in names:
                lines.append(failure)
            names.setdefault(failure.reason, []).extend(failure.names)
        else:
            lines.append(failure)
    merged = (
        UnfitInputError(names[each.reason], each.reason) if isinstance(each, UnfitInputError) and each.names else each
        for each in lines
    )
    return gravest([report(each) for each in merged])
