"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hookscope.cli import sections as under
from hookscope.cli.completion import complete_layer, complete_model

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A torchvision name (resnet34), timm:NAME, 'demo', file.py:factory, package.module:factory, or a weights "
        "file.",
        autocompletion=complete_model,
    ),
]
Layer = Annotated[
    list[str] | None,
    under.layers(
        "--layer",
        "-l",
        metavar="PATTERN",
        help="Layers by name or type; repeatable. A word matches part of either (conv), a glob (*?[]) the whole, "
        "/.../ is a regular expression; name: or type: restrict the match, ! excludes, @3 or @-1 picks by execution "
        "order. Default: modules with parameters, and leaf modules.",
        autocompletion=complete_layer,
    ),
]
Ops = Annotated[
    bool,
    under.layers(
        "--ops",
        help="Also show the operations that the network's own code calls: F.relu, +, torch.cat. --layer op:relu or "
        "'layer3.*:cat' selects some.",
    ),
]
Repeats = Annotated[
    bool,
    under.layers(
        "--repeats", help="Also show modules that return their input unchanged, such as dropout in eval mode."
    ),
]
Weights = Annotated[
    str,
    under.model(
        metavar="NAME",
        help="auto: pretrained if cached or downloadable, else random with a warning; none: random; or a name such "
        "as IMAGENET1K_V1 or a file, which must load.",
    ),
]
Arch = Annotated[
    str | None,
    under.model(
        metavar="MODEL", help="Network of the weights file given as MODEL; default: inferred from names and shapes."
    ),
]
Verify = Annotated[
    bool,
    under.run("--verify/--no-verify", help="Run the first batch once more without hooks, and compare output and loss."),
]
Trust = Annotated[
    bool,
    under.model(
        "--trust",
        help="Let the weights file run code while it is read: pickled modules, TorchScript, .pt2. It can do anything "
        "that you can.",
    ),
]
Key = Annotated[
    str | None,
    under.model(metavar="PATH", help="Path of the weights inside the file, such as ema or checkpoint.model."),
]
AllowMissing = Annotated[
    list[str] | None,
    under.model(
        "--allow-missing",
        metavar="PATTERN",
        help="Parameters that the weights file may lack, as a glob (fc.*); repeatable.",
    ),
]
AllowUnexpected = Annotated[
    list[str] | None,
    under.model(
        "--allow-unexpected",
        metavar="PATTERN",
        help="Names in the weights file that the network may lack, as a glob (head.*); repeatable.",
    ),
]
Classes = Annotated[
    str | None,
    under.model(
        metavar="FILE",
        help="Names of the classes: a line each, or JSON (a list, or names by index); default: those that come with "
        "the weights, or ImageNet's for a known network with 1000 classes.",
    ),
]
ModelArg = Annotated[
    list[str] | None,
    under.model("--model-arg", metavar="NAME=VALUE", help="Keyword argument of the factory; repeatable."),
]
Seed = Annotated[int, under.run(min=0, max=2**63 - 1, metavar="N", help="Seed of random weights and random numbers.")]
Device = Annotated[
    str, under.run(metavar="DEVICE", help="auto, cpu, cuda, cuda:1 or mps; auto takes an accelerator if there is one.")
]
Dtype = Annotated[
    Literal["float32", "float64", "float16", "bfloat16"] | None,
    under.run(help="Run in this floating dtype; default: the model's own."),
]
Json = Annotated[bool, under.show("--json", help="Print the result as JSON on stdout, and everything else on stderr.")]


Resize = Annotated[
    str | None,
    under.inputs(
        metavar="SIZE",
        help="Resize the shorter side to 256, exactly to 240x320, or none; default: the weights' own, else 224.",
    ),
]
Crop = Annotated[
    str | None,
    under.inputs(metavar="SIZE", help="Centre crop to 224, to 192x256, or none; default: the weights' own, else 224."),
]
Mean = Annotated[
    str | None,
    under.inputs(
        metavar="VALUES",
        help="Subtracted after scaling to 0-1: one value, one per channel, or none; default: the weights' own, "
        "else 0.485,0.456,0.406 (ImageNet's).",
    ),
]
Std = Annotated[
    str | None,
    under.inputs(
        metavar="VALUES",
        help="Divides what remains, in the same form; default: the weights' own, else 0.229,0.224,0.225 (ImageNet's).",
    ),
]
MaxPixels = Annotated[
    int | None,
    under.inputs(
        "--max-pixels",
        min=1,
        metavar="N",
        help="Refuse larger pictures before decoding them; default: 89478485, Pillow's limit for decompression bombs.",
    ),
]
BatchAxis = Annotated[
    str | None,
    under.inputs(
        "--batch-axis",
        metavar="AXIS",
        help="Batch axis of a tensor file: 0, another index, none, or auto (the first of (N, C, H, W)).",
    ),
]
NamedInputs = Annotated[
    list[str] | None,
    under.inputs(
        "--input",
        metavar="NAME=VALUE",
        help="Keyword argument of forward: a number (sr=16000), a picture or a tensor file (b=b.npy); repeatable.",
    ),
]
BatchSize = Annotated[int, under.inputs(min=1, metavar="N", help="Pictures per forward pass.")]
InputShape = Annotated[
    str | None,
    under.inputs(
        metavar="N,C,H,W", help="Shape of the noise to run over; default: inferred from the weights or the first layer."
    ),
]
OutputKey = Annotated[
    str | None,
    under.model(metavar="KEY", help="Which output to use if there are several, such as logits, [0] or ['aux']."),
]
Edits = Annotated[
    list[str] | None,
    under.layers(
        "--edit",
        metavar="PATTERN:PLACE:OPERATION",
        help="Change a layer's input, output or grad, or a parameter's grad, and show the effect; repeatable, applied "
        "in order. Operations: zero, scale(2), add(0.5), clamp(min=0), clip-norm(1), noise(0.1); channels=3,7 narrows.",
    ),
]
GridsFor = Annotated[int, under.write(min=1, metavar="N", help="Draw grids for the first N pictures.")]
MaxChannels = Annotated[int | None, under.write(min=1, metavar="N", help="Draw only the first N channels of a layer.")]
Cmap = Annotated[
    str,
    under.write(
        metavar="NAME",
        help="Matplotlib colour map; auto: sequential for maps without negative values, else diverging around 0.",
    ),
]
Scale = Annotated[
    Literal["channel", "layer"], under.write(help="One colour range per channel, or one for the whole layer.")
]
Show = Annotated[
    bool,
    under.show("--show", help="Also show overview.png in the terminal. Needs hookscope[show]."),
]
TensorBoard = Annotated[
    Path | None,
    under.write(
        "--tensorboard",
        metavar="DIR",
        help="Also write scalars, histograms and grids for TensorBoard; one DIR per run. Needs hookscope[tensorboard].",
    ),
]
Report = Annotated[
    Path | None, under.write("--report", metavar="FILE", help="Also write the run as one HTML page, FILE.")
]
Out = Annotated[
    Path | None,
    under.write(
        metavar="DIR", help="Run directory; default: hookscope-runs/COMMAND-MODEL-INPUT, numbered where another run is."
    ),
]
Quiet = Annotated[bool, under.show("--quiet", "-q", help="Print warnings and errors only.")]
Full = Annotated[bool, under.show("--full", help="Show every row of a long table.")]
