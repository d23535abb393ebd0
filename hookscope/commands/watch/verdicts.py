"""The verdicts that are in force, and their beginnings and ends."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from hookscope.commands.watch.rules import OF_ONE_PLACE, TRAINING_RULES, WATCHED_PATIENCE, listed
from hookscope.results.training import TrainingFinding


@dataclass(slots=True)
class _Standing:
    """Findings that began together: their places, and the number of judgements in a row that have passed."""

    first: TrainingFinding
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
        self, step: int, rule: str, findings: Sequence[TrainingFinding], measured: AbstractSet[str] | None = None
    ) -> list[TrainingFinding]:
        """Add all findings of a rule at a step; return the verdicts that begin or end.

        Findings that begin together are one verdict. It ends when the rule has passed at all of their places often
        enough in a row; a rule that names one of several places, when it has passed everywhere. If only some places
        were `measured`, it passes at those.
        """
        standing = self._standing.setdefault(rule, [])
        failing = {finding.where for finding in findings}
        places = {place for finding in standing for place in finding.places}
        patience = TRAINING_RULES[rule].patience if rule in TRAINING_RULES else WATCHED_PATIENCE
        changes: list[TrainingFinding] = []
        for verdict in [*standing]:
            persists = bool(failing) if rule in OF_ONE_PLACE else bool(verdict.places & failing)
            if not persists and measured is not None and not verdict.places <= measured:
                continue
            verdict.passed = 0 if persists else verdict.passed + 1
            if verdict.passed >= patience:
                standing.remove(verdict)
                where = verdict.first.where
                message = f"Cleared at '{where}'." if where else "Cleared."
                changes.append(replace(verdict.first, step=step, value=None, state="ended", message=message))
        fresh = [finding for finding in findings if finding.where not in places]
        if fresh:
            standing.append(_Standing(fresh[0], frozenset(finding.where for finding in fresh)))
            others = [finding.where for finding in fresh[1:]]
            more = f" The same for {len(others):,} more: {listed(others)}." if others else ""
            changes.append(replace(fresh[0], step=step, message=f"{fresh[0].message}{more}"))
        return changes
