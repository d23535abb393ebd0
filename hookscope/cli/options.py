"""Options and arguments that several commands share, and what their values come to."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hookscope.errors import UsageError

if TYPE_CHECKING:
    import torch

    from hookscope.models import FileOptions

# Our choice: 1 GiB of float32, more than anybody's input.
_MAX_ELEMENTS = 2**28

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A torchvision name (resnet34), timm:NAME, 'demo', file.py:factory, package.module:factory, or a weights "
        "file.",
    ),
]
Layer = Annotated[
    list[str] | None,
    typer.Option(
        "--layer",
        "-l",
        metavar="PATTERN",
        help="Layers by name or type; repeatable. A word matches a part of either (conv), *?[] make a glob over the "
        "whole, /.../ a regular expression, name: or type: narrow it, ! excludes, @3 or @-1 picks by execution order. "
        "Default: modules that own parameters, and leaves.",
    ),
]
Repeats = Annotated[
    bool,
    typer.Option(
        "--repeats",
        help="Also show modules that return their input, such as dropout in eval mode, although their rows repeat "
        "another one.",
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto: pretrained if cached or downloadable, else random with a warning; none: random; a name such as "
        "IMAGENET1K_V1, or a file: that or an error.",
    ),
]
Arch = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The network that a weights file given as MODEL belongs to; default: inferred from names and shapes.",
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify/--no-verify", help="Run the first batch once more without hooks, and compare output and loss."
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Let the weights file run code while it is read: pickled modules, TorchScript, .pt2. It can do anything "
        "that you can.",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Where in the file the weights are, such as ema or checkpoint.model."),
]
AllowMissing = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-missing",
        metavar="PATTERN",
        help="Names of the network that the weights file need not have, as a glob (fc.*); repeatable.",
    ),
]
AllowUnexpected = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-unexpected",
        metavar="PATTERN",
        help="Names of the weights file that the network need not know, as a glob (head.*); repeatable.",
    ),
]
ModelArg = Annotated[
    list[str] | None,
    typer.Option("--model-arg", metavar="NAME=VALUE", help="Keyword argument for the model's factory; repeatable."),
]
Seed = Annotated[
    int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Seed of random weights and random numbers.")
]
Device = Annotated[
    str,
    typer.Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:1 or mps; auto takes an accelerator if there is one."),
]
Dtype = Annotated[
    Literal["float32", "float64", "float16", "bfloat16"] | None,
    typer.Option(help="Run in this floating dtype; default: the model's own."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON to stdout; everything for people to stderr.")
]


Resize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Resize the shorter side to 256, exactly to 240x320, or none; default: the weights' own, else 224.",
    ),
]
Crop = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Centre crop to 224, to 192x256, or none; default: the weights' own, else 224."),
]
Mean = Annotated[
    str | None,
    typer.Option(
        metavar="VALUES",
        help="Subtracted after scaling to 0-1: one value, one per channel, or none; default: the weights' own, "
        "else 0.485,0.456,0.406 (ImageNet's).",
    ),
]
Std = Annotated[
    str | None,
    typer.Option(
        metavar="VALUES",
        help="Divided by, likewise; default: the weights' own, else 0.229,0.224,0.225 (ImageNet's).",
    ),
]
MaxPixels = Annotated[
    int | None,
    typer.Option(
        "--max-pixels",
        min=1,
        metavar="N",
        help="Refuse pictures of more pixels before decoding them; default: 89478485, where Pillow warns of bombs.",
    ),
]
BatchAxis = Annotated[
    str | None,
    typer.Option(
        "--batch-axis",
        metavar="AXIS",
        help="Which axis of a tensor file counts inputs: 0, another, none, or auto: the first of (N, C, H, W).",
    ),
]
NamedInputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=VALUE",
        help="Give the model an input by name: a number (sr=16000), a picture or a tensor file (b=b.npy); repeatable.",
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, metavar="N", help="Pictures per forward pass.")]
InputShape = Annotated[
    str | None,
    typer.Option(metavar="N,C,H,W", help="Shape of the noise to run with; default: what the weights or layers tell."),
]
OutputKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Which of several outputs counts, such as logits, [0] or ['aux']."),
]
Edits = Annotated[
    list[str] | None,
    typer.Option(
        "--edit",
        metavar="PATTERN:PLACE:OPERATION",
        help="Change a layer's input, output or grad, or a parameter's grad, and show the effect; repeatable, applied "
        "in order. Operations: zero, scale(2), add(0.5), clamp(min=0), clip-norm(1), noise(0.1); channels=3,7 narrows.",
    ),
]
GridsFor = Annotated[int, typer.Option(min=1, metavar="N", help="Draw grids for the first N pictures.")]
MaxChannels = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Draw the first N channels of a layer; default: all.")
]
Cmap = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Matplotlib colour map; auto: one for maps from 0 up, another, centred, for signed ones."
    ),
]
Scale = Annotated[
    Literal["channel", "layer"], typer.Option(help="Colour range of each channel by itself, or one for the layer.")
]
Show = Annotated[
    bool,
    typer.Option(
        "--show",
        help="Also show up to six grids of the first input, spread over depth, in the terminal. Needs hookscope[show].",
    ),
]
TensorBoard = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        metavar="DIR",
        help="Also write scalars, histograms and grids for TensorBoard into DIR, one folder for each run. Needs "
        "hookscope[tensorboard].",
    ),
]
Report = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Also write the run as one HTML page, FILE.")
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Run directory; default: hookscope-runs/COMMAND-MODEL-INPUT.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]
Full = Annotated[bool, typer.Option("--full", help="Show every row of a long table.")]


def file_options(
    trust: bool, key: str | None, allow_missing: list[str] | None, allow_unexpected: list[str] | None
) -> "FileOptions":
    """Return what `--trust`, `--key`, `--allow-missing` and `--allow-unexpected` come to."""
    from hookscope.models import FileOptions

    return FileOptions(trust, key, tuple(allow_missing or ()), tuple(allow_unexpected or ()))


def choose_device(name: str) -> "torch.device":
    """Return the device that `--device` means.

    Args:
        name: "auto", or a torch device string.

    Returns:
        A device that exists; "cuda" becomes "cuda:0".

    Raises:
        UsageError: If there is no such device here.
    """
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda:0")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name!r} is not a device. Give auto, cpu, cuda, cuda:1 or mps.") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) < count:
            return torch.device("cuda", device.index or 0)
        raise UsageError(f"--device {name!r}: {count} CUDA devices are visible here. Give --device cpu, or auto.")
    if device.type == "mps" and torch.backends.mps.is_available():
        return torch.device("mps")
    raise UsageError(f"--device {name!r} is not available here. Give --device cpu, or auto.")


def floating_dtype(module: "torch.nn.Module") -> "torch.dtype":
    """Return the floating dtype that the inputs of `module` need: its first floating parameter's, else float32."""
    import torch

    return next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the shape that `--input-shape` means.

    Raises:
        UsageError: If it is not a shape, or one of more values than anybody's input.
    """
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError as error:
        raise UsageError(f"--input-shape {text!r} is not a shape. Give sizes like 1,3,224,224.") from error
    if min(shape) < 1:
        raise UsageError(f"--input-shape {text!r} has a size below 1. Give sizes like 1,3,224,224.")
    if math.prod(shape) > _MAX_ELEMENTS:
        raise UsageError(f"--input-shape {text!r} has more than {_MAX_ELEMENTS} values. Give a smaller shape.")
    return shape
