"""`hookscope survey`: what layers and their channels do over a data set, in one process or several."""

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import typer

from hookscope.cli import options
from hookscope.cli import sections as under
from hookscope.cli.console import consoles, progress_bar
from hookscope.cli.exporters import check_exports, page_line, show_picture
from hookscope.cli.run_model import arguments_of, check_early, command_line, print_saved, run_path, show_result
from hookscope.errors import UsageError
from hookscope.text import safe_text, strict_json


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
    layer: options.Layer = None,
    ops: options.Ops = False,
    top: Annotated[
        int, under.layers("--top", min=1, metavar="N", help="For every channel, list the N inputs that excite it most.")
    ] = 9,
    by_class: Annotated[
        bool,
        under.inputs(
            "--by-class",
            help="INPUT is a folder with a folder for each class in it, or a CSV of paths and labels: also measure how "
            "selective channels are.",
        ),
    ] = False,
    features: Annotated[
        Path | None,
        under.write(
            metavar="PATH",
            help="Also write the outputs of the layers of --layer: to a .safetensors or .parquet file, or to a folder "
            "with one file per chunk; a JSON file next to it lists the inputs.",
        ),
    ] = None,
    pool: Annotated[
        Literal["avg", "max", "cls", "none"],
        under.write(help="Reduce features over positions: mean, maximum, first token, or not at all."),
    ] = "avg",
    features_dtype: Annotated[
        Literal["float32", "float16"], under.write("--features-dtype", help="Store features in this dtype.")
    ] = "float32",
    weights: options.Weights = "auto",
    arch: options.Arch = None,
    model_arg: options.ModelArg = None,
    trust: options.Trust = False,
    key: options.Key = None,
    allow_missing: options.AllowMissing = None,
    allow_unexpected: options.AllowUnexpected = None,
    classes: options.Classes = None,
    resize: options.Resize = None,
    crop: options.Crop = None,
    mean: options.Mean = None,
    std: options.Std = None,
    max_pixels: options.MaxPixels = None,
    batch_axis: options.BatchAxis = None,
    batch_size: options.BatchSize = 32,
    chunk_size: Annotated[
        int,
        under.workers(
            "--chunk-size",
            min=1,
            metavar="N",
            help="Files per chunk, the unit of work of a process.",
        ),
    ] = 1024,
    workers: Annotated[
        int | None,
        under.workers(
            "--workers",
            min=0,
            metavar="N",
            help="Threads that read pictures ahead; default: one per processor, at most 4. Results do not change.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        under.workers(
            "--resume", help="Continue an unfinished survey from its finished chunks, with any number of processes."
        ),
    ] = False,
    shard: Annotated[
        str | None,
        under.workers(
            metavar="I/N",
            help="Measure only part I of N of the data, as one job of a cluster; run --merge afterwards.",
        ),
    ] = None,
    merge: Annotated[
        Path | None,
        under.workers(
            metavar="DIR", help="Merge the chunks of all shards that were measured with --out DIR, and write DIR."
        ),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    seed: options.Seed = 0,
    verify: options.Verify = True,
    crops: Annotated[
        int | None,
        under.write(
            min=0,
            metavar="N",
            help="Draw crops for N channels of each layer, 0 for none; default: 128 channels over all layers.",
        ),
    ] = None,
    show: options.Show = False,
    tensorboard: options.TensorBoard = None,
    page: options.Report = None,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    full: options.Full = False,
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
    option = SimpleNamespace(**locals())
    if merge is not None:
        return _merge(merge, option)
    if not model or not images:
        raise UsageError(
            "Missing INPUT: name the network, and a folder or files. See `hookscope survey --help`."
            if model
            else "Missing MODEL and INPUT, or --merge DIR. See `hookscope survey --help`."
        )
    return _survey(vars(option))


def _survey(given: dict[str, Any]) -> int:
    from hookscope import api
    from hookscope.results.runs.directory import check_target, command_of
    from hookscope.results.survey import Survey

    option = SimpleNamespace(**given)
    if option.shard is not None and (option.page or option.show or option.json or option.tensorboard):
        raise UsageError("--shard only measures a part: give --report, --show, --tensorboard and --json with --merge.")
    check_early(given | ({"images": None} if option.by_class else {}))
    target = run_path("survey", [option.model], option.out, option.images, (), "inputs")
    replaced = command_of(target)
    check_target(target, "--out")
    check_exports(target, show=option.show, tensorboard=option.tensorboard, page=option.page)
    chunks = chunk_folder(target)
    is_quiet = option.quiet or os.environ.get("RANK", "0") != "0"
    tables, messages = consoles(json=option.json)
    try:
        with (
            redirect_stdout(sys.stderr if option.json else sys.stdout),
            progress_bar(messages, shown=not is_quiet) as advance,
        ):
            result = api.survey(**arguments_of(api.survey, given), chunks=chunks, on_progress=advance)
    except BaseException as error:
        _say_how_to_go_on(error, chunks)
        raise
    if not isinstance(result, Survey):
        if option.shard is not None and not option.quiet:
            tables.print(f"Chunks of this shard: {safe_text(str(chunks))}", soft_wrap=True)
        return 0
    return _finish(result, target, chunks, option, replaced)


def _merge(folder: Path, option: SimpleNamespace) -> int:
    """Merge the chunks of shards; the run takes the name that they were given."""
    from hookscope.results.runs.directory import check_target, command_of
    from hookscope.surveys.plan import ChunkFolder
    from hookscope.surveys.run_survey import merge_survey

    if option.model or option.images or option.out or option.features:
        raise UsageError("--merge takes DIR alone, the --out of the shards, which had MODEL, inputs and features.")
    check_target(folder, "--merge")
    check_exports(folder, show=option.show, tensorboard=option.tensorboard, page=option.page)
    chunks = chunk_folder(folder)
    result = merge_survey(ChunkFolder(chunks))
    option.out = folder
    return _finish(result, folder, chunks, option, command_of(folder))


def _finish(result: Any, target: Path, chunks: Path, option: SimpleNamespace, replaced: str | None) -> int:
    """Print, write and show a survey; finished chunks go once the run stands."""
    from hookscope import api
    from hookscope.render.survey_files import save_survey
    from hookscope.results.runs.directory import OVERVIEW
    from hookscope.surveys.plan import ChunkFolder

    tables, messages = consoles(json=option.json)
    show_result(result, tables, messages, quiet=option.quiet, full=option.full)
    saved = save_survey(result, target, crops=option.crops, command=command_line(), numbered=option.out is None)
    ChunkFolder(chunks).remove()
    if not option.quiet:
        print_saved(tables, saved.last_lines, replaced)
        if result.features is not None:
            files = result.features.files
            tables.print(f"Inputs of the features: {safe_text(files[-1])}", soft_wrap=True)
    if option.tensorboard is not None:
        from hookscope.cli.tensorboard import write_survey

        write_survey(option.tensorboard, result)
    if option.page is not None:
        written = api.report(saved.folder, option.page)
        if not option.quiet:
            tables.print(page_line(written), soft_wrap=True)
    if option.show:
        show_picture(saved.folder / OVERVIEW, tables, messages, json=option.json)
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
