"""`hookscope activations`: run a model over pictures and show what its layers make of them."""

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hookscope.cli.console import consoles, progress_bar, report
from hookscope.cli.options import (
    Arch,
    Device,
    Dtype,
    Json,
    Layer,
    Model,
    ModelArg,
    Seed,
    Weights,
    choose_device,
    floating_dtype,
)
from hookscope.errors import HookscopeError, ModelError, OutputError, gravest
from hookscope.text import safe_text

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from hookscope.models import LoadedModel
    from hookscope.results import FeatureMaps, Inspection, Preprocessing

_TENSORS = "activations.safetensors"


def activations(
    model: Model,
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE", help="Pictures, tensor files (.npy, .pt, .safetensors), folders or globs."),
    ],
    layer: Layer = None,
    weights: Weights = "auto",
    arch: Arch = None,
    model_arg: ModelArg = None,
    resize: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Resize the shorter side to 256, exactly to 240x320, or none; default: the weights' own, else 224.",
        ),
    ] = None,
    crop: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Centre crop to 224, to 192x256, or none; default: the weights' own, else 224."
        ),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option(
            metavar="VALUES",
            help="Subtracted after scaling to 0-1: one value, one per channel, or none; default: the weights' own, "
            "else 0.485,0.456,0.406 (ImageNet's).",
        ),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option(
            metavar="VALUES",
            help="Divided by, likewise; default: the weights' own, else 0.229,0.224,0.225 (ImageNet's).",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Pictures per forward pass.")] = 8,
    grids: Annotated[bool, typer.Option("--grids/--no-grids", help="Draw feature-map grids.")] = True,
    grids_for: Annotated[int, typer.Option(min=1, metavar="N", help="Draw grids for the first N pictures.")] = 4,
    max_channels: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Draw the first N channels of a layer; default: all.")
    ] = None,
    cmap: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Matplotlib colour map; auto: one for maps from 0 up, another, centred, for signed ones.",
        ),
    ] = "auto",
    scale: Annotated[
        Literal["channel", "layer"], typer.Option(help="Colour range of each channel by itself, or one for the layer.")
    ] = "channel",
    device: Device = "auto",
    dtype: Dtype = None,
    seed: Seed = 0,
    save_tensors: Annotated[
        bool, typer.Option("--save-tensors", help="Also write the activations themselves, activations.safetensors.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run directory; default: hookscope-runs/activations-MODEL-IMAGE.")
    ] = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Show every row of a long table.")] = False,
) -> int:
    """Run MODEL over pictures once; write feature-map grids, a shape table and activation statistics.

    \b
    hookscope activations demo cat.jpg --layer conv
    hookscope activations resnet34 cat.jpg --layer 'layer[34].*' --layer '!downsample'
    hookscope activations net.py:build photos/ --model-arg width=2 --resize 64 --crop 64
    hookscope activations model.pt cat.jpg --arch resnet18 --layer type:relu --json
    """
    from hookscope import inputs, runs
    from hookscope.inspection import ForwardError, inspect
    from hookscope.models import load_model
    from hookscope.render.grids import check_cmap
    from hookscope.render.tables import inspection_to_json

    began = time.perf_counter()
    check_cmap(cmap)
    paths = inputs.find_inputs(images)
    target = out or runs.default_run_path("activations", Path(model).name, paths[0].name)
    runs.check_target(target)
    where = choose_device(device)
    tables, messages = consoles(json=json)
    failures: list[HookscopeError] = []
    tensors: dict[str, list[torch.Tensor]] = {}
    with redirect_stdout(sys.stderr if json else sys.stdout):  # a model may print
        loaded = load_model(model, weights=weights, arch=arch, model_arguments=model_arg or (), seed=seed)
        preprocessing = inputs.preprocessing_from_options(
            loaded.preprocessing, resize=resize, crop=crop, mean=mean, std=std
        )
        floating = _place(loaded, where, dtype)
        load_seconds = time.perf_counter() - began
        with progress_bar(messages, len(paths), shown=not quiet) as advance:
            batches = inputs.load_batches(paths, preprocessing, batch_size, failures.append)
            try:
                inspection = inspect(
                    loaded,
                    (inputs.to_device(batch, where, floating) for batch in batches),
                    layer or (),
                    grids_for=grids_for if grids else 0,
                    max_channels=max_channels,
                    seed=seed,
                    on_tensor=_keeper(tensors) if save_tensors else None,
                    on_batch=advance,
                )
            except ForwardError as error:
                failures.append(error)
                inspection = error.inspection
    inspection = replace(inspection, timings={"load": load_seconds, **inspection.timings})

    if inspection.inputs:
        _show(inspection, tables, messages, quiet=quiet, full=full)
    written = bool(inspection.inputs) and inspection.failure is None
    if written:
        with runs.new_run(target) as run:
            drawn = _draw(run.path, inspection, cmap=cmap, scale=scale)
            _write_tables(run.path, inspection, tensors)
            run.finish(_record(inspection, preprocessing, layer or (), drawn, failures))
        if not quiet:
            line = _last_line(target, len(drawn), len(inspection.inputs), grids_for, tensors=bool(tensors))
            tables.print(line, soft_wrap=True)
    if json:
        typer.echo(inspection_to_json(inspection, {"run": str(target) if written else None}), nl=False)
    return gravest([report(failure) for failure in failures])


def _place(loaded: "LoadedModel", where: "torch.device", dtype: str | None) -> "torch.dtype":
    """Move the network to its device and dtype; return the floating dtype that its inputs need."""
    import torch

    try:
        loaded.module.to(device=where, dtype=getattr(torch, dtype) if dtype else None)
    except (RuntimeError, TypeError) as error:  # out of memory, or a dtype that the device does not know
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{loaded.info.name} cannot be moved to {where} in {dtype or 'its dtype'}: {reason}"
        ) from error
    return floating_dtype(loaded.module)


def _keeper(tensors: "dict[str, list[torch.Tensor]]") -> "Callable[[str, torch.Tensor], None]":
    """Return an observer that copies every output to the CPU."""

    def keep(label: str, tensor: "torch.Tensor") -> None:
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        elif tensor.is_sparse or tensor.is_nested:
            return  # safetensors holds strided tensors only
        tensors.setdefault(label, []).append(tensor.detach().to("cpu", copy=True).contiguous())

    return keep


def _show(inspection: "Inspection", tables: "Console", messages: "Console", *, quiet: bool, full: bool) -> None:
    """Print the inspection for people: warnings to stderr first, so that they are seen before any number."""
    from hookscope.render import terminal

    if inspection.warnings:
        messages.print(terminal.warnings_panel(inspection.warnings))
    if not quiet:
        tables.print(terminal.layer_table(inspection, width=tables.width, full=full))
        if inspection.uncalled:
            tables.print(terminal.uncalled_lines(inspection.uncalled, full=full))
        if inspection.predictions:
            tables.print(terminal.predictions_lines(inspection, full=full))
    if inspection.failure is not None:
        messages.print(terminal.failure_panel(inspection.failure))


def _draw(folder: Path, inspection: "Inspection", *, cmap: str, scale: Literal["channel", "layer"]) -> list[str]:
    """Draw the grids into `folder`; return their paths inside the run."""
    from hookscope.render import grids

    names = [
        f"grids/{grids.grid_name(maps, len(inspection.rows), input_count=len(inspection.inputs))}"
        for maps in inspection.feature_maps
    ]

    def draw(maps: "FeatureMaps", name: str) -> None:
        picture = grids.draw_grid(maps, cmap=cmap, scale=scale, input_name=inspection.inputs[maps.input_index].name)
        (folder / name).write_bytes(grids.encode_png(picture))

    if names:
        (folder / "grids").mkdir()
        # NumPy and zlib let go of the interpreter for most of the work.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(draw, inspection.feature_maps, names))
    return names


def _write_tables(folder: Path, inspection: "Inspection", tensors: "Mapping[str, Sequence[torch.Tensor]]") -> None:
    from hookscope.render import tables

    (folder / "layers.csv").write_text(tables.rows_to_csv(inspection), encoding="utf-8")
    (folder / "layers.json").write_text(tables.rows_to_json(inspection), encoding="utf-8")
    if tensors:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file(_joined(tensors), folder / _TENSORS)
        except SafetensorError as error:
            raise OutputError(
                f"Cannot write {_TENSORS}: {error}. Free some space, or leave out --save-tensors."
            ) from error


def _joined(tensors: "Mapping[str, Sequence[torch.Tensor]]") -> "dict[str, torch.Tensor]":
    """Join each activation over the batches, along axis 0; where shapes differ, number the batches instead."""
    import torch

    joined = {}
    for label, parts in tensors.items():
        if len(parts) == 1:
            joined[label] = parts[0]
        elif parts[0].dim() and len({part.shape[1:] for part in parts}) == 1:
            joined[label] = torch.cat(list(parts))
        else:
            joined.update({f"{label}@{number}": part for number, part in enumerate(parts)})
    return joined


def _record(
    inspection: "Inspection",
    preprocessing: "Preprocessing",
    patterns: Sequence[str],
    grids: Sequence[str],
    failures: Sequence[HookscopeError],
) -> dict[str, Any]:
    """Return what `run.json` says besides the rows, which have files of their own."""
    import torch

    from hookscope.render.tables import inspection_to_dict

    record = {
        "verb": "activations",
        "command": shlex.join(["hookscope", *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("hookscope", "torch", "torchvision", "numpy", "pillow")},
        },
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "patterns": list(patterns),
        "preprocessing": asdict(preprocessing),
        "unusable_inputs": [str(failure) for failure in failures],
        "grids": list(grids),
    }
    details = inspection_to_dict(inspection)
    return record | {name: value for name, value in details.items() if name not in ("rows", "uncalled")}


def _last_line(target: Path, grid_count: int, input_count: int, grids_for: int, *, tensors: bool) -> str:
    """Say where the files are."""
    cut = f" for the first {grids_for} of {input_count} inputs (--grids-for)" if grids_for < input_count else ""
    drawn = [f"{grid_count} grid{'s' if grid_count != 1 else ''}{cut}"] if grid_count else []
    files = [*drawn, "layers.csv", "layers.json", *([_TENSORS] if tensors else [])]
    return f"{', '.join(files)} and run.json are in {safe_text(str(target))}"
