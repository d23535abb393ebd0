"""The entries of a training checkpoint other than its weights, as numbers: optimisers, scalers, averages."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OptimiserValues:
    """The state of an optimiser in the file.

    Attributes:
        key: Where it is in the file.
        tensor_count: Tensors in it.
        non_finite: Those with NaN or Inf, as "state.0.exp_avg".
        negative: Second moments (`exp_avg_sq` and its like) with negative values.
        steps: How many parameters have been stepped how often.
        wrong_settings: Hyperparameters that torch.optim refuses, with their values: "param_groups.0.lr is nan".
        excess_moments: First moments of Adam (`exp_avg`) that are greater than their second moments allow, by name,
            and how many times as great.
        other_rates: Learning rates that are not those which the only schedule in the file has set, in words.
        rates: Learning rate of each parameter group that has a single one.
        live_count: Tensors in it, counts of steps aside, with a value other than 0.
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
        key: Where it is in the file.
        scale, growth_factor, backoff_factor, growth_interval: As `torch.amp.GradScaler` has them; NaN for no number.
        growth_tracker: Steps since the scale has changed.
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
        key: Where it is in the file.
        tensor_count: Tensors in it.
        non_finite: Those with NaN or Inf, by name.
        reshaped: Those of another shape than the weights that are loaded.
        missing: Parameters that are loaded and not in it; buffers need not be.
        unknown: Tensors in it that stand for none of the weights; counters aside.
        cosines: Cosine between a tensor and the weights that it is the average of, for those of 2,048 values and more.
        untrained: Tensors that look drawn at random, though the weights look trained; see `spread_beyond_chance`.
        reset: Layers of BatchNorm whose statistics are as they start, though those of the weights are not.
        single_valued: Matrices and kernels that hold one value, such as 0, where those of the weights hold several.
        matrix_count: Matrices and kernels of the weights that hold several values and have an average.
        newer: BatchNorms that count more batches than those of the weights, with both counts.
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
