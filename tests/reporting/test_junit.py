import re
from collections.abc import Sequence
from dataclasses import replace
from xml.etree.ElementTree import Element, fromstring

import pytest
from hypothesis import given
from junitparser import Error, Failure, JUnitXml
from junitparser.xunit2 import TestCase, TestSuite

from hookscope.reporting.junit import checks_to_junit
from hookscope.results.check import CheckReport
from hookscope.text import safe_text
from tests.reporting.checked import (
    CORRUPT,
    CORRUPT_TEXT,
    EVERY,
    FAILED,
    HOSTILE,
    KILLED,
    LONG_NAME,
    MANY,
    PASSING,
    RAISED,
    SKIPPING,
    UNTRUSTED,
    WARNED,
    anything,
    hostile,
)

# What junit-10.xsd of Jenkins' xunit plugin says of the elements that we write: attributes that must be there, that may
# be there, and children that may be there, in any order and number.
SCHEMA: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": (set(), {"name", "time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors"},
        {"group", "time", "skipped", "timestamp", "hostname", "id", "package", "file", "log", "url"},
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
    ),
    "testcase": (
        {"name"},
        {"time", "classname", "group"},
        {"skipped", "error", "failure", "system-out", "system-err"},
    ),
    "failure": (set(), {"type", "message"}, set()),
    "error": (set(), {"type", "message"}, set()),
    "skipped": (set(), {"type", "message"}, set()),
    "system-out": (set(), set(), set()),
}
HOLD_TEXT = {"failure", "error", "skipped", "system-out"}

# SUREFIRE_TIME, the type of `time` in "testsuites" and "testsuite": no exponent, no sign.
SUREFIRE_TIME = re.compile(r"(([0-9]{0,3},)*[0-9]{3}|[0-9]{0,3})*(\.[0-9]*)?")

# Servers and the older schema of Ant want results before output.
ORDER = ("skipped", "error", "failure", "system-out")


def assert_valid(element: Element, *, root: bool = True) -> None:
    if root:
        assert element.tag == "testsuites"
    required, optional, children = SCHEMA[element.tag]
    assert required <= set(element.attrib) <= required | optional
    assert {child.tag for child in element} <= children
    if element.tag not in HOLD_TEXT:
        assert not (element.text or "").strip()
    assert not (element.tail or "").strip()
    if element.tag in ("testsuites", "testsuite"):
        assert SUREFIRE_TIME.fullmatch(element.attrib["time"])
    if element.tag == "testcase":
        assert [child.tag for child in element] == sorted((child.tag for child in element), key=ORDER.index)
        assert len({child.tag for child in element}) == len(element)
    for child in element:
        assert_valid(child, root=False)


def tree(*reports: CheckReport) -> Element:
    """Return what a strict parser reads from the bytes that are written."""
    return fromstring(checks_to_junit(reports).encode("utf-8"))


def suites(*reports: CheckReport) -> list[TestSuite]:
    """Return what `junitparser` reads."""
    return [TestSuite.fromelem(suite._elem) for suite in JUnitXml.fromstring(checks_to_junit(reports).encode("utf-8"))]


def case(report: CheckReport, name: str) -> TestCase:
    (suite,) = suites(report)
    (actual,) = [each for each in suite if each.name == name]
    return TestCase.fromelem(actual._elem)


@pytest.mark.parametrize("reports", [(), EVERY, HOSTILE], ids=["none", "every kind", "hostile"])
def test_every_document_keeps_to_the_schema(reports: Sequence[CheckReport]) -> None:
    assert_valid(tree(*reports))


def test_utf_8_is_declared_on_the_first_line() -> None:
    assert checks_to_junit(EVERY).splitlines()[0] == '<?xml version="1.0" encoding="UTF-8"?>'
    assert suites(hostile("é 层 🦊"))[0].name == "é 层 🦊"


def test_each_checkpoint_is_a_suite_and_each_rule_a_test() -> None:
    first, second = suites(FAILED, SKIPPING)
    assert (first.name, second.name) == ("models/broken.pt", "models/skipping.pt")
    names = ["examination", "integrity", "batchnorm-variance", "dead-channels", "drift"]
    assert [(value.classname, value.name) for value in first] == [("models/broken.pt", name) for name in names]
    assert [each.name for each in second] == ["examination", "integrity", "expectation", "drift"]  # off: left out


@pytest.mark.parametrize(
    ("report", "counts"),
    [  # tests, failures, errors, skipped
        (PASSING, (4, 0, 0, 0)),
        (SKIPPING, (4, 0, 0, 2)),
        (WARNED, (3, 0, 0, 0)),
        (FAILED, (5, 2, 0, 1)),
        (CORRUPT, (7, 1, 1, 5)),
        (UNTRUSTED, (7, 1, 1, 5)),
        (KILLED, (6, 0, 1, 5)),
        (RAISED, (7, 0, 1, 5)),
        (MANY, (2, 1, 0, 0)),
        (CheckReport("x.pt", (), error="The worker was killed.", error_code=3), (1, 0, 1, 0)),
    ],
    ids=lambda each: each.checkpoint if isinstance(each, CheckReport) else "",
)
def test_counts_are_those_of_the_tests(report: CheckReport, counts: tuple[int, int, int, int]) -> None:
    (suite,) = suites(report)
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == counts
    suite.update_statistics()  # junitparser counts for itself
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == counts


def test_the_counts_of_the_whole_are_the_sums_over_the_suites() -> None:
    whole = JUnitXml.fromstring(checks_to_junit(EVERY).encode("utf-8"))
    assert (whole.tests, whole.failures, whole.errors) == (
        4 + 4 + 3 + 5 + 7 + 7 + 6 + 7 + 2,
        0 + 0 + 0 + 2 + 1 + 1 + 0 + 0 + 1,
        0 + 0 + 0 + 0 + 1 + 1 + 1 + 1 + 0,
    )


def test_a_suite_takes_the_time_of_its_checkpoint_and_so_do_its_tests_together() -> None:
    for suite, report in zip(suites(*EVERY), EVERY, strict=True):
        assert suite.time == report.seconds["total"]
        assert sum(each.time for each in suite) == report.seconds["total"]
    assert JUnitXml.fromstring(checks_to_junit([PASSING, KILLED]).encode("utf-8")).time == 9.0


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 12345.678, 1e7])
def test_a_time_has_neither_exponent_nor_separator(seconds: float) -> None:
    (suite,) = tree(replace(PASSING, seconds={"total": seconds}))
    assert re.fullmatch(r"\d+\.\d{3}", suite.attrib["time"])


def test_a_rule_that_failed_is_a_failure_with_all_its_findings() -> None:
    (failure,) = case(FAILED, "batchnorm-variance").result
    assert isinstance(failure, Failure)
    first = "layer1.0.bn1.running_var: 3 of 64 variances are below zero: -0.5."
    assert (failure.type, failure.message) == ("batchnorm-variance", f"{first} (and 1 more)")
    assert failure.text == f"{first}\nbn1.running_var: 1 of 64 variances is zero (limit: above 0)."


def test_of_many_findings_none_is_left_out() -> None:
    (failure,) = case(MANY, "dead-filter").result
    assert failure.message.endswith(" (and 499 more)")
    assert len(failure.text.splitlines()) == 500
    assert len(case(MANY, "dead-filter").system_out.splitlines()) == 500


def test_a_warning_passes_and_stands_in_the_output() -> None:
    warned = case(WARNED, "dead-channels")
    assert warned.is_passed
    assert warned.system_out == "warning: layer2.0.relu#1: 12 of 128 channels are zero over 2 inputs (limit 5%)."
    assert case(FAILED, "dead-channels").system_out.startswith(f"warning: {LONG_NAME}: 9 of 64 ")


def test_a_checkpoint_that_could_not_be_checked_is_an_error_and_a_corrupt_file_fails_its_rule_too() -> None:
    for report in (KILLED, RAISED, CORRUPT, UNTRUSTED):
        (error,) = case(report, "examination").result
        assert isinstance(error, Error)
        assert (error.type, error.message, error.text) == (f"exit code {report.error_code}", report.error, report.error)
    (failure,) = case(CORRUPT, "integrity").result
    assert (failure.type, failure.message) == ("integrity", CORRUPT_TEXT)


def test_what_a_reader_must_see_and_the_evidence_stand_in_the_first_test() -> None:
    assert case(WARNED, "examination").system_out == "note: Only 2 inputs were given."
    assert case(FAILED, "examination").system_out == "evidence: evidence/models-broken.pt"


@given(text=anything)
def test_any_text_at_all_makes_a_document_that_is_well_formed(text: str) -> None:
    report = hostile(text)
    root = tree(report)
    assert_valid(root)
    assert len(list(root.iter())) == len(list(tree(hostile("harmless")).iter()))
    skipped, failure = root.find(".//skipped"), root.find(".//failure")
    assert skipped is not None
    assert failure is not None
    assert (root[0].get("name"), skipped.get("message")) == (safe_text(text), safe_text(text))
    assert failure.get("message", "").endswith(safe_text(f"It says: {text}."))
