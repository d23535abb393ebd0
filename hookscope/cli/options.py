"""Options and arguments that several commands share, and what their values come to."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hookscope.errors import UsageError

if TYPE_CHECKING:
    import torch

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A torchvision name (resnet34), 'demo', file.py:factory, package.module:factory, or a weights file with "
        "--arch.",
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
        "Default: every leaf.",
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
    str | None, typer.Option(metavar="MODEL", help="The network that a weights file given as MODEL belongs to.")
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
