import json
from dataclasses import replace
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
    assert read(FAILED)["checkpoints"] == [
        {
            "checkpoint": "models/broken.pt",
            "passed": False,
            "exit_code": 1,
            "error": "",
            "error_code": 0,
            "model": {
                "name": "resnet18",
                "kind": "ResNet",
                "weights": "models/good.pt",
                "random": False,
                "sha256": "b627a593" * 8,
                "parameter_count": 11689512,
                "arguments": {"width": 2},
            },
            "inputs": [
                {
                    "name": name,
                    "sha256": digest * 8,
                    "size": [640, 480],
                    "shape": [3, 224, 224],
                    "steps": ["resize 256", "crop 224x224"],
                    "region": None,
                    "sampling_rate": None,
                }
                for name, digest in (("cat.jpg", "0123abcd"), ("dog.jpg", "4567cdef"))
            ],
            "outcomes": [
                {
                    "rule": outcome.rule,
                    "status": outcome.status,
                    "reason": outcome.reason,
                    "findings": [
                        {
                            "rule": finding.rule,
                            "level": finding.level,
                            "where": finding.where,
                            "message": finding.message,
                            "followed_by": list(finding.followed_by),
                        }
                        for finding in outcome.findings
                    ],
                }
                for outcome in FAILED.outcomes
            ],
            "warnings": [],
            "seconds": {"load": 0.25, "forward": 1.0, "total": 1.5},
            "evidence": "evidence/models-broken.pt",
            "accuracy": None,
        }
    ]


def test_a_checkpoint_that_could_not_be_checked_has_an_error_and_no_model() -> None:
    killed, corrupt = read(KILLED, CORRUPT)["checkpoints"]
    assert (killed["error"], killed["error_code"], killed["model"]) == (KILLED.error, 3, None)
    assert (corrupt["passed"], corrupt["exit_code"]) == (False, 3)


def test_reports_keep_their_order_and_take_a_line_each() -> None:
    lines = checks_to_json(EVERY).splitlines()
    names = [json.loads(line.strip().rstrip(","))["checkpoint"] for line in lines if line.startswith("    {")]
    assert names == [report.checkpoint for report in EVERY]


def test_a_number_that_json_does_not_know_is_a_text() -> None:
    assert read(replace(PASSING, seconds={"total": float("nan")}))["checkpoints"][0]["seconds"] == {"total": "NaN"}
