"""The conditions of `--fail-over` as a report of `check`, so that the same renderers write them for CI."""

from collections.abc import Iterator

from hookscope.render.columns import number_text
from hookscope.render.differences_text import sides_text
from hookscope.results.check import CheckReport, RuleOutcome
from hookscope.results.differences import Differences, Exceeded
from hookscope.results.findings import Finding


def differences_as_check(result: Differences, conditions: tuple[str, ...]) -> CheckReport:
    """Return a report with one rule for each condition, by its text."""
    return CheckReport(
        checkpoint=sides_text(result),
        outcomes=tuple(_outcomes(result, conditions)),
        model=result.a.model,
        inputs=result.inputs,
        warnings=result.warnings,
        seconds={**result.timings, "total": sum(result.timings.values())},
    )


def _outcomes(result: Differences, conditions: tuple[str, ...]) -> Iterator[RuleOutcome]:
    for condition in dict.fromkeys(conditions):
        findings = tuple(_finding(each) for each in result.exceeded if each.condition == condition)
        yield RuleOutcome(condition, "fail" if findings else "pass", findings)


def _finding(each: Exceeded) -> Finding:
    where = each.label or "The output"
    message = f"{where} is beyond '{each.condition}': {number_text(each.value)}."
    return Finding(each.condition, "fail", each.label, message)
