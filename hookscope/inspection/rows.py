"""From hooks to rows: reduce in the hook, merge over batches, set flags, keep maps to draw."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks.autograd import plain_arithmetic
from hookscope.hooks.callers import have_own_operations
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import GradientSite, ModuleCall, Observation, RowKey
from hookscope.hooks.operations import OperationChoice
from hookscope.hooks.pytree import tensors_in
from hookscope.inspection.batch_shapes import BatchShapes
from hookscope.inspection.losses.choosing import output_at
from hookscope.inspection.losses.formulas import class_probabilities
from hookscope.inspection.losses.targets import Output
from hookscope.inspection.map_summaries import MapRecorder
from hookscope.inspection.network import InspectedNetwork
from hookscope.inspection.token_norms import TokenRecorder
from hookscope.results.activations import FeatureMaps, Flag, LayerRow
from hookscope.results.comparison import Prediction
from hookscope.results.gradients import GradientRow
from hookscope.results.network import row_label
from hookscope.results.statistics import TensorStatistics
from hookscope.results.token_norms import TokenNorms
from hookscope.statistics.channel_axis import AxisReader, arrange
from hookscope.statistics.reducer import Measured, Reducer, collect, summarise
from hookscope.statistics.reduction import Reduction, merge
from hookscope.statistics.storage import gathered
from hookscope.statistics.token_layout import TokenLayout
from hookscope.text import counted

OnCall = Callable[[ModuleCall], None]
OnTensor = Callable[[str, Tensor, int | None], None]
"""What hooks call with a call, and then with the label of a row, its tensor, and the axis that counts channels."""

# A layer is flagged from this share of dead channels on: after a ReLU a few are dead for any one picture.
_DEAD_FRACTION = 0.5

# Fields that are counts or comparisons, and those that are sums, which may be rounded differently. Channels depend on
# an axis that is inferred anew at each module.
_counted: Callable[[TensorStatistics], tuple[object, ...]] = attrgetter(
    "shape", "dtype", "element_count", "min", "max", "zero_fraction", "nan_count", "inf_count", "unmeasured"
)
_summed: Callable[[TensorStatistics], tuple[object, ...]] = attrgetter("mean", "std", "mean_abs", "l2")


@dataclass(slots=True)
class Rows:
    """What each place has shown so far, over all batches.

    Attributes:
        seen: In execution order. An output is passed through, or repeats another, if it does so in every batch;
            `sources` come from the first batch.
        shapes: The shapes of each tensor in the batches.
    """

    seen: dict[RowKey, Observation[Reduction]] = field(default_factory=dict)
    shapes: dict[RowKey, BatchShapes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedActivation:
    """One input's activation, cloned in the hook."""

    key: RowKey
    input_index: int
    values: Tensor
    channel_axis: int | None
    channel_count: int
    shape: tuple[int, ...]
    grids: tuple[tuple[int, ...], ...]
    note: str


@dataclass(slots=True)
class Recorder:
    """The observer given to `capture`: reduces every output, and clones what is to be drawn."""

    grids_for: int
    max_channels: int | None
    on_tensor: OnTensor | None
    reducer: Reducer = field(default_factory=Reducer)
    axes: AxisReader = field(default_factory=AxisReader)
    operations: OperationChoice | None = None
    rules_only: frozenset[str] = frozenset()  # modules whose rows are not shown
    rules_reducer: Reducer | None = None  # for rows that are not shown: no distributions, no kept values
    on_call: OnCall | None = None
    maps: MapRecorder | None = None
    tokens: TokenRecorder | None = None
    token_layout: TokenLayout | None = None
    kept: list[SavedActivation] = field(default_factory=list)
    indices: tuple[int, ...] = ()

    def start(self, indices: tuple[int, ...], *, pictures: tuple[int, int, int] | None = None) -> None:
        """Begin a forward pass over the inputs at `indices`: pictures, or others."""
        self.axes.restart()
        if self.token_layout is not None:
            self.token_layout.restart(pictures)
        self.indices = indices
        if self.maps is not None:
            self.maps.start(indices)
        if self.tokens is not None:
            self.tokens.start(indices)

    def settle(self) -> None:
        """Finish what waits for later outputs, without the caller's autocast and observation of operations."""
        if self.maps is not None:
            with plain_arithmetic(), torch._C.DisableTorchFunction():
                self.maps.finish()

    def forget(self) -> None:
        """Drop what was cloned in the latest forward pass."""
        first = min(self.indices, default=0)
        self.kept = [activation for activation in self.kept if activation.input_index < first]
        if self.maps is not None:
            self.maps.forget()
        if self.tokens is not None:
            self.tokens.forget()

    def lists(self, call: ModuleCall | GradientSite[Measured]) -> bool:
        """Tell whether a call has rows that are shown: those that are only judged are not."""
        operation = call.operation
        if operation is None:
            return call.layer not in self.rules_only
        if self.operations is None:
            return True
        return self.operations.lists(operation.owner, operation.name, call.call)

    def observe(self, call: ModuleCall, slot: str, tensor: Tensor) -> Measured:
        """Reduce one output in the hook."""
        if type(tensor) is not Tensor:
            tensor = gathered(tensor)
        maker, axis_count = call.maker, tensor.dim()
        if call.vmapped:
            axis = self.axes.channel_axis_in_vmap(maker, tensor.shape, call.vmapped)
        else:
            axis = None if tensor.is_nested else self.axes.channel_axis(maker, tensor.shape)
        if self.on_call is not None:
            self.on_call(call)
        is_shown = self.lists(call)
        reducer = self.reducer if is_shown or self.rules_reducer is None else self.rules_reducer
        measured = reducer.reduce(tensor, axis, len(self.indices))
        key = (call.layer, call.call, slot)
        if self.token_layout is not None and axis_count > 3:
            self.token_layout.note_patches(maker, tensor)
        grids = self.grids_of(key, tensor, axis) if axis_count == 3 else self.axes.grids
        is_unmeasured = isinstance(measured, Reduction) and measured.unmeasured is not None
        if is_shown and self.on_tensor is not None and not (is_unmeasured and missing_memory(tensor)):
            self.on_tensor(row_label(*key), tensor, axis)
        if is_shown and not is_unmeasured:
            if self.grids_for:
                self.keep(key, tensor, axis)
            if self.maps is not None and axis is not None and axis_count > 2 and (grids or not self.axes.grids):
                self.maps.see(key, tensor, axis, grids)
            if self.tokens is not None and self.token_layout is not None and axis == 2:
                self.tokens.see(key, tensor, self.token_layout.layout_at(key), measured)
        return measured

    def grids_of(self, key: RowKey, tensor: Tensor, axis: int | None) -> Sequence[tuple[int, ...]]:
        """Return the grids on which an output may lie; to be called where it is returned."""
        if self.token_layout is None or tensor.is_nested or tensor.dim() != 3 or axis != 2:
            return self.axes.grids
        grids = self.axes.grids
        self.token_layout.layout(key, tensor, len(self.indices), axis, grids, axes=len(grids[-1]) if grids else 2)
        return self.token_layout.grids_at(key, grids)

    def keep(self, key: RowKey, tensor: Tensor, axis: int | None) -> None:
        """Clone the `slices`."""
        slices = self.slices(key, tensor, axis)
        self.kept += [replace(part, values=part.values.detach().clone()) for part in slices]

    def slices(self, key: RowKey, tensor: Tensor, axis: int | None) -> Iterator[SavedActivation]:
        """Return the slices that belong to the inputs to be drawn, if there are any, in the tensor's own memory."""
        is_dense = tensor.layout == torch.strided and not tensor.is_nested
        if self.grids_for <= min(self.indices, default=0) or not is_dense or not tensor.numel():
            return
        count, note = len(self.indices), ""
        layout, grids = None, tuple(self.axes.grids)
        if self.token_layout is not None:
            layout, grids = self.token_layout.layout_at(key), self.token_layout.grids_at(key, grids)
        if layout is not None and layout.windows is not None:
            tensor, axis = layout.maps(tensor), 1
        tensor = tensor if tensor.dim() else tensor.reshape(1)
        if tensor.shape[0] != count:
            if tensor.dim() == 3 and tensor.shape[1] == count:  # (T, N, D)
                tensor = tensor.transpose(0, 1)
            else:
                note = f"element 0 of {tensor.shape[0]}: axis 0 is not the batch"
        for index, values in zip(self.indices, tensor, strict=False):
            if index >= self.grids_for:
                break
            shape = tuple(values.shape)
            channel_count = values.numel() if axis is None else shape[axis - 1]
            if self.max_channels is not None and axis is not None:
                values = values.narrow(axis - 1, 0, min(self.max_channels, channel_count))  # noqa: PLW2901
            yield SavedActivation(key, index, values, axis, channel_count, shape, grids, note)
            if note:
                break


def merge_observations(rows: Rows, observations: Sequence[Observation[Measured]], input_count: int) -> None:
    """Merge one forward pass over so many inputs into the rows; new ones are appended in execution order."""
    reductions = iter(collect([seen.value for seen in observations if seen.value is not None]))
    for seen in observations:
        reduction = None if seen.value is None else next(reductions)
        row: Any = seen if reduction is seen.value else seen._replace(value=reduction)
        earlier = rows.seen.setdefault(row.place, row)
        if reduction is not None:
            rows.shapes.setdefault(row.place, BatchShapes()).add(input_count, reduction.shape)
        if earlier is not row:
            rows.seen[row.place] = _merged(earlier, row)


def _merged(old: Observation[Reduction], new: Observation[Reduction]) -> Observation[Reduction]:
    first, second = old.value, new.value
    if first is not None and second is not None:
        first = merge(first, second)
    return old._replace(
        value=first or second,
        passed_through=old.passed_through and new.passed_through,
        duplicate_of=old.duplicate_of if old.duplicate_of == new.duplicate_of else None,
    )


def layer_rows(
    inspected: InspectedNetwork, rows: Rows, tokens: Mapping[RowKey, TokenNorms] | None = None
) -> tuple[LayerRow, ...]:
    """Turn rows into results, in execution order; `tokens` are the norms of those that are tokens."""
    # A container shares the reduction of its last child.
    reductions = {id(row.value): row.value for row in rows.seen.values() if row.value is not None}
    measured = dict(zip(reductions, summarise([*reductions.values()]), strict=True))
    measured[id(None)] = TensorStatistics((), "none", 0)  # where no tensor was returned
    norms = tokens or {}
    result = []
    for index, (place, seen) in enumerate(rows.seen.items()):
        (layer, call, slot), operation, first = place, seen.operation, seen.duplicate_of
        statistics, shapes, token_norms = measured[id(seen.value)], rows.shapes.get(place), norms.get(place)
        flags = _flags(statistics, seen, varies=shapes is not None and shapes.varies)
        flags += ["massive activations"] if token_norms is not None and token_norms.massive_count else []
        repeated = ""
        if first is not None and _counted_alike(statistics, measured[id(rows.seen[first].value)]):
            repeated = row_label(*first)
        row = LayerRow(  # by position, as `TensorStatistics`
            index,
            layer,
            type(inspected.modules[layer]).__name__ if operation is None else operation.name,
            call,
            slot,
            inspected.parameter_counts[layer] if operation is None else 0,
            statistics if shapes is None else with_whole_shape(statistics, shapes),
            tuple(flags),
            inspected.aliases.get(layer, ()),
            repeated,
            (),
            None if operation is None else operation.owner,
            "" if operation is None else operation.source,
            tuple([source if isinstance(source, str) else row_label(*source) for source in seen.sources]),
            token_norms,
        )
        result.append(row)
    return tuple(result)


def with_whole_shape(statistics: TensorStatistics, shapes: BatchShapes) -> TensorStatistics:
    """Return statistics of several batches with the shape of all of them."""
    return statistics if shapes.batch_count == 1 else replace(statistics, shape=shapes.whole)


def hidden_labels(
    rows: Iterable[LayerRow], selected: Collection[str], operations: OperationChoice | None
) -> tuple[str, ...]:
    """Return the labels of the modules that are not selected, and of the operations that no pattern selects."""

    def lists(row: LayerRow) -> bool:
        if row.owner is None:
            return row.layer in selected
        return operations is not None and operations.lists(row.owner, row.kind, row.call)

    return tuple(row.label for row in rows if not lists(row))


def same_values(first: TensorStatistics, second: TensorStatistics) -> bool:
    """Tell whether two tensors have the same statistics, whichever of their axes counts channels."""
    return _counted_alike(first, second) and _summed(first) == _summed(second)


def _counted_alike(first: TensorStatistics, second: TensorStatistics) -> bool:
    return first is second or _counted(first) == _counted(second)


def _flags(statistics: TensorStatistics, seen: Observation[Reduction], *, varies: bool) -> list[Flag]:
    flags: list[Flag] = ["not a tensor"] if seen.value is None else []
    flags += value_flags(statistics)
    if seen.in_place:
        flags.append("in-place")
    if seen.passed_through:
        flags.append("pass-through")
    if varies:
        flags.append("shape varies")
    if seen.vmapped:
        flags.append("vmap")
    return flags


def value_flags(statistics: TensorStatistics) -> list[Flag]:
    """Return the flags that depend on values alone, in the order of display."""
    low, high = statistics.min, statistics.max
    flags: list[Flag] = []
    if statistics.unmeasured is not None:
        flags.append("unmeasured")
    is_finite = not (statistics.nan_count or statistics.inf_count)
    if not is_finite:
        flags.append("non-finite")
    if is_finite and low is not None and low == high and statistics.element_count > 1:
        flags.append("all zero" if low == 0 else "constant")
    elif statistics.has_enough_per_channel and (statistics.dead_channel_fraction or 0) >= _DEAD_FRACTION:
        flags.append("dead channels")
    return flags


def fast_path_warning(
    modules: Mapping[str, nn.Module], selected: Mapping[str, nn.Module], *, with_operations: bool
) -> tuple[str, ...]:
    """Warn when hooks change which kernels run: torch's fused encoder layer steps aside for hooks, and for modes."""
    fused = [module for module in modules.values() if isinstance(module, nn.TransformerEncoderLayer)]
    hooked = {id(module) for module in selected.values()} if fused else set()
    # Operations are not looked for inside torch's own encoders, which see no function mode then.
    encoders = [module for module in modules.values() if isinstance(module, nn.TransformerEncoder)] if fused else []
    closed = [encoder for encoder in encoders if not have_own_operations(encoder.modules())]
    unseen = {id(part) for encoder in closed for part in encoder.modules()}
    if torch.backends.mha.get_fastpath_enabled() and any(
        (with_operations and id(layer) not in unseen) or any(id(part) in hooked for part in layer.modules())
        for layer in fused
    ):
        return ("nn.TransformerEncoderLayer runs unfused while hooked; the last digits may differ.",)
    return ()


def feature_maps(rows: Iterable[LayerRow | GradientRow], kept: Sequence[SavedActivation]) -> tuple[FeatureMaps, ...]:
    """Arrange the kept maps of the rows for drawing."""
    by_key = {(row.layer, row.call, row.slot): row for row in rows}
    pairs = [(item, by_key[item.key]) for item in kept]
    result = [arranged(item, row.index, row.label, row.kind) for item, row in pairs]
    return tuple(sorted(result, key=lambda maps: (maps.row, maps.input_index)))


def arranged(item: SavedActivation, index: int, label: str, kind: str) -> FeatureMaps:
    """Arrange the kept maps of one row for drawing."""
    values = item.values.dequantize() if item.values.is_quantized else item.values
    values = (values.abs() if values.is_complex() else values).float().cpu()
    arrangement, drawn, extra, remark = arrange(values, item.channel_axis, item.grids)
    return FeatureMaps(
        index,
        label,
        kind,
        item.input_index,
        arrangement,
        drawn.numpy(),
        None if extra is None else extra.numpy(),
        item.channel_count,
        item.shape,
        "; ".join(text for text in (item.note, remark) if text),
    )


def predictions(
    output: object,
    categories: Sequence[str],
    indices: Sequence[int],
    output_key: str | None = None,
    *,
    multi_label: bool = False,
) -> tuple[list[Prediction], str]:
    """Return the five best classes per input, if the output is one row of logits per input over the categories.

    The text is a sentence on why classes have no names though some are known; "" otherwise.

    Args:
        output: What the model returned.
        categories: Class names by index, if known.
        indices: Of the inputs.
        output_key: Which of several outputs holds the logits; its classes need not be known by name.
        multi_label: Read scores as sigmoids; classes then need no known names either.

    Raises:
        UsageError: If there is no such output.
    """
    scores = _scores(output, len(indices), output_key)
    if scores is None:
        return [], ""
    unnamed, count = "", scores.shape[1]
    if categories and count != len(categories):
        names = f"{counted(len(categories), 'class name')} {'is' if len(categories) == 1 else 'are'} known"
        unnamed = f"The output has {counted(count, 'score')} per input, but {names}, so none is shown."
    if output_key is None and not multi_label and count != len(categories):
        return [], unnamed
    names_by_index = categories if count == len(categories) else ()
    return top_classes(scores, names_by_index, indices, 5, multi_label=multi_label), unnamed


def _scores(output: object, count: int, output_key: str | None) -> Tensor | None:
    """Return the output that may be one row of logits per input, (N, K); None without one."""
    if output_key is not None:
        floating = [Output(path, tensor) for path, tensor in tensors_in(output) if tensor.is_floating_point()]
        output = output_at(floating, output_key).tensor
    elif isinstance(output, Mapping):  # what networks of transformers return
        output = output.get("logits")
    output = gathered(output) if isinstance(output, Tensor) else output
    if not isinstance(output, Tensor) or output.is_nested or output.dim() != 2 or len(output) != count:
        return None
    # Decisions in integers, and layouts and dtypes that torch does not compute with, are no scores.
    is_score = output.is_floating_point() and output.itemsize > 1 and output.layout == torch.strided
    return output if is_score and output.numel() and not output.is_meta and not missing_memory(output) else None


def top_classes(
    scores: Tensor, categories: Sequence[str], indices: Sequence[int], count: int, *, multi_label: bool = False
) -> list[Prediction]:
    """Return the best classes per input, with their probabilities.

    Args:
        scores: Logits, or probabilities already, (N, K).
        categories: K class names; empty if they are not known.
        indices: Of the inputs, (N,).
        count: How many classes to return at most.
        multi_label: Whether each class is a label by itself.
    """
    shares, reading = class_probabilities(scores, Output("", scores), multi_label=multi_label)
    classes = scores.topk(min(count, scores.shape[1])).indices  # (N, count); shares may be 0 or 1 for several classes
    probabilities = shares.float().gather(1, classes)
    return [
        Prediction(
            index, tuple(best), tuple(categories[number] for number in best if categories), tuple(likely), reading
        )
        for index, best, likely in zip(indices, classes.tolist(), probabilities.tolist(), strict=True)
    ]
