"""How two networks, or one network run in two ways, differ: row by row, in the output, and in the weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from hookscope.results.activations import FeatureMaps
from hookscope.results.comparison import Prediction
from hookscope.results.findings import Finding
from hookscope.results.inputs import InputRecord, Provenance
from hookscope.results.json_form import UNSTORED, in_json
from hookscope.results.network import ModelInfo
from hookscope.results.renderers import RunResult
from hookscope.text import counted

T = TypeVar("T")

Match = Literal["name", "prefix", "order", "map"]
"""How a pair was found: equal name and call; equal without known prefixes; order, type and shapes; `--map`."""

Way = Literal["networks", "tensors", "values", "weights"]
"""What was compared: two networks that ran; two saved runs, by all values or by 256 per input; weights alone."""

FEWER_TENSORS = "returns fewer tensors there"
"""`Unmatched.reason` has this, or one of the next constants, if both sides call the layer, or may do so."""
UNPAIRED_CALL = "not called in the first batch, in which layers are paired"
PARTS_ALONE = "'s run only has rows of its parts"
NOT_LISTED = "'s run does not list it"
SAME_OUTPUT = "its output is that of"

Origin = Literal["equal", "rounding", "begins", "passed on", "unclear"]
"""The source of a row's difference: none; rounding; this layer; its inputs; not known which of these two."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Counts of elements that are NaN or infinite in A or B, and differ on the other side.

    Attributes:
        nan_a: Elements that are NaN in A. `inf_a` are infinite in A; `nan_b` and `inf_b` are NaN and infinite in B.
        element_count: All elements.
    """

    nan_a: int
    inf_a: int
    nan_b: int
    inf_b: int
    element_count: int


@dataclass(frozen=True, slots=True)
class Measures:
    """How far tensor B is from tensor A, over all inputs of the run.

    Attributes:
        relative_l2: L2 norm of A-B over the L2 norm of A; infinite if A is 0 and B is not; NaN if a value is NaN or
            infinite on one side and differs on the other.
        cosine: Cosine of the angle between A and B over finite elements; None if A or B is 0, or it is not known.
        max_abs: Largest finite magnitude of A-B; None if it is not known.
        max_at: Place of `max_abs`: the position of the input in the run, then the indices in its tensor; only the
            indices for a tensor without a batch axis; None if it is not known.
        ulps: `max_abs` in units in the last place, at A's value there or at `max_abs`, whichever is larger, in the
            coarser of the two dtypes. None if that dtype is not floating, or if it is not known.
        unequal_fraction: Share of elements that differ at all; None if it is not known.
        value_count: Number of values that were compared, if runs keep only some values; `relative_l2` is then theirs,
            or a lower bound from the statistics of all values, if that is larger. None if all were compared.
        nonfinite: Elements that the measures leave out, so that `relative_l2` is NaN; None without any.
    """

    relative_l2: float
    cosine: float | None = None
    max_abs: float | None = None
    max_at: tuple[int, ...] | None = None
    ulps: float | None = None
    unequal_fraction: float | None = None
    value_count: int | None = None
    nonfinite: NonFinite | None = None

    @property
    @in_json
    def sqnr_db(self) -> float:
        """Signal to quantisation noise in decibels, 20 log10 of ‖A‖ / ‖A-B‖; infinite if they are equal."""
        if not self.relative_l2:
            return math.inf
        return -20 * math.log10(self.relative_l2) if self.relative_l2 > 0 else math.nan


class TensorDifference:
    """How far a tensor of B is from its partner in A."""

    __slots__ = ()

    measures: Measures | None

    @property
    def relative_l2(self) -> float | None:
        """`relative_l2` of the measures; None if the two cannot be compared."""
        return None if self.measures is None else self.measures.relative_l2

    @property
    def nonfinite(self) -> NonFinite | None:
        """Elements that the measures leave out; None without any."""
        return None if self.measures is None else self.measures.nonfinite


@dataclass(frozen=True, slots=True)
class ChannelShare:
    """The single channel with most of a row's squared difference."""

    channel: int
    channel_count: int
    fraction: float


@dataclass(frozen=True, slots=True)
class DifferenceRow(TensorDifference):
    """One output of a layer of A and its partner in B.

    Attributes:
        index: Position in `Differences.rows`; for two saved runs, the row's index in A's run.
        layer: Dotted name in A; `label` has the call and the slot too.
        kind: Class name of A's module, or name of the operation.
        label_b: Label of the partner in B, as `kind_b`, `shape_b` and `dtype_b` are the partner's.
        matched: How the pair was found.
        shape: Shape of A's output, over all batches as in `TensorStatistics`.
        measures: None if the two cannot be compared; `note` has the reason.
        input_relative_l2: As `Measures.relative_l2`, the largest over the layer's inputs; infinite if the shapes of an
            input differ, None if it is not known.
        arriving_relative_l2: As `input_relative_l2`, without parameters, buffers and other tensors of modules.
        source: The line that calls an operation of A, "net.py:14"; "" for a module.
        arguments: Constants and stored tensors that differ: "given 1.0 in A and 1.3 in B"; or "with an edited input".
        added: The difference that this layer adds by itself: B's layer on A's input, compared with A's output. None
            without `--shadow`.
        error: L2 norm of A minus the reference, over the reference's; None without a reference. `error_b` is B's.
        limit: `relative_l2` up to which rounding explains a difference.
        channel: The channel with most of the squared difference; None without one.
    """

    index: int
    layer: str
    label: str
    kind: str
    label_b: str
    kind_b: str
    matched: Match
    shape: tuple[int, ...]
    shape_b: tuple[int, ...]
    dtype: str
    dtype_b: str
    measures: Measures | None
    origin: Origin = "unclear"
    input_relative_l2: float | None = None
    arriving_relative_l2: float | None = None
    source: str = ""
    arguments: str = ""
    added: Measures | None = None
    error: float | None = None
    error_b: float | None = None
    limit: float = 0.0
    channel: ChannelShare | None = None
    note: str = ""

    @property
    def duplicates(self) -> tuple[str, ...]:
        """The label in B, if it is different."""
        return (self.label_b,) if self.label_b != self.label else ()


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A row, or a tensor of the weights, that has no partner on the other side.

    Attributes:
        reason: Why, in a few words: "B has no such layer", "called twice here, once by B".
    """

    side: Literal["A", "B"]
    label: str
    kind: str
    shape: tuple[int, ...]
    reason: str

    @property
    def is_called_alone(self) -> bool:
        """Whether only this side calls the layer, which may cause a difference."""
        shared = (FEWER_TENSORS, UNPAIRED_CALL, PARTS_ALONE, NOT_LISTED, SAME_OUTPUT)
        return not any(reason in self.reason for reason in shared)


@dataclass(frozen=True, slots=True)
class OutputDifference(TensorDifference):
    """How one output tensor of the networks differs.

    Attributes:
        slot: Path inside a nested output; "" for a plain tensor.
        measures: None if the two cannot be compared.
        error: As in `DifferenceRow`, like `error_b`.
        top1: Inputs with the same best class; None if the output is not one row of class scores for each input.
        top5: Mean share of A's five best classes that are among B's five best, 0-1; NaN if the scores of an input are
            NaN on one side only; None as for `top1`, or below 5 classes.
        kl: Mean over inputs of the Kullback-Leibler divergence of B's softmax from A's, in nats; NaN if an input has a
            softmax on one side only; None as for `top1`.
        predictions: Best classes by A and by B; () if the classes are not known.
    """

    slot: str
    shape: tuple[int, ...]
    measures: Measures | None
    error: float | None = None
    error_b: float | None = None
    input_count: int = 0
    top1: int | None = None
    top5: float | None = None
    kl: float | None = None
    predictions: tuple[tuple[Prediction, ...], tuple[Prediction, ...]] = ((), ())


@dataclass(frozen=True, slots=True)
class WeightDifference(TensorDifference):
    """One tensor of A's state and its partner in B's.

    Attributes:
        measures: None if the shapes differ.
        sign_flips: Share of elements with the opposite sign; None if the shapes differ.
    """

    name: str
    name_b: str
    matched: Match
    shape: tuple[int, ...]
    shape_b: tuple[int, ...]
    dtype: str
    dtype_b: str
    measures: Measures | None
    sign_flips: float | None = None

    @property
    def label(self) -> str:
        """Its name."""
        return self.name


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where a difference beyond rounding begins.

    Attributes:
        layer: Dotted name in A of the module in which the difference begins; "" is the whole model.
        row: Label of the first row that shows the difference.
        in_own_code: Whether it arises in the module's own forward code, between the modules that it calls.
        relative_l2: Relative L2 difference of that row; None if its shapes differ.
        gone_at: Label of the first row at which outputs agree again; "" if the difference stays.
    """

    layer: str
    row: str
    in_own_code: bool
    relative_l2: float | None
    gone_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToleranceFinding(Finding):
    """A row, or the output (""), that breaks a condition of `--fail-over`.

    Attributes:
        rule: The condition as given: "rel>1e-3", "layer4*:cosine<0.99".
    """

    value: float


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two sides, A or B.

    Attributes:
        ways: How it ran differently from the other side: "autocast to bfloat16", "train mode", "threads: 2".
        run: The run directory that was read; "" for a network that ran.
    """

    model: ModelInfo
    device: str = "cpu"
    dtype: str = "float32"
    ways: tuple[str, ...] = ()
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Differences(RunResult[DifferenceRow]):
    """The differences between A and B.

    Attributes:
        way: What was compared.
        inputs: Inputs of A, and of B unless `inputs_b` has its own; () if only weights were compared.
        inputs_b: Inputs of B, if they differ from those of A; else ().
        rows: Pairs, in A's order of execution.
        gradients: Pairs of gradients, labelled "conv1 grad_output" and "conv1.weight grad"; empty without `--grads`,
            and for runs without gradients.
        unmatched: Rows of either side without a partner; tensors if `way` is "weights".
        outputs: Comparison of the networks' outputs; () if only weights were compared.
        weights: Pairs of tensors in the networks' states; () unless only weights were compared.
        first_differences: Layers where differences begin, in A's order of execution: layers with equal inputs and
            different outputs; with `--shadow`, all layers that add a difference. Differences that vanish later are
            last.
        first_gradient_difference: Label of the first gradient in the backward pass that differs beyond rounding; "" if
            there is none, or if activations differ, which explains different gradients.
        maps: A-B for the first input, at most twelve: at rows where differences begin, and the largest over the depth.
        exceeded: Rows and outputs that break a condition of `--fail-over`.
        reference: Errors are measured against it: "A's weights in float64"; "" without a reference.
        warnings: Sentences a reader must see; `notes` need no action.
        timings: Seconds by phase.
    """

    a: Side
    b: Side
    way: Way
    inputs: tuple[InputRecord, ...] = ()
    inputs_b: tuple[InputRecord, ...] = ()
    rows: tuple[DifferenceRow, ...] = ()
    gradients: tuple[DifferenceRow, ...] = ()
    unmatched: tuple[Unmatched, ...] = ()
    outputs: tuple[OutputDifference, ...] = ()
    weights: tuple[WeightDifference, ...] = ()
    first_differences: tuple[FirstDifference, ...] = ()
    first_gradient_difference: str = ""
    maps: tuple[FeatureMaps, ...] = field(default=(), metadata=UNSTORED)
    exceeded: tuple[ToleranceFinding, ...] = ()
    reference: str = ""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seed: int = 0
    timings: Mapping[str, float] = field(default_factory=dict)
    provenance: Provenance | None = field(default=None, metadata=UNSTORED)

    def __repr__(self) -> str:
        many = counted(len(self.weights), "tensor") if self.way == "weights" else counted(len(self.rows), "row")
        return f"<{type(self).__name__} of {self.a.model.name} and {self.b.model.name}: {many}>"


def spread(items: Sequence[T], count: int, comes_first: Callable[[T], bool], size: Callable[[T], float]) -> list[T]:
    """Choose `count` items, in order: items that come first, then the largest of each equal part of the others."""
    chosen = [at for at, item in enumerate(items) if comes_first(item)][:count]
    others = [at for at, item in enumerate(items) if not comes_first(item)]
    parts = min(count - len(chosen), len(others))
    for part in range(parts):
        places = others[len(others) * part // parts : len(others) * (part + 1) // parts]
        chosen.append(max(places, key=lambda at: size(items[at])))
    return [items[at] for at in sorted(chosen)]
