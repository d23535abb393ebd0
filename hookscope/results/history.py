"""The checkpoints of a training: contents of files, changes of weights, and the files that break rules; no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hookscope.errors import EXIT_CHECK_FAILED, EXIT_DONE, most_severe
from hookscope.results.comparison import Prediction
from hookscope.results.findings import Finding, raise_failures
from hookscope.results.inputs import InputRecord, Provenance
from hookscope.results.json_form import UNSTORED, in_json
from hookscope.results.renderers import RunResult
from hookscope.text import counted


@dataclass(frozen=True, slots=True)
class OptimiserPoint:
    """The state of an optimiser in one file.

    Attributes:
        key: Its path in the file.
        steps: The greatest count of steps of a parameter; None if none is stored, as by SGD.
        rates: Learning rate of each parameter group.
        non_finite_count: Tensors of the state that hold NaN or Inf.
        live_count: Tensors of the state with a value other than 0, without counts of steps; None if it is not known.
    """

    key: str
    tensor_count: int
    steps: float | None
    rates: tuple[float, ...]
    non_finite_count: int
    live_count: int | None = None


@dataclass(frozen=True, slots=True)
class HistoryFile:
    """One file of the series.

    Attributes:
        name: Its path as found: "ckpt/epoch_7.pt".
        label: A short name that no other file has: "epoch_7.pt".
        status: "read"; "unreadable", with the `error`; or "skipped", because `--bisect` did not need it.
        counters: Counts of epochs and steps in the file, by their keys: {"epoch": 7}.
        exit_code: As for `hookscope check`: 0 passed, 1 a rule failed, else the exit code of the `error`.
        error: Why it could not be read or run, in one line; "" if it was.
        judged: Rules that were judged.
        compared_with: Index of the file that its weights are compared with; None for the first file that was read.
        predictions: A classifier's best classes for each picture.
        warnings: Sentences that a reader must see; `notes` need no action.
    """

    index: int
    name: str
    label: str
    status: Literal["read", "unreadable", "skipped"] = "skipped"
    counters: Mapping[str, int] = field(default_factory=dict)
    sha256: str = ""
    exit_code: int = EXIT_DONE
    error: str = ""
    judged: tuple[str, ...] = ()
    compared_with: int | None = None
    optimisers: tuple[OptimiserPoint, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightPoint:
    """One tensor in one file. Statistics are over the finite values.

    Attributes:
        file: Index of the file.
        layer: Dotted name of the module that owns it; "" is the whole network.
        role: "parameter", or "buffer" for BatchNorm's statistics and other values that are not learnt.
        norm: L2 norm; None for dtypes that are not floating-point, and without a finite value.
        min, max: None without a finite value, and for values without an order.
        nonfinite_count: NaN and Inf.
        dead_filter_count: Output channels whose weights, or whose scale in a normalisation, are exactly zero; None
            without output channels.
        filter_count: Output channels; None likewise.
        drift: L2 norm of the change since the file it is compared with, over the norm there: 0 for equal values, Inf if
            all values there were zero; None without such a file, if shapes differ, or if a value is not finite.
        drift_from_first: The same since the first file that was read.
        moved_from: The tensor that had this tensor's values in the file before, if tensors traded places; "" for none.
    """

    file: int
    name: str
    layer: str
    role: Literal["parameter", "buffer"]
    shape: tuple[int, ...]
    dtype: str
    element_count: int
    norm: float | None
    min: float | None
    max: float | None
    nonfinite_count: int
    zero_fraction: float
    dead_filter_count: int | None = None
    filter_count: int | None = None
    drift: float | None = None
    drift_from_first: float | None = None
    moved_from: str = ""

    @property
    def is_weight(self) -> bool:
        """Whether it is a learnt matrix or kernel: at least two axes are longer than 1."""
        return self.role == "parameter" and sum(size > 1 for size in self.shape) >= 2

    @property
    def is_scale(self) -> bool:
        """Whether it is the scale of a normalisation: a "weight" with one axis, whose channels are counted."""
        return len(self.shape) == 1 and self.filter_count is not None


@dataclass(frozen=True, slots=True)
class ActivationPoint:
    """One output of a layer, over all inputs, with the weights of one file.

    Attributes:
        label: As `LayerRow.label`.
        std: Population standard deviation.
        dead_channel_fraction: Share of channels that are zero over the whole input, 0-1; None without channels.
        nonfinite_count: NaN and Inf.
    """

    file: int
    label: str
    kind: str
    mean: float | None
    std: float | None
    zero_fraction: float | None
    dead_channel_fraction: float | None
    nonfinite_count: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryFinding(Finding):
    """A problem that a rule of `hookscope check`, or a rule on changes between files, finds in some files.

    Attributes:
        level: The most severe level in any of the files.
        message: The rule's message on one of the places, in the first file with the problem: a sentence with value and
            limit.
        followed_by: Further places with the same problem in the same files.
        first: Index of the first file with the problem.
        before: Index of the last file that was read before `first`; None if `first` is the first file that was read.
        files: Indices of the files in which it was seen.
        lasts: Whether every later file that was read has it; `--bisect` assumes this.
        is_change: Whether it is about a change between two files, not about the state of one.
    """

    first: int
    before: int | None
    files: tuple[int, ...]
    lasts: bool
    is_change: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class History(RunResult[tuple[WeightPoint, ...]]):
    """A training, followed over its checkpoints.

    Attributes:
        files: All files in order, including those that were not read.
        order: The sort key of the files: "the epoch stored in each file".
        verdicts: Failures first, then in the order in which they began.
        rows: Every tensor in every file that was read, file by file.
        activations: Outputs of layers, file by file; empty without a network.
        scope: One sentence that lists what was judged and what was not.
        searched: Whether `--bisect` left files out.
        arch: The network that was run; "" if the stored values were judged without a network.
    """

    files: tuple[HistoryFile, ...]
    order: str
    verdicts: tuple[HistoryFinding, ...]
    rows: tuple[WeightPoint, ...]
    activations: tuple[ActivationPoint, ...] = ()
    inputs: tuple[InputRecord, ...] = ()
    scope: str = ""
    searched: bool = False
    arch: str = ""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    provenance: Provenance | None = field(default=None, metadata=UNSTORED)

    _noun = "tensor"

    @property
    def read(self) -> tuple[HistoryFile, ...]:
        """The files that were read."""
        return tuple(file for file in self.files if file.status == "read")

    @property
    def unreadable(self) -> tuple[HistoryFile, ...]:
        """The files that could not be read or run."""
        return tuple(file for file in self.files if file.error)

    @property
    @in_json
    def exit_code(self) -> int:
        """The most severe exit code of the files, or 1 if only a change between files fails."""
        fails = any(verdict.level == "fail" for verdict in self.verdicts)
        return most_severe([*(file.exit_code for file in self.files), EXIT_CHECK_FAILED if fails else EXIT_DONE])

    @property
    def passed(self) -> bool:
        """Whether every file was read and no rule failed; warnings do not count."""
        return self.exit_code == EXIT_DONE

    def raise_for_failure(self) -> None:
        """Raise unless every file could be read and no rule failed: one line for a test.

        Raises:
            AssertionError: With each failure, and the file in which it began.
        """
        __tracebackhide__ = True
        failures = [(verdict.first, verdict.message) for verdict in self.verdicts if verdict.level == "fail"]
        errors = [(file.index, file.error) for file in self.unreadable]
        lines = (f"{self.files[at].label}: {message}" for at, message in (*errors, *failures))
        if not self.passed:
            raise_failures(("Not every file passed.", *lines))

    def by_label(self) -> dict[str, tuple[WeightPoint, ...]]:
        """Return each tensor in the order of the files, by name: "layer1.0.conv1.weight"."""
        points: dict[str, list[WeightPoint]] = {}
        for row in self.rows:
            points.setdefault(row.name, []).append(row)
        return {name: tuple(rows) for name, rows in points.items()}

    def __repr__(self) -> str:
        return f"<History of {counted(len(self.files), 'file')}: {counted(len(self.verdicts), 'verdict')}>"


@dataclass(frozen=True, slots=True)
class LayerPoint:
    """The parameters of one layer in one file, taken together.

    Attributes:
        norm: L2 norm over all of its parameters; None where they have no finite value.
        drift: L2 norm of their change since the file before, over the norm there, as for `WeightPoint`; None too if a
            value of any of them is not finite.
        dead_fraction: Share of output channels whose weights are all zero, 0-1; None without output channels.
        nonfinite_count: NaN and Inf, in its buffers too.
    """

    norm: float | None
    drift: float | None
    drift_from_first: float | None
    dead_fraction: float | None
    nonfinite_count: int


def by_layer(history: History) -> dict[str, dict[int, LayerPoint]]:
    """Return the layers that own parameters, in the order of the files, each by index of file."""
    held: dict[str, dict[int | None, list[WeightPoint]]] = {}
    for row in history.rows:
        held.setdefault(row.layer, {}).setdefault(row.file, []).append(row)
    first = next((file.index for file in history.read), None)
    return {
        layer: {
            file.index: _layer_point(files[file.index], files.get(file.compared_with, []), files.get(first, []))
            for file in history.files
            if file.index in files
        }
        for layer, files in held.items()
        if any(map(_learnt, files.values()))
    }


def _learnt(rows: list[WeightPoint]) -> list[WeightPoint]:
    return [row for row in rows if row.role == "parameter" and (row.norm is not None or row.nonfinite_count)]


def _layer_point(rows: list[WeightPoint], before: list[WeightPoint], first: list[WeightPoint]) -> LayerPoint:
    learnt = _learnt(rows)
    norms = [point.norm for point in learnt if point.norm is not None]
    filters = sum(point.filter_count or 0 for point in learnt)
    dead = sum(point.dead_filter_count or 0 for point in learnt)
    return LayerPoint(
        math.hypot(*norms) if norms else None,
        _joined(learnt, before, "drift"),
        _joined(learnt, first, "drift_from_first"),
        dead / filters if filters else None,
        sum(row.nonfinite_count for row in rows),
    )


def _joined(rows: list[WeightPoint], before: list[WeightPoint], name: str) -> float | None:
    """Return the drift of several tensors as if they were one: the L2 norm of all changes over the norm before."""
    if any(point.nonfinite_count for point in (*rows, *_learnt(before))):
        return None
    norms = {point.name: point.norm or 0.0 for point in _learnt(before)}
    moved = [row for row in rows if row.name in norms and getattr(row, name) is not None]
    drifts = [(row, getattr(row, name), norms[row.name]) for row in moved]
    if not drifts:
        return None
    changes = math.hypot(*(share * norm if norm else point.norm or 0.0 for point, share, norm in drifts))
    whole = math.hypot(*(norm for _, _, norm in drifts))
    return changes / whole if whole else math.inf if changes else 0.0
