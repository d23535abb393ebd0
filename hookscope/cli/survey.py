"""`hookscope survey`: what layers and their channels do over a data set, in one process or several."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hookscope import options
from hookscope.cli.console import consoles
from hookscope.cli.exporters import export
from hookscope.cli.options import with_options
from hookscope.cli.run_model import RunPlace, check_early, command_line, run_place, running, show_result
from hookscope.errors import UsageError
from hookscope.text import safe_text, strict_json

if TYPE_CHECKING:
    from hookscope.results.survey import Survey


@with_options
def survey(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="As for `activations`; none with --merge."),
    ] = None,
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT...",
            help="The data: folders, globs, pictures, tensor files (.npy, .pt, .safetensors); none with --merge.",
        ),
    ] = None,
    *,
    option: options.Survey,
) -> int:
    """Measure the channels of MODEL over a data set: dead channels, value ranges, what excites each, features.

    With the same batch size and threads, results are the same bit for bit for any number of processes. Finished chunks
    stay in OUT.chunks until the survey is complete.

    \b
    hookscope survey resnet18 photos/ --layer type:relu
    hookscope survey resnet18 imagenet/val --by-class --report survey.html
    hookscope survey resnet18 photos/ --layer avgpool --features features.safetensors
    torchrun --nproc-per-node 2 -m hookscope survey resnet18 photos/
    hookscope survey resnet18 photos/ --shard 3/8 --out runs/a
    hookscope survey --merge runs/a
    """
    if option.merge is not None:
        return _merge(option.merge, option, takes_inputs=bool(model or images))
    if not model or not images:
        raise UsageError(
            "Missing INPUT: name the network, and a folder or files. See `hookscope survey --help`."
            if model
            else "Missing MODEL and INPUT, or --merge DIR. See `hookscope survey --help`."
        )
    return _survey(model, images, option)


def _survey(model: str, images: list[str], option: options.Survey) -> int:
    from hookscope import commands
    from hookscope.results.survey import Survey

    if option.shard is not None and (option.page or option.show or option.json or option.tensorboard):
        raise UsageError("--shard only measures a part: give --report, --show, --tensorboard and --json with --merge.")
    check_early(option, [] if option.by_class else images, model)
    place = run_place("survey", [model], option, images, "inputs")
    chunks = chunk_folder(place.folder)
    tables, messages = consoles(json=option.json)
    try:
        with running(option, messages, shown=os.environ.get("RANK", "0") == "0") as advance:
            result = commands.survey(model, images, option=option, chunks=chunks, on_progress=advance)
    except BaseException as error:
        _say_how_to_go_on(error, chunks)
        raise
    if not isinstance(result, Survey):
        if option.shard is not None and not option.quiet:
            tables.print(f"Chunks of this shard: {safe_text(str(chunks))}", soft_wrap=True)
        return 0
    return _finish(result, place, option)


def _merge(folder: Path, option: options.Survey, *, takes_inputs: bool) -> int:
    """Merge the chunks of shards; the run takes the name that they were given."""
    from hookscope.results.runs.directory import check_target
    from hookscope.surveys.plan import ChunkFolder
    from hookscope.surveys.run_survey import merge_survey

    if takes_inputs or option.out or option.features:
        raise UsageError("--merge takes DIR alone, the --out of the shards, which had MODEL, inputs and features.")
    check_target(folder, "--merge")
    place = run_place("survey", (), replace(option, out=folder), (), "")
    return _finish(merge_survey(ChunkFolder(chunk_folder(folder))), place, replace(option, out=folder))


def _finish(result: "Survey", place: RunPlace, option: options.Survey) -> int:
    """Print, write and show a survey; finished chunks go once the run stands."""
    from hookscope.render.survey_files import save_survey
    from hookscope.surveys.plan import ChunkFolder

    tables, messages = consoles(json=option.json)
    show_result(result, tables, messages, option)
    saved = save_survey(result, place.folder, crops=option.crops, command=command_line(), numbered=option.out is None)
    ChunkFolder(chunk_folder(place.folder)).remove()
    place.print_saved(tables, option, saved.last_lines())
    if result.features is not None and not option.quiet:
        tables.print(f"Inputs of the features: {safe_text(result.features.files[-1])}", soft_wrap=True)
    if option.tensorboard is not None:
        from hookscope.cli.tensorboard import write_survey

        write_survey(option.tensorboard, result)
    export(saved.folder, (tables, messages), option, show=option.show)
    for each in result.unusable:
        typer.echo(f"hookscope: error: {safe_text(each.message)}", err=True)
    if option.json:
        typer.echo(strict_json({**result.to_dict(), "run": str(saved.folder)}), nl=False)
    return int(result.exit_code)


def chunk_folder(run: Path) -> Path:
    """Return where the finished chunks of a run wait until it is whole."""
    return run.with_name(f"{run.name}.chunks")


def _say_how_to_go_on(error: BaseException, chunks: Path) -> None:
    """After Ctrl-C, SIGTERM or an error: say what is finished, and how to go on."""
    from hookscope.errors import OutputError

    count = sum(each.stem.isdecimal() for each in chunks.glob("*.json")) if chunks.is_dir() else 0
    if count and not isinstance(error, OutputError) and os.environ.get("RANK", "0") == "0":
        noun = "chunk waits" if count == 1 else "chunks wait"
        typer.echo(
            f"hookscope: {count} finished {noun} in {safe_text(str(chunks))}: the same command with --resume goes on.",
            err=True,
        )
