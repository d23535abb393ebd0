"""Where a run can be seen besides its directory: in the terminal, in TensorBoard."""

import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hookscope.cli.preview import check_preview, show_grids
from hookscope.errors import OutputError, UsageError
from hookscope.text import safe_text

if TYPE_CHECKING:
    from rich.console import Console

    from hookscope.results import GradientInspection, Inspection


def check_outlets(run: Path, tensorboard: Path | None, *, show: bool, grids: bool) -> None:
    """Refuse `--show` and `--tensorboard` where they cannot be done, before a model is run for nothing.

    Args:
        run: The run directory.
        tensorboard: Where TensorBoard's file goes, if it is wanted.
        show: Whether grids are shown in the terminal.
        grids: Whether grids are drawn at all.

    Raises:
        UsageError: If a package is missing, or the options do not go together.
        OutputError: If nothing can be written to `tensorboard`, or it lies in the run directory.
    """
    if show:
        check_preview(grids=grids)
    if tensorboard is not None:
        _check_tensorboard(tensorboard, run)


def serve_outlets(
    run: Path,
    drawn: Sequence[str],
    inspection: "Inspection | GradientInspection",
    consoles: "tuple[Console, Console]",
    tensorboard: Path | None,
    *,
    show: bool,
    json: bool,
) -> None:
    """Write a finished run for TensorBoard and show its grids, as far as that is wanted.

    Args:
        run: The run directory.
        drawn: Paths of the grids in it.
        inspection: What was found.
        consoles: For tables and for messages.
        tensorboard: As for `check_outlets`.
        show: As for `check_outlets`.
        json: Whether stdout is taken by JSON.

    Raises:
        OutputError: If TensorBoard's file cannot be written.
    """
    from hookscope.results import Inspection

    maps = inspection.feature_maps if isinstance(inspection, Inspection) else inspection.gradient_maps
    pictures = [run / name for name in drawn]
    if tensorboard is not None:
        from hookscope.tensorboard import write_run

        write_run(tensorboard, inspection, pictures)
    if show:
        show_grids(maps, pictures, *consoles, json=json)


def _check_tensorboard(folder: Path, run: Path) -> None:
    if find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs one more package: pip install 'hookscope[tensorboard]'.")
    try:
        target = Path(os.path.realpath(folder))
        with suppress(FileNotFoundError, NotADirectoryError):
            target.lstat()  # says what is wrong with a name; asking whether it exists does not
        standing = next(each for each in (target, *target.parents) if os.path.lexists(each))
        writable = os.access(standing, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        raise _refusal(folder, "no folder can have such a name") from error
    if Path(os.path.realpath(run)) in (target, *target.parents):
        raise _refusal(folder, "it lies in the run directory, which holds its own files only")
    if not standing.is_dir():
        raise _refusal(folder, f"'{safe_text(str(standing))}' is not a folder")
    if not writable:
        raise _refusal(folder, f"no permission to write '{safe_text(str(standing))}'")


def _refusal(folder: Path, reason: str) -> OutputError:
    return OutputError(f"Cannot write '{safe_text(str(folder))}': {reason}. Name another folder with --tensorboard.")
