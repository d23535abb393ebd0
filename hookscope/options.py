"""Every option, once: its type, default and help, for the command line and for the Python functions.

A dataclass holds options that belong together; a command's class inherits from the classes of its options. Fields come
in the order of `dataclasses.fields`, the last base first. A field has the help. The class docstring describes fields
whose help would mislead Python callers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from inspect import get_annotations
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, dataclass_transform, get_args, get_origin

from hookscope.errors import UsageError
from hookscope.parameters import arg
from hookscope.text import printable

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.checkpoints.class_names import Classes
    from hookscope.inspection.edits import Edit
    from hookscope.inspection.given_inputs import Images
    from hookscope.results.attributions import Method
    from hookscope.results.noise_shapes import NoiseShapes

    Target = str | int | Sequence[int | str] | Path | Tensor | None

Texts = str | Sequence[str]
Arguments = Texts | Mapping[str, Any]
Limits = Texts | Mapping[str, float]
Numbers = str | float | Sequence[float]
Sizes = str | int | Sequence[int]
File = str | Path
Named = str | PathLike[str]  # a name or a file
Dtype = Literal["float32", "float64", "float16", "bfloat16"]
Autocast = Literal["bfloat16", "float16"]
Mode = Literal["eval", "train"]

# The types on the command line that differ from those in Python; repeatable options are always texts.
_ON_COMMAND_LINE: Mapping[Any, Any] = {
    **dict.fromkeys((Sizes | None, Numbers | None, Named | None, str | int | None), str | None),
    **dict.fromkeys(("Classes | None", "Target"), str | None),
    **dict.fromkeys((str | Callable[..., object], Named, "Method"), str),
    str | Callable[..., object] | None: str | None,
    File | None: Path | None,
    "NoiseShapes | None": list[str] | None,
    int | Sequence[int]: list[int] | None,
}

# Headings in the help, in their order.
_HEADINGS = (
    MOST_USED := "Most used",
    TRAINING := "Training",
    GRADIENTS := "Loss and gradients",
    LOOKS := "Method and targets",
    HEADS := "Blocks, heads and queries",
    LAYERS := "Layers",
    COMPARISON := "Comparison",
    RULES := "Rules",
    MODEL := "Model",
    OTHER := "How B runs",
    INPUT := "Input",
    FILES := "Files",
    NUMBERS := "Device and numbers",
    PROCESSES := "Processes",
    TERMINAL := "Terminal",
)

# The options that most people need come first, in this order; a long help has a heading for them.
_MOST_USED = (
    *("layer", "ops", "grads", "loss", "target", "method", "query", "reference", "shadow", "fail_over", "fail_on"),
    *("config", "select", "ignore", "baseline", "images", "data", "top", "by_class", "features", "resume", "bisect"),
    *("weights", "arch", "input_shape", "device", "out", "page", "json"),
)
_LONG = 20  # a help with more options is long

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OnCommandLine:
    """An option on the command line.

    Attributes:
        help: Names and metavar, two blanks, and a description: "--layer -l PATTERN  Layers by name". The default name
            is the field's.
        section: The heading in the help; "" for the heading of the class.
        bounds: Least and greatest number.
        command_default: The default on the command line, if it is not the field's.
        is_python: Whether the Python function has it.
    """

    help: str
    section: str = ""
    bounds: tuple[float | None, float | None] = (None, None)
    command_default: Any = None
    is_python: bool = True


def option(default: Any, help_text: str, **further: Any) -> Any:
    """Return a field for an option; the arguments after the default go to `OnCommandLine`."""
    return field(default=default, metadata={"option": OnCommandLine(help_text, **further)})


def shown(default: Any, help_text: str, **further: Any) -> Any:
    """Return a field for an option that only the command line has."""
    return option(default, help_text, is_python=False, **further)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def group(section: str = "") -> Callable[[type[T]], type[T]]:
    """Return a decorator for dataclasses of options; `section` is the heading of options without their own."""

    def declared(kind: type[T]) -> type[T]:
        changed: dict[str, Any] = {"__init__": _init, "__post_init__": _settle}
        for name in get_annotations(kind):
            setting: Field[Any] = vars(kind)[name]
            here = replace(on_command_line(setting), section=on_command_line(setting).section or section)
            changed[name] = field(default=setting.default, metadata={"option": here})
        for name, value in changed.items():
            setattr(kind, name, value)
        # All share one `__init__`: generating 50 of them would take a tenth of the time of --help.
        return dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False, match_args=False)(kind)

    return declared


def on_command_line(setting: "Field[Any]") -> OnCommandLine:
    """Return the part of a field for the command line."""
    return cast("OnCommandLine", setting.metadata["option"])


def text_type(setting: "Field[Any]") -> Any:
    """Return the type into which the command line converts an option's text."""
    return _ON_COMMAND_LINE.get(setting.type, list[str] | None if setting.default == () else setting.type)


def in_help(kind: Any) -> "list[tuple[Field[Any], str]]":
    """Return a class's options in the order of the help, each with its heading."""
    every = fields(kind)
    rank = {name: place for place, name in enumerate(_MOST_USED)}
    above = rank if len(every) > _LONG else {}
    headed = [(setting, MOST_USED if setting.name in above else on_command_line(setting).section) for setting in every]
    return sorted(headed, key=lambda row: (_HEADINGS.index(row[1]), rank.get(row[0].name, len(rank))))


# By type of an option, the classes that its value may have, and their description.
_KINDS: Mapping[Any, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys((str, str | None), ((str,), "a text")),
    **dict.fromkeys((int, int | None), ((Integral,), "a whole number")),
    **dict.fromkeys((bool, bool | None), ((bool,), "True or False")),
    int | Sequence[int]: ((Integral, list, tuple), "a whole number or a list of whole numbers"),
    str | int | None: ((str, Integral), "a text or a whole number"),
    str | int | Sequence[str | int]: ((str, Integral, list, tuple), "texts and whole numbers"),
    Texts: ((str, list, tuple), "a text or a list of texts"),
    **dict.fromkeys((Limits, Arguments), ((str, list, tuple, Mapping), "a mapping, a text or a list of texts")),
    **{kind: ((*get_args(kind), PathLike), "a path") for kind in (File, File | None)},
    **dict.fromkeys((Named, Named | None), ((str, PathLike), "a text or a path")),
}
_HINTS = {
    "arch": " Give the name of a network here, such as 'net.py:build', and a module as `model`.",
    "device": " Give its name, such as 'cuda:1'.",
    "input": " It gives arguments by name: {'meta': tensor}.",
    "target": " A function is given as 'file.py:function'.",
}


def _init(self: Any, **kwargs: Any) -> None:
    for setting in fields(self):
        object.__setattr__(self, setting.name, kwargs.pop(setting.name, setting.default))
    if kwargs:
        raise TypeError(f"{type(self).__name__} has no {next(iter(kwargs))}")
    self.__post_init__()


def _settle(self: Any) -> None:
    """Turn single values of repeatable options into tuples, and refuse values of a wrong type or out of bounds."""
    for setting in fields(self):
        value = getattr(self, setting.name)
        if value is setting.default or "option" not in setting.metadata:
            continue
        value = of_kind(setting.name, setting.type, value)
        if setting.default == () and setting.type != "Images" and not isinstance(value, Mapping):
            value = tuple(value) if isinstance(value, list | tuple) else (value,)
        object.__setattr__(self, setting.name, value)
        least, most = on_command_line(setting).bounds
        items: Sequence[Any] = value if isinstance(value, tuple) else [value]
        numbers: list[Any] = [item for item in items if isinstance(item, Real)]
        for number in numbers if numbers and value != setting.default else ():
            if least is not None and number < least:
                raise UsageError(f"{arg(setting.name)} {number} is not possible: give {least} or more.")
            if most is not None and number > most:
                raise UsageError(f"{arg(setting.name)} {number} is not possible: give {most} or less.")


def of_kind(name: str, kind: Any, value: Any) -> Any:
    """Return the value of an option or argument, a path of type `Named` as text; UsageError if its type is wrong."""
    choices = [choice for part in (kind, *get_args(kind)) if get_origin(part) is Literal for choice in get_args(part)]
    classes, wanted = _KINDS.get(kind, ((), ""))
    is_list = isinstance(value, list | tuple) and list in classes
    right = tuple({*classes} - {list, tuple, Mapping}) if is_list else classes
    items = value if is_list else [value]
    wrong = [item for item in items if not isinstance(item, right) or isinstance(item, bool) is not (bool in classes)]
    if classes and wrong:
        actual = f"the class {wrong[0].__name__}" if isinstance(wrong[0], type) else f"type {type(wrong[0]).__name__}"
        raise UsageError(f"{arg(name)} takes {wanted}, not {printable(actual)}.{_HINTS.get(name, '')}")
    if choices and value not in choices:
        raise UsageError(f"{arg(name)} takes {' or '.join(choices)}, not {printable(repr(value))}.")
    return fspath(value) if kind in (Named, Named | None) else value


def is_given(option: Any, name: str) -> bool:
    """Tell whether an option has a value other than its default; an empty list counts as none."""
    value, default = getattr(option, name), type(option).__dataclass_fields__[name].default
    if isinstance(value, list | tuple | Mapping) and not value:
        return False
    return value is not default and not (type(value) is type(default) and value == default)


def any_given(option: Any, kind: Any) -> bool:
    """Tell whether `option` has a value other than the default for any option of class `kind`."""
    return any(is_given(option, setting.name) for setting in fields(kind))


def taken(kind: type[T], option: Any, **changes: Any) -> T:
    """Return options of class `kind`, with the values of options that both classes have, and with changes."""
    names = [setting.name for setting in fields(option) if hasattr(kind, setting.name)]
    return kind(**({name: getattr(option, name) for name in names} | changes))


@group(MODEL)
class KeyOption:
    """Which weights of a file are read."""

    key: str | None = option(None, "PATH  Path of the weights inside the file, such as ema or checkpoint.model.")


@group(MODEL)
class NetworkOptions(KeyOption):
    """Which network a weights file belongs to, and what of the file is read.

    Attributes:
        model_arg: Keyword arguments for the network's factory: a mapping, or texts "NAME=VALUE".
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
    """

    arch: Named | None = option(
        None, "MODEL  Network of the weights file given as MODEL; default: inferred from names and shapes."
    )
    model_arg: Arguments = option((), "NAME=VALUE  Keyword argument of the factory; repeatable.")
    allow_missing: Texts = option(
        (), "PATTERN  Parameters that the weights file may lack, as a glob (fc.*); repeatable."
    )
    allow_unexpected: Texts = option(
        (), "PATTERN  Names in the weights file that the network may lack, as a glob (head.*); repeatable."
    )


@group(MODEL)
class TrustOption:
    """Whether a file is trusted."""

    trust: bool = option(
        False,
        "Allow the weights file to run code while it is read: pickled modules, TorchScript, .pt2. It can do anything "
        "that you can.",
    )


@group(MODEL)
class ModelOptions(TrustOption, NetworkOptions):
    """How MODEL becomes a network with weights.

    Attributes:
        weights: For MODEL: "auto" (trained if available, else random with a warning), "none" (random), a name, or a
            file.
    """

    weights: Named = option(
        "auto",
        "NAME  auto: trained weights if cached or downloadable, else random with a warning; none: random; or a name "
        "(IMAGENET1K_V1) or a file, which must load.",
    )


@group(MODEL)
class ClassNames:
    """What the classes are called.

    Attributes:
        classes: Class names: a file, a list, or names by index; default: the weights' own.
    """

    classes: "Classes | None" = option(
        None,
        "FILE  Class names: one per line, or JSON (a list, or names by index); default: the weights' own, or "
        "ImageNet's for a known network with 1000 classes.",
    )


@group(MODEL)
class OutputKey:
    """Which output counts.

    Attributes:
        output_key: Which of several outputs holds the class scores.
    """

    output_key: str | None = option(None, "KEY  Output to use if there are several, such as logits, [0] or ['aux'].")


@group(MODEL)
class ScoreOptions(ClassNames, OutputKey):
    """How scores are read."""

    multi_label: bool = option(
        False, "Classes are independent labels (BCE): read scores as sigmoids, not as a softmax."
    )


@group(INPUT)
class PictureOptions:
    """How pictures and tensor files become inputs.

    Attributes:
        resize: Size of pictures in pixels: the shorter side, (height, width), or "none".
        crop: Size in pixels that is cut from the centre, in the same forms; by default no larger than `resize`.
        mean: Subtracted after scaling pixels to 0-1: one value, one per channel, or "none".
        std: Divisor after `mean` is subtracted, in the same forms.
        batch_axis: Axis of a tensor file that counts inputs: an index, "auto" or "none".
    """

    resize: Sizes | None = option(
        None, "SIZE  Resize the shorter side to 256, exactly to 240x320, or none; default: the network's own, else 224."
    )
    crop: Sizes | None = option(
        None,
        "SIZE  Centre crop to 224, to 192x256, or none; default: the network's own, else 224, no larger than --resize.",
    )
    mean: Numbers | None = option(
        None,
        "VALUES  Subtracted after scaling to 0-1: one value, one per channel, or none; default: the weights' own, "
        "else 0.485,0.456,0.406 (ImageNet's).",
    )
    std: Numbers | None = option(
        None,
        "VALUES  Divisor after --mean, in the same form; default: the weights' own, else 0.229,0.224,0.225 "
        "(ImageNet's).",
    )
    max_pixels: int | None = option(
        None,
        "N  Refuse larger pictures before decoding; default: 89478485, Pillow's limit for decompression bombs.",
        bounds=(1, None),
    )
    batch_axis: str | int | None = option(
        None,
        "AXIS  Axis of a tensor file that counts inputs: an index; none: it is one input; auto: axis 0, unless its "
        "rank is that of one input.",
    )


@group(INPUT)
class NoiseOption:
    """Noise instead of inputs.

    Attributes:
        input_shape: Noise instead of inputs, batch axis first: (4, 20), or "4,20:int64<1000" with dtype and bound; a
            list of these for several arguments by position; or a mapping of argument names to these, which may be
            combined with pictures and tensors by position.
    """

    input_shape: "NoiseShapes | None" = option(
        None,
        "[NAME=]SHAPE  Run over noise of this shape, batch axis first: 4,3,64,64, with dtype and bound "
        "4,20:int64<1000; repeatable, for the arguments of forward in their order or by name "
        "(tokens=4,20:int64<1000).",
    )


@group(INPUT)
class NamedInputs:
    """Inputs by name.

    Attributes:
        input: Inputs by name: tensors, lists and dicts of tensors, numbers, text, and a `Path` for a file; or texts
            "NAME=VALUE".
    """

    input: Arguments = option(
        (),
        "NAME=VALUE  Keyword argument of forward: a number (sr=16000), a row of numbers (ids=4,8,15:int64), a "
        "picture, or a file with a tensor, or a list or dict of tensors (b=b.pt); repeatable.",
    )


@group()
class InputOptions(NamedInputs, PictureOptions, NoiseOption):
    """What a network runs over, and how."""


@group(INPUT)
class BatchSize:
    """How many inputs run at once.

    Attributes:
        batch_size: Inputs per forward pass.
    """

    batch_size: int = option(8, "N  Pictures per forward pass.", bounds=(1, None))


@group(LAYERS)
class LayerOptions:
    """Which layers have rows.

    Attributes:
        layer: Patterns of layers to measure; default: modules that own parameters, and leaves. "op:relu" and
            "layer3.*:cat" select operations.
        ops: Also observe all operations that the network's own code calls: `F.relu`, `+`, `torch.cat`.
    """

    layer: Texts = option(
        (),
        "--layer -l PATTERN  Layers by name or type; repeatable. A word matches part of either (conv), a glob (*?[]) "
        "the whole, /.../ is a regular expression; name: or type: restrict the match, ! excludes, @3 or @-1 picks by "
        "execution order. Default: modules with parameters, and leaf modules.",
    )
    ops: bool = option(
        False,
        "Also show all operations that the network's own code calls, whatever --layer selects: F.relu, +, torch.cat. "
        "Without --ops, --layer op:relu or 'layer3.*:cat' shows some.",
    )


@group(LAYERS)
class RowOptions(LayerOptions):
    """Which layers have rows, and what is changed before they are measured.

    Attributes:
        edit: Changes to inputs, outputs or parameters, "layer3:output:zero(channels=3)"; `comparison` of the result has
            their effect.
    """

    repeats: bool = option(False, "Also show modules that return their input unchanged, such as dropout in eval mode.")
    edit: "Texts | Sequence[Edit]" = option(
        (),
        "PATTERN:PLACE:OPERATION  Change a layer's input, output or grad, or a parameter's grad or value "
        "(param:NAME:value:…), and show the effect; repeatable, applied in order. Operations: zero, scale(2), "
        "add(0.5), clamp(min=0), clip-norm(1), noise(0.1), prune(0.5), round(int8); channels=3,8-15 limits the "
        "channels.",
    )


@group(NUMBERS)
class OnProcessor:
    """Where a network runs, if not on the CPU."""

    device: str = option("cpu", "DEVICE  auto, cpu, cuda, cuda:1 or mps.")


@group(NUMBERS)
class RunOptions:
    """Where a network runs, and in which numbers.

    Attributes:
        device: For MODEL: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: For MODEL: run in this dtype.
    """

    device: str = option("auto", "DEVICE  auto, cpu, cuda, cuda:1 or mps; auto uses an accelerator if there is one.")
    dtype: Dtype | None = option(None, "Run in this floating dtype; default: the model's own.")
    seed: int = option(0, "N  Seed of random weights and random numbers.", bounds=(0, 2**63 - 1))


@group(NUMBERS)
class CostOption:
    """What a network costs."""

    cost: bool = option(
        False,
        "Also measure each module for one input: multiply-adds, bytes of parameters, of output and saved for "
        "backward, receptive field, time on this machine.",
    )


@group(NUMBERS)
class VerifyOption:
    """Whether what hooks saw is compared with a run without them.

    Attributes:
        verify: Run the first batch again without hooks, and compare the outputs.
    """

    verify: bool = option(True, "Do not repeat the first batch without hooks to compare the results.")


@group(FILES)
class GridOptions:
    """What is drawn of each layer.

    Attributes:
        grids_for: Keep feature maps for drawing, for the first `grids_for` inputs.
        max_channels: Keep at most the first `max_channels` channels of each feature map.
    """

    grids: bool = shown(True, "Draw no feature-map grids.")
    grids_for: int = option(0, "N  Draw grids for the first N pictures.", bounds=(1, None), command_default=4)
    max_channels: int | None = option(None, "N  Draw only the first N channels of a layer.", bounds=(1, None))
    cmap: str = shown(
        "auto",
        "NAME  Matplotlib colour map; auto: sequential for maps without negative values, else diverging around 0.",
    )
    scale: Literal["channel", "layer"] = shown("channel", "One colour range per channel, or one for the layer.")


@group(FILES)
class TensorBoardOption:
    """A run for TensorBoard."""

    tensorboard: Path | None = shown(
        None,
        "DIR  Also write scalars, histograms and grids for TensorBoard; one DIR per run. Needs hookscope[tensorboard].",
    )


@group(TERMINAL)
class ShowOption:
    """The picture of a run in the terminal."""

    show: bool = shown(False, "Also show overview.png in the terminal. Needs hookscope[show].")


@group(TERMINAL)
class JsonOption:
    """A result for programs."""

    json: bool = shown(False, "Print the result as JSON on stdout, and everything else on stderr.")


@group(TERMINAL)
class LinesOptions:
    """How much is printed."""

    quiet: bool = shown(False, "--quiet -q  Print warnings and errors only.")
    full: bool = shown(False, "Show every row of a long table.")


@group(TERMINAL)
class StrictOption:
    """Whether a problem fails the command."""

    strict: bool = shown(
        False,
        "Exit with 1 if there is a problem: a verdict, a map that fails a check, a block that was not seen, a channel "
        "that is dead over 30 inputs or more, NaN or Inf.",
    )


@group(FILES)
class OutputOptions(LinesOptions, JsonOption):
    """What a command prints and writes."""

    out: Path | None = shown(
        None, "DIR  Run directory; default: hookscope-runs/COMMAND-MODEL-INPUT, numbered if taken by a different run."
    )
    page: Path | None = shown(None, "--report FILE  Also write the run as one HTML page, FILE.")
    open: bool = shown(False, "Open the page of --report, or else overview.png, when all is written.")


@group(FILES)
class Activations(
    OutputOptions,
    StrictOption,
    ShowOption,
    VerifyOption,
    CostOption,
    RunOptions,
    TensorBoardOption,
    GridOptions,
    BatchSize,
    InputOptions,
    ScoreOptions,
    ModelOptions,
    RowOptions,
):
    """Options of `activations`.

    Attributes:
        cost: Also measure the cost of every module for the first input, in `cost` of the result: see `NetworkCost`.
        save_tensors: Keep the activations in `tensors` of the result; `save` then writes them too.
    """

    save_tensors: bool = option(False, "Also write the activations themselves, activations.safetensors.")


@group(GRADIENTS)
class Grads(
    OutputOptions,
    ShowOption,
    VerifyOption,
    RunOptions,
    TensorBoardOption,
    GridOptions,
    BatchSize,
    InputOptions,
    RowOptions,
    ModelOptions,
    ScoreOptions,
):
    """Options of `grads`.

    Attributes:
        loss: "ce", "bce", "mse", "l1", "huber", "nll", "sum", "logit", "projection", "file.py:function", or a function
            of the output, and of the target if there is one, that returns a 0-d tensor.
        target: Target of the loss: a class index or name, or one per input, "zeros", "noise", "self", a tensor or its
            file.
        mode: "train" for batch statistics and dropout as in training.
        per_image: Also differentiate the loss of every single input; the norms are in `inputs_alone` of the result.
        limit: Limits of rules: a mapping, `{"vanishing": 1e-5}`, or texts "NAME=VALUE".
        input_shape: As for `activations`; None to infer it from the model.
        output_key: Which of several outputs the loss is computed from.
        edit: Changes to inputs, outputs, gradients, parameters or their gradients; `comparison` of the result has their
            effect.
        grids_for: Keep gradients of outputs for drawing, for the first `grids_for` inputs.
        save_tensors: Keep the gradients in `tensors` of the result; `save` then writes them too.
    """

    loss: str | Callable[..., object] = option(
        "projection",
        "LOSS  ce, bce, mse, l1, huber, nll, sum, logit, projection (a seeded random projection of all outputs), or "
        "file.py:function.",
    )
    target: "Target" = option(
        None,
        "TARGET  A class index or name, or one per input separated by commas; zeros, noise, self (the input), or a "
        "tensor file. Default: the best class for ce, nll and logit, 0.5 for bce, noise for mse, l1 and huber.",
    )
    inputs: bool = option(False, "Also report grad_input: the gradient through the layer alone.")
    mode: Mode = option("eval", "train: batch statistics and dropout as in training.")
    per_image: bool = option(
        False, "Also differentiate each picture separately; show its gradient norms and their spread."
    )
    limit: Limits = option((), "NAME=VALUE  Threshold of a rule, such as vanishing=1e-6; repeatable.")
    fail_on: Literal["fail", "warn"] | None = shown(
        None, "LEVEL  Exit with 1 if a verdict has this level: fail, or warn for warnings too. Default: never."
    )
    grids: bool = shown(False, "Draw gradients of outputs as grids.", section=FILES)
    save_tensors: bool = option(False, "Also write the gradients themselves, gradients.safetensors.", section=FILES)
    autocast: Autocast | None = option(None, "Run forward pass and loss under autocast.", section=NUMBERS)


@group(INPUT)
class TokensOption:
    """How tokens are placed on a picture."""

    tokens: str | None = option(
        None,
        "LAYOUT  How tokens are placed on the picture if it cannot be inferred: prefix=1,grid=14x14. Words or other "
        "tokens behind the patches: grid=8x8,suffix=12.",
    )


@group(LOOKS)
class Attribute(
    OutputOptions,
    StrictOption,
    ShowOption,
    RunOptions,
    BatchSize,
    InputOptions,
    ModelOptions,
    ScoreOptions,
    TokensOption,
):
    """Options of `attribute`.

    Attributes:
        method: "grad-cam", "grad-cam++", "layer-cam" and "hires-cam" map a layer; "gradient", "input-x-gradient",
            "guided-backprop", "integrated-gradients", "smoothgrad" and "occlusion" map the pixels. Sources of the
            formulas are in `hookscope.commands.attribute`.
        target: What to explain: classes by index or name, one against another ("tabby-tiger cat"), a detector's boxes
            ("box:0", or the best of a class), a class's pixels where each pixel has scores, or the number per input
            that a function of the network's output returns ("file.py:function"). Every target in a list, or
            separated by commas, gets a map.
        top: Explain this many best classes or boxes of each input instead; without `target` and `top`, the best one.
        layer: Names of layers, or patterns; none means the last layer whose output is a map of the picture.
        sanity: Tests of the maps: "none", "quick" on the first batch, or "full" on all inputs.
    """

    method: "Method" = option(
        "grad-cam",
        "METHOD  Maps of a layer: grad-cam, grad-cam++, layer-cam, hires-cam. Maps of the input itself: gradient, "
        "input-x-gradient, guided-backprop, smoothgrad; with hookscope[attribute] integrated-gradients, occlusion.",
    )
    target: str | int | Sequence[str | int] = option(
        (),
        "TARGET  What to explain: a class by name or index, one against another (tabby-tiger cat), box:0 of a "
        "detector, or file.py:function; repeatable, or with commas. Default: the best class of each input.",
    )
    top: int | None = option(None, "N  Explain the N best classes of each input.", bounds=(1, None))
    layer: Texts = option(
        (),
        "--layer -l PATTERN  Layers whose output to look at, as for `activations`; repeatable. Default: the last "
        "layer whose output is a map of the input.",
    )
    sanity: Literal["none", "quick", "full"] = option(
        "quick", "Test whether the maps can be believed: not at all, on the first batch, or on all inputs."
    )


@group(HEADS)
class Attention(
    OutputOptions,
    StrictOption,
    ShowOption,
    VerifyOption,
    RunOptions,
    BatchSize,
    InputOptions,
    ModelOptions,
    TokensOption,
):
    """Options of `attention`.

    Attributes:
        block: Which blocks to draw, of those seen: positions from 0, or -1 for the last, or names.
        head: Which heads to draw, from 0; none means the mean over heads.
        query: Whose attention to draw: "cls", "register:1", "mean", or "x,y", a pixel of the photograph; or a list of
            these. None means the class token, or the mean over queries if there is no class token.
        numbers: Measure every head. If False, only the rows of `query` are computed: maps of large pictures then cost
            little more than the forward pass.
        save_tensors: Keep the attention weights in `tensors` of the result; `save` then writes them too.
    """

    block: str | int | Sequence[str | int] = option(
        (),
        "BLOCK  Block to draw: its position among those seen (0, or -1 for the last), or its name; repeatable. "
        "Default: the last.",
    )
    head: int | Sequence[int] = option(
        (), "N  Head to draw, from 0; repeatable. Default: the mean over heads.", bounds=(0, None)
    )
    query: Texts = option(
        (),
        "QUERY  Whose attention to draw: cls, register:1, mean, or the x,y of a pixel of the photograph; repeatable. "
        "Default: the class token, or the mean over queries if there is none.",
    )
    rollout: bool = option(False, "Also follow attention through all blocks.")
    numbers: bool = option(
        True,
        "Do not measure heads; compute only the rows of --query: maps of large pictures then cost little more than "
        "the forward pass.",
    )
    save_tensors: bool = option(False, "Also write the attention weights: attention.safetensors.", section=FILES)


@group(OTHER)
class OtherOptions:
    """How B runs.

    Attributes:
        weights_b: As `weights`, for B; default: A's.
        input_b: Inputs of B instead of `images`, one per image in the same order, such as padded or cropped pictures.
            Inputs then run one by one; rows with different shapes are not compared.
        device_b: As `device`, for B; default: A's.
        compile_b: Run B through torch.compile. The output comes from the whole network, compiled in one piece; the rows
            come from blocks that are compiled one by one, and `layer` can make these blocks smaller.
        edit_b: Changes to B's parameters, or to inputs or outputs of its layers: "layer3:output:zero(channels=3)".
    """

    weights_b: Named | None = option(None, "NAME  Weights of B, as --weights. Default: A's.")
    input_b: "Images" = option(
        (), "IMAGE  Input of B instead of IMAGE, such as a padded or cropped picture; repeatable, one per IMAGE."
    )
    device_b: str | None = option(None, "DEVICE  Device of B, as --device. Default: A's.")
    dtype_b: Dtype | None = option(None, "Run B in this dtype. Default: A's.")
    autocast_b: Autocast | None = option(None, "Run B under autocast to this dtype.")
    mode_b: Mode = option("eval", "Run B with batch statistics and dropout as in training.")
    threads_b: int | None = option(None, "N  Threads that B computes with on the CPU.", bounds=(1, None))
    compile_b: bool = option(False, "Run B through torch.compile: the output compiled whole, rows block by block.")
    edit_b: "Texts | Sequence[Edit]" = option((), "EDIT  Change B, as --edit of `activations`; repeatable.")


@group(COMPARISON)
class Diff(OutputOptions, RunOptions, BatchSize, ScoreOptions, InputOptions, OtherOptions, ModelOptions, LayerOptions):
    """Options of `diff`.

    Attributes:
        grads: Also run both backward, batch by batch, and compare gradients of outputs, and gradients of parameters
            summed over batches. `first_gradient_difference` of the result is the first gradient to differ in the
            backward pass. The gradients of all layers' inputs and outputs over a batch, of both models, wait as A's
            outputs do.
        loss: As for `grads`; default: "projection".
        target: As for `grads`; without a target, A and B compute one each.
        fail_over: Conditions for `exceeded`: "rel>1e-3", "layer4*:cosine<0.99", "output:kl>0.01", "top1<1".
        layer: Layers of A whose rows are shown.
        map: Pairs of layers with different names, "encoder.*=backbone.*".
        output_key: Which of several outputs is compared and differentiated; None for all.
    """

    reference: Literal["float64"] | None = option(
        None, "Also run A's weights in float64, and measure the errors of A and B against it: is B worse?"
    )
    shadow: bool = option(False, "Also run each layer of B on A's input: how much the layer itself adds.")
    grads: bool = option(
        False,
        "Also compare gradients of outputs and parameters (summed over batches), and name the first to differ; keeps "
        "all gradients of a batch, beyond 2 GiB in a temporary file.",
    )
    loss: str | Callable[..., object] | None = option(
        None, "LOSS  Loss that --grads differentiates, as --loss of `grads`."
    )
    target: "Target" = option(
        None, "TARGET  As --target of `grads`; the default is computed from each side's own output."
    )
    fail_over: Texts = option(
        (),
        "CONDITION  Exit with 1 if a row or the output exceeds this limit: 'rel>1e-3', 'layer4*:cosine<0.99', "
        "'output:kl>0.01', 'top1<1'. Measures: rel, cosine, sqnr, max, ulps, input, added, error; of the output kl, "
        "top1, top5. Repeatable.",
    )
    map: Texts = option((), "A=B  Layers that belong together: 'encoder.*=backbone.*'; repeatable.", section=LAYERS)
    junit: Path | None = shown(None, "FILE  Also write the conditions of --fail-over as JUnit XML.", section=FILES)
    report_format: Literal["text", "github", "markdown"] | None = shown(
        None, "--format  Format on stdout; default: github in GitHub Actions, else text.", section=TERMINAL
    )


@group(TERMINAL)
class Layers(JsonOption, CostOption, NamedInputs, NoiseOption, ModelOptions, LayerOptions):
    """Options of `layers`.

    Attributes:
        layer: Patterns to mark; default: modules that own parameters, and leaves.
        weights: A file or a name of weights, which must load; "auto" and "none" load none: no values are needed.
        input_shape: Noise, as for `activations`; None to infer its shape from the model.
        input: Inputs by name, as for `activations`; tensors replace the noise.
        cost: Also measure the cost of every module, in `cost` of the result: see `NetworkCost`. MODEL then also runs on
            the CPU; if it takes more than half of this machine's memory, there are no times.
    """

    depth: int | None = option(
        None, "N  Show modules down to this depth: 1 for the network and its children.", bounds=(0, None)
    )
    csv: Path | None = shown(None, "FILE  Also write the rows as CSV, FILE.", section=FILES)


@group(TERMINAL)
class Checkpoint(JsonOption, KeyOption):
    """Options of `checkpoint`.

    Attributes:
        key: Path of the weights inside the file; None for all sets of weights.
    """

    full: bool = shown(False, "Show every tensor, the optimiser's too.")


@group(MODEL)
class PickleOptions(NetworkOptions):
    """Which network checkpoints belong to, and what they may name.

    Attributes:
        allow_global: Globs over classes and functions that the file's pickle may name in addition to plain data. They
            are skipped, never imported.
    """

    allow_global: Texts = option(
        (),
        "NAME  Class or function, as a glob (vendornet.*), that a pickle may name besides plain data; it is skipped, "
        "never imported; repeatable.",
    )


@group(INPUT)
class CheckInputs:
    """What a check runs over.

    Attributes:
        images: As for `activations`, instead of the configuration's or of noise.
        data: Labelled pictures to measure the accuracy on: a folder of class folders, a CSV file with a path and a
            label on each line, or a JSON file of labels by path; with `multi_label`, a picture may have several labels.
    """

    images: "Images" = option(
        (), "PATH  Run over this picture, tensor file, folder or glob instead of noise; repeatable."
    )
    data: File | None = option(
        None,
        "PATH  Labelled pictures: a folder of class folders, a CSV file with path,label per line, or JSON. With "
        "--multi-label, several labels each.",
    )
    survey: File | None = option(
        None, "DIR  Run directory of `survey` of this network: rules about activations then judge all of its inputs."
    )


@group(RULES)
class RuleOptions:
    """By which rules checkpoints are judged.

    Attributes:
        config: The configuration file; default: the one in the working directory, else the built-in defaults.
        select: Rules or globs to judge by; default: all rules that are on.
        ignore: Rules or globs to leave out.
        limit: Limits of rules: a mapping, `{"dead-channels.max-fraction": 0.5}`, or texts "RULE.LIMIT=VALUE"; they
            override the configuration and the defaults.
    """

    config: File | None = option(
        None, "FILE  Settings; default: hookscope.toml, or [tool.hookscope] in pyproject.toml."
    )
    select: Texts = option((), "RULE  Apply only this rule or glob; repeatable.")
    ignore: Texts = option((), "RULE  Skip this rule or glob; repeatable.")
    limit: Limits = option(
        (),
        "RULE.LIMIT=VALUE  Limit of a rule, such as dead-channels.max-fraction=0.5; repeatable. `hookscope check "
        "--explain RULE` lists them.",
    )


@group(RULES)
class Check(OnProcessor, RuleOptions, InputOptions, CheckInputs, TrustOption, ScoreOptions, PickleOptions):
    """Options of `check`.

    Attributes:
        arch: The network that a weights file belongs to; "none" to judge the stored values without a network; None for
            the network of the configuration, or to recognise it.
        input_shape: Noise, as for `activations`, instead of the configuration's.
        baseline: File written by `--update-baseline`; default: the configuration's, if any.
        evidence: Folder for an overview, and for grids and rows of the layers that failed; None writes nothing.
    """

    arch: Named | None = option(
        None,
        "MODEL  Network of the weights files; none: judge stored values only, without a network; default: inferred "
        "from names and shapes.",
        section=MODEL,
    )
    baseline: File | None = option(None, "FILE  Compare layer statistics with this baseline.")
    multi_label: bool | None = option(  # type: ignore[assignment] # it is read through `CheckSettings`
        None,
        "--multi-label/--no-multi-label  Classes are independent labels (BCE): read scores as sigmoids, not as a "
        "softmax; default: the configuration's, else no.",
        section=MODEL,
    )
    junit: Path | None = shown(None, "FILE  Also write the report as JUnit XML.", section=FILES)
    sarif: Path | None = shown(None, "FILE  Also write the report as SARIF 2.1.0, for code scanning.", section=FILES)
    page: Path | None = shown(None, "--report FILE  Also write the report as one HTML page.", section=FILES)
    evidence: File | None = option(
        None,
        "DIR  If a checkpoint fails, write an overview, and grids and rows of the failing layers, to DIR.",
        section=FILES,
    )
    report_format: Literal["text", "json", "github", "markdown"] | None = shown(
        None, "--format  Format on stdout; default: github in GitHub Actions, else text.", section=TERMINAL
    )
    jobs: int = shown(1, "N  Checkpoints to check in parallel.", bounds=(1, None), section=PROCESSES)
    timeout: float = shown(600, "SECONDS  Time limit for each checkpoint.", bounds=(0.1, 1e6), section=PROCESSES)
    memory: float | None = shown(
        None,
        "GIB  Memory limit for each checkpoint; default: 90% of the machine's memory, divided by --jobs.",
        bounds=(0.01, 1e6),
        section=PROCESSES,
    )
    update_baseline: bool = shown(False, "Write the baseline of one checkpoint instead of comparing with it.")
    rules: bool = shown(False, "List the rules and exit.")
    explain: str | None = shown(None, "RULE  Explain a rule and its limits, and exit.")
    init: bool = shown(False, "Write a hookscope.toml with every setting, and exit.")


@group(RULES)
class History(OutputOptions, OnProcessor, RuleOptions, InputOptions, ClassNames, OutputKey, PickleOptions):
    """Options of `history`.

    Attributes:
        arch: The network that the files belong to; "none" to judge the stored values without a network. None takes the
            network of the configuration; if it has none, the network is recognised with inputs, and "none" without.
        input_shape: Noise to run the network over, as for `activations`.
    """

    arch: Named | None = option(
        None,
        "MODEL  Network of the checkpoints, to run it and to judge by all rules; none: judge the stored values only. "
        "Default: none, or inferred if IMAGEs are given.",
        section=MODEL,
    )
    bisect: bool = option(
        False,
        "Read the first and the last file, then only as many as it takes to find the first file with each verdict of "
        "the last; assumes that verdicts stay.",
    )


@group(FILES)
class FeatureOptions:
    """How outputs are written as features.

    Attributes:
        pool: Reduce features (N, C, ...) over positions: "avg" to their mean and "max" to their maximum, "cls" to the
            first token; "none" keeps them.
    """

    pool: Literal["avg", "max", "cls", "none"] = option(
        "avg", "Reduce features over positions: mean, maximum, first token, or not at all."
    )
    features_dtype: Literal["float32", "float16"] = option("float32", "Store features in this dtype.")


@group(NUMBERS)
class Features(FeatureOptions):
    """Options of `features`."""

    seed: int = option(0, "N  Seed of random weights and random numbers.", bounds=(0, 2**63 - 1))


@group(PROCESSES)
class ChunkOptions:
    """How a survey is divided.

    Attributes:
        chunk_size: Files per chunk, or inputs if they are in memory. A file of several inputs is in one chunk.
        workers: Threads that read pictures ahead, 0 for none; None for one per processor, at most 4. The number does
            not change results.
        resume: Use the finished chunks in `chunks` if they have the same model, inputs and settings.
        shard: "3/8" measures only the third of eight parts, into `chunks`. The same call without `shard`, with
            `resume`, measures the missing chunks and merges all.
    """

    chunk_size: int = option(1024, "N  Files per chunk, the unit of work of a process.", bounds=(1, None))
    workers: int | None = option(
        None,
        "N  Threads that read pictures ahead; default: one per processor, at most 4. Results do not change.",
        bounds=(0, None),
    )
    resume: bool = option(
        False, "Continue an unfinished survey from its finished chunks, with any number of processes."
    )
    shard: str | None = option(
        None, "I/N  Measure only part I of N of the data, as one job of a cluster; run --merge afterwards."
    )
    merge: Path | None = shown(
        None, "DIR  Merge the chunks of all shards that were measured with --out DIR, and write DIR."
    )


@group(LAYERS)
class Survey(
    OutputOptions,
    StrictOption,
    ShowOption,
    TensorBoardOption,
    VerifyOption,
    RunOptions,
    ChunkOptions,
    BatchSize,
    PictureOptions,
    ClassNames,
    ModelOptions,
    FeatureOptions,
    LayerOptions,
):
    """Options of `survey`.

    Attributes:
        top: For every channel, list this many of the inputs that excite it most.
        by_class: Inputs are one folder with a folder for each class in it, or a CSV file of paths and labels: also
            measure how selective channels are for classes.
        features: Also write the outputs of the layers of `layer`: to a .safetensors or .parquet file, or to a folder
            with one file per chunk; a JSON file next to it lists the inputs.
        batch_size: Inputs per forward pass; a different batch size may change the last bits of the results.
    """

    top: int = option(9, "N  For every channel, list the N inputs that excite it most.", bounds=(1, None))
    by_class: bool = option(
        False,
        "INPUT is a folder with a folder for each class in it, or a CSV of paths and labels: also measure how "
        "selective channels are.",
        section=INPUT,
    )
    features: File | None = option(
        None,
        "PATH  Also write the outputs of the layers of --layer: to a .safetensors or .parquet file, or to a folder "
        "with one file per chunk; a JSON file next to it lists the inputs.",
        section=FILES,
    )
    batch_size: int = option(32, "N  Pictures per forward pass.", bounds=(1, None), section=INPUT)
    crops: int | None = shown(
        None,
        "N  Draw crops for N channels of each layer, 0 for none; default: 128 channels over all layers.",
        bounds=(0, None),
        section=FILES,
    )


@group(FILES)
class Report(LinesOptions):
    """Options of `report`."""

    out: Path | None = shown(None, "--out -o FILE  HTML file to write; default: RUN.html next to RUN.")
    tensorboard: Path | None = shown(
        None,
        "DIR  Also write the scalars of a watched training for TensorBoard, at their steps; one DIR per run. Needs "
        "hookscope[tensorboard].",
    )


@group(TRAINING)
class Watch:
    """Options of `watch`.

    Attributes:
        layer: Patterns, as for `activations`: watched steps record only these layers and their parameters.
        eager_forward: Measure activations of compiled networks too: at watched steps the network runs once more,
            eagerly and without gradients, on the first batch. Everything that this changes is put back.
        out: Folder for `watch.jsonl`, which grows a line at a time; None writes nothing.
        resume: Append to the log of an earlier training in `out`.
    """

    module: str | None = shown(None, "-m MODULE  Run a module instead of a script, as `python -m` does.")
    every: int = option(100, "N  Measure weights, updates and activations at every Nth step.", bounds=(1, None))
    layer: Texts = option(
        (),
        "--layer -l PATTERN  Measure only these layers and their parameters in full: patterns as in `hookscope "
        "activations`, without positions (@3); repeatable. Default: modules with parameters, and leaf modules.",
        section=LAYERS,
    )
    edit: Texts = shown(
        (),
        "PATTERN:PLACE:OPERATION  Change the training: a layer's input, output or grad, a parameter's grad or value "
        "(param:NAME:value:…), or freeze parameters (param:NAME:freeze); repeatable, applied in order.",
        section=LAYERS,
    )
    eager_forward: bool = option(
        False, "Measure activations of compiled networks too, by one more, eager forward pass at every Nth step."
    )
    out: File | None = option(
        None,
        "DIR  Folder for the log of all steps, watch.jsonl; `hookscope report DIR` makes a page of it.",
        section=FILES,
    )
    resume: bool = option(False, "Append to the log in --out, if there is one.", section=FILES)
    strict: bool = shown(
        False, "Exit with 1 if a problem or no training was seen in a script that itself ends with 0.", section=TERMINAL
    )
