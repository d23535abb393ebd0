"""Run a network over one chunk of the inputs, and gather what its outputs and their channels do."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookscope.commands.survey.channel_rows import Reduced, RowsOnDevice, reduce_channels
from hookscope.commands.survey.channel_totals import ChannelTotals
from hookscope.commands.survey.features import FeatureSpool
from hookscope.commands.survey.judged_inputs import InputJudge, JudgedInputs
from hookscope.errors import HookscopeError, UnfitInputError
from hookscope.hooks.embedding_rows import RowsUsed
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import version_of
from hookscope.hooks.pytree import tensors_in
from hookscope.inputs.batches import Batch, in_batches, length_of
from hookscope.inputs.pipeline import InputPipeline
from hookscope.inputs.tensors import ONE_TENSOR, several_by_name
from hookscope.inspection.forward import ForwardError, ForwardOptions, inspect
from hookscope.inspection.network import queued
from hookscope.models.construction import LoadedModel
from hookscope.parameters import arg
from hookscope.results.activations import LayerRow, UncalledLayer, Verification
from hookscope.results.json_form import UNSTORED
from hookscope.results.statistics import TensorStatistics
from hookscope.results.survey import NONFINITE_OUTPUT, Unusable
from hookscope.statistics.reduction import Reduction
from hookscope.statistics.storage import stored_values, without_float8

RIGHT_UNKNOWN = "Whether inputs are classified right is not known."


@dataclass(frozen=True, slots=True)
class MeasuredInput:
    """An input that was measured.

    Attributes:
        number: Its number in the chunk, unusable inputs counted.
        sha256: Digest of its file; None for one in memory.
        label: Number of its class; None without classes.
        is_nonfinite: Whether it holds NaN, or Inf in an argument by position: masks, given by name, may hold -Inf.
    """

    number: int
    name: str
    sha256: str | None
    label: int | None = None
    is_nonfinite: bool = False

    def name_in(self, offset: int) -> str:
        """Return its name; inputs in memory are numbered among all inputs, and this chunk begins at `offset`."""
        is_numbered = self.sha256 is not None or self.name.endswith("]")
        return self.name if is_numbered else f"{self.name}[{offset + self.number}]"


@dataclass(slots=True)
class ChunkRow:
    """One output over a chunk.

    Attributes:
        row: The output; its statistics have only the shape, and why it was not measured.
        reduction: Of all values; the distribution is in bins.
        totals: Of its channels; None without them.
    """

    row: LayerRow
    reduction: Reduction
    totals: ChannelTotals | None


@dataclass(slots=True)
class MeasuredChunk:
    """What was found in a chunk.

    Attributes:
        place_count: Inputs of the chunk, unusable ones counted.
        features: Of its inputs; None if they were not asked for.
        judged: How they are classified; None without classes, and where they cannot be judged.
        rows_used: Of embeddings and codebooks by name, whether each row was looked up.
    """

    inputs: list[MeasuredInput]
    place_count: int
    rows: list[ChunkRow]
    unusable: list[Unusable]
    uncalled: tuple[UncalledLayer, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    verification: Verification | None = None
    features: FeatureSpool | None = field(default=None, metadata=UNSTORED)
    judged: JudgedInputs | None = None
    rows_used: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ChannelRecorder:
    """Reduces the channels of every output in the hook, and adds a batch to the totals once the network returned.

    Attributes:
        top: Inputs in each list of greatest values.
        sample: Most inputs, evenly spread over the chunk, whose means are kept to find duplicates.
        class_of: The number of an input's class by its name; None without classes.
    """

    top: int
    sample: int
    class_of: Callable[[str], int] | None = None
    features: FeatureSpool | None = None
    judge: InputJudge | None = None
    rows_used: RowsUsed | None = None
    totals: dict[str, ChannelTotals] = field(default_factory=dict)
    inputs: list[MeasuredInput] = field(default_factory=list)
    sampled_count: int = 0
    sample_step: int = 1
    returns_nonfinite: bool = False
    _latest: dict[str, Reduced] = field(default_factory=dict)
    _before: tuple[weakref.ref[Tensor], int, int, NDArray[np.float64] | None, Reduced] | None = None

    def see(self, label: str, tensor: Tensor, channel_axis: int | None) -> None:
        """Reduce an output; a container's output that repeats the last output is not read again."""
        if self.features is not None:
            self.features.see(label, tensor, channel_axis)
        if channel_axis is None or channel_axis == 0:
            return
        version, totals = version_of(tensor), self.totals.get(label)
        thresholds = None if totals is None else totals.top.thresholds
        if self._before is not None:
            reference, old_version, axis, limits, rows = self._before
            is_same = reference() is tensor and old_version == version >= 0 and axis == channel_axis
            if is_same and (limits is None or (thresholds is not None and np.array_equal(limits, thresholds))):
                self._latest[label] = rows
                return
        channel_rows = reduce_channels(tensor, channel_axis, thresholds)
        if channel_rows is not None:
            self._latest[label] = channel_rows
            self._before = (weakref.ref(tensor), version, channel_axis, thresholds, channel_rows)

    def keep(self, batch: Batch, output: object) -> None:
        """Add a batch that went through the network."""
        if not self.returns_nonfinite:
            self.returns_nonfinite = any(_holds_nonfinite(tensor, with_inf=True) for _, tensor in tensors_in(output))
        numbers = np.array(batch.indices, np.int64)
        classes = [] if self.class_of is None else [self.class_of(record.name) for record in batch.records]
        sampled = [place for place, number in enumerate(batch.indices) if number % self.sample_step == 0]
        self.sampled_count += len(sampled)
        unique = {id(rows): rows for rows in self._latest.values()}  # a container and its last layer share rows
        fetched = {key: rows.fetched() if isinstance(rows, RowsOnDevice) else rows for key, rows in unique.items()}
        for label, reduced in self._latest.items():
            rows, totals = fetched[id(reduced)], self.totals.get(label)
            if totals is None:
                totals = self.totals[label] = ChannelTotals.empty(rows.high.shape[1], self.top)
            if totals.high.size == rows.high.shape[1]:
                totals.add(rows, numbers, classes, sampled)
            else:
                totals.is_of_one_size = False
        while self.sampled_count > self.sample:  # how many inputs there are is not known: a file may hold several
            for totals in self.totals.values():
                totals.thin_sample()
            self.sample_step, self.sampled_count = 2 * self.sample_step, (self.sampled_count + 1) // 2
        if self.features is not None:
            self.features.keep(len(numbers))
        if self.rows_used is not None:
            self.rows_used.keep()
        if self.judge is not None and not self.judge.reason:
            self.judge.add(batch, output)
        labels: Sequence[int | None] = classes or [None] * len(numbers)
        broken = [*map(_is_nonfinite, in_batches(batch, 1))] if _is_nonfinite(batch) else [False] * len(numbers)
        self.inputs += [
            MeasuredInput(number, record.name, record.sha256, label, is_nonfinite)
            for number, record, label, is_nonfinite in zip(batch.indices, batch.records, labels, broken, strict=True)
        ]

    def end_batch(self) -> None:
        """Clear the batch, whether it was kept or the network raised."""
        self._latest.clear()
        self._before = None
        if self.features is not None:
            self.features.forget()
        if self.rows_used is not None:
            self.rows_used.forget()


def _is_nonfinite(batch: Batch) -> bool:
    """Tell whether an input of a batch holds NaN or Inf; in arguments by name only NaN counts, as masks hold -Inf."""
    arguments = {f"[{at}]": value for at, value in enumerate(batch.args)} | dict(batch.kwargs)
    for name, value in arguments.items():
        is_named = name in batch.kwargs
        is_listed = isinstance(value, list) and (name in batch.listed or not is_named)
        for path, tensor in tensors_in(value):
            is_of_inputs = name + path not in batch.shared and (is_listed or length_of(tensor) == len(batch.indices))
            if is_of_inputs and _holds_nonfinite(tensor, with_inf=not is_named):
                return True
    return False


def _holds_nonfinite(tensor: Tensor, *, with_inf: bool) -> bool:
    """Tell whether a tensor stores NaN or, with `with_inf`, Inf; freed and meta tensors store nothing."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or missing_memory(tensor):
        return False
    values = without_float8(stored_values(tensor.detach(), ())[0])
    return bool((~values.isfinite() if with_inf else values.isnan()).any())


def measure_chunk(
    loaded: LoadedModel,
    inputs: InputPipeline,
    batch_size: int,
    recorder: ChannelRecorder,
    options: ForwardOptions,
    *,
    is_first: bool,
    on_batch: Callable[[int], None],
) -> MeasuredChunk:
    """Run the network over a chunk, with a new recorder.

    `on_batch` is called after each batch with the number of inputs finished.

    Raises:
        ForwardError: If the network raised on every input of the first chunk of this process.
        LayerNotFoundError: If a pattern selects nothing.
    """
    unusable: list[Unusable] = []

    def report(error: HookscopeError) -> None:
        texts = [f"{name}: {error.reason}" for name in error.names] if isinstance(error, UnfitInputError) else []
        texts = texts or [str(error).replace(several_by_name(), ONE_TENSOR)]
        unusable.extend(Unusable(text, error.exit_code) for text in texts)

    def end_batch(finished: int) -> None:
        recorder.end_batch()
        on_batch(finished)

    try:
        with recorder.rows_used or nullcontext():
            run = inspect(
                loaded,
                queued(inputs, batch_size, report),
                options,
                on_tensor=recorder.see,
                on_output=recorder.keep,
                on_batch=end_batch,
            )
    except ForwardError as error:
        if is_first:
            failure = error.inspection.failure
            advice = ("", "") if failure is None else (failure.remedy(), failure.remedy(arguments=False))
            raise ForwardError(str(error).replace(*advice), error.inspection) from error  # its inputs are files
        run = replace(error.inspection, rows=())
    warnings, notes, judge = run.warnings, run.notes, recorder.judge
    if recorder.returns_nonfinite and not any(row.activation.nan_count or row.activation.inf_count for row in run.rows):
        where = "." if options.ops else f": operations between them were not looked at ({arg('ops')})."
        warnings = (*warnings, NONFINITE_OUTPUT + where)
    if judge is not None and judge.reason:
        notes = (*notes, f"{RIGHT_UNKNOWN} {judge.reason}")
    return MeasuredChunk(
        inputs=recorder.inputs,
        place_count=max([len(inputs.files), *(record.number + 1 for record in recorder.inputs)]),
        rows=[_chunk_row(row, recorder.totals.get(row.label)) for row in run.rows],
        unusable=unusable,
        uncalled=run.uncalled,
        warnings=warnings,
        notes=notes,
        verification=run.verification,
        features=recorder.features,
        judged=None if judge is None else judge.result(),
        rows_used={} if recorder.rows_used is None else recorder.rows_used.used,
    )


def _chunk_row(row: LayerRow, totals: ChannelTotals | None) -> ChunkRow:
    statistics = row.activation
    reduction = statistics.reduction or Reduction((), statistics.dtype, 0)  # where no tensor was returned
    spread = statistics.distribution
    if spread is not None and spread.values is not None:
        keys, counts = spread.binned()
        spread = replace(spread, values=None, keys=keys, counts=counts)
    reduction = reduction._replace(shape=statistics.shape, distribution=spread)
    described = TensorStatistics(statistics.shape, statistics.dtype, 0, unmeasured=statistics.unmeasured)
    is_known = totals is not None and totals.is_of_one_size
    return ChunkRow(replace(row, activation=described), reduction, totals if is_known else None)
