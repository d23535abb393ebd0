"""Put every wanted rule to an examination: which can be judged, which are silenced by others, what comes of each."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from hookscope.checks.activations import dead_channels, quiet_channels, saturated_activation
from hookscope.checks.baseline import Baseline
from hookscope.checks.context import WHOLE, Terms, terms_of
from hookscope.checks.drift import drift, require_fit
from hookscope.checks.expectations import expectation
from hookscope.checks.finite import bf16_headroom, forward_raises, fp16_headroom, non_finite_activation, raised
from hookscope.checks.gradients import cause_of_silence, gradient_findings, gradient_verdicts
from hookscope.checks.outputs import batch_consistency, constant_output, output_shape, repeatability
from hookscope.checks.rules import RULES, Rule
from hookscope.checks.settings import CheckSettings
from hookscope.checks.stored import (
    batchnorm_variance,
    constant_parameter,
    dead_filter,
    duplicate_parameter,
    non_finite_parameter,
    zero_parameter,
)
from hookscope.errors import (
    EXIT_DONE,
    CheckpointError,
    HookscopeError,
    MisfitError,
    ModelError,
    UntrustedFileError,
    UsageError,
)
from hookscope.results.check import CheckReport, Examination, Finding, RuleOutcome
from hookscope.results.gradients import Verdict

_JUDGES: Mapping[str, Callable[[Examination, Terms], Iterator[Finding]]] = {
    "non-finite-parameter": non_finite_parameter,
    "zero-parameter": zero_parameter,
    "constant-parameter": constant_parameter,
    "duplicate-parameter": duplicate_parameter,
    "batchnorm-variance": batchnorm_variance,
    "dead-filter": dead_filter,
    "forward": forward_raises,
    "non-finite-activation": non_finite_activation,
    "output-shape": output_shape,
    "constant-output": constant_output,
    "repeatability": repeatability,
    "batch-consistency": batch_consistency,
    "dead-channels": dead_channels,
    "quiet-channels": quiet_channels,
    "saturated-activation": saturated_activation,
    "fp16-headroom": fp16_headroom,
    "bf16-headroom": bf16_headroom,
    "expectation": expectation,
}
"""Whoever needs nothing but what was measured. The file's own rules have passed once there is an examination."""

_BROKEN_BY_NON_FINITE = frozenset(
    {
        *("constant-output", "repeatability", "batch-consistency", "expectation", "drift"),
        *("dead-channels", "quiet-channels", "saturated-activation"),
    }
)

_FOLLOWS_FROM_NON_FINITE = "a module makes NaN or Inf, from which the rest follows"

_IDLE_WITHOUT = {"drift": "a baseline (--baseline FILE)", "expectation": "an [[expect]] in the configuration"}

# These say themselves what could not be measured: whoever asks for them must not take silence for consent.
_NEVER_UNMEASURED = frozenset({"non-finite-activation", "expectation"})


def judge(
    checkpoint: str,
    examination: Examination,
    settings: CheckSettings,
    wanted: AbstractSet[str],
    baseline: Baseline | None = None,
) -> CheckReport:
    """Judge one checkpoint by every wanted rule.

    A cause silences its consequences: where a module makes NaN or Inf, or a pass raises, the rules that it would break
    are skipped, with that reason. `expectation` and `drift` are off where there is nothing to hold the network to.

    Args:
        checkpoint: What was checked, for the report.
        examination: What was measured.
        settings: What the check was told.
        wanted: Identifiers of rules, as `wanted_rules` returns them.
        baseline: What `drift` compares with; None for nothing.

    Returns:
        The verdict. Where a pass raised, it has the error, and exit code 6.

    Raises:
        UsageError: If the settings ask for a class, an output or a layer pattern that cannot be, if the baseline is of
            another network or of other inputs, or if no rule is left to judge by.
    """
    idle = ({"expectation"} if not settings.expectations else set()) | ({"drift"} if baseline is None else set())
    terms = {name: terms_of(rule, settings) for name, rule in RULES.items() if name in wanted and name not in idle}
    if not terms:
        unmet = " and ".join(f"{name} needs {_IDLE_WITHOUT[name]}" for name in sorted(wanted & idle))
        raise UsageError(f"No rule is left to check: {unmet or 'all are off or left out'}.")
    gradients = examination.gradients
    verdicts = gradient_verdicts(gradients, terms) if gradients is not None else ()
    outcomes: dict[str, RuleOutcome] = {}
    for name, rule in RULES.items():
        if name not in terms:
            outcomes[name] = RuleOutcome(name, "off")
        elif reason := _obstacle(rule, examination, outcomes):
            outcomes[name] = _unjudged(rule, reason, terms[name], examination, outcomes)
        elif reason := _silenced(name, verdicts, outcomes):
            outcomes[name] = RuleOutcome(name, "skipped", reason=reason)
        elif rule.needs == "gradients" and gradients is not None:
            outcomes[name] = outcome(name, gradient_findings(gradients, verdicts, terms[name]))
        elif name == "drift" and baseline is not None:
            require_fit(baseline, examination)
            outcomes[name] = outcome(name, drift(examination, terms[name], baseline))
        else:
            outcomes[name] = outcome(name, _JUDGES[name](examination, terms[name]) if name in _JUDGES else ())
    error = _error(examination)
    return CheckReport(
        checkpoint,
        tuple(outcomes.values()),
        examination.model,
        examination.forward.inputs if examination.forward else (),
        error,
        ModelError.exit_code if error else EXIT_DONE,
        examination.warnings,
        examination.seconds,
    )


def refused(checkpoint: str, error: HookscopeError, wanted: AbstractSet[str]) -> CheckReport:
    """Report a checkpoint that could not be loaded, or not be checked to the end.

    Weights that do not fit the network fail the rule `architecture`, any other weights file that cannot be had fails
    `integrity`; both whatever their level. All other rules are skipped. Where the rule is not wanted, or the error is
    another one, its own exit code stands: a checkpoint that nothing is known of never passes.

    Args:
        checkpoint: What was to be checked.
        error: Why it could not be.
        wanted: Identifiers of rules, as `wanted_rules` returns them.
    """
    broken, reason = "", "the check could not be made"
    if isinstance(error, MisfitError):
        broken, reason = "architecture", "the weights do not fit the network"
    elif isinstance(error, CheckpointError | UntrustedFileError):
        broken, reason = "integrity", "the file could not be read"
    outcomes = {name: RuleOutcome(name, "skipped" if name in wanted else "off") for name in RULES}
    for name in wanted & outcomes.keys():
        if name == broken:
            outcomes[name] = outcome(name, [Finding(name, "fail", "", str(error))])
        elif name == "integrity" and broken == "architecture":
            outcomes[name] = RuleOutcome(name, "pass")
        else:
            outcomes[name] = RuleOutcome(name, "skipped", reason=reason)
    is_finding = broken == "architecture" and broken in wanted
    code = EXIT_DONE if is_finding else error.exit_code
    return CheckReport(checkpoint, tuple(outcomes.values()), error=str(error), error_code=code)


def outcome(rule: str, found: Iterable[Finding]) -> RuleOutcome:
    """Return what came of a rule that could be judged."""
    findings = tuple(sorted(found, key=lambda finding: finding.level != "fail"))
    return RuleOutcome(rule, findings[0].level if findings else "pass", findings)


def _obstacle(rule: Rule, examination: Examination, outcomes: Mapping[str, RuleOutcome]) -> str:
    """Return why a rule cannot be judged, in a sentence; "" if it can."""
    name, needs = rule.identifier, rule.needs
    if needs in ("file", "network"):
        return ""
    if needs != "stored":
        if examination.forward is not None and examination.forward.failure is not None and name != "forward":
            return "the forward pass raised"
        if needs == "gradients" and examination.gradients is None:
            return examination.unmeasured.get(name, "no gradients were taken")
        if examination.forward is None and needs != "gradients":
            return examination.unmeasured.get(name, "the network was not run")
    if name in _BROKEN_BY_NON_FINITE and outcomes["non-finite-activation"].findings:
        return _FOLLOWS_FROM_NON_FINITE
    return "" if name in _NEVER_UNMEASURED else examination.unmeasured.get(name, "")


def _unjudged(
    rule: Rule, reason: str, terms: Terms, examination: Examination, outcomes: Mapping[str, RuleOutcome]
) -> RuleOutcome:
    """Return what comes of a rule that cannot be judged.

    It is skipped; but somebody has asked for a rule that is off by default, so the first of those objects instead,
    unless a pass that raised has said it already.
    """
    message = f"What is asked for cannot be judged: {reason.rstrip('.')}."
    said = any(finding.message == message for each in outcomes.values() for finding in each.findings)
    if rule.level != "off" or said or _error(examination):
        return RuleOutcome(rule.identifier, "skipped", reason=reason)
    return outcome(rule.identifier, terms.object_to(WHOLE, message))


def _silenced(rule: str, verdicts: Sequence[Verdict], outcomes: Mapping[str, RuleOutcome]) -> str:
    """Return which finding leaves nothing to say about gradients by a rule; "" if there is none."""
    cause = cause_of_silence(rule, verdicts)
    # After a forward pass that is not finite, the backward of whatever comes last would be blamed.
    if (
        "non-finite-gradient" in (rule, cause.rule if cause else "")
        and outcomes["non-finite-activation"].status == "fail"
    ):
        return _FOLLOWS_FROM_NON_FINITE
    if cause is None or cause.rule not in outcomes or not outcomes[cause.rule].findings:
        return ""
    return f"the gradients break {cause.rule}, from which the rest follows"


def _error(examination: Examination) -> str:
    """Return which pass raised, and where; "" for none."""
    forward, gradients = examination.forward, examination.gradients
    if forward is not None and forward.failure is not None:
        return raised("forward", forward.failure)
    if gradients is not None and gradients.failure is not None:
        return raised("forward" if gradients.loss is None else "backward", gradients.failure)
    return ""
