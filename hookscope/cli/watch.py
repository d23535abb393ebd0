"""`hookscope watch`: run a training script unchanged, and watch it."""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from hookscope import options
from hookscope.cli.sections import SectionedCommand
from hookscope.commands.watch.script import Script
from hookscope.errors import UsageError
from hookscope.text import printable

_ARGUMENTS = "hookscope.script_arguments"

# Launchers that people write before their script, and what to write instead.
_LAUNCHERS = {
    "torchrun": "`torchrun OPTIONS -m hookscope watch train.py`",
    "accelerate": "`accelerate launch -m hookscope watch train.py`",
    **dict.fromkeys(("python", "python3"), "the script alone: `hookscope watch train.py`"),
}


class WatchCommand(SectionedCommand):
    """Passes the arguments after the first `--` to the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments before `--`."""
        where = args.index("--") if "--" in args else len(args)
        launcher = Path(args[0]).name if where else ""
        if launcher in _LAUNCHERS:
            raise UsageError(f"'{launcher}' is not a script. Give {_LAUNCHERS[launcher]}.")
        ctx.meta[_ARGUMENTS] = tuple(args[where + 1 :])
        return super().parse_args(ctx, args[:where])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Add the arguments of the script to the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENT...]"]


def watch(context: typer.Context, script: str | None = None, *, option: options.Watch) -> Script:
    """Run a training script unchanged, watch every step, and print a line when something breaks.

    Arguments after -- go to the script. Weights, output, errors and exit code are those of the plain run, the weights
    bit for bit. The first step is step 1. Lines go to stderr; of several processes, only the first prints.

    \b
    hookscope watch train.py
    hookscope watch train.py --every 50 --out runs/a -- --lr 0.1 --epochs 3
    hookscope watch -m package.train -- --config small.yaml
    torchrun --nproc-per-node 2 -m hookscope watch train.py -- --lr 0.1
    """
    from hookscope.hooks.patterns import refuse_positions

    if (script is None) == (option.module is None):
        problem = "Nothing to run is given" if script is None else "Both a script and -m are given"
        raise UsageError(f"{problem}: give SCRIPT or -m MODULE, and the arguments of the script after --.")
    if script is not None and not os.path.isfile(script):  # noqa: PTH113 never raises
        problem = "is a folder" if os.path.isdir(script) else "does not exist"  # noqa: PTH112
        raise UsageError(f"There is no script to run: '{printable(script)}' {problem}.")
    refuse_positions(option.layer)
    out = None if option.out is None else Path(option.out)
    ranks = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    if out is not None and next(filter(None, ranks), "0") == "0":
        _check_writable(out, resume=option.resume)
    elif option.resume and out is None:
        raise UsageError("--resume needs --out, the folder of the training to continue.")
    arguments: tuple[str, ...] = context.meta[_ARGUMENTS]
    option = replace(option, out=out and Path(os.path.abspath(out)))  # noqa: PTH100 - the script may go elsewhere
    return Script(option.module or str(script), option.module is not None, arguments, option, str(out) if out else None)


def _check_writable(folder: Path, *, resume: bool) -> None:
    """Raise OutputError if the folder cannot be written; leave nothing in it, because the script may never train."""
    from hookscope.commands.watch.training_log import TrainingLogFile

    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    file = TrainingLogFile(folder, resume=resume, warn=lambda _: None)
    file.close()
    with suppress(OSError):
        if not file.path.stat().st_size:
            file.path.unlink()
            for path in made:
                path.rmdir()
