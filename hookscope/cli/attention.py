"""`hookscope attention`: what the attention of a transformer looks at."""

from typing import Annotated

import typer

from hookscope.cli import options
from hookscope.cli import sections as under
from hookscope.cli.run_model import run_model
from hookscope.errors import UsageError


def attention(
    model: options.Model,
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE", help="Pictures, tensor files (.npy, .pt, .safetensors), folders or globs."),
    ] = None,
    block: Annotated[
        list[str] | None,
        under.heads(
            "--block",
            metavar="BLOCK",
            help="Block to draw: its position among those seen (0, or -1 for the last), or its name; repeatable. "
            "Default: the last.",
        ),
    ] = None,
    head: Annotated[
        list[int] | None,
        under.heads("--head", metavar="N", help="Head to draw, from 0; repeatable. Default: the mean over heads."),
    ] = None,
    query: Annotated[
        list[str] | None,
        under.heads(
            "--query",
            metavar="QUERY",
            help="Whose attention to draw: cls, register:1, mean, or the x,y of a pixel of the photograph; repeatable. "
            "Default: the class token, or the mean over queries if there is none.",
        ),
    ] = None,
    rollout: Annotated[bool, under.heads("--rollout", help="Also follow attention through all blocks.")] = False,
    numbers: Annotated[
        bool,
        under.heads(
            " /--no-numbers",
            help="Do not measure heads; compute only the rows of --query: maps of large pictures then cost little more "
            "than the forward pass.",
            show_default=False,
        ),
    ] = True,
    tokens: Annotated[
        str | None,
        under.heads(
            metavar="LAYOUT",
            help="How tokens are placed on the picture if it cannot be inferred: prefix=1,grid=14x14. Words or other "
            "tokens behind the patches: grid=8x8,suffix=12.",
        ),
    ] = None,
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
    verify: options.Verify = True,
    save_tensors: Annotated[
        bool, under.write("--save-tensors", help="Also write the attention weights: attention.safetensors.")
    ] = False,
    show: Annotated[
        bool, under.show("--show", help="Also show the first overview in the terminal. Needs hookscope[show].")
    ] = False,
    page: options.Report = None,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    full: options.Full = False,
) -> int:
    """Show what the attention of MODEL looks at: maps on the photograph, and numbers of every block and head.

    \b
    hookscope attention vit_b_16 cat.jpg
    hookscope attention timm:vit_small_patch14_reg4_dinov2 cat.jpg --query cls --query register:1
    hookscope attention swin_t cat.jpg --query 120,80 --block 3 --head 0
    hookscope attention vit_b_16 cat.jpg --rollout --report attention.html
    """
    from hookscope import api

    if not images and not input and not input_shape:
        raise UsageError(
            "Missing IMAGE: name a picture, a tensor file or a folder, or give --input-shape for noise. "
            "See `hookscope attention --help`."
        )
    return run_model(
        api.attention, locals(), otherwise="noise" if input_shape and not input else "named", has_progress=True
    )
