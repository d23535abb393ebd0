"""`hookscope activations`: run a model over pictures and show what its layers make of them."""

from typing import Annotated

import typer

from hookscope import options
from hookscope.cli.options import Model, with_options
from hookscope.cli.run_model import run_model


@with_options
def activations(
    model: Model,
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGE",
            help="Pictures, tensor files (.npy, .pt, .safetensors), folders or globs; optional with --input or "
            "--input-shape.",
        ),
    ] = None,
    *,
    option: options.Activations,
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
    from hookscope import commands

    return run_model(commands.activations, model, images or [], option)
