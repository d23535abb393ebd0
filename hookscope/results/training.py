"""The log of a watched training: all steps briefly, watched steps in full, and changes of verdicts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hookscope.results.findings import Finding
from hookscope.results.table_rows import TableRows


@dataclass(frozen=True, slots=True)
class TrainingStart:
    """The start of watching; a resumed training has one for each start.

    Attributes:
        step: The first step after the start.
        networks: Class name of each watched network.
        optimizers: Each optimiser with its settings: "SGD, lr 0.1, momentum 0.9".
        every: Number of steps from one watched step to the next.
        patterns: Patterns of the selected layers; empty for all.
        started: Time in UTC, ISO 8601.
        versions: Versions of hookscope, torch and Python.
        notes: Sentences on parts that cannot be measured.
    """

    step: int
    networks: tuple[str, ...]
    optimizers: tuple[str, ...]
    every: int
    patterns: tuple[str, ...]
    started: str
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One step of the optimiser, or one that was skipped.

    Attributes:
        step: Counted from 1, over all starts, or the number that the loop gave to `Watch.step`.
        loss: Loss that was passed to `step`, the mean if gradients were accumulated; None without one. In a watched
            script, the sum of the tensors that `backward` was called on.
        gradient_norm: L2 norm over all gradients at the optimisers, after unscaling and clipping, without optimisers
            that a GradScaler skips.
        norm_before_clipping: The same norm before the clipping functions of `torch.nn.utils`; None if none was called.
        largest: The ten parameters with the largest gradient norms, largest first, with the norms.
        learning_rates: One per parameter group.
        skipped: Whether no optimiser took a step, because a GradScaler found NaN or Inf.
        losses: Parts of `loss` by the line that calls `backward`, "train.py:9", if a script calls it in several places.
        edits: The active edits, with the number of tensors that each edit changed or kept frozen in this step.
    """

    step: int
    loss: float | None
    gradient_norm: float | None
    norm_before_clipping: float | None
    largest: tuple[tuple[str, float], ...]
    learning_rates: tuple[float, ...]
    skipped: bool = False
    losses: tuple[tuple[str, float], ...] = ()
    edits: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class WatchedParameter:
    """One parameter at a watched step.

    Attributes:
        status: "gradient", "no gradient" (trainable, but no gradient arrived) or "frozen".
        weight_norm: L2 norm before the step.
        gradient_norm: L2 norm of the gradient as the optimiser got it; None without one.
        gradient_max: Largest magnitude in the gradient.
        gradient_zero_fraction: Share of exact zeros in the gradient, 0-1.
        gradient_nonfinite_count: NaN and Inf in the gradient.
        update_norm: L2 norm of the change by the step; None if it was not measured.
    """

    name: str
    status: Literal["gradient", "no gradient", "frozen"]
    weight_norm: float | None
    gradient_norm: float | None = None
    gradient_max: float | None = None
    gradient_zero_fraction: float | None = None
    gradient_nonfinite_count: int | None = None
    update_norm: float | None = None

    @property
    def update_ratio(self) -> float | None:
        """Norm of the update over the norm of the weight; None if either is missing or the weight is zero."""
        return self.update_norm / self.weight_norm if self.update_norm is not None and self.weight_norm else None


@dataclass(frozen=True, slots=True)
class WatchedLayer:
    """One output of a layer at a watched step, over the batches of that step.

    Attributes:
        label: As in `LayerRow`.
        std: Population standard deviation.
        zero_fraction: Share of exact zeros, 0-1.
        dead_channel_fraction: Share of channels that are zero over the whole batch, 0-1; None without channels.
        saturated_fraction: Share of values at which a bounded activation function (sigmoid, tanh) is flat, 0-1; None
            for other layers.
        nonfinite_count: NaN and Inf.
    """

    label: str
    kind: str
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    zero_fraction: float | None
    dead_channel_fraction: float | None
    saturated_fraction: float | None
    nonfinite_count: int | None


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """A step that was measured in full.

    Attributes:
        reason: "every", or the event at an earlier step: a jump of "loss" or "gradient norm", "non-finite", or "zero
            gradient" if the gradient of a parameter became exactly 0.
        layers: Outputs in execution order; empty if activations were not watched.
        tables: Embeddings and codebooks whose rows were looked up in its forward passes on this process.
    """

    step: int
    reason: str
    parameters: tuple[WatchedParameter, ...]
    layers: tuple[WatchedLayer, ...] = ()
    tables: tuple[TableRows, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFinding(Finding):
    """The beginning or the end of a problem.

    Attributes:
        where: A parameter, the label of a layer's output, or "" for the training as a whole.
        message: The printed sentence with value and limit; a second one counts `followed_by`.
        step: The step at which the change was noticed.
        value: Measured value; None if the rule has no number.
    """

    step: int
    value: float | None
    limit: float | None
    state: Literal["began", "ended"]


@dataclass(frozen=True, slots=True)
class TrainingEnd:
    """How watching ended: "closed", "not recorded", or the exception's class name and text."""

    step: int
    reason: str


TrainingRecord = TrainingStart | TrainingStep | WatchedStep | TrainingFinding | TrainingEnd


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """The contents of a folder of `hookscope.watch`, in order.

    Attributes:
        ends: One for each start; none for the last if it still runs, or was killed.
        cut_short: Whether the last line is incomplete, because the process was killed while it wrote.
    """

    starts: tuple[TrainingStart, ...]
    steps: tuple[TrainingStep, ...]
    watched: tuple[WatchedStep, ...]
    verdicts: tuple[TrainingFinding, ...]
    ends: tuple[TrainingEnd, ...]
    cut_short: bool = False
