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
        help="A torchvision name (resnet34), timm:NAME, 'demo', file.py:factory, package.module:factory, a weights "
        "file, or a folder of weights (Hugging Face, distributed).",
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
        help="Also show all operations that the network's own code calls, whatever --layer selects: F.relu, +, "
        "torch.cat. Without --ops, --layer op:relu or 'layer3.*:cat' shows some.",
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
        help="auto: trained weights if cached or downloadable, else random with a warning; none: random; or a name "
        "(IMAGENET1K_V1) or a file, which must load.",
    ),
]
Arch = Annotated[
    str | None,
    under.model(
        metavar="MODEL", help="Network of the weights file given as MODEL; default: inferred from names and shapes."
    ),
]
Cost = Annotated[
    bool,
    under.run(
        "--cost",
        help="Also measure each module for one input: multiply-adds, bytes of parameters, of output and saved "
        "for backward, receptive field, time on this machine.",
    ),
]
Depth = Annotated[
    int | None,
    under.show(min=0, metavar="N", help="Show modules down to this depth: 1 for the network and its children."),
]
Csv = Annotated[Path | None, under.write("--csv", metavar="FILE", help="Also write the rows as CSV, FILE.")]
Verify = Annotated[
    bool,
    under.run(
        " /--no-verify", help="Do not repeat the first batch without hooks to compare the results.", show_default=False
    ),
]
Trust = Annotated[
    bool,
    under.model(
        "--trust",
        help="Allow the weights file to run code while it is read: pickled modules, TorchScript, .pt2. It can do "
        "anything that you can.",
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
        help="Class names: one per line, or JSON (a list, or names by index); default: the weights' own, or "
        "ImageNet's for a known network with 1000 classes.",
    ),
]
MultiLabel = Annotated[
    bool,
    under.model(
        "--multi-label",
        help="Classes are independent labels (BCE): read scores as sigmoids, not as a softmax.",
    ),
]
ModelArg = Annotated[
    list[str] | None,
    under.model("--model-arg", metavar="NAME=VALUE", help="Keyword argument of the factory; repeatable."),
]
Seed = Annotated[int, under.run(min=0, max=2**63 - 1, metavar="N", help="Seed of random weights and random numbers.")]
Device = Annotated[
    str, under.run(metavar="DEVICE", help="auto, cpu, cuda, cuda:1 or mps; auto uses an accelerator if there is one.")
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
    under.inputs(
        metavar="SIZE",
        help="Centre crop to 224, to 192x256, or none; default: the weights' own, else 224, no larger than --resize.",
    ),
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
        help="Divisor after --mean, in the same form; default: the weights' own, else 0.229,0.224,0.225 (ImageNet's).",
    ),
]
MaxPixels = Annotated[
    int | None,
    under.inputs(
        "--max-pixels",
        min=1,
        metavar="N",
        help="Refuse larger pictures before decoding; default: 89478485, Pillow's limit for decompression bombs.",
    ),
]
BatchAxis = Annotated[
    str | None,
    under.inputs(
        "--batch-axis",
        metavar="AXIS",
        help="Axis of a tensor file that counts inputs: an index; none: it is one input; auto: axis 0, unless its "
        "rank is that of one input.",
    ),
]
NamedInputs = Annotated[
    list[str] | None,
    under.inputs(
        "--input",
        metavar="NAME=VALUE",
        help="Keyword argument of forward: a number (sr=16000), a row of numbers (ids=4,8,15:int64), a picture, or a "
        "file with a tensor, or a list or dict of tensors (b=b.pt); repeatable.",
    ),
]
BatchSize = Annotated[int, under.inputs(min=1, metavar="N", help="Pictures per forward pass.")]
InputShape = Annotated[
    list[str] | None,
    under.inputs(
        "--input-shape",
        metavar="[NAME=]SHAPE",
        help="Run over noise of this shape, batch axis first: 4,3,64,64, with dtype and bound 4,20:int64<1000; "
        "repeatable, for the arguments of forward in their order or by name (tokens=4,20:int64<1000).",
    ),
]
OutputKey = Annotated[
    str | None,
    under.model(metavar="KEY", help="Output to use if there are several, such as logits, [0] or ['aux']."),
]
Edits = Annotated[
    list[str] | None,
    under.layers(
        "--edit",
        metavar="PATTERN:PLACE:OPERATION",
        help="Change a layer's input, output or grad, or a parameter's grad or value (param:NAME:value:…), and show "
        "the effect; repeatable, applied in order. Operations: zero, scale(2), add(0.5), clamp(min=0), clip-norm(1), "
        "noise(0.1), prune(0.5), round(int8); channels=3,8-15 limits the channels.",
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
Scale = Annotated[Literal["channel", "layer"], under.write(help="One colour range per channel, or one for the layer.")]
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
        metavar="DIR",
        help="Run directory; default: hookscope-runs/COMMAND-MODEL-INPUT, numbered if taken by a different run.",
    ),
]
Quiet = Annotated[bool, under.show("--quiet", "-q", help="Print warnings and errors only.")]
Full = Annotated[bool, under.show("--full", help="Show every row of a long table.")]
