"""Which network ran, its modules, the labels of rows, and where a forward pass raised."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from hookscope.parameters import arg
from hookscope.results.cost import NetworkCost, depth_of
from hookscope.results.inputs import Provenance
from hookscope.results.json_form import UNSTORED
from hookscope.results.renderers import Entry_co, RowContainer, RunResult
from hookscope.text import counted


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Which network ran, with which weights.

    Attributes:
        name: Short name for titles and folders: "resnet34", "net.py:build".
        weights: Origin for people: "ResNet34_Weights.IMAGENET1K_V1", "random, seed 0", "model.pt".
        sha256: Hex digest of the weights file; None without a file.
        parameter_count: Elements over all parameters; a tied parameter counts once.
        categories: Class names by index, from the weights or the user; () if there are none.
        arguments: The factory's keyword arguments (`--model-arg`).
    """

    name: str
    kind: str
    weights: str
    random: bool
    sha256: str | None
    parameter_count: int
    categories: tuple[str, ...] = field(default=(), metadata=UNSTORED)
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class NetworkResult(RunResult[Entry_co]):
    """The fields of all results of commands that run one network.

    Attributes:
        warnings: Sentences a reader must see; `notes` need no action.
        dtype: Floating dtype of the parameters: "float32".
        timings: Seconds by phase.
        provenance: None for a run that did not finish, or was read from a run directory.
    """

    model: ModelInfo
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    timings: Mapping[str, float] = field(default_factory=dict)
    provenance: Provenance | None = field(default=None, metadata=UNSTORED)


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module of a network, or one operation that it calls, for the `layers` command.

    Attributes:
        layer: Dotted name; "" is the whole model.
        parameter_count: Elements in the parameters it owns directly.
        total_parameter_count: Elements in its own and its descendants' parameters; a tied parameter counts once.
        call_count: Calls in one forward pass.
        input_shapes: Shapes at the first call, nested inputs flattened, as in `output_shapes`.
        note: Why there are no shapes, or aliases; for an operation, the line that calls it; "" otherwise.
        owner: As `LayerRow.owner`.
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
    owner: str | None = None

    @property
    def label(self) -> str:
        """Its dotted name."""
        return self.layer


_MISSING = re.compile(
    r"^\S*forward\(\) (?:missing \d+ required (?:positional|keyword-only) arguments?:|is missing value for argument)"
    " (.+)"
)
_SHAPES_DIFFER = re.compile(
    "shapes cannot be multiplied|size mismatch|must match|expected input|Expected .*size|got input"
    r"|expected a \dD|expected \dD|values to unpack"
)
_WHOLE_NUMBERS = re.compile(
    r"Input type \((?:unsigned char|signed char|char|short|int|long int|bool)\)"
    r"|but got (?:Byte|Char|Short|Int|Long|Bool) and|input dtype \(torch\.(?:u?int\d+|bool)\)"
    r"|not implemented for '(?:Byte|Char|Short|Int|Long|Bool)'"
)

# The last axis has the size that the channel axis should have.
_CHANNELS_LAST = re.compile(r"expected input\[[\d, ]*, (\d+)\] to have \1 channels")
_NO_TENSOR = re.compile("must be Tensor, not (?:int|float|list|tuple)$")
# `inspection.failures` adds this to an error.
_ONE_ARGUMENT = re.compile(r"; its one argument is (\w+)$")


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a forward pass raised.

    Attributes:
        layer: Dotted name of the innermost module that was running.
        input_shapes: Shapes of its tensor inputs, in order; keyword inputs as "name=shape".
        error: The exception, as "TypeName: first line of the message".
    """

    layer: str
    kind: str
    input_shapes: tuple[str, ...]
    error: str

    def remedy(self, *, files: bool = True, arguments: bool = True) -> str:
        """Return a sentence to append about the option that helps; "" if the error does not show that the input is bad.

        `files` is False for commands that take no pictures and tensor files as positional arguments, `arguments` is
        False for commands without `--input` and `--input-shape`.
        """
        kind, _, text = self.error.partition(": ")
        missing = [] if self.layer else _missing_arguments(text)
        if missing:
            return _by_name(missing, files_only=not arguments)
        if only := _ONE_ARGUMENT.search(text):
            fits = "as in a dict" in text or all(shape.startswith("['") for shape in self.input_shapes)
            return f". Give it the dict of a file by {arg('input')} {only[1]}=FILE" if arguments and fits else ""
        is_named = any("[" in shape for shape in self.input_shapes)
        # Whether the case applies, the advice, and the advice about `--input` and `--input-shape`.
        noise = f"{arg('input_shape')} for noise"
        shapes = f"{arg('resize')} and {arg('crop')} for pictures, {arg('batch_axis')} for a tensor file"
        cases = (
            (
                kind == "RuntimeError" and "'indices'" in text and "Float" in text,
                "It takes whole numbers: a tensor file of an integer dtype",
                f", {arg('input')} NAME=1,2,3:int64, or {arg('input_shape')} SHAPE:int64 for noise",
            ),
            (
                bool(_WHOLE_NUMBERS.search(text)),
                "It takes floating-point numbers: save the tensor as float32",
                f", or leave out the dtype in {arg('input')} and {arg('input_shape')}",
            ),
            (
                kind == "TypeError" and bool(_NO_TENSOR.search(text)) and arguments,
                f"Numbers with commas are a tensor: {arg('input')} NAME=1,2,3, or NAME=1,2,3:int64 for whole numbers",
                "",
            ),
            (
                kind == "RuntimeError" and "target dtype to be Long" in text,
                "Targets are whole numbers: a tensor file of an integer dtype",
                f", or {arg('input_shape')} NAME=SHAPE:int64<CLASSES for noise",
            ),
            (
                kind == "IndexError" and text == "index out of range in self" and arguments,
                f"If the input is noise: {arg('input_shape')} SHAPE:int64<BOUND",
                "",
            ),
            (
                kind == "RuntimeError" and "number of dimensions" in text and is_named,
                "A tensor by name needs its batch axis: (1, 5), not (5,)",
                f", or {arg('input')} NAME=1,2,3",
            ),
            (
                bool(_CHANNELS_LAST.search(text)),
                "If channels are the last axis of the tensor, make them the first, as in (3, 224, 224)",
                "",
            ),
            (
                kind in ("RuntimeError", "ValueError") and bool(_SHAPES_DIFFER.search(text)),
                f"If the input has the wrong shape: {f'{shapes} (0: several inputs, none: one)' if files else noise}",
                f", {noise}" if files else "",
            ),
        )
        return next((f". {advice}{further if arguments else ''}" for holds, advice, further in cases if holds), "")


def _by_name(missing: Sequence[str], *, files_only: bool) -> str:
    if files_only:
        named = " and ".join(f"'{name}'" for name in missing)
        return f". Give all arguments in one .pt file: a dict of tensors by name, with {named}, or a tuple"
    by_name = " ".join(f"{arg('input')} {name}=FILE" for name in missing)
    noise = " ".join(f"{arg('input_shape')} {name}=SHAPE" for name in missing)
    return f". Give what is missing by name: {by_name}, or {noise} for noise"


def _missing_arguments(text: str) -> list[str]:
    match = _MISSING.search(text)
    return re.findall(r"'(\w+)'", match[1]) if match else []


@dataclass(frozen=True, slots=True, repr=False)
class ModuleTable(RowContainer[ModuleRow]):
    """The modules of a network.

    Attributes:
        rows: One per module, in the order of `named_modules()`.
        failure: Set if the forward pass raised; later modules then have no shapes.
        cost: Cost of one forward pass; None without `cost=True`.
    """

    model: ModelInfo
    rows: tuple[ModuleRow, ...]
    failure: Failure | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cost: NetworkCost | None = None

    def down_to(self, depth: int) -> "ModuleTable":
        """Return the modules down to a depth, with their operations; 0 is the whole model alone."""
        rows = tuple(row for row in self.rows if depth_of(row.layer if row.owner is None else row.owner) <= depth)
        return replace(self, rows=rows, cost=self.cost and self.cost.down_to(depth))

    def __repr__(self) -> str:
        return f"<ModuleTable of {self.model.name}: {counted(len(self.rows), 'module')}>"


@lru_cache(2**14)  # a row is asked for its label again and again
def row_label(layer: str, call: int, slot: str) -> str:
    """Return the label of a layer's output for people and files: "layer1.0.relu#1", "backbone['out']", "(model)".

    An attribute of an output is "encoder().hidden", because "encoder.hidden" would be a module.
    """
    called = f"#{call}" if call else "()" if layer and slot.startswith(".") else ""
    return f"{layer or '(model)'}{called}{slot}"


def is_output_of_key(label: str, key: str) -> bool:
    """Tell whether a key that a user wrote ("logits", ".logits", "[0]") or a label means this output of the network."""
    path, name = label.removeprefix("(model)"), key.removeprefix("(model)")
    return path in (name, f"[{name!r}]", f".{name}", f"[{name}]")
