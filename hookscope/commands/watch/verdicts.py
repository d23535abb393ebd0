"""The verdicts that are in force, and their beginnings and ends."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from hookscope.commands.watch.rules import OF_ONE_PLACE, TRAINING_RULES, WATCHED_PATIENCE
from hookscope.results.training import TrainingFinding
from hookscope.rules.rule import listed


@dataclass(slots=True)
class Verdicts:
    """The verdicts in force, by rule, each with the number of judgements in a row that have passed."""

    _standing: dict[str, dict[TrainingFinding, int]] = field(default_factory=dict)

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
        enough in a row, or everywhere if the rule reports only one of several places. If only some places were
        `measured`, it passes at those.
        """
        standing = self._standing.setdefault(rule, {})
        failing = {finding.where for finding in findings}
        places = {place for verdict in standing for place in verdict.places}
        patience = TRAINING_RULES[rule].patience if rule in TRAINING_RULES else WATCHED_PATIENCE
        changes: list[TrainingFinding] = []
        for verdict in [*standing]:
            persists = bool(failing) if rule in OF_ONE_PLACE else not failing.isdisjoint(verdict.places)
            if not persists and measured is not None and not {*verdict.places} <= measured:
                continue
            standing[verdict] = 0 if persists else standing[verdict] + 1
            if standing[verdict] >= patience:
                del standing[verdict]
                message = f"Cleared at '{verdict.where}'." if verdict.where else "Cleared."
                changes.append(replace(verdict, step=step, value=None, state="ended", message=message))
        fresh = [finding for finding in findings if finding.where not in places]
        if fresh:
            others = tuple(finding.where for finding in fresh[1:])
            more = f" The same for {len(others):,} more: {listed(others)}." if others else ""
            begun = replace(fresh[0], step=step, message=f"{fresh[0].message}{more}", followed_by=others)
            standing[begun] = 0
            changes.append(begun)
        return changes
