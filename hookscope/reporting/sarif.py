"""Reports on checkpoints as SARIF 2.1.0, for code scanning: one run, a result for each finding."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hookscope.errors import most_severe
from hookscope.reporting.check_report import (
    finding_text,
    readable,
    remarks,
    repository_file,
    unreported_error,
)
from hookscope.results.check import CheckReport
from hookscope.results.findings import Level
from hookscope.text import counted, plain

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

# GitHub refuses a run with more results (docs.github.com, "SARIF support for code scanning").
_MOST_RESULTS = 25_000

# The only fingerprint that GitHub looks at.
_FINGERPRINT = "primaryLocationLineHash"

_LEVELS: Mapping[Level, str] = {"fail": "error", "warn": "warning", "off": "error"}


@dataclass(frozen=True, slots=True)
class RuleText:
    """What a rule is, for people: its identifier, default level, meaning in a sentence, and full explanation."""

    identifier: str
    level: Level
    meaning: str
    help: str


# For checkpoints that could not be checked: without a result, a viewer would take old findings for fixed.
_EXAMINATION = RuleText(
    "examination",
    "fail",
    "A checkpoint could not be checked to the end.",
    "The message has the reason. What was not checked may be wrong, so this does not count as a pass.",
)


def checks_to_sarif(
    reports: Sequence[CheckReport],
    rules: Sequence[RuleText],
    *,
    version: str,
    repository: Path = Path(),
    instead: str = "",
    error: str = "",
    exit_code: int | None = None,
) -> str:
    """Return `reports` as the text of a SARIF 2.1.0 log, failures before warnings.

    The location of a result is the checkpoint's file, by its path below `repository`, or `instead` if the file is not
    there. Its partial fingerprint is made of checkpoint, rule and layer, so numbers in the message do not change it.
    `executionSuccessful` is false unless every checkpoint was checked to the end.

    Args:
        reports: Of every checkpoint.
        rules: All rules, in order.
        version: Of hookscope.
        repository: The folder that paths are relative to.
        instead: A file, relative to the repository, for results whose checkpoint is not in it; "" for none.
        error: Why reports are missing; "" if there are all.
        exit_code: Of the command; default: the most severe of the reports.
    """
    rules = [*rules, _EXAMINATION]
    places = {rule.identifier: place for place, rule in enumerate(rules)}
    results, notifications = [], []
    for report in reports:
        file = repository_file(report.checkpoint, repository)
        of_report, notes = _results_and_notes(readable(report), file, instead, places)
        results += of_report
        notifications += notes
    if error:
        results.append(_result(_EXAMINATION.identifier, "error", error, _location(instead), places, "nothing checked"))
    results.sort(key=lambda result: result["level"] != "error")
    _number_fingerprints(results)
    notifications += [_notification("error", error)] if error else []
    if len(results) > _MOST_RESULTS:
        more = counted(len(results) - _MOST_RESULTS, "more result")
        why = f"{more} are left out: GitHub takes {_MOST_RESULTS:,} at most. --format json lists all."
        notifications.append(_notification("warning", why))
    run = {
        "tool": {
            "driver": {"name": "hookscope", "semanticVersion": version, "rules": [_descriptor(rule) for rule in rules]}
        },
        "invocations": [
            {
                "executionSuccessful": bool(reports) and not error and not any(check.error_code for check in reports),
                "exitCode": most_severe(check.exit_code for check in reports) if exit_code is None else exit_code,
                "toolExecutionNotifications": notifications,
            }
        ],
        "columnKind": "unicodeCodePoints",
        "results": results[:_MOST_RESULTS],
    }
    document = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(plain(document), indent=1, allow_nan=False) + "\n"


def _results_and_notes(
    report: CheckReport, file: str, instead: str, places: Mapping[str, int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the results and the notifications of a report with safe texts.

    Their location is the checkpoint's `file`, or `instead` outside of a repository.
    """
    location, checkpoint = _location(file or instead), Path(report.checkpoint)
    # Identifies results across runs: folders outside the repository may change and are left out.
    identity = file or (checkpoint.name if checkpoint.is_absolute() else str(checkpoint))
    subject = "" if file else f"{report.checkpoint}: "
    results = []
    if error := unreported_error(report):
        rule = _EXAMINATION.identifier
        results.append(_result(rule, "error", subject + error, location, places, f"{identity}\0{rule}"))
    for finding in report.findings:
        layer = {"logicalLocations": [{"fullyQualifiedName": finding.where}]} if finding.where else {}
        message, level = subject + finding_text(finding), _LEVELS[finding.level]
        parts = f"{identity}\0{finding.rule}\0{finding.where}"
        results.append(_result(finding.rule, level, message, {**location, **layer}, places, parts))
    notes = [words if kind == "note" else f"{kind}: {words}" for kind, words in remarks(report)]
    errors = [_notification("error", subject + report.error, location)] if report.error else []
    return results, [*errors, *(_notification("note", subject + note, location) for note in notes)]


def _descriptor(rule: RuleText) -> dict[str, Any]:
    level = _LEVELS[rule.level]
    return {
        "id": rule.identifier,
        "shortDescription": {"text": rule.meaning},
        "fullDescription": {"text": rule.meaning},
        "help": {"text": rule.help},
        "defaultConfiguration": {"level": level, **({"enabled": False} if rule.level == "off" else {})},
        "properties": {"problem.severity": level},
    }


def _result(
    rule: str, level: str, message: str, location: Mapping[str, Any], places: Mapping[str, int], identity: str
) -> dict[str, Any]:
    digest = hashlib.sha256(identity.encode(errors="backslashreplace")).hexdigest()[:16]
    return {
        "ruleId": rule,
        **({"ruleIndex": places[rule]} if rule in places else {}),
        "level": level,
        "message": {"text": _message(message)},
        **({"locations": [location]} if location else {}),
        "partialFingerprints": {_FINGERPRINT: digest},
    }


def _notification(level: str, message: str, location: Mapping[str, Any] | None = None) -> dict[str, Any]:
    locations = {"locations": [location]} if location else {}
    return {"level": level, "message": {"text": _message(message)}, **locations}


def _location(file: str) -> dict[str, Any]:
    """Return the beginning of a file as a location that GitHub accepts."""
    if not file:
        return {}
    region = {"startLine": 1, "startColumn": 1, "endLine": 1, "endColumn": 1}
    return {"physicalLocation": {"artifactLocation": {"uri": quote(file), "uriBaseId": "%SRCROOT%"}, "region": region}}


def _message(text: str) -> str:
    """Escape a text so that it has no placeholder and no embedded link (SARIF 2.1.0, 3.11.5, 3.11.6).

    SARIF has no escape for text that looks like a link, so its "(" is spelled out.
    """
    return text.replace("{", "{{").replace("}", "}}").replace("](", r"]\x28")


def _number_fingerprints(results: Sequence[dict[str, Any]]) -> None:
    """Number equal fingerprints: GitHub would take their results for one."""
    seen: Counter[str] = Counter()
    for result in results:
        digest = result["partialFingerprints"][_FINGERPRINT]
        seen[digest] += 1
        result["partialFingerprints"] = {_FINGERPRINT: f"{digest}:{seen[digest]}"}
