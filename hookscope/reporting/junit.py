"""Reports on checkpoints as JUnit XML, for CI servers."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from hookscope.reporting.check_report import finding_text, readable, remarks, total_seconds
from hookscope.results.check import CheckReport, RuleOutcome

# The test case for whether a checkpoint could be checked at all. It has all of the time: rules are judged afterwards.
_EXAMINATION = "examination"


def checks_to_junit(reports: Sequence[CheckReport]) -> str:
    """Return `reports` as JUnit XML: a suite for each checkpoint, in it a test for each rule that is not off.

    Warnings of a rule that passes are its `system-out`. The first test of a suite, "examination", holds the
    checkpoint's seconds and what a reader must see, and is an `error` where it could not be checked to the end.

    Write the text in UTF-8, which it declares. `safe_text` spells out characters that XML 1.0 cannot hold. The dialect
    is `junit-10.xsd` of Jenkins' xunit plugin, which pytest and Maven Surefire write too.
    """
    root = Element("testsuites", name="hookscope check")
    for report in reports:
        root.append(_suite(readable(report)))
    for count in ("tests", "failures", "errors"):
        root.set(count, str(sum(int(suite.get(count, 0)) for suite in root)))
    root.set("time", f"{sum(map(total_seconds, reports)):.3f}")
    indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'


def _suite(report: CheckReport) -> Element:
    name = report.checkpoint
    tests = [_examination(report), *(_rule(outcome) for outcome in report.outcomes if outcome.status != "off")]
    suite = Element("testsuite", name=name, tests=str(len(tests)))
    for count, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(sum(test.find(tag) is not None for test in tests)))
    suite.set("time", f"{total_seconds(report):.3f}")
    for test in tests:
        test.set("classname", name)
        suite.append(test)
    return suite


def _examination(report: CheckReport) -> Element:
    test = Element("testcase", name=_EXAMINATION, time=f"{total_seconds(report):.3f}")
    if report.error:
        SubElement(test, "error", type=f"exit code {report.error_code}", message=report.error).text = report.error
    notes = [f"{kind}: {words}" for kind, words in remarks(report) if kind in ("data", "note")]
    notes += [f"evidence: {report.evidence}"] if report.evidence else []
    _add_output(test, notes)
    return test


def _rule(outcome: RuleOutcome) -> Element:
    test = Element("testcase", name=outcome.rule, time="0.000")
    failures = [finding_text(finding) for finding in outcome.findings if finding.level == "fail"]
    if failures:
        more = f" (and {len(failures) - 1:,} more)" if len(failures) > 1 else ""
        SubElement(test, "failure", type=outcome.rule, message=failures[0] + more).text = "\n".join(failures)
    if outcome.status == "skipped":
        SubElement(test, "skipped", message=outcome.reason)
    _add_output(test, [f"warning: {finding_text(finding)}" for finding in outcome.findings if finding.level == "warn"])
    return test


def _add_output(test: Element, lines: Sequence[str]) -> None:
    if lines:
        SubElement(test, "system-out").text = "\n".join(lines)
