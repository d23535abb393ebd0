"""Reports on checkpoints as SARIF 2.1.0, for code scanning: one run, a result for each finding."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hookscope.errors import most_severe
from hookscope.reporting.check_report import (
    accuracy_line,
    finding_text,
    readable,
    repository_file,
    skipped_rules,
    untold_error,
)
from hookscope.results.check import CheckReport
from hookscope.results.findings import Level
from hookscope.text import counted, plain

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

# GitHub refuses a run with more results (docs.github.com, "SARIF support for code scanning").
_MOST_RESULTS = 25_000

# The only one that GitHub looks at.
_FINGERPRINT = "primaryLocationLineHash"

_LEVELS: Mapping[Level, str] = {"fail": "error", "warn": "warning", "off": "error"}


@dataclass(frozen=True, slots=True)
class RuleText:
    """What a rule is, for people: its identifier, default level, meaning in a sentence, and full explanation."""

    identifier: str
    level: Level
    meaning: str
    help: str


# A result that is no rule's finding: without one, a viewer would take old findings for fixed.
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

    A result lies in the checkpoint's file, by its path below `repository`; where that is no file of the repository, in
    `instead`. Its partial fingerprint is made of checkpoint, rule and layer, so it stays the same while a number in the
    message changes. `executionSuccessful` is false unless every checkpoint was checked to the end.

    Args:
        reports: Of every checkpoint.
        rules: All rules, in order.
        version: Of hookscope.
        repository: The folder that paths are relative to.
        instead: A file of the repository, relative to it, for results that lie in no file of it; "" for none.
        error: Why there are no reports, or not all; "" if there are.
        exit_code: Of the command; default: the most severe of the reports.
    """
    outcomes = [_Safe(readable(report), repository_file(report.checkpoint, repository), instead) for report in reports]
    rules = [*rules, _EXAMINATION]
    places = {rule.identifier: place for place, rule in enumerate(rules)}
    results = [result for outcome in outcomes for result in outcome.results(places)]
    if error:
        results.append(_result(_EXAMINATION.identifier, "error", error, _location(instead), places, "nothing checked"))
    results.sort(key=lambda result: result["level"] != "error")
    _number_fingerprints(results)
    notifications = [note for outcome in outcomes for note in outcome.notifications()]
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


@dataclass(frozen=True, slots=True)
class _Safe:
    """A report with safe texts. Results lie in its checkpoint, `file`, or in `instead` outside of a repository."""

    report: CheckReport
    file: str
    instead: str

    def results(self, places: Mapping[str, int]) -> Iterator[dict[str, Any]]:
        location = _location(self.file or self.instead)
        if error := untold_error(self.report):
            rule = _EXAMINATION.identifier
            yield _result(rule, "error", self._named(error), location, places, self._identity(rule))
        for finding in self.report.findings:
            layer = {"logicalLocations": [{"fullyQualifiedName": finding.where}]} if finding.where else {}
            message = self._named(finding_text(finding))
            identity = self._identity(finding.rule, finding.where)
            yield _result(finding.rule, _LEVELS[finding.level], message, {**location, **layer}, places, identity)

    def _identity(self, *parts: str) -> str:
        """Identify a result across runs. Folders outside the repository may change and are left out."""
        checkpoint = Path(self.report.checkpoint)
        name = checkpoint.name if checkpoint.is_absolute() else str(checkpoint)
        return "\0".join((self.file or name, *parts))

    def notifications(self) -> Iterator[dict[str, Any]]:
        location = _location(self.file or self.instead)
        if self.report.error:
            yield _notification("error", self._named(self.report.error), location)
        data = accuracy_line(self.report)
        for note in ([f"data: {data}"] if data else []) + [*self.report.warnings]:
            yield _notification("note", self._named(note), location)
        for reason, rules in skipped_rules(self.report).items():
            yield _notification("note", self._named(f"skipped {rules}: {reason}"), location)

    def _named(self, message: str) -> str:
        return message if self.file else f"{self.report.checkpoint}: {message}"


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

    SARIF has no escape for text that looks like a link: its "(" is spelled out, as other renderers do with markup.
    """
    return text.replace("{", "{{").replace("}", "}}").replace("](", r"]\x28")


def _number_fingerprints(results: Sequence[dict[str, Any]]) -> None:
    """Number equal fingerprints: GitHub would take their results for one."""
    seen: Counter[str] = Counter()
    for result in results:
        digest = result["partialFingerprints"][_FINGERPRINT]
        seen[digest] += 1
        result["partialFingerprints"] = {_FINGERPRINT: f"{digest}:{seen[digest]}"}
