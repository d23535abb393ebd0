"""Count for how many steps parameters have had no gradient, or a gradient of exactly 0."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hookscope.commands.watch.steps import ArrivedStep


@dataclass(slots=True)
class IdleParameters:
    """Numbers of consecutive steps, by name of the parameter.

    Attributes:
        without: Steps without a gradient.
        zero: Steps with a gradient of exactly 0.
        newly_frozen: Parameters that were trained before and are frozen at the last step.
        still_stepped: Those of them that hold a gradient, with which their optimiser still steps; whether it is 0.
    """

    without: dict[str, int] = field(default_factory=dict)
    zero: dict[str, int] = field(default_factory=dict)
    newly_frozen: list[str] = field(default_factory=list)
    still_stepped: dict[str, bool] = field(default_factory=dict)
    _zero_count: int = 0
    _frozen: dict[int, list[str]] = field(default_factory=dict)  # by `id` of the optimiser, at its last step
    _trained: set[str] = field(default_factory=set)
    _trained_last: dict[int, Sequence[str]] = field(default_factory=dict)  # by `id` of the optimiser

    @property
    def any(self) -> bool:
        """Whether any parameter is in one of the three."""
        return bool(self.without or self.zero or self.newly_frozen)

    def count(self, arrived: ArrivedStep) -> bool:
        """Count a step that was not skipped; return whether more gradients are 0 than at the step before."""
        edited = arrived.step.edited
        for key, reading in arrived.step.readings.items():
            for name in reading.without:
                self.without[name] = self.without.get(name, 0) + 1
            if self.without:
                for name in (*reading.names, *reading.frozen):
                    self.without.pop(name, None)
            if self._trained_last.get(key) is not reading.names:
                self._trained_last[key] = reading.names
                self._trained.update(reading.names)
            self._frozen[key] = [name for name in reading.frozen if name in self._trained and name not in edited]
        zeros = arrived.zero
        if zeros or self.still_stepped or arrived.step.measurement is not None:
            zeros = self._without_frozen(arrived, zeros)
        self.newly_frozen = [*(name for names in self._frozen.values() for name in names), *self.still_stepped]
        if self.zero or zeros:
            seen = {name for name, norm in zip(arrived.names, arrived.norms, strict=True) if math.isfinite(norm)}
            self.zero = {
                **{name: count for name, count in self.zero.items() if name not in seen},
                **{name: self.zero.get(name, 0) + 1 for name in zeros},
            }
        before, self._zero_count = self._zero_count, len(zeros)
        return self._zero_count > before

    def _without_frozen(self, arrived: ArrivedStep, zeros: Sequence[str]) -> list[str]:
        """Set apart the frozen parameters that hold a gradient; return the others of those whose gradient is 0."""
        for reading in arrived.step.readings.values():
            for name, parameter in zip(reading.names, reading.parameters, strict=True):
                if parameter.requires_grad or name in arrived.step.edited:
                    self.still_stepped.pop(name, None)
                else:
                    self.still_stepped[name] = name in zeros
            for name in (*reading.without, *reading.frozen):
                self.still_stepped.pop(name, None)
        return [name for name in zeros if name not in self.still_stepped]
