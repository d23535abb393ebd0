"""What layers put out in one run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hookscope.results.inputs import InputRecord
from hookscope.results.network import ModelInfo
from hookscope.results.showing import as_html
from hookscope.results.statistics import TensorStatistics

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
        input_index: Position in `Activations.inputs`.
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
class Activations:
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
