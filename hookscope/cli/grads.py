"""`hookscope grads`: run a model forward and backward and show where gradients go."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hookscope.checks.verdicts.limits import RULES, Limits
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
    InputShape,
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
from hookscope.errors import HookscopeError, LayerNotFoundError, UnfitInputError, UsageError, nearest
from hookscope.text import counted, safe_text

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from hookscope.inputs import Batch
    from hookscope.losses import Loss
    from hookscope.models import LoadedModel
    from hookscope.results.comparison import Comparison
    from hookscope.results.gradients import Gradients, InputGradients
    from hookscope.results.grids import Grid
    from hookscope.results.inputs import InputRecord

_TENSORS = "gradients.safetensors"
_LIMITS = ", ".join(f"{each.name}={each.default:g}" for each in fields(Limits))
_MOST_HISTOGRAMS = 12
_TENSOR_SUFFIXES = (".npy", ".pt", ".pth", ".safetensors")

EPILOG = "\n\n".join(["Verdicts:", *(f"{rule}: {meaning}" for rule, meaning in RULES.items())])


def grads(
    model: Model,
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[IMAGE]...",
            help="Pictures, tensor files, folders or globs; default: seeded noise of the shape that MODEL takes.",
        ),
    ] = None,
    loss: Annotated[
        str,
        typer.Option(
            metavar="LOSS",
            help="ce, bce, mse, l1, huber, nll, sum, logit, projection (a seeded random projection of all outputs), or "
            "file.py:function.",
        ),
    ] = "projection",
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="A class index or name, or one per input with commas; zeros, noise, self (the input), or a tensor "
            "file. Default: the output's own argmax for losses of classes, 0.5 for bce, noise for mse, l1 and huber.",
        ),
    ] = None,
    output_key: OutputKey = None,
    layer: Layer = None,
    repeats: Repeats = False,
    with_inputs: Annotated[
        bool, typer.Option("--inputs", help="Also report grad_input: the gradient through each layer alone.")
    ] = False,
    mode: Annotated[
        Literal["eval", "train"], typer.Option(help="train: batch statistics and dropout as in training.")
    ] = "eval",
    weights: Weights = "auto",
    arch: Arch = None,
    model_arg: ModelArg = None,
    trust: Trust = False,
    key: Key = None,
    allow_missing: AllowMissing = None,
    allow_unexpected: AllowUnexpected = None,
    input_shape: InputShape = None,
    resize: Resize = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    max_pixels: MaxPixels = None,
    batch_axis: BatchAxis = None,
    named: NamedInputs = None,
    batch_size: BatchSize = 8,
    per_image: Annotated[
        bool, typer.Option("--per-image", help="Also differentiate each picture alone; write norms and their spread.")
    ] = False,
    edit: Edits = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit", metavar="NAME=VALUE", help=f"Where a verdict begins to object; repeatable. Defaults: {_LIMITS}."
        ),
    ] = None,
    grids: Annotated[bool, typer.Option("--grids/--no-grids", help="Draw gradients of outputs as grids.")] = False,
    grids_for: GridsFor = 4,
    max_channels: MaxChannels = None,
    cmap: Cmap = "auto",
    scale: Scale = "channel",
    histogram: Annotated[
        list[str] | None,
        typer.Option(
            "--histogram",
            metavar="LABEL",
            help="Layers to draw histograms of, twelve at most; default: twelve over depth.",
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = None,
    autocast: Annotated[
        Literal["bfloat16", "float16"] | None, typer.Option(help="Run forward pass and loss under autocast.")
    ] = None,
    seed: Seed = 0,
    verify: Verify = True,
    keep_tensors: Annotated[
        bool, typer.Option("--save-tensors", help=f"Also write the gradients themselves, {_TENSORS}.")
    ] = False,
    show: Show = False,
    tensorboard: TensorBoard = None,
    page: Report = None,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
    full: Full = False,
) -> int:
    """Run MODEL forward and backward; write gradients of layers and parameters, plots, and verdicts.

    \b
    hookscope grads model.pt --loss mse
    hookscope grads resnet34 cat.jpg --loss ce --target 281 --layer conv
    hookscope grads net.py:build photos/ --mode train --per-image
    hookscope grads demo cat.jpg --loss logit --edit 'relu:grad:clamp(min=0)'
    """
    from hookscope.checks.verdicts import judge
    from hookscope.inspection.backward import inspect_gradients
    from hookscope.models import load_model
    from hookscope.render.grids import check_cmap
    from hookscope.runs.directory import check_target, default_run_path, new_run
    from hookscope.runs.serialize import inspection_to_json

    began = time.perf_counter()
    check_cmap(cmap)
    limits = _limits(limit or ())
    _check_input_options(images, input_shape, per_image=per_image)
    notes: list[str] = []
    paths, first = find_files(images or (), named or (), notes, "noise")
    target_path = out or default_run_path("grads", Path(model).name, first)
    check_target(target_path)
    outlets = choose_outlets(target_path, show=show, tensorboard=tensorboard, page=page, grids=grids)
    where = choose_device(device)
    reading = file_options(trust, key, allow_missing, allow_unexpected)
    tables, messages = consoles(json=json)
    with redirect_stdout(sys.stderr if json else sys.stdout):  # a model may print
        loaded = load_model(
            model, weights=weights, arch=arch, model_arguments=model_arg or (), seed=seed, options=reading
        )
        loaded, finish = _with_targets(replace(loaded, notes=(*notes, *loaded.notes)), mode)
        feed = feed_of(
            loaded,
            paths,
            named or (),
            device=where,
            dtype=dtype,
            seed=seed,
            noise=True,
            input_shape=input_shape,
            finish=finish,
            resize=resize,
            crop=crop,
            mean=mean,
            std=std,
            max_pixels=max_pixels,
            batch_axis=batch_axis,
        )
        chosen = _loss(loss, target, output_key, loaded, seed, feed)
        load_seconds = time.perf_counter() - began
        differentiate = partial(
            inspect_gradients, loaded, loss=chosen, layers=layer or (), mode=mode, seed=seed, autocast=_dtype(autocast)
        )
        with progress_bar(messages, len(paths), shown=not quiet and bool(paths)) as advance:
            outcome = _run(
                differentiate,
                feed,
                batch_size,
                edit or (),
                repeats=repeats,
                per_image=per_image,
                keep_tensors=keep_tensors,
                include_inputs=with_inputs,
                verify=verify,
                grids_for=grids_for if grids else 0,
                max_channels=max_channels,
                output_key=output_key,
                advance=advance,
            )
    inspection = replace(outcome.inspection, timings={"load": load_seconds, **outcome.inspection.timings})
    inspection = replace(inspection, verdicts=judge(inspection, limits))
    outcome = replace(outcome, inspection=inspection)
    _check_histograms(histogram or (), outcome)

    if inspection.inputs:
        _show(outcome, tables, messages, quiet=quiet, full=full)
    written = bool(inspection.inputs) and outcome.complete
    if written:
        with new_run(target_path) as run:
            drawn = draw_grids(
                run.path,
                inspection.gradient_maps,
                inspection.inputs,
                len(inspection.gradients),
                cmap=cmap,
                scale=scale,
            )
            files = _write_files(run.path, outcome, histogram or ())
            settings = {
                "edits": list(edit or ()),
                "limits": asdict(limits),
                "autocast": autocast,
                "thumbnails": feed.write_pictures(run.path, inspection.inputs),
            }
            run.finish(_record(outcome, feed, layer or (), drawn, settings))
        if not quiet:
            parts = [counted(len(drawn), "grid")] * bool(drawn) + files
            tables.print(f"{', '.join(parts)} and run.json are in {safe_text(str(target_path))}", soft_wrap=True)
        outlets.serve(target_path, drawn, inspection, (tables, messages), json=json, quiet=quiet)
    if json:
        alone = [asdict(each) for each in outcome.by_input]
        extra = {"run": str(target_path) if written else None, "inputs_alone": alone}
        typer.echo(inspection_to_json(inspection, extra), nl=False)
    return report_all(outcome.failures)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of running the model.

    Attributes:
        inspection: Of all inputs, with the edits if there are any; partial if the model raised.
        complete: Whether it did not.
        comparison: With the run without edits; None without any.
        by_input: Of each input alone, if asked for.
        tensors: The gradients by label, if asked for.
        failures: Inputs that cannot be used, and what the model raised.
    """

    inspection: "Gradients"
    complete: bool
    comparison: "Comparison | None" = None
    by_input: "tuple[InputGradients, ...]" = ()
    tensors: "Mapping[str, Sequence[torch.Tensor]]" = field(default_factory=dict)
    failures: "Sequence[HookscopeError]" = ()


def _run(
    differentiate: "Callable[..., Gradients]",
    feed: Feed,
    batch_size: int,
    edits: Sequence[str],
    *,
    repeats: bool,
    per_image: bool,
    keep_tensors: bool,
    include_inputs: bool,
    verify: bool,
    advance: Callable[[int], None],
    **options: Any,
) -> _Outcome:
    """Run the model over all inputs, without edits first if there are any, and over each input alone if asked for.

    Args:
        differentiate: `inspect_gradients` with everything given that all of these runs have in common.
        feed: The inputs.
        batch_size: Inputs at a time.
        edits: Expressions.
        repeats: Whether to keep rows that repeat another.
        per_image: Whether to run each input alone too.
        keep_tensors: Whether to keep the gradients themselves.
        include_inputs: Whether to differentiate with respect to inputs of layers too.
        verify: Whether to compare the run without edits to one without hooks.
        advance: Called with the number of inputs finished.
        options: For the run that is reported, alone.
    """
    from hookscope.inspection.backward import PassError
    from hookscope.inspection.per_input import gradients_by_input
    from hookscope.results.repeats import fold_repeats

    failures: list[HookscopeError] = []
    collector = TensorCollector(advance)
    try:
        batches = feed.batches(batch_size, ignore_error)
        common = {"include_inputs": include_inputs, "distributions": True, "verify": verify}
        plain = differentiate(inputs=batches, on_error=ignore_error, **common) if edits else None
        inspection = differentiate(
            inputs=feed.batches(batch_size, failures.append),
            edits=edits,
            on_tensor=collector.collect if keep_tensors else None,
            on_batch=collector.end_batch,
            on_error=failures.append,
            **common,
            **options,
        )
    except PassError as error:
        failures += [error] if unreported(error, failures) else []
        inspection = error.inspection if repeats else fold_repeats(error.inspection)
        return _Outcome(inspection, complete=False, failures=failures)
    collector.end()  # gradients of parameters come last
    inspection, comparison = compared(plain, inspection, edits, repeats=repeats)
    by_input: tuple[InputGradients, ...] = ()
    if per_image and inspection.inputs:
        used = set(inspection.inputs)

        def report_alone(record: "InputRecord", error: PassError) -> None:  # batch normalisation needs several values
            if record in used:
                failures.append(UnfitInputError([safe_text(record.name)], f"alone, for --per-image: {error}"))

        by_input = gradients_by_input(
            lambda batch: differentiate(inputs=batch, edits=edits), feed.batches(1, ignore_error), report_alone
        )
    shown = {row.label for row in inspection.gradients if row.role == "output"}
    by_input = tuple(
        replace(each, rows_l2={label: norm for label, norm in each.rows_l2.items() if label in shown})
        for each in by_input
    )
    return _Outcome(inspection, True, comparison, by_input, collector.tensors, failures)


def _check_input_options(images: Sequence[str] | None, input_shape: str | None, *, per_image: bool) -> None:
    if images and input_shape:
        raise UsageError("--input-shape is the shape of noise: leave it out, or the pictures.")
    if per_image and not images:
        raise UsageError("--per-image is about pictures: give IMAGE.")


def _with_targets(loaded: "LoadedModel", mode: str) -> "tuple[LoadedModel, Callable[[Batch], Batch] | None]":
    """Return what gives batches the targets that a detector needs in train mode, and the model with a warning of it."""
    from hookscope.inspection.detection import default_targets_text, with_default_targets

    targets = default_targets_text(loaded.module) if mode == "train" else ""
    if not targets:
        return loaded, None
    sentence = f"{loaded.info.name} needs targets in train mode: each input is given {targets}."
    loaded = replace(loaded, warnings=(*loaded.warnings, sentence))
    return loaded, partial(with_default_targets, loaded.module)


def _check_histograms(labels: Sequence[str], outcome: _Outcome) -> None:
    """Refuse what cannot be drawn.

    Raises:
        LayerNotFoundError: If a label is of no output with a gradient.
        UsageError: If there are more than a picture holds.
    """
    if len(labels) > _MOST_HISTOGRAMS:
        raise UsageError(f"--histogram is given {len(labels)} times: a picture holds {_MOST_HISTOGRAMS}.")
    rows = outcome.inspection.gradients
    known = [row.label for row in rows if row.role == "output" and row.status == "gradient"]
    folded = {label: row.label for row in rows for label in row.also}
    for label in labels:
        if label not in known and outcome.complete:
            hint = safe_text(nearest(label, known))
            if label in folded:
                hint = f" Its row repeats '{safe_text(folded[label])}': give that, or --repeats."
            raise LayerNotFoundError(f"--histogram '{safe_text(label)}' is no output with a gradient.{hint}")


def _limits(texts: Sequence[str]) -> Limits:
    """Return the limits that `--limit` options give.

    Raises:
        UsageError: If one is not of the form NAME=VALUE, with a known name and a positive number.
    """
    known = [each.name for each in fields(Limits)]
    given = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known:
            raise UsageError(f"--limit {text!r} names no limit.{nearest(name, known)} Give one of {', '.join(known)}.")
        try:
            given[name] = float(value)
        except ValueError as error:
            raise UsageError(f"--limit {text!r} has no number. Give, for example, --limit {name}=0.5.") from error
        if not 0 < given[name] < float("inf"):
            raise UsageError(f"--limit {text!r} is not a positive number. Give, for example, --limit {name}=0.5.")
    return Limits(**given)


def _dtype(name: str | None) -> "torch.dtype | None":
    import torch

    dtype: torch.dtype | None = getattr(torch, name) if name else None
    return dtype


def _loss(
    loss: str, target: str | None, output_key: str | None, loaded: "LoadedModel", seed: int, feed: Feed
) -> "Loss":
    """Return the loss that `--loss`, `--target` and `--output-key` choose."""
    from hookscope.inputs import read_tensor
    from hookscope.losses import choose_loss
    from hookscope.models import load_function

    source, _, name = loss.rpartition(":")
    is_file = target is not None and target.lower().endswith(_TENSOR_SUFFIXES)
    return choose_loss(
        load_function(Path(source), name) if source.endswith(".py") else loss,
        target=read_tensor(Path(target)) if target is not None and is_file else target,
        target_name=Path(target).name if target is not None and is_file else "",
        seed=seed,
        categories=loaded.info.categories,
        output_key=output_key,
        # Only targets given per input need it.
        input_count=feed.input_count() if target is not None and (is_file or "," in target) and feed.paths else None,
    )


def _show(outcome: _Outcome, tables: "Console", messages: "Console", *, quiet: bool, full: bool) -> None:
    """Print the outcome for people: warnings to stderr first, loss and verdicts last, where the eye comes to rest."""
    from hookscope.render import gradient_tables, terminal
    from hookscope.render.comparison import comparison_report
    from hookscope.render.gradient_tables import by_input_table

    inspection = outcome.inspection
    if inspection.warnings:
        messages.print(terminal.warnings_panel(inspection.warnings))
    if not quiet:
        if inspection.notes:
            tables.print(terminal.note_lines(inspection.notes))
        tables.print(gradient_tables.gradient_table(inspection, width=tables.width, full=full))
        tables.print(gradient_tables.parameter_table(inspection, width=tables.width, full=full))
        if inspection.uncalled:
            tables.print(terminal.uncalled_lines(inspection.uncalled, full=full))
        if outcome.by_input:
            tables.print(by_input_table(outcome.by_input, width=tables.width, full=full))
        if outcome.comparison is not None:
            tables.print(comparison_report(outcome.comparison, width=tables.width, full=full))
        if inspection.predictions:
            tables.print(terminal.predictions_lines(inspection, full=full))
        tables.print(gradient_tables.loss_lines(inspection.loss, inspection.verification))
    if not quiet or inspection.verdicts:
        tables.print(gradient_tables.verdicts_panel(inspection))
    if inspection.failure is not None:
        messages.print(terminal.failure_panel(inspection.failure))


def _record(
    outcome: _Outcome,
    feed: Feed,
    patterns: Sequence[str],
    drawn: "Sequence[Grid]",
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    from hookscope.runs.serialize import inspection_to_dict

    details = {**inspection_to_dict(outcome.inspection), **settings}
    return run_record("grads", feed, patterns, drawn, outcome.failures, details)


def _write_files(folder: Path, outcome: _Outcome, histogram: Sequence[str]) -> list[str]:
    """Write the rows as CSV and JSON, the plots and the tensors; return their paths inside the run."""
    from hookscope.render import plots, tables
    from hookscope.runs import serialize

    inspection = outcome.inspection
    texts = {
        "layers.csv": tables.rows_to_csv(inspection),
        "layers.json": serialize.rows_to_json(inspection),
        "gradients.csv": tables.gradients_to_csv(inspection),
        "parameters.csv": tables.parameters_to_csv(inspection),
        "gradients.json": serialize.gradients_to_json(inspection),
    }
    if outcome.comparison is not None:
        texts["changes.csv"] = tables.changes_to_csv(outcome.comparison)
    if outcome.by_input:
        texts["inputs.csv"] = tables.inputs_to_csv(outcome.by_input)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "plots").mkdir()
    drawn = {f"plots/{name}.png": draw(inspection) for name, draw in plots.PLOTS.items()}
    if histogram:
        drawn["plots/gradient-histograms.png"] = plots.gradient_histograms(inspection, histogram)
    for name, figure in drawn.items():
        (folder / name).write_bytes(plots.figure_png(figure))
    labels = {f"{row.label} grad_{row.role}" for row in inspection.gradients}
    labels |= {f"{row.name} grad" for row in inspection.parameters}
    save_tensors(folder / _TENSORS, outcome.tensors, labels)
    return [*texts, *drawn, *([_TENSORS] if outcome.tensors else [])]
