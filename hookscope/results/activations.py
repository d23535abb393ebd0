"""The outputs of layers in one run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hookscope.results.comparison import Comparison, Prediction
from hookscope.results.cost import NetworkCost
from hookscope.results.findings import Finding
from hookscope.results.inputs import InputRecord
from hookscope.results.json_form import UNSTORED
from hookscope.results.network import Failure, NetworkResult, row_label
from hookscope.results.renderers import Entry_co, rendered
from hookscope.results.statistics import MeasuredTensor, TensorStatistics
from hookscope.results.token_norms import TokenMap, TokenNorms
from hookscope.text import counted

Flag = Literal[
    "in-place",
    "pass-through",
    "non-finite",
    "constant",
    "all zero",
    "dead channels",
    "massive activations",
    "shape varies",
    "vmap",
    "not a tensor",
    "unmeasured",
]

OverChannels = Literal["mean", "RMS"]

NO_ROWS, NOT_SEEN = "No rows for", "not seen:"
"""Words in notes about parts that no rule has judged: an all-clear is then limited to what was seen."""


@dataclass(frozen=True, slots=True, repr=False)
class OutputRow(MeasuredTensor):
    """One output of one call of one module, or of one operation.

    Attributes:
        index: Position in execution order among the rows, from 0. A module finishes after its children.
        layer: Dotted name as in `named_modules()`; "" is the whole model.
        kind: Class of the module, or name of the operation.
        call: 0 for the module's first call in a forward pass, 1 for its second.
        slot: Path inside a nested output: "" for a plain tensor, "[0]", "['out']".
        parameter_count: Elements in the parameters the module owns itself (not its children's); those of
            parametrisations and ParameterLists in it count.
        activation: Statistics over all inputs.
        aliases: Other names of the same module object.
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

    @property
    def label(self) -> str:
        """Name for people, see `row_label`."""
        return row_label(self.layer, self.call, self.slot)

    @property
    def statistics(self) -> TensorStatistics:
        """The statistics of the activation."""
        return self.activation


@dataclass(frozen=True, slots=True, repr=False)
class LayerRow(OutputRow):
    """A row of one run.

    Attributes:
        duplicate_of: Label of the earlier row with the same tensor, for a pass-through module; "" if no earlier row
            has it.
        duplicates: Labels of the rows that repeat this one and were folded into it by `reduced`.
        owner: For an operation, the dotted name of the module whose forward calls it; `layer` is then "MODULE:NAME",
            and `kind` the operation's name. None for a module.
        source: The line that calls the operation, "net.py:14"; "" for a module, and where no Python code calls it.
        inputs: Where the input tensors came from, if operations were observed: labels of rows, names of parameters and
            buffers, "input" for the network's own, "" for anything else.
        tokens: Norms of an output of tokens (N, T, D); None for other outputs, and if they were not measured.
    """

    duplicate_of: str = ""
    duplicates: tuple[str, ...] = ()
    owner: str | None = None
    source: str = ""
    inputs: tuple[str, ...] = ()
    tokens: TokenNorms | None = None


@dataclass(frozen=True, slots=True)
class FeatureMaps:
    """The values of one activation for one input, arranged for drawing.

    Attributes:
        row: `LayerRow.index` of the activation it belongs to.
        arrangement: "maps": `values` is (C, H, W); "frames": (C, T, H, W); "tokens": (C, H, W), a token sequence laid
            back on its grid; "vector": (F,).
        values: float32. At most `--max-channels` channels: the first ones.
        extra_tokens: For "tokens", the class token and its like, (K, C); else None.
        channel_count: All channels of the activation.
        shape: The activation's shape without the batch axis, as the network produced it; the shape of the map if
            windows were put back.
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

    @property
    def is_sequence(self) -> bool:
        """Whether `values` is one picture of a sequence, (1, C, T): a channel in each row."""
        return self.arrangement == "maps" and len(self.shape) == 2

    def _repr_html_(self) -> str:
        return str(rendered(self, "html"))


@dataclass(frozen=True, slots=True)
class MapSummary:
    """The maps of one activation for one input, summarised as two maps for the overview.

    Maps of more than 160 values a side are averaged over square blocks. A token sequence is laid back on its grid,
    without class token and registers. A clip is shown by its middle frame. A sequence, of a signal or of words, has
    h = 1 and magnitudes.

    Attributes:
        row: `LayerRow.index` of the activation it belongs to.
        combined: All channels as one, (h, w) float32; a mean that is 0 up to rounding is 0.
        strongest: The first channel with NaN, else the first with Inf, else the one whose root mean square is the
            greatest, (h, w) float32.
        channel: Index of the channel in `strongest`, from 0.
        size: (H, W) before averaging.
        over_channels: How `combined` is computed: the mean; the root mean square for tokens, signals and maps with
            channels last, because LayerNorm makes their means 0.
    """

    row: int
    label: str
    kind: str
    input_index: int
    combined: NDArray[np.float32]
    strongest: NDArray[np.float32]
    channel: int
    channel_count: int
    size: tuple[int, int]
    over_channels: OverChannels = "mean"


@dataclass(frozen=True, slots=True)
class UncalledLayer:
    """A selected module whose forward never ran as a module, and why, if that is known."""

    layer: str
    kind: str
    parameter_count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether the network computes the same with hooks as without, on the first batch.

    The output must be equal bit for bit; with a backward pass, so must the loss and the gradients of parameters.
    Gradients may differ by rounding if they are summed in a different order: on an accelerator, or where hooks replace
    tensors by aliases.

    Attributes:
        status: "same"; "differs"; or "not repeatable": it differs between two passes without hooks as well.
        difference: What differs, in a few words; "" for "same".
        layer: For "differs", the first layer in execution order whose hooks make the difference.
    """

    status: Literal["same", "differs", "not repeatable"]
    difference: str = ""
    layer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Run(NetworkResult[Entry_co]):
    """The fields that all runs have, with or without a backward pass.

    Attributes:
        rows: One per (layer, call, slot), in execution order.
        verdicts: What the rules find, failures first. Rules judge operations even if they have no rows.
        hidden: Labels of rows that were measured for verdicts alone; `reduced` leaves them out.
        broadcast_inputs: Arguments of the network that were given as a single row and used for every input: "['meta']".
        predictions: Top classes per input, for classifiers.
        failure: Set when the model raised; `rows` then ends where it raised.
        verification: Whether hooks changed what the network computes; None with `verify=False` or with edits.
        comparison: What edits changed; None without edits.
        tensors: With `save_tensors=True`, the activations on the CPU by label, read from a temporary file one by one.
            A run with a backward pass has the gradients instead: "LABEL grad_output", "LABEL grad_input", and
            "NAME grad" of a parameter.
    """

    inputs: tuple[InputRecord, ...]
    rows: tuple[LayerRow, ...]
    uncalled: tuple[UncalledLayer, ...] = ()
    verdicts: tuple[Finding, ...] = ()
    hidden: tuple[str, ...] = ()
    broadcast_inputs: tuple[str, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    failure: Failure | None = None
    verification: Verification | None = None
    comparison: Comparison | None = None
    tensors: Mapping[str, Any] = field(default_factory=dict, metadata=UNSTORED)

    def __repr__(self) -> str:
        parts = (counted(len(self.rows), "row"), counted(len(self.inputs), "input"))
        return f"<{type(self).__name__} of {self.model.name}: {', '.join(parts)}>"

    @property
    def where_judged(self) -> str:
        """The end of an all-clear: " in what was seen" if a row or a note tells of what was not seen, else ""."""
        is_unmeasured = any(row.activation.unmeasured is not None for row in self.rows)
        return " in what was seen" * (is_unmeasured or any(NO_ROWS in note or NOT_SEEN in note for note in self.notes))

    def save(self, path: str | Path, *, cmap: str = "auto", scale: Literal["channel", "layer"] = "channel") -> Path:
        """Write the run directory, as `RunResult.save`, with grids in one of Matplotlib's colour maps.

        With `scale` "channel", each channel has its own colour range; with "layer", the layer has one.
        """
        return Path(rendered(self, "save", path, cmap=cmap, scale=scale).folder)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Activations(Run[LayerRow]):
    """The outputs of layers in one run; `feature_maps` only if requested.

    Attributes:
        map_summaries: Reduced feature maps of the first three inputs, for the overview.
        token_maps: Norms of tokens on their grids, for the first three inputs, in layers with high tokens; in the last
            block if no layer has any.
        cost: Cost of one forward pass over the first input, by module; None without `cost=True`.
    """

    feature_maps: tuple[FeatureMaps, ...] = field(default=(), metadata=UNSTORED)
    map_summaries: tuple[MapSummary, ...] = field(default=(), metadata=UNSTORED)
    token_maps: tuple[TokenMap, ...] = ()
    cost: NetworkCost | None = None
