"""The statistics of one tensor."""

import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookscope.results.distribution import Distribution, Histogram, histogram
from hookscope.results.json_form import UNSTORED, in_json
from hookscope.text import printable, shape_text

QUANTILE_LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)

VALUES_PER_CHANNEL = 32
"""A channel of fewer values is often zero by chance; one of 32, once in 2**32 behind a balanced ReLU."""


class Quantiles(NamedTuple):
    """Values at `QUANTILE_LEVELS`."""

    q01: float
    q05: float
    q25: float
    q50: float
    q75: float
    q95: float
    q99: float


QUANTILE_NAMES = Quantiles._fields


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Statistics of one tensor, over the whole input (all batches).

    NaN and Inf are counted; all other statistics are over the finite values. Complex tensors are measured by modulus. A
    value is None where it does not exist (an empty tensor has no mean) or could not be measured.

    Attributes:
        shape: Shape of all batches, joined along the axis that counts inputs; the shape of the first batch if there is
            no such axis, or if batches differ in other axes.
        dtype: torch's name without the prefix: "float32".
        std: Population standard deviation (divisor n); 0 for a single element.
        zero_fraction: Share of exact zeros among all elements, 0-1.
        channel_axis: Axis of `shape` that counts channels; None without one.
        dead_channel_count: Channels that are exactly zero over the whole input.
        quantiles: Values at `QUANTILE_LEVELS`, by `numpy.quantile`'s linear definition; None without a distribution.
            Exact for up to 1,024 finite values; for more, within 3% of the value or within 0.5% of its rank.
        unmeasured: Why statistics are missing; None if they are complete.
        distribution: The values or their counts over bins, for quantiles and histograms; None if it was not measured.
        kept_values: Up to 256 values of each input at fixed places, (N, K), for comparison with another run; (1, all
            values) if inputs differ in shape. None if none were kept.
        reduction: The `Reduction` behind the statistics, for merging with other inputs; None if values were kept.
    """

    shape: tuple[int, ...]
    dtype: str
    element_count: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    mean_abs: float | None = None
    l2: float | None = None
    zero_fraction: float | None = None
    nan_count: int | None = None
    inf_count: int | None = None
    channel_axis: int | None = None
    channel_count: int | None = None
    dead_channel_count: int | None = None
    quantiles: Quantiles | None = None
    unmeasured: str | None = None
    distribution: Distribution | None = field(default=None, repr=False, compare=False)
    kept_values: NDArray[np.floating] | None = field(default=None, repr=False, compare=False)
    reduction: Any = field(default=None, repr=False, compare=False, metadata=UNSTORED)

    @property
    def max_abs(self) -> float | None:
        """Largest finite magnitude; None if there is none, or it was not measured."""
        return None if self.min is None or self.max is None else max(abs(self.min), abs(self.max))

    @property
    @in_json
    def dead_channel_fraction(self) -> float | None:
        """Share of dead channels, 0-1; None without channels."""
        if self.dead_channel_count is None or not self.channel_count:
            return None
        return self.dead_channel_count / self.channel_count

    @property
    def has_enough_per_channel(self) -> bool:
        """Whether there are `VALUES_PER_CHANNEL`."""
        return self.element_count >= VALUES_PER_CHANNEL * (self.channel_count or math.inf)

    @property
    @in_json
    def histogram(self) -> Histogram | None:
        """The distribution in few bins."""
        return histogram(self.distribution)


def _statistic(name: str) -> Any:
    return property(attrgetter(f"statistics.{name}"), doc=f"See `TensorStatistics.{name}`.")


class MeasuredTensor:
    """A row about one tensor, with short names for the most used statistics."""

    __slots__ = ()

    kind: str

    @property
    def label(self) -> str:
        """Name for people."""
        raise NotImplementedError

    @property
    def statistics(self) -> TensorStatistics:
        """All statistics of the row's tensor."""
        raise NotImplementedError

    def __repr__(self) -> str:
        statistics = self.statistics
        numbers = {name: getattr(statistics, name.lower()) for name in ("mean", "std", "min", "max", "L2")}
        words = [f"{name} {value:.4g}" for name, value in numbers.items() if value is not None]
        words += [] if statistics.zero_fraction is None else [f"zeros {statistics.zero_fraction:.3g}"]
        counts = {"NaN": "nan_count", "Inf": "inf_count", "dead channels": "dead_channel_count"}
        words += [f"{count} {name}" for name, key in counts.items() if (count := getattr(statistics, key))]
        words += [statistics.unmeasured] if statistics.unmeasured else []
        title = f"{self.label or '(model)'} ({self.kind}) {shape_text(statistics.shape)} {statistics.dtype}"
        return f"<{type(self).__name__} {printable(title)}: {printable(', '.join(words))}>"

    shape: tuple[int, ...] = _statistic("shape")
    dtype: str = _statistic("dtype")
    mean: float | None = _statistic("mean")
    std: float | None = _statistic("std")
    min: float | None = _statistic("min")
    max: float | None = _statistic("max")
    l2: float | None = _statistic("l2")
    zero_fraction: float | None = _statistic("zero_fraction")
