"""`hookscope activations`: run a model over pictures and show what its layers make of them."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hookscope.cli.console import consoles, progress_bar
from hookscope.cli.exporters import choose_outlets
from hookscope.cli.options import (
    AllowMissing,
    AllowUnexpected,
    Arch,
    BatchAxis,
    BatchSize,
    Cmap,
    Crop,
    Device,
    Dtype,
    Edits,
    Full,
    GridsFor,
    Json,
    Key,
    Layer,
    MaxChannels,
    MaxPixels,
    Mean,
    Model,
    ModelArg,
    NamedInputs,
    Out,
    OutputKey,
    Quiet,
    Repeats,
    Report,
    Resize,
    Scale,
    Seed,
    Show,
    Std,
    TensorBoard,
    Trust,
    Verify,
    Weights,
    choose_device,
    file_options,
)
from hookscope.cli.running import (
    Feed,
    TensorCollector,
    compared,
    draw_grids,
    feed_of,
    find_files,
    ignore_error,
    report_all,
    run_record,
    save_tensors,
    unreported,
)
from hookscope.errors import HookscopeError, UsageError
from hookscope.text import safe_text

if TYPE_CHECKING:
    from rich.console import Console

    from hookscope.results.activations import Activations
    from hookscope.results.comparison import Comparison

_TENSORS = "activations.safetensors"


def activations(
    model: Model,
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[IMAGE]...",
            help="Pictures, tensor files (.npy, .pt, .safetensors), folders or globs; only --input can do without.",
        ),
    ] = None,
    layer: Layer = None,
    repeats: Repeats = False,
    weights: Weights = "auto",
    arch: Arch = None,
    model_arg: ModelArg = None,
    trust: Trust = False,
    key: Key = None,
    allow_missing: AllowMissing = None,
    allow_unexpected: AllowUnexpected = None,
    resize: Resize = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    max_pixels: MaxPixels = None,
    batch_axis: BatchAxis = None,
    named: NamedInputs = None,
    output_key: OutputKey = None,
    edit: Edits = None,
    batch_size: BatchSize = 8,
    grids: Annotated[bool, typer.Option("--grids/--no-grids", help="Draw feature-map grids.")] = True,
    grids_for: GridsFor = 4,
    max_channels: MaxChannels = None,
    cmap: Cmap = "auto",
    scale: Scale = "channel",
    device: Device = "auto",
    dtype: Dtype = None,
    seed: Seed = 0,
    verify: Verify = True,
    keep_tensors: Annotated[
        bool, typer.Option("--save-tensors", help="Also write the activations themselves, activations.safetensors.")
    ] = False,
    show: Show = False,
    tensorboard: TensorBoard = None,
    page: Report = None,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
    full: Full = False,
) -> int:
    """Run MODEL over pictures once; write feature-map grids, a shape table and activation statistics.

    \b
    hookscope activations demo cat.jpg --layer conv
    hookscope activations resnet34 cat.jpg --layer 'layer[34].*' --layer '!downsample'
    hookscope activations net.py:build photos/ --model-arg width=2 --resize 64 --crop 64
    hookscope activations model.pt cat.jpg --arch resnet18 --layer type:relu --json
    hookscope activations net.py:build --input wave=speech.npy --input rate=16000
    """
    from hookscope.inspection.forward import inspect
    from hookscope.models import load_model
    from hookscope.render.grids import check_cmap
    from hookscope.runs.directory import check_target, default_run_path, new_run
    from hookscope.runs.serialize import inspection_to_dict, inspection_to_json

    began = time.perf_counter()
    check_cmap(cmap)
    if not images and not named:
        raise UsageError(
            "Missing IMAGE: name a picture, a tensor file or a folder. See `hookscope activations --help`."
        )
    notes: list[str] = []
    paths, first = find_files(images or (), named or (), notes, "named")
    target = out or default_run_path("activations", Path(model).name, first)
    check_target(target)
    outlets = choose_outlets(target, show=show, tensorboard=tensorboard, page=page, grids=grids)
    where = choose_device(device)
    reading = file_options(trust, key, allow_missing, allow_unexpected)
    tables, messages = consoles(json=json)
    failures: list[HookscopeError] = []
    with redirect_stdout(sys.stderr if json else sys.stdout):  # a model may print
        loaded = load_model(
            model, weights=weights, arch=arch, model_arguments=model_arg or (), seed=seed, options=reading
        )
        loaded = replace(loaded, notes=(*notes, *loaded.notes))
        feed = feed_of(
            loaded,
            paths,
            named or (),
            device=where,
            dtype=dtype,
            seed=seed,
            resize=resize,
            crop=crop,
            mean=mean,
            std=std,
            max_pixels=max_pixels,
            batch_axis=batch_axis,
        )
        load_seconds = time.perf_counter() - began
        with progress_bar(messages, len(paths), shown=not quiet) as advance:
            collector = TensorCollector(advance)
            inspection, comparison = _run(
                partial(inspect, loaded, layers=layer or (), seed=seed, distributions=True, verify=verify),
                feed,
                batch_size,
                edit or (),
                failures,
                repeats=repeats,
                grids_for=grids_for if grids else 0,
                max_channels=max_channels,
                output_key=output_key,
                on_tensor=(lambda label, tensor, _axis: collector.collect(label, tensor)) if keep_tensors else None,
                on_batch=collector.end_batch,
            )
    inspection = replace(inspection, timings={"load": load_seconds, **inspection.timings})
    if inspection.inputs:
        _show(inspection, comparison, tables, messages, quiet=quiet, full=full)
    written = bool(inspection.inputs) and inspection.failure is None
    if written:
        with new_run(target) as folder:
            drawn = draw_grids(
                folder.path, inspection.feature_maps, inspection.inputs, len(inspection.rows), cmap=cmap, scale=scale
            )
            files = _write_tables(folder.path, inspection, comparison)
            save_tensors(folder.path / _TENSORS, collector.tensors, {row.label for row in inspection.rows})
            details = {
                **inspection_to_dict(inspection),
                **({} if comparison is None else {"edits": list(edit or ())}),
                "thumbnails": feed.write_pictures(folder.path, inspection.inputs),
            }
            folder.finish(run_record("activations", feed, layer or (), drawn, failures, details))
        if not quiet:
            files += [_TENSORS] if collector.tensors else []
            tables.print(_last_line(target, len(drawn), files, len(inspection.inputs), grids_for), soft_wrap=True)
        outlets.serve(target, drawn, inspection, (tables, messages), json=json, quiet=quiet)
    if json:
        typer.echo(inspection_to_json(inspection, {"run": str(target) if written else None}), nl=False)
    return report_all(failures)


def _run(
    inspected: "Callable[..., Activations]",
    feed: Feed,
    batch_size: int,
    edits: Sequence[str],
    failures: list[HookscopeError],
    *,
    repeats: bool,
    **options: Any,
) -> "tuple[Activations, Comparison | None]":
    """Run the model over all inputs, without edits first if there are any; return what both differ in.

    Args:
        inspected: `inspect` with everything given that both runs have in common.
        feed: The inputs.
        batch_size: Inputs at a time.
        edits: Expressions.
        failures: Gets the inputs that cannot be used, and what the model raised.
        repeats: Whether to keep rows that repeat another.
        options: For the run that is reported, alone.
    """
    from hookscope.inspection.forward import ForwardError
    from hookscope.results.repeats import fold_repeats

    try:
        plain = inspected(inputs=feed.batches(batch_size, ignore_error), on_error=ignore_error) if edits else None
        batches = feed.batches(batch_size, failures.append)
        inspection = inspected(inputs=batches, edits=edits, on_error=failures.append, **options)
    except ForwardError as error:
        failures += [error] if unreported(error, failures) else []
        return error.inspection if repeats else fold_repeats(error.inspection), None
    return compared(plain, inspection, edits, repeats=repeats)


def _show(
    inspection: "Activations",
    comparison: "Comparison | None",
    tables: "Console",
    messages: "Console",
    *,
    quiet: bool,
    full: bool,
) -> None:
    """Print the inspection for people: warnings to stderr first, so that they are seen before any number."""
    from hookscope.render import terminal
    from hookscope.render.comparison import comparison_report

    if inspection.warnings:
        messages.print(terminal.warnings_panel(inspection.warnings))
    if not quiet:
        if inspection.notes:
            tables.print(terminal.note_lines(inspection.notes))
        tables.print(terminal.layer_table(inspection, width=tables.width, full=full))
        if inspection.uncalled:
            tables.print(terminal.uncalled_lines(inspection.uncalled, full=full))
        if inspection.predictions:
            tables.print(terminal.predictions_lines(inspection, full=full))
        if comparison is not None:
            tables.print(comparison_report(comparison, width=tables.width, full=full))
        if inspection.verification is not None:
            tables.print(terminal.verification_line(inspection.verification, with_loss=False))
    if inspection.failure is not None:
        messages.print(terminal.failure_panel(inspection.failure))


def _write_tables(folder: Path, inspection: "Activations", comparison: "Comparison | None") -> list[str]:
    """Write the rows, and what edits changed; return the names of the files."""
    from hookscope.render import tables
    from hookscope.runs.serialize import rows_to_json

    texts = {"layers.csv": tables.rows_to_csv(inspection), "layers.json": rows_to_json(inspection)}
    if comparison is not None:
        texts["changes.csv"] = tables.changes_to_csv(comparison)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(texts)


def _last_line(target: Path, grid_count: int, files: list[str], input_count: int, grids_for: int) -> str:
    """Say where the files are."""
    cut = f" for the first {grids_for} of {input_count} inputs (--grids-for)" if grids_for < input_count else ""
    drawn = [f"{grid_count} grid{'s' if grid_count != 1 else ''}{cut}"] if grid_count else []
    return f"{', '.join([*drawn, *files])} and run.json are in {safe_text(str(target))}"
