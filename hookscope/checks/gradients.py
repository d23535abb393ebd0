"""Rules about the backward pass: what `hookscope grads` judges, under the check's levels and limits."""

from collections.abc import Iterator, Mapping, Sequence

from hookscope.checks.context import Subject, Terms
from hookscope.checks.verdicts import Limits, judge
from hookscope.results.check import Finding
from hookscope.results.gradients import Gradients, Verdict, parameter_owner

# What `judge` leaves out once it has found a graver thing, which would be its cause.
_SILENCED_BY: Mapping[str, Sequence[str]] = {
    "zero-gradient": ("non-finite-gradient",),
    "dead-gradient": ("non-finite-gradient", "zero-gradient"),
    "vanishing-gradient": ("non-finite-gradient", "zero-gradient"),
    "exploding-gradient": ("non-finite-gradient", "zero-gradient"),
    "gradient-imbalance": ("non-finite-gradient", "zero-gradient", "vanishing-gradient"),
}


def gradient_verdicts(gradients: Gradients, terms: Mapping[str, Terms]) -> tuple[Verdict, ...]:
    """Judge a backward pass once, for all rules, with the limits that hold for the whole network.

    Args:
        gradients: What to judge.
        terms: By rule; those that nobody wants keep their default limits.
    """
    own = Limits()

    def limit(rule: str, name: str, default: float) -> float:
        return terms[rule].limit(name) if rule in terms else default

    limits = Limits(
        vanishing=limit("vanishing-gradient", "min_ratio", own.vanishing),
        exploding=limit("exploding-gradient", "max_ratio", own.exploding),
        imbalance=limit("gradient-imbalance", "max_ratio", own.imbalance),
        rounding=limit("zero-gradient", "rounding", own.rounding),
    )
    return judge(gradients, limits)


def cause_of_silence(rule: str, verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return the verdict on account of which nothing is said by `rule`; None if it spoke, or could have."""
    if any(verdict.rule == rule for verdict in verdicts):
        return None
    causes = (verdict for cause in _SILENCED_BY.get(rule, ()) for verdict in verdicts if verdict.rule == cause)
    return next(causes, None)


def gradient_findings(gradients: Gradients, verdicts: Sequence[Verdict], terms: Terms) -> Iterator[Finding]:
    """Return the verdicts by one rule as findings; a verdict that is a warning stays one at level "fail".

    What silences the rule is its own finding.
    """
    rule = terms.rule.identifier
    for verdict in verdicts:
        if verdict.rule == rule:
            yield from terms.object_to(_subject(gradients, verdict.where), verdict.message, verdict.level)
    if cause := cause_of_silence(rule, verdicts):
        message = f"It cannot be judged, as the gradients break {cause.rule}: {cause.message}"
        yield from terms.object_to(_subject(gradients, cause.where), message, cause.level)


def _subject(gradients: Gradients, where: str) -> Subject:
    """Return what a verdict is about: an output, a parameter, a module, or the whole network."""
    for row in gradients.rows:
        if row.label == where:
            return Subject(where, (row.layer, *row.aliases), row.kind)
    for parameter in gradients.parameters:
        if parameter.name == where:
            return Subject(where, (where, parameter_owner(where, parameter.kind)), parameter.kind)
    return Subject(where, (where,) if where else ())
