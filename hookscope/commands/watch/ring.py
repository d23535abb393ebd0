"""The last steps of a training, and how far a new value is above them."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from hookscope.results.training import TrainingStep

LENGTH = 200
"""Steps that are kept."""

# With fewer steps the spread is not known.
_FEWEST = 20

# Median and spread are computed again after this many steps: they change slowly.
_RENEWED_AFTER = 10

# The median of absolute deviations, times this, is the standard deviation of a normal distribution.
_DEVIATIONS = 1.4826

# The least spread, 10%: a training that hardly moves has less.
_LEAST_SPREAD = 0.1

# A loss or norm this many deviations above the median causes a watched step, without a message.
_JUMP = 8.0


@dataclass(frozen=True, slots=True)
class Usual:
    """Median and spread of the last `count` values, or of their logarithms."""

    median: float
    spread: float
    count: int
    logarithmic: bool


@dataclass(frozen=True, slots=True)
class Jump:
    """A value above the median of earlier steps: how far, in robust deviations."""

    value: float
    usual: Usual

    @property
    def deviations(self) -> float:
        """Its robust z-score, (x - median) / spread; 0 below the median. Of logarithms if all values are above 0."""
        value, middle = self.value, self.usual.median
        if value <= middle:
            return 0.0
        return (math.log(value / middle) if self.usual.logarithmic else value - middle) / self.usual.spread


class _History:
    """Median and spread of one quantity over the ring.

    Losses and norms vary by factors, so their logarithms are used, unless a value is 0 or negative. The spread is then
    at least an eighth of the range: only the range tells an outlier from usual values of different magnitude.
    """

    def __init__(self) -> None:
        self._values: deque[float | None] = deque(maxlen=LENGTH)  # None if it is not finite, or not known
        self._age = _RENEWED_AFTER
        self._usual: Usual | None = None

    def add(self, value: float | None) -> None:
        """Add the value of a step to the ring."""
        self._values.append(value if value is not None and math.isfinite(value) else None)

    def jump(self, value: float | None) -> Jump | None:
        """Return how far a value is above the median; None if it is not far, or while the ring is too short."""
        self._age += 1
        if self._age >= _RENEWED_AFTER and len(self._values) >= _FEWEST:
            self._renew()
        if self._usual is None or value is None or not math.isfinite(value):
            return None
        if Jump(value, self._usual).deviations > _JUMP:  # the finding tells the median of the last steps
            self._renew()
        jump = Jump(value, self._usual)
        return jump if jump.deviations > _JUMP else None

    def _renew(self) -> None:
        values = [number for number in self._values if number is not None]
        if len(values) < _FEWEST:
            return
        self._age = 0
        middle, logarithmic = median(values), min(values) > 0
        if logarithmic:
            deviation = median([abs(math.log(value / middle)) for value in values])
            spread = max(_DEVIATIONS * deviation, _LEAST_SPREAD)
        else:
            deviation = median([abs(value - middle) for value in values])
            spread = max(_DEVIATIONS * deviation, (max(values) - min(values)) / 8, abs(middle) * _LEAST_SPREAD, 1e-12)
        self._usual = Usual(middle, spread, len(values), logarithmic)


class Ring:
    """The last `LENGTH` steps."""

    def __init__(self) -> None:
        """Start without steps."""
        self.steps: deque[TrainingStep] = deque(maxlen=LENGTH)
        self._loss = _History()
        self._norm = _History()
        self.first_loss: float | None = None  # above 0; Inf once a loss is below 0, as ratios then mean nothing

    def before(self, step: TrainingStep) -> list[TrainingStep]:
        """Return the earlier steps that the optimiser did not skip."""
        return [past for past in self.steps if past.step < step.step and not past.skipped]

    def add(self, step: TrainingStep) -> tuple[Jump | None, Jump | None]:
        """Add a step; return how far its loss and its gradient norm are above earlier ones, where that is far."""
        loss, norm = step.loss, norm_of(step) or None
        if loss is not None and loss < 0:
            self.first_loss = math.inf
        elif self.first_loss is None and loss is not None and 0 < loss < math.inf:
            self.first_loss = loss
        jumps = (None, None) if step.skipped else (self._loss.jump(loss), self._norm.jump(norm))
        self.steps.append(step)
        self._loss.add(loss)
        self._norm.add(norm)
        return jumps


def norm_of(step: TrainingStep) -> float | None:
    """Return the gradient norm, before clipping if gradients were clipped."""
    return step.gradient_norm if step.norm_before_clipping is None else step.norm_before_clipping
