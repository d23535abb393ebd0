"""`hookscope attribute`: where a network looks in a picture."""

from typing import Annotated, Literal

import typer

from hookscope.cli import options
from hookscope.cli import sections as under
from hookscope.cli.run_model import run_model
from hookscope.errors import UsageError


def attribute(
    model: options.Model,
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE", help="Pictures, tensor files (.npy, .pt, .safetensors), folders or globs."),
    ] = None,
    method: Annotated[
        str,
        under.looks(
            metavar="METHOD",
            help="Maps of a layer: grad-cam, grad-cam++, layer-cam, hires-cam. Maps of the input itself: "
            "gradient, input-x-gradient, guided-backprop; with hookscope[attribute] integrated-gradients, smoothgrad, "
            "occlusion.",
        ),
    ] = "grad-cam",
    target: Annotated[
        list[str] | None,
        under.looks(
            "--target",
            metavar="TARGET",
            help="What to explain: a class by name or index, one against another (tabby-tiger cat), box:0 of a "
            "detector, or file.py:function; repeatable, or with commas. Default: the best class of each input.",
        ),
    ] = None,
    top: Annotated[
        int | None, under.looks(min=1, metavar="N", help="Explain the N best classes of each input.")
    ] = None,
    layer: Annotated[
        list[str] | None,
        under.looks(
            "--layer",
            "-l",
            metavar="PATTERN",
            help="Layers whose output to look at, as for `activations`; repeatable. Default: the last layer whose "
            "output is a map of the input.",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        under.looks(
            metavar="LAYOUT",
            help="How a transformer's tokens lie on the input where it cannot be inferred: prefix=1,grid=14x14. "
            "Words or other tokens behind the patches: grid=8x8,suffix=12.",
        ),
    ] = None,
    sanity: Annotated[
        Literal["none", "quick", "full"],
        under.looks(help="Test whether the maps can be believed: not at all, on the first batch, or on all inputs."),
    ] = "quick",
    output_key: options.OutputKey = None,
    classes: options.Classes = None,
    multi_label: options.MultiLabel = False,
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
    batch_size: options.BatchSize = 8,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    seed: options.Seed = 0,
    show: Annotated[
        bool, under.show("--show", help="Also show the first overview in the terminal. Needs hookscope[show].")
    ] = False,
    page: options.Report = None,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    full: options.Full = False,
) -> int:
    """Draw where MODEL looks: which places of a picture, signal or volume the score for a class comes from.

    \b
    hookscope attribute demo cat.jpg
    hookscope attribute resnet34 photos/ --top 3 --report looks.html
    hookscope attribute demo cat.jpg --target 'tabby-tiger cat' --method layer-cam
    hookscope attribute model.pt cat.jpg --target 281 --layer layer3 --layer layer4
    """
    from hookscope import api

    if not images and not input and not input_shape:
        raise UsageError(
            "Missing IMAGE: name a picture, a tensor file or a folder, or give --input-shape for noise. "
            "See `hookscope attribute --help`."
        )
    return run_model(
        api.attribute, locals(), otherwise="noise" if input_shape and not input else "named", has_progress=True
    )
