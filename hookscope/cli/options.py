"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hookscope.cli.sections import INPUT, LAYERS, MODEL, RUN, SHOW, WRITE

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
        help="Layers by name or type; repeatable. A word matches part of either (conv), a glob (*?[]) the whole, "
        "/.../ is a regular expression; name: or type: restrict the match, ! excludes, @3 or @-1 picks by execution "
        "order. Default: modules with parameters, and leaf modules.",
        rich_help_panel=LAYERS,
    ),
]
Ops = Annotated[
    bool,
    typer.Option(
        "--ops",
        help="Also show the operations that the network's own code calls: F.relu, +, torch.cat. --layer op:relu or "
        "'layer3.*:cat' selects some.",
        rich_help_panel=LAYERS,
    ),
]
Repeats = Annotated[
    bool,
    typer.Option(
        "--repeats",
        help="Also show modules that return their input unchanged, such as dropout in eval mode.",
        rich_help_panel=LAYERS,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto: pretrained if cached or downloadable, else random with a warning; none: random; or a name such "
        "as IMAGENET1K_V1 or a file, which must load.",
        rich_help_panel=MODEL,
    ),
]
Arch = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Network of the weights file given as MODEL; default: inferred from names and shapes.",
        rich_help_panel=MODEL,
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify/--no-verify",
        help="Run the first batch once more without hooks, and compare output and loss.",
        rich_help_panel=RUN,
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Let the weights file run code while it is read: pickled modules, TorchScript, .pt2. It can do anything "
        "that you can.",
        rich_help_panel=MODEL,
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Path of the weights inside the file, such as ema or checkpoint.model.",
        rich_help_panel=MODEL,
    ),
]
AllowMissing = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-missing",
        metavar="PATTERN",
        help="Parameters that the weights file may lack, as a glob (fc.*); repeatable.",
        rich_help_panel=MODEL,
    ),
]
AllowUnexpected = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-unexpected",
        metavar="PATTERN",
        help="Names in the weights file that the network may lack, as a glob (head.*); repeatable.",
        rich_help_panel=MODEL,
    ),
]
ModelArg = Annotated[
    list[str] | None,
    typer.Option(
        "--model-arg",
        metavar="NAME=VALUE",
        help="Keyword argument of the factory; repeatable.",
        rich_help_panel=MODEL,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        min=0, max=2**63 - 1, metavar="N", help="Seed of random weights and random numbers.", rich_help_panel=RUN
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="auto, cpu, cuda, cuda:1 or mps; auto takes an accelerator if there is one.",
        rich_help_panel=RUN,
    ),
]
Dtype = Annotated[
    Literal["float32", "float64", "float16", "bfloat16"] | None,
    typer.Option(help="Run in this floating dtype; default: the model's own.", rich_help_panel=RUN),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print the result as JSON on stdout, and everything else on stderr.", rich_help_panel=SHOW
    ),
]


Resize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Resize the shorter side to 256, exactly to 240x320, or none; default: the weights' own, else 224.",
        rich_help_panel=INPUT,
    ),
]
Crop = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Centre crop to 224, to 192x256, or none; default: the weights' own, else 224.",
        rich_help_panel=INPUT,
    ),
]
Mean = Annotated[
    str | None,
    typer.Option(
        metavar="VALUES",
        help="Subtracted after scaling to 0-1: one value, one per channel, or none; default: the weights' own, "
        "else 0.485,0.456,0.406 (ImageNet's).",
        rich_help_panel=INPUT,
    ),
]
Std = Annotated[
    str | None,
    typer.Option(
        metavar="VALUES",
        help="Divides what remains, in the same form; default: the weights' own, else 0.229,0.224,0.225 (ImageNet's).",
        rich_help_panel=INPUT,
    ),
]
MaxPixels = Annotated[
    int | None,
    typer.Option(
        "--max-pixels",
        min=1,
        metavar="N",
        help="Refuse larger pictures before decoding them; default: 89478485, Pillow's limit for decompression bombs.",
        rich_help_panel=INPUT,
    ),
]
BatchAxis = Annotated[
    str | None,
    typer.Option(
        "--batch-axis",
        metavar="AXIS",
        help="Batch axis of a tensor file: 0, another index, none, or auto (the first of (N, C, H, W)).",
        rich_help_panel=INPUT,
    ),
]
NamedInputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=VALUE",
        help="Keyword argument of forward: a number (sr=16000), a picture or a tensor file (b=b.npy); repeatable.",
        rich_help_panel=INPUT,
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, metavar="N", help="Pictures per forward pass.", rich_help_panel=INPUT)]
InputShape = Annotated[
    str | None,
    typer.Option(
        metavar="N,C,H,W",
        help="Shape of the noise to run over; default: inferred from the weights or the first layer.",
        rich_help_panel=INPUT,
    ),
]
OutputKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Which output to use if there are several, such as logits, [0] or ['aux'].",
        rich_help_panel=MODEL,
    ),
]
Edits = Annotated[
    list[str] | None,
    typer.Option(
        "--edit",
        metavar="PATTERN:PLACE:OPERATION",
        help="Change a layer's input, output or grad, or a parameter's grad, and show the effect; repeatable, applied "
        "in order. Operations: zero, scale(2), add(0.5), clamp(min=0), clip-norm(1), noise(0.1); channels=3,7 narrows.",
        rich_help_panel=LAYERS,
    ),
]
GridsFor = Annotated[
    int, typer.Option(min=1, metavar="N", help="Draw grids for the first N pictures.", rich_help_panel=WRITE)
]
MaxChannels = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Draw only the first N channels of a layer.", rich_help_panel=WRITE),
]
Cmap = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Matplotlib colour map; auto: sequential for maps without negative values, else diverging around 0.",
        rich_help_panel=WRITE,
    ),
]
Scale = Annotated[
    Literal["channel", "layer"],
    typer.Option(help="One colour range per channel, or one for the whole layer.", rich_help_panel=WRITE),
]
Show = Annotated[
    bool,
    typer.Option(
        "--show",
        help="Also show up to six grids of the first input in the terminal. Needs hookscope[show].",
        rich_help_panel=SHOW,
    ),
]
TensorBoard = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        metavar="DIR",
        help="Also write scalars, histograms and grids for TensorBoard; one DIR per run. Needs hookscope[tensorboard].",
        rich_help_panel=WRITE,
    ),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Also write the run as one HTML page, FILE.", rich_help_panel=WRITE),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Run directory; default: hookscope-runs/COMMAND-MODEL-INPUT.", rich_help_panel=WRITE
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.", rich_help_panel=SHOW)]
Full = Annotated[bool, typer.Option("--full", help="Show every row of a long table.", rich_help_panel=SHOW)]
