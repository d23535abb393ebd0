"""What hookscope found, as frozen dataclasses of numbers, names and small arrays.

Nothing here knows torch, files or terminals: the pipeline fills these in, renderers and checks read them. A notebook
asks the object itself how it looks: `hookscope.results.showing` knows who can tell.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hookscope.results.distribution import Distribution
from hookscope.results.showing import as_html

QUANTILE_LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)

InputKind = Literal["image", "detection", "video", "flow"]

# Where Pillow starts to warn of decompression bombs (Image.MAX_IMAGE_PIXELS): 256 MiB of 24-bit pixels.
MAX_PIXELS = 1024 * 1024 * 1024 // 4 // 3

Flag = Literal[
    "in-place",
    "pass-through",
    "non-finite",
    "constant",
    "all zero",
    "dead channels",
    "shape varies",
    "not a tensor",
    "unmeasured",
]


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How a file becomes a network input.

    Attributes:
        kind: What the network takes: one image tensor (N, C, H, W), a list of (C, H, W) for detection, a clip
            (N, C, T, H, W), or two frames (N, C, H, W) for optical flow.
        channels: C, 1 or 3.
        resize: Length of the shorter side after resizing, in pixels, or an exact (height, width); None keeps the size.
        crop: Height and width of the centre crop, in pixels; None keeps everything.
        interpolation: Pillow's name in lower case, "bilinear" or "bicubic".
        mean: Per channel, subtracted after scaling to 0-1. Empty means no normalisation.
        std: Per channel, divided by. Empty means no normalisation.
        frames: T, for a clip: the image is repeated.
        multiple: Height and width are cropped down to a multiple of this.
        max_pixels: A picture of more is refused before it is decoded, and so is a resize to more.
        batch_axis: Which axis of a tensor file counts inputs; "auto": the first of a tensor with an axis more than an
            input of this kind; "none": a tensor is one input as it is.
        source: Where these values come from, for people: "ResNet34_Weights.IMAGENET1K_V1", "defaults", "options".
    """

    kind: InputKind = "image"
    channels: int = 3
    resize: int | tuple[int, int] | None = 224
    crop: tuple[int, int] | None = (224, 224)
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    frames: int = 1
    multiple: int = 1
    max_pixels: int = MAX_PIXELS
    batch_axis: int | Literal["auto", "none"] = "auto"
    source: str = "defaults"


@dataclass(frozen=True, slots=True)
class InputRecord:
    """One input and what was done to it.

    Attributes:
        name: File name as the user gave it or as found in a folder, or "noise", "tensor".
        sha256: Hex digest of the file's bytes; None when there is no file.
        size: Width and height of the file's picture in pixels, before anything was done; None for tensors.
        shape: Shape handed to the network without the batch axis, e.g. (C, H, W).
        steps: What was done, in order, for people and for the record.
    """

    name: str
    sha256: str | None
    size: tuple[int, int] | None
    shape: tuple[int, ...]
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Which network ran, with which weights.

    Attributes:
        name: Short name for titles and folders: "resnet34", "net.py:build".
        kind: Class name of the root module.
        weights: Origin for people: "ResNet34_Weights.IMAGENET1K_V1", "random, seed 0", "model.pt".
        random: Whether the weights are random instead of trained.
        sha256: Hex digest of the weights file; None when there is none.
        parameter_count: Elements over all parameters; a tied one counts once.
        categories: Class names by index, when the weights come with them.
        arguments: What the factory was called with (`--model-arg`).
    """

    name: str
    kind: str
    weights: str
    random: bool
    sha256: str | None
    parameter_count: int
    categories: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Statistics of one tensor, over the whole input (all batches).

    With NaN or Inf among the values every statistic is taken over the finite ones. Complex tensors are measured by
    modulus. A value is None where it does not exist (an empty tensor has no mean) or could not be measured.

    Attributes:
        shape: As it came out in the first batch, batch axis included.
        dtype: torch's name without the prefix: "float32".
        element_count: Elements over the whole input.
        mean: Arithmetic mean.
        std: Population standard deviation (divisor n); 0 for a single element.
        min: Smallest value.
        max: Largest value.
        mean_abs: Mean absolute value.
        l2: Square root of the sum of squares.
        zero_fraction: Share of exact zeros among all elements, 0-1.
        nan_count: Elements that are NaN.
        inf_count: Elements that are +Inf or -Inf.
        channel_axis: Axis of `shape` that counts channels; None when there is none.
        channel_count: Channels; None without a channel axis.
        dead_channel_count: Channels that are exactly zero over the whole input.
        quantiles: Values at `QUANTILE_LEVELS`, by `numpy.quantile`'s linear definition; None without a distribution.
            Exact for up to 1,024 finite values; of more within 3 % of the value or within 0.5 % of its rank.
        unmeasured: Why statistics are missing; None when they are not.
        distribution: How the values are distributed, for quantiles and histograms; None if it was not asked for.
    """

    shape: tuple[int, ...]
    dtype: str
    element_count: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    mean_abs: float | None = None
    l2: float | None = None
    zero_fraction: float | None = None
    nan_count: int | None = None
    inf_count: int | None = None
    channel_axis: int | None = None
    channel_count: int | None = None
    dead_channel_count: int | None = None
    quantiles: tuple[float, ...] | None = None
    unmeasured: str | None = None
    distribution: Distribution | None = field(default=None, repr=False, compare=False)

    @property
    def dead_channel_fraction(self) -> float | None:
        """Share of dead channels, 0-1; None without channels."""
        if self.dead_channel_count is None or not self.channel_count:
            return None
        return self.dead_channel_count / self.channel_count


def row_label(layer: str, call: int, slot: str) -> str:
    """Return the name of a layer's output for people and files: "layer1.0.relu#1", "backbone['out']", "(model)"."""
    return f"{layer or '(model)'}{f'#{call}' if call else ''}{slot}"


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One output of one call of one module.

    Attributes:
        index: Position in execution order among the rows, from 0. A module finishes after its children.
        layer: Dotted name as in `named_modules()`; "" is the whole model.
        kind: Class name of the module.
        call: 0 for the module's first call in a forward pass, 1 for its second.
        slot: Path inside a nested output: "" for a plain tensor, "[0]", "['out']".
        parameter_count: Elements in the parameters the module owns itself (not its children's); those of
            parametrisations and ParameterLists in it count.
        activation: The output's statistics.
        flags: What a reader should know, in words.
        aliases: Other names of the same module object.
        repeats: Label of the row with this very tensor, for a pass-through module whose input another row shows; "" for
            a tensor that no earlier row shows.
        also: Labels of the rows that repeat this one and were folded into it by `fold_repeats`.
    """

    index: int
    layer: str
    kind: str
    call: int
    slot: str
    parameter_count: int
    activation: TensorStatistics
    flags: tuple[Flag, ...] = ()
    aliases: tuple[str, ...] = ()
    repeats: str = ""
    also: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Name for people: "layer1.0.relu#1", "backbone['out']", "(model)"."""
        return row_label(self.layer, self.call, self.slot)


@dataclass(frozen=True, slots=True)
class UncalledLayer:
    """A selected module whose forward never ran as a module, and why as far as known."""

    layer: str
    kind: str
    parameter_count: int
    reason: str


@dataclass(frozen=True, slots=True)
class FeatureMaps:
    """The values of one activation for one input, arranged for drawing.

    Attributes:
        row: `LayerRow.index` of the activation it belongs to.
        label: `LayerRow.label`.
        kind: Class name of the module.
        input_index: Position in `Inspection.inputs`.
        arrangement: "maps": `values` is (C, H, W); "frames": (C, T, H, W); "tokens": (C, H, W), a token sequence laid
            back on its grid; "vector": (F,).
        values: float32. At most `--max-channels` channels: the first ones.
        extra_tokens: For "tokens", the class token and its like, (K, C); else None.
        channel_count: Channels the activation has in all.
        shape: The activation's shape without the batch axis, as the network produced it.
        note: A remark for the caption, e.g. that the first axis is not the batch.
    """

    row: int
    label: str
    kind: str
    input_index: int
    arrangement: Literal["maps", "frames", "tokens", "vector"]
    values: NDArray[np.float32]
    extra_tokens: NDArray[np.float32] | None
    channel_count: int
    shape: tuple[int, ...]
    note: str = ""

    def _repr_html_(self) -> str:
        return as_html(self)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The highest-scoring classes of a classifier for one input, best first."""

    input_index: int
    class_indices: tuple[int, ...]
    class_names: tuple[str, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a forward pass broke off.

    Attributes:
        layer: Dotted name of the innermost module that was running.
        kind: Its class name.
        input_shapes: Shapes of its tensor inputs, in order; keyword inputs as "name=shape".
        error: The exception, as "TypeName: first line of the message".
    """

    layer: str
    kind: str
    input_shapes: tuple[str, ...]
    error: str


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether the network gives the same output, and loss, with hooks as without; compared on the first batch.

    Attributes:
        status: "same"; "differs"; or "not repeatable": it differs between two passes without hooks as well.
        difference: In a few words; "" for "same".
        layer: For "differs", the first layer in execution order whose hooks make the difference.
    """

    status: Literal["same", "differs", "not repeatable"]
    difference: str = ""
    layer: str = ""


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything one run of a model over its inputs showed.

    Attributes:
        model: Which network.
        inputs: What it was given, in order.
        rows: One per (layer, call, slot), in execution order.
        uncalled: Selected modules that never ran.
        feature_maps: For drawing; empty unless asked for.
        predictions: Top classes per input, for classifiers.
        warnings: Sentences a reader must see.
        notes: Sentences about what was done that are no cause for alarm.
        failure: Set when the forward pass raised; `rows` then hold what was reached.
        seed: Seed of random weights and of any randomness in the forward pass.
        device: Where it ran: "cpu", "cuda:0".
        dtype: Floating dtype of the parameters: "float32".
        timings: Seconds by phase.
        verification: Whether hooks changed the output; None where that was not asked for, or edits changed it.
    """

    model: ModelInfo
    inputs: tuple[InputRecord, ...]
    rows: tuple[LayerRow, ...]
    uncalled: tuple[UncalledLayer, ...] = ()
    feature_maps: tuple[FeatureMaps, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    failure: Failure | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    timings: Mapping[str, float] = field(default_factory=dict)
    verification: Verification | None = None

    def _repr_html_(self) -> str:
        return as_html(self)


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module of a network, for the `layers` command.

    Attributes:
        layer: Dotted name; "" is the whole model.
        kind: Class name.
        parameter_count: Elements in the parameters it owns directly.
        total_parameter_count: Elements in its own and its descendants' parameters; a tied one counts once.
        call_count: Calls in one forward pass.
        input_shapes: Of the first call, nested inputs flattened.
        output_shapes: Of the first call, nested outputs flattened.
        selected: Whether the given patterns select it.
        note: Why there are no shapes, or aliases; "" otherwise.
    """

    layer: str
    kind: str
    parameter_count: int
    total_parameter_count: int
    call_count: int
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    selected: bool
    note: str = ""


GradientStatus = Literal["gradient", "zero", "no gradient path", "not reached"]
"""What became of a tensor in the backward pass.

"gradient": it received one with a value other than zero (NaN and Inf included). "zero": it received one, exactly zero
everywhere. "no gradient path": autograd does not track it (frozen, integer, computed under `no_grad`). "not reached":
autograd tracks it, but the loss does not depend on it.
"""


@dataclass(frozen=True, slots=True)
class GradientRow:
    """The gradient of the loss with respect to one output, or one input, of one call of one module.

    Attributes:
        index: Position among the rows in forward execution order, from 0.
        backward_index: Position in the order in which gradients arrived in the backward pass, from 0; None without one.
        layer: Dotted name as in `named_modules()`; "" is the whole model.
        kind: Class name of the module.
        call: 0 for the module's first call in the forward pass, 1 for its second.
        slot: Path inside a nested output or input: "" for a plain tensor output, "[0]" for the first positional input.
        role: "output" for grad_output, "input" for grad_input.
        status: What became of it.
        gradient: Statistics of the gradient; without one, shape and dtype are the tensor's and all else is empty.
        remark: Why there is no gradient, or what the gradient means where that is not plain; "" otherwise.
        aliases: Other names of the same module object.
        repeats: As `LayerRow.repeats`, if the gradient is the same too: that of a pass-through output counts the uses
            of that output only, that of the tensor it repeats counts all. The rows of its inputs likewise.
        also: As `LayerRow.also`.
        taken_by: Labels of the outputs that are computed from this one with no other row's output between, "" for the
            loss: where its gradient comes from. Known where some gradient of the run is zero; else, and inside
            reentrant checkpoints, None.
    """

    index: int
    backward_index: int | None
    layer: str
    kind: str
    call: int
    slot: str
    role: Literal["output", "input"]
    status: GradientStatus
    gradient: TensorStatistics
    remark: str = ""
    aliases: tuple[str, ...] = ()
    repeats: str = ""
    also: tuple[str, ...] = ()
    taken_by: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        """Name for people: "layer1.0.relu#1", "backbone['out']", "(model)"."""
        return row_label(self.layer, self.call, self.slot)


# Modules that hold parameters for the module they are in, which is the one that has rows.
_HOLDERS = frozenset({"ParameterList", "ParameterDict", "NonDynamicallyQuantizableLinear"})


def parameter_owner(name: str, kind: str) -> str:
    """Return the dotted name of the module that a parameter belongs to, as its rows have it.

    Args:
        name: The parameter's dotted name.
        kind: Class name of the module that it is registered with. A ParameterList, a parametrisation and the output
            projection of MultiheadAttention hold theirs for the module around them.
    """
    around, parametrised, _ = f".{name}".rpartition(".parametrizations.")
    if parametrised:
        return around.removeprefix(".")
    owner = name.rpartition(".")[0]
    return owner.rpartition(".")[0] if kind in _HOLDERS else owner


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """The gradient of the loss with respect to one parameter.

    Attributes:
        index: Position in `named_parameters()`, from 0.
        name: Dotted name: "layer1.0.conv1.weight".
        kind: Class name of the module that owns it.
        trainable: Its `requires_grad`.
        status: What became of it.
        gradient: Statistics of the gradient; without one, shape and dtype are the parameter's and all else is empty.
        weight_l2: Root of the sum of squares of the parameter itself.
        ratio: Gradient's L2 over `weight_l2`; None where either does not exist or the weight is zero.
        aliases: Other names of the same (tied) parameter.
    """

    index: int
    name: str
    kind: str
    trainable: bool
    status: GradientStatus
    gradient: TensorStatistics
    weight_l2: float | None
    ratio: float | None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LossRecord:
    """The scalar that was differentiated.

    Attributes:
        name: "ce", "mse", "projection", "file.py:function" and so on.
        target: What the output was compared with, for people: "noise (seed 0)", "class 281, tabby"; "" without one.
        value: Its value over the whole batch; NaN and Inf are kept.
        outputs: Labels of the outputs it was computed from: "(model)", "(model)['logits']".
    """

    name: str
    target: str
    value: float
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judgement about a run, by one rule.

    Attributes:
        rule: Stable identifier: "vanishing-gradient".
        level: "fail" for what breaks training or results, "warn" for what deserves a look.
        where: Label of the row or name of the parameter it is about; "" for the whole network.
        message: One sentence with the measured value and the limit.
    """

    rule: str
    level: Literal["fail", "warn"]
    where: str
    message: str


@dataclass(frozen=True, slots=True)
class GradientInspection:
    """Everything one forward and backward pass of a model over its inputs showed.

    Attributes:
        model: Which network.
        inputs: What it was given, in order.
        loss: What was differentiated; None when the forward pass raised.
        rows: Activations, one per (layer, call, slot), in execution order: as in `Inspection`.
        gradients: One per output of `rows`, in execution order; those of inputs among them when asked for.
        parameters: One per parameter of the whole network, in the order of `named_parameters()`.
        uncalled: Selected modules that never ran.
        gradient_maps: Gradients of outputs, for drawing; empty unless asked for. `row` is the index in `gradients`.
        predictions: Top classes per input, for classifiers.
        verdicts: Judgements, the gravest first.
        warnings: Sentences a reader must see.
        notes: Sentences about what was done that are no cause for alarm.
        failure: Set when the forward or the backward pass raised; rows then hold what was reached.
        mode: "eval", or "train" for batch statistics and dropout as in training.
        seed: Seed of everything random.
        device: Where it ran: "cpu", "cuda:0".
        dtype: Floating dtype of the parameters: "float32".
        timings: Seconds by phase.
        verification: Whether hooks changed the output or the loss; None where that was not asked for, or edits did.
    """

    model: ModelInfo
    inputs: tuple[InputRecord, ...]
    loss: LossRecord | None
    rows: tuple[LayerRow, ...]
    gradients: tuple[GradientRow, ...]
    parameters: tuple[ParameterRow, ...]
    uncalled: tuple[UncalledLayer, ...] = ()
    gradient_maps: tuple[FeatureMaps, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    failure: Failure | None = None
    mode: Literal["eval", "train"] = "eval"
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    timings: Mapping[str, float] = field(default_factory=dict)
    verification: Verification | None = None

    def _repr_html_(self) -> str:
        return as_html(self)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a weights file.

    Its statistics are those of the finite elements, of complex numbers those of their moduli. They are None where the
    values could not be read: a view too scattered, a tensor without data, a dtype without arithmetic.

    Attributes:
        key: Its name in the part of the file that it is in: "conv1.weight", "state.0.exp_avg".
        shape: Sizes of its axes.
        dtype: torch's name without the prefix: "float32".
        byte_count: Bytes of its elements; tied tensors each count theirs.
        nan_count: Elements that are NaN; None where they could not be counted.
        inf_count: Elements that are +Inf or -Inf; None likewise.
        tied_to: The first tensor that shares an element with this one, with its part's key before it if that is another
            part; "" for none. Tensors side by side in one storage, as an LSTM's may be, are not tied.
        zero_count: Elements that are zero.
        min: Smallest element, exactly; an int for integers.
        max: Largest element, likewise.
        mean: Mean of the elements.
        std: Their standard deviation, with the number of elements as the divisor.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    byte_count: int
    nan_count: int | None
    inf_count: int | None
    tied_to: str = ""
    zero_count: int | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a weights file that holds tensors: a set of weights, or something else such as an optimiser's state.

    Attributes:
        key: Where in the file it is: "model"; "" when it is the whole file, or beside all others.
        is_weights: Whether it is a set of weights.
        tensors: All tensors in it, in the file's order.
        prefix: What every name begins with: "module"; "" for nothing.
        architectures: The known networks whose names and shapes fit, with remarks; empty for none.
    """

    key: str
    is_weights: bool
    tensors: tuple[StoredTensor, ...]
    prefix: str = ""
    architectures: tuple[str, ...] = ()

    @property
    def nonfinite_count(self) -> int:
        """Elements that are NaN or Inf, over all tensors whose values could be counted."""
        return sum((tensor.nan_count or 0) + (tensor.inf_count or 0) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One top-level entry of a checkpoint: what a training script saved beside the weights.

    Attributes:
        key: Its name.
        kind: Its type: "dict", "int".
        summary: Its value if it is short, else what it holds: "3 entries, 2 tensors".
    """

    key: str
    kind: str
    summary: str


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """What a weights file holds.

    Attributes:
        name: The file's name.
        kind: "torch", "legacy torch", "safetensors" and so on.
        producer: What wrote it, as far as the file tells: "torch.save, zip format 3".
        byte_count: Size of the file, in bytes; of all shards for an index.
        parts: Every set of weights, then what else has tensors.
        entries: The top-level entries of a larger checkpoint; empty for a bare state dict.
        metadata: Text stored beside the tensors.
        warnings: Sentences a reader must see.
    """

    name: str
    kind: str
    producer: str
    byte_count: int
    parts: tuple[StoredPart, ...]
    entries: tuple[StoredEntry, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """The tensors of all parts."""
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    @property
    def nonfinite_count(self) -> int:
        """Elements that are NaN or Inf, over all tensors whose values could be counted."""
        return sum(part.nonfinite_count for part in self.parts)


@dataclass(frozen=True, slots=True)
class Change:
    """How one set of statistics differs between two runs.

    Attributes:
        label: The row's label, or the parameter's name.
        what: "activation", "grad_output", "grad_input", or "gradient" of a parameter.
        before: In the first run; None if the row is only in the second.
        after: In the second run; None if the row is only in the first.
    """

    label: str
    what: str
    before: TensorStatistics | None
    after: TensorStatistics | None

    @property
    def l2_ratio(self) -> float | None:
        """L2 after over L2 before; None where either is missing or the first is 0."""
        before, after = (None if each is None else each.l2 for each in (self.before, self.after))
        return None if not before or after is None else after / before


@dataclass(frozen=True, slots=True)
class Comparison:
    """What edits changed: the same run without and with them.

    Attributes:
        edits: The expressions.
        losses: Of the run without and of the run with edits; None for a run without a loss.
        predictions: Likewise.
        changes: Rows whose statistics differ at all, in the order of the run.
        row_count: Rows that were compared.
    """

    edits: tuple[str, ...]
    losses: tuple[float, float] | None
    predictions: tuple[tuple[Prediction, ...], tuple[Prediction, ...]]
    changes: tuple[Change, ...]
    row_count: int


@dataclass(frozen=True, slots=True)
class InputGradients:
    """Gradient norms of one input alone.

    Attributes:
        name: The input's.
        loss: Of this input alone.
        parameters_l2: Root of the sum of squares over the gradients of all parameters; None if no parameter has one.
        rows_l2: Per label of an output, the L2 norm of its gradient; None without one.
    """

    name: str
    loss: float
    parameters_l2: float | None
    rows_l2: Mapping[str, float | None]
