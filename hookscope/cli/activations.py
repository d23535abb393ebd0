"""`hookscope activations`: run a model over pictures and show what its layers make of them."""

from typing import Annotated

import typer

from hookscope.cli import options
from hookscope.cli import sections as under
from hookscope.cli.run_model import run_model
from hookscope.errors import UsageError


def activations(
    model: options.Model,
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGE",
            help="Pictures, tensor files (.npy, .pt, .safetensors), folders or globs; optional with --input or "
            "--input-shape.",
        ),
    ] = None,
    layer: options.Layer = None,
    ops: options.Ops = False,
    repeats: options.Repeats = False,
    weights: options.Weights = "auto",
    arch: options.Arch = None,
    model_arg: options.ModelArg = None,
    trust: options.Trust = False,
    key: options.Key = None,
    allow_missing: options.AllowMissing = None,
    allow_unexpected: options.AllowUnexpected = None,
    input_shape: options.InputShape = None,
    resize: options.Resize = None,
    crop: options.Crop = None,
    mean: options.Mean = None,
    std: options.Std = None,
    max_pixels: options.MaxPixels = None,
    batch_axis: options.BatchAxis = None,
    input: options.NamedInputs = None,  # noqa: A002 - the name of the option
    output_key: options.OutputKey = None,
    classes: options.Classes = None,
    multi_label: options.MultiLabel = False,
    edit: options.Edits = None,
    batch_size: options.BatchSize = 8,
    grids: Annotated[bool, under.write(" /--no-grids", help="Draw no feature-map grids.", show_default=False)] = True,
    grids_for: options.GridsFor = 4,
    max_channels: options.MaxChannels = None,
    cmap: options.Cmap = "auto",
    scale: options.Scale = "channel",
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    seed: options.Seed = 0,
    cost: options.Cost = False,
    verify: options.Verify = True,
    save_tensors: Annotated[
        bool, under.write("--save-tensors", help="Also write the activations themselves, activations.safetensors.")
    ] = False,
    show: options.Show = False,
    tensorboard: options.TensorBoard = None,
    page: options.Report = None,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    full: options.Full = False,
) -> int:
    """Run MODEL over pictures; write feature-map grids, shapes and activation statistics.

    \b
    hookscope activations demo cat.jpg --layer conv
    hookscope activations resnet34 cat.jpg --layer 'layer[34].*' --layer '!downsample'
    hookscope activations net.py:build photos/ --model-arg width=2 --resize 64 --crop 64
    hookscope activations model.pt cat.jpg --arch resnet18 --layer type:relu --json
    hookscope activations resnet34 cat.jpg --cost
    hookscope activations net.py:build --input wave=speech.npy --input rate=16000
    """
    from hookscope import api

    if not images and not input and not input_shape:
        raise UsageError(
            "Missing IMAGE: name a picture, a tensor file or a folder, or give --input-shape for noise. "
            "See `hookscope activations --help`."
        )
    return run_model(
        api.activations, locals(), otherwise="noise" if input_shape and not input else "named", has_progress=True
    )
