"""The verdicts that are in force, and their beginnings and ends."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from hookscope.commands.watch.rules import OF_ONE_PLACE, StepFinding, listed, patience_of
from hookscope.results.training import TrainingFinding


@dataclass(slots=True)
class _Standing:
    """Objections that began together: their places, and the number of judgements in a row that have passed."""

    first: StepFinding
    places: frozenset[str]
    passed: int = 0


@dataclass(slots=True)
class Verdicts:
    """The verdicts in force, by rule."""

    _standing: dict[str, list[_Standing]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of verdicts that have begun and not ended."""
        return sum(map(len, self._standing.values()))

    def stands(self, rule: str) -> bool:
        """Tell whether a verdict of a rule has begun and not ended."""
        return bool(self._standing.get(rule))

    def judged(
        self, step: int, rule: str, objections: Sequence[StepFinding], measured: AbstractSet[str] | None = None
    ) -> list[TrainingFinding]:
        """Add all objections of a rule at a step; return the verdicts that begin or end.

        Objections that begin together are one verdict. It ends when the rule has passed at all of their places often
        enough in a row; a rule that names one of several places, when it has passed everywhere. If only some places
        were `measured`, it passes at those.
        """
        standing = self._standing.setdefault(rule, [])
        objected = {objection.where for objection in objections}
        places = {place for objection in standing for place in objection.places}
        changes: list[TrainingFinding] = []
        for verdict in [*standing]:
            persists = bool(objected) if rule in OF_ONE_PLACE else bool(verdict.places & objected)
            if not persists and measured is not None and not verdict.places <= measured:
                continue
            verdict.passed = 0 if persists else verdict.passed + 1
            if verdict.passed >= patience_of(rule):
                standing.remove(verdict)
                changes.append(_verdict(step, verdict.first, ended=True))
        fresh = [objection for objection in objections if objection.where not in places]
        if fresh:
            standing.append(_Standing(fresh[0], frozenset(objection.where for objection in fresh)))
            changes.append(_verdict(step, fresh[0], [objection.where for objection in fresh[1:]]))
        return changes


def _verdict(step: int, objection: StepFinding, others: Sequence[str] = (), *, ended: bool = False) -> TrainingFinding:
    message = objection.message
    if others:
        message += f" The same holds for {len(others):,} more: {listed(others)}."
    if ended:
        message = f"'{objection.where}' passes again." if objection.where else "It passes again."
    return TrainingFinding(
        step=step,
        rule=objection.rule,
        level=objection.level,
        where=objection.where,
        value=None if ended else objection.value,
        limit=objection.limit,
        state="ended" if ended else "began",
        message=message,
    )
