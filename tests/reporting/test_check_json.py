import json
from dataclasses import asdict
from typing import Any

from hookscope.results.check import CheckReport, checks_to_json
from tests.reporting.checked import CORRUPT, EVERY, FAILED, KILLED, PASSING, SKIPPING


def read(*reports: CheckReport) -> dict[str, Any]:
    """Return what a parser that knows no NaN reads."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    document = json.loads(checks_to_json(reports), parse_constant=refuse)
    assert isinstance(document, dict)
    return document


def test_the_document_has_a_version_and_the_exit_code_of_the_command() -> None:
    assert read(*EVERY).items() >= {"schema_version": 3, "exit_code": 4}.items()
    assert read(PASSING, SKIPPING)["exit_code"] == 0
    assert read(PASSING, FAILED)["exit_code"] == 1
    assert read(FAILED, KILLED)["exit_code"] == 3
    assert read() == {"schema_version": 3, "exit_code": 0, "checkpoints": []}


def test_a_checkpoint_says_all_that_its_report_does() -> None:
    expected = json.loads(json.dumps(asdict(FAILED)))
    for name in ("overview_parts", "unmatched", "looks_untrained"):  # for pictures and words alone
        del expected[name]
    del expected["model"]["categories"]
    assert read(FAILED)["checkpoints"] == [{**expected, "passed": False, "exit_code": 1}]


def test_a_checkpoint_that_could_not_be_checked_has_an_error_and_no_model() -> None:
    killed, corrupt = read(KILLED, CORRUPT)["checkpoints"]
    assert (killed["error"], killed["error_code"], killed["model"]) == (KILLED.error, 3, None)
    assert (corrupt["passed"], corrupt["exit_code"]) == (False, 3)


def test_reports_keep_their_order_and_take_a_line_each() -> None:
    lines = checks_to_json(EVERY).splitlines()
    names = [json.loads(line.strip().rstrip(","))["checkpoint"] for line in lines if line.startswith("    {")]
    assert names == [report.checkpoint for report in EVERY]
