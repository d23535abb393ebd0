"""Judge measurements by rules: select rules, skip rules whose cause another one reports, and collect outcomes."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Literal

from hookscope.errors import (
    EXIT_DONE,
    CheckpointError,
    HookscopeError,
    LayerNotFoundError,
    MisfitError,
    ModelError,
    UntrustedFileError,
    UsageError,
    nearest,
)
from hookscope.hooks.patterns import NOT_JUDGED
from hookscope.options import RuleOptions
from hookscope.parameters import arg
from hookscope.results.activations import Activations
from hookscope.results.check import CheckMeasurements, CheckReport, RuleOutcome
from hookscope.results.findings import Finding
from hookscope.results.gradients import Gradients
from hookscope.results.repeats import Run, reduced
from hookscope.rules import ACTIVATIONS_RULES, GRADS_RULES, RULES, check_limits, grads_limits
from hookscope.rules.baseline import Baseline
from hookscope.rules.forward import raised
from hookscope.rules.rule import WHOLE_NETWORK, Rule, RuleFinding, RuleTerms, is_on, terms_of
from hookscope.rules.settings import CheckSettings, RuleSettings
from hookscope.rules.weights import looks_untrained
from hookscope.text import printable, safe_text


def _idle_without(rule: str) -> str:
    labelled = f"labelled pictures ({arg('data')} FOLDER)"
    return {
        "drift": f"a baseline ({arg('baseline')} FILE)",
        "expectation": "an [[expect]] in the configuration",
        "accuracy-drop": f"{labelled} and a baseline",
    }.get(rule, labelled)


_NEED_NO_NETWORK = frozenset({"file", "stored"})  # a weights file suffices

NEED_NO_PASS = _NEED_NO_NETWORK | {"network"}
"""The needs of rules for which the network does not run."""

# These rules report missing measurements themselves.
_NEVER_UNMEASURED = frozenset({"non-finite-activation", "expectation"})


def judge(
    checkpoint: str,
    measured: CheckMeasurements,
    settings: CheckSettings,
    wanted: AbstractSet[str],
    baseline: Baseline | None = None,
) -> CheckReport:
    """Judge one checkpoint by every wanted rule; if a pass raised, the report has the error, and exit code 6.

    Rules whose findings would follow from a reported cause are skipped, with that reason. Rules with nothing to compare
    with are off.

    Raises:
        UsageError: If the settings name a class, an output or a layer pattern that does not exist, if the baseline is
            from a different network or from different inputs, or if no rule is left to judge by.
    """
    judging = _Judging(measured, _terms(measured, settings, wanted, baseline))
    for rule in sorted(RULES.values(), key=lambda rule: bool(rule.yields_to)):
        name = rule.identifier
        judging.outcomes[name] = judging.outcome(rule) if name in judging.terms else RuleOutcome(name, "off")
    error = _error(measured)
    return CheckReport(
        checkpoint,
        tuple(judging.outcomes[name] for name in RULES),
        measured.model,
        measured.forward.inputs if measured.forward else (),
        error,
        ModelError.exit_code if error else EXIT_DONE,
        measured.warnings,
        measured.seconds,
        accuracy=measured.labelled.accuracy if measured.labelled is not None else None,
        looks_untrained=looks_untrained(measured),
    )


def _terms(
    measured: CheckMeasurements, settings: CheckSettings, wanted: AbstractSet[str], baseline: Baseline | None
) -> dict[str, RuleTerms]:
    if measured.no_network and all(RULES[name].needs not in _NEED_NO_NETWORK for name in wanted):
        raise UsageError(f"No rule is left to check: all selected rules need a network, but {measured.no_network}.")
    idle = _idle(settings, baseline)
    if not wanted - idle:
        unmet = " and ".join(f"{name} needs {_idle_without(name)}" for name in sorted(wanted))
        raise UsageError(f"No rule is left to check: {unmet or 'all are off or left out'}.")
    return {name: terms_of(rule, settings, baseline) for name, rule in RULES.items() if name in wanted - idle}


def _idle(settings: CheckSettings, baseline: Baseline | None) -> set[str]:
    """Return the rules without anything to compare with: a baseline, labelled pictures, expectations."""
    idle = set() if settings.expectations else {"expectation"}
    if baseline is None:
        idle |= {"drift", "accuracy-drop"}
    if settings.data is None:
        idle |= {"accuracy", "class-accuracy"} | (set() if baseline and baseline.labelled else {"accuracy-drop"})
    return idle


def judge_gradients(gradients: Gradients, limits: Mapping[str, float] | None = None) -> tuple[Finding, ...]:
    """Judge one forward and backward pass by the rules of `hookscope grads`: failures first, then as in `GRADS_RULES`.

    If the pass raised, only the loss and the activations are judged. Limits are named as in `limits_of_grads`.
    """
    all_limits = grads_limits()
    changed: dict[str, dict[str, float]] = {}
    for name, value in (limits or {}).items():
        rule, limit = all_limits[name]
        changed.setdefault(rule.identifier, {})[limit] = value
    settings = CheckSettings(rules={name: RuleSettings(limits=values) for name, values in changed.items()})
    return _judged(gradients, [terms_of(RULES[name], settings) for name in GRADS_RULES])


def judge_activations(activations: Activations) -> tuple[Finding, ...]:
    """Judge one forward pass by the rules of `hookscope activations`: failures first."""
    return _judged(activations, [terms_of(RULES[name], CheckSettings()) for name in ACTIVATIONS_RULES])


def _judged(run: Run, terms: Sequence[RuleTerms]) -> tuple[Finding, ...]:
    folded = _for_rules(run)
    gradients = folded if isinstance(folded, Gradients) else None
    measured = CheckMeasurements(folded.model, (), folded, gradients=gradients, origin_searched=False)
    by_rule = _evaluated(measured, terms)
    findings: dict[str, list[Finding]] = {}
    for term in terms:
        findings[term.rule.identifier] = term.findings(by_rule.get(term.rule.identifier, ()), findings)
    return _failures_first(chain.from_iterable(findings.values()))


def refused(
    checkpoint: str, error: HookscopeError, wanted: AbstractSet[str], alone: CheckReport | None = None
) -> CheckReport:
    """Report a checkpoint that could not be loaded, or not be checked to the end.

    Weights that do not fit the network fail `architecture`; any other unreadable file fails `integrity`; both at any
    level. Other rules have the outcomes of `alone`, the report on the file without its network, or are skipped. The
    report has the error's exit code, unless `architecture` is wanted and fails.
    """
    broken, reason = "", "the checkpoint could not be checked"
    if isinstance(error, MisfitError):
        broken, reason = "architecture", "the weights do not fit the network"
    elif isinstance(error, CheckpointError | UntrustedFileError):
        broken, reason = "integrity", "no weights could be read"
    outcomes = {name: RuleOutcome(name, "off") for name in RULES}
    outcomes |= {name: RuleOutcome(name, "skipped", reason=reason) for name in RULES if name in wanted}
    if broken in wanted:
        outcomes[broken] = _outcome(broken, [Finding(broken, "fail", "", str(error))])
    if broken == "architecture" and "integrity" in wanted:
        outcomes["integrity"] = RuleOutcome("integrity", "pass")
    code = EXIT_DONE if broken == "architecture" and broken in wanted else error.exit_code
    report = CheckReport(checkpoint, tuple(outcomes.values()), error=str(error), error_code=code)
    if alone is None:
        return report
    outcomes |= {outcome.rule: outcome for outcome in alone.outcomes if outcome.rule != broken}
    return replace(report, outcomes=tuple(outcomes.values()), warnings=alone.warnings, seconds=alone.seconds)


def refuse_unmatched(reports: Sequence[CheckReport], wanted: AbstractSet[str]) -> Sequence[CheckReport]:
    """Refuse all checkpoints if a pattern of [[layers]] matches no layer of any, and all of them ran."""
    nowhere = set.intersection(*({*report.unmatched} for report in reports))
    pattern = next((pattern for pattern in reports[0].unmatched if pattern in nowhere), None)
    if pattern is None:
        return reports
    errors = [LayerNotFoundError(report.unmatched[pattern]) for report in reports]
    return [
        replace(refused(report.checkpoint, error, wanted), seconds=report.seconds, evidence=report.evidence)
        for report, error in zip(reports, errors, strict=True)
    ]


def wanted_rules(settings: CheckSettings, select: Sequence[str] = (), ignore: Sequence[str] = ()) -> frozenset[str]:
    """Return the identifiers of the rules to judge by.

    Without `select`, these are all rules that are on, at least for some layers. A selected rule that is off everywhere
    is judged at level "fail".

    Raises:
        UsageError: If `select` or `ignore` name an unknown rule, or no rule is left.
    """
    on = {name for name, rule in RULES.items() if is_on(rule, settings)}
    chosen = _matching(arg("select"), select) if select else on
    left = frozenset(chosen - _matching(arg("ignore"), ignore))
    if not left:
        raise UsageError(f"No rule is left to check; leave out {arg('ignore')}, or turn rules on in the configuration.")
    return left


def judged_by(
    settings: CheckSettings, option: RuleOptions, baseline: Baseline | None, *, renews_baseline: bool = False
) -> tuple[CheckSettings, frozenset[str]]:
    """Return the settings with the limits of the options, and the rules to judge by.

    Raises:
        UsageError: If a rule or a limit does not exist, no rule is left, or a limit would have no effect.
    """
    wanted = wanted_rules(settings, option.select, option.ignore)
    idle, rules = _idle(settings, baseline), dict(settings.rules)
    for name, limits in check_limits(option.limit).items():
        useless = f"{arg('limit')} {name}.{next(iter(limits)).replace('_', '-')} has no effect"
        if name not in wanted and not renews_baseline:
            raise UsageError(f"{useless}: the rule is off or left out. Turn it on with {arg('select')} {name}.")
        if name in idle and not renews_baseline:
            raise UsageError(f"{useless}: {name} needs {_idle_without(name)}.")
        current = rules.get(name, RuleSettings())
        rules[name] = replace(current, limits={**current.limits, **limits})
    return replace(settings, rules=rules), wanted


def _matching(option: str, patterns: Iterable[str]) -> set[str]:
    names: set[str] = set()
    for pattern in patterns:
        matched = {name for name in RULES if fnmatchcase(name, pattern)}
        if not matched:
            remedy = f"{nearest(pattern, RULES)} List them with `hookscope check --rules`."
            raise UsageError(f"{option} '{printable(pattern, 80)}' is no rule.{remedy}")
        names |= matched
    return names


def _evaluated(measured: CheckMeasurements, terms: Iterable[RuleTerms]) -> dict[str, list[RuleFinding]]:
    """Return findings by rule, without rules whose cause an earlier rule reports; gradients come from `_for_rules`."""
    gradients = measured.gradients
    complete = gradients is not None and gradients.loss is not None and gradients.failure is None
    by_rule: dict[str, list[RuleFinding]] = {}
    for term in terms:
        rule = term.rule
        # NaN and Inf were not traced to the layer that makes them, so non-finite-activation silences no rule here.
        causes = [cause for cause in rule.silenced_by if cause != "non-finite-activation"]
        has_loss = gradients is not None and rule.identifier == "non-finite-loss"  # this rule needs no backward pass
        is_possible = complete or has_loss or rule.needs != "gradients"
        if is_possible and not any(by_rule.get(cause) for cause in causes):
            by_rule[rule.identifier] = [*rule.evaluate(measured, term)]
    return by_rule


def _for_rules(run: Run) -> Run:
    """Return a run without rows that rules ignore: repeated rows, operations in `NOT_JUDGED`, empty gradients."""
    left_out = {row.label for row in run.rows if row.owner is not None and row.kind in NOT_JUDGED}
    if isinstance(run, Gradients):
        outputs = [row for row in run.gradients if row.role == "output" and row.backward_index is not None]
        left_out |= {row.label for row in outputs if not row.gradient.element_count}
    return reduced(run, left_out, folds=True)


def _failures_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.level != "fail"))


def _outcome(rule: str, unsorted: Iterable[Finding]) -> RuleOutcome:
    findings = _failures_first(unsorted)
    return RuleOutcome(rule, findings[0].level if findings else "pass", findings)


def _not_run(terms: RuleTerms, problem: RuleFinding) -> RuleOutcome:
    """Report that a rule could not run, at the most severe level that it has for any layer."""
    levels = {terms.level, *(changes.level for _, changes in terms.layers)}
    level: Literal["fail", "warn"] = "fail" if "fail" in levels and problem.at_most == "fail" else "warn"
    name = terms.rule.identifier
    return _outcome(name, [Finding(name, level, problem.target.where, safe_text(problem.message))])


class _Judging:
    """The outcomes so far, and the findings of all rules about gradients: rules that are off also silence others."""

    def __init__(self, measured: CheckMeasurements, terms: Mapping[str, RuleTerms]) -> None:
        self.measured, self.terms = measured, terms
        self.outcomes: dict[str, RuleOutcome] = {}
        gradients = measured.gradients
        self.of_gradients = _evaluated(
            measured if gradients is None else replace(measured, gradients=_for_rules(gradients)),
            [
                terms.get(name) or terms_of(rule, CheckSettings())
                for name, rule in RULES.items()
                if rule.needs == "gradients"
            ],
        )

    def outcome(self, rule: Rule) -> RuleOutcome:
        name, terms, about_gradients = rule.identifier, self.terms[rule.identifier], rule.needs == "gradients"
        cause = next((cause for cause in rule.silenced_by if self.of_gradients.get(cause)), "")
        missing, silencing = self._missing(terms), self._silencing(rule, cause)
        if silencing and not (missing and about_gradients):
            return RuleOutcome(name, "skipped", reason=silencing)
        if missing:
            return self._unjudged(terms, missing)
        problems = self.of_gradients.get(name, ()) if about_gradients else rule.evaluate(self.measured, terms)
        if cause:  # the rule of the cause is off, so this rule reports it
            first = self.of_gradients[cause][0]
            message = f"It could not run, because the gradients fail {cause}: {first.message}"
            return _not_run(terms, replace(first, message=message))
        findings = {other: outcome.findings for other, outcome in self.outcomes.items()}
        return _outcome(name, terms.findings(problems, findings))

    def _missing(self, terms: RuleTerms) -> str:
        """Return the reason why a rule cannot run, in words; "" if it can."""
        measured, name, needs = self.measured, terms.rule.identifier, terms.rule.needs
        if name == "accuracy-drop" and terms.settings.data is None:
            return f"the baseline has labelled pictures, and none are given: {arg('data')} FOLDER"
        if name == "accuracy-drop" and not (terms.baseline and terms.baseline.labelled):
            return f"the baseline was written without labelled pictures ({arg('data')})"
        if measured.no_network and needs not in _NEED_NO_NETWORK:
            return measured.no_network
        if needs not in NEED_NO_PASS:
            if measured.forward is not None and measured.forward.failure is not None and name != "forward":
                return "the forward pass raised"
            run = measured.gradients if needs == "gradients" else measured.forward
            if run is None:
                lack = "no gradients were taken" if needs == "gradients" else "the network was not run"
                return measured.unmeasured.get(name, lack)
        return "" if name in _NEVER_UNMEASURED else measured.unmeasured.get(name, "")

    def _unjudged(self, terms: RuleTerms, reason: str) -> RuleOutcome:
        """Return the outcome of a rule that cannot run: skipped, or a failure for a rule that is off by default."""
        message = f"This rule could not run: {reason.rstrip('.')}."
        earlier = (finding.message for outcome in self.outcomes.values() for finding in outcome.findings)
        if terms.rule.level != "off" or message in earlier or _error(self.measured) or self.measured.no_network:
            return RuleOutcome(terms.rule.identifier, "skipped", reason=reason)
        return _not_run(terms, RuleFinding(WHOLE_NETWORK, message))

    def _silencing(self, rule: Rule, cause: str) -> str:
        """Return the finding that silences a rule, in words; "" if none does."""
        if "non-finite-activation" in (RULES[cause] if cause else rule).silenced_by:
            origin = self.outcomes["non-finite-activation"]
            # After a forward pass that is not finite, rules about gradients would blame the layer that runs last. After
            # a warning, which may be about a mask, gradients are judged anyway.
            if origin.status == "fail" or (origin.findings and rule.needs != "gradients"):
                maker = "an output has" if self.measured.origin is None else "a module makes"
                return f"{maker} NaN or Inf, which causes the rest"
        is_reported = cause and self.outcomes[cause].findings
        return f"the gradients fail {cause}, which causes the rest" if is_reported else ""


def _error(measured: CheckMeasurements) -> str:
    forward, gradients = measured.forward, measured.gradients
    if forward is not None and forward.failure is not None:
        return raised("forward", forward.failure)
    if gradients is not None and gradients.failure is not None:
        return raised("forward" if gradients.loss is None else "backward", gradients.failure)
    return ""
