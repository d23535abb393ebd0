"""Count for how many steps parameters have had no gradient, or a gradient of exactly 0."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hookscope.watching.steps import ArrivedStep


@dataclass(slots=True)
class IdleParameters:
    """Numbers of consecutive steps, by name of the parameter.

    Attributes:
        without: Steps without a gradient.
        zero: Steps with a gradient of exactly 0.
        newly_frozen: Parameters that were trained before and are frozen at the last step.
    """

    without: dict[str, int] = field(default_factory=dict)
    zero: dict[str, int] = field(default_factory=dict)
    newly_frozen: list[str] = field(default_factory=list)
    _zero_count: int = 0
    _trained: set[str] = field(default_factory=set)
    _trained_last: dict[int, Sequence[str]] = field(default_factory=dict)  # by `id` of the optimiser

    @property
    def any(self) -> bool:
        """Whether any parameter is in one of the three."""
        return bool(self.without or self.zero or self.newly_frozen)

    def count(self, arrived: ArrivedStep) -> bool:
        """Count a step that was not skipped; return whether more gradients are 0 than at the step before."""
        edited = arrived.step.edited
        self.newly_frozen = []
        for key, reading in arrived.step.readings.items():
            for name in reading.without:
                self.without[name] = self.without.get(name, 0) + 1
            if self.without:
                for name in (*reading.names, *reading.frozen):
                    self.without.pop(name, None)
            if self._trained_last.get(key) is not reading.names:
                self._trained_last[key] = reading.names
                self._trained.update(reading.names)
            self.newly_frozen += [name for name in reading.frozen if name in self._trained and name not in edited]
        zeros = arrived.zero
        if self.zero or zeros:
            seen = {*arrived.names}
            self.zero = {
                **{name: count for name, count in self.zero.items() if name not in seen},
                **{name: self.zero.get(name, 0) + 1 for name in zeros},
            }
        before, self._zero_count = self._zero_count, len(zeros)
        return self._zero_count > before
