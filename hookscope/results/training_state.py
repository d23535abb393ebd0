"""Numbers from a training checkpoint's entries other than its weights: optimisers, scalers, averages."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OptimiserValues:
    """The state of an optimiser in the file.

    Attributes:
        key: Its path in the file.
        tensor_count: Tensors in it.
        non_finite: Names of tensors with NaN or Inf: "state.0.exp_avg".
        negative: Second moments (`exp_avg_sq` and similar ones) with negative values.
        steps: Number of parameters by their count of steps.
        wrong_settings: Hyperparameters that torch.optim refuses, with their values: "param_groups.0.lr is nan".
        excess_moments: First moments of Adam (`exp_avg`) that are greater than their second moments allow, by name,
            and how many times as great.
        other_rates: Learning rates that differ from the rates of the only schedule in the file, in words.
        rates: Learning rate of each parameter group that has a single one.
        live_count: Tensors in it with a value other than 0, without counts of steps.
    """

    key: str
    tensor_count: int
    non_finite: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    steps: Mapping[float, int] = field(default_factory=dict)
    wrong_settings: tuple[str, ...] = ()
    excess_moments: Mapping[str, float] = field(default_factory=dict)
    other_rates: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    live_count: int = 0


@dataclass(frozen=True, slots=True)
class ScalerValues:
    """The state of a GradScaler, which scales the loss of mixed precision.

    Attributes:
        key: Its path in the file.
        scale, growth_factor, backoff_factor, growth_interval: As in `torch.amp.GradScaler`; NaN if one is no number.
        growth_tracker: Steps since the scale last changed.
    """

    key: str
    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: float
    growth_tracker: float


@dataclass(frozen=True, slots=True)
class CopyValues:
    """An averaged copy of the weights (EMA) in the same file.

    Attributes:
        key: Its path in the file.
        tensor_count: Tensors in it.
        non_finite: Names of tensors with NaN or Inf.
        reshaped: Names of tensors whose shape differs from the loaded weight.
        missing: Loaded parameters that it lacks; it may lack buffers.
        unknown: Tensors in it that match no weight, without counters.
        cosines: Cosine between a tensor and the weight that it averages, for tensors of 2,048 values or more.
        untrained: Tensors that look random though the weights look trained; see `spread_beyond_chance`.
        reset: BatchNorm layers with initial statistics, though the weights' statistics are not initial.
        single_valued: Matrices and kernels that hold one value, such as 0, though the weight holds several.
        matrix_count: Matrices and kernels of the weights that hold several values and have an average.
        newer: BatchNorms that count more batches than the weights' BatchNorms, with both counts.
    """

    key: str
    tensor_count: int
    non_finite: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    cosines: Mapping[str, float] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    single_valued: tuple[str, ...] = ()
    matrix_count: int = 0
    newer: Mapping[str, tuple[int, int]] = field(default_factory=dict)
