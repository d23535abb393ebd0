"""Reports on checkpoints as JSON, for machines."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hookscope.errors import gravest
from hookscope.results.check import CheckReport, RuleOutcome
from hookscope.results.network import ModelInfo
from hookscope.text import strict_json

SCHEMA_VERSION = 1


def checks_to_json(reports: Sequence[CheckReport]) -> str:
    """Return `reports` as strict JSON, one checkpoint a line: see `checks_to_dict`."""
    return strict_json(checks_to_dict(reports))


def checks_to_dict(reports: Sequence[CheckReport]) -> dict[str, Any]:
    """Return `reports` as dicts, lists, text and numbers, in their order.

    At the top: `schema_version` (it changes when a key goes or changes its meaning), `exit_code` of the command, and
    `checkpoints`, a list of objects:

    - `checkpoint`: what was checked; `passed`: true or false; `exit_code`: 0 passed, 1 a rule failed, else the error's.
    - `error`: why it could not be checked to the end, or ""; `error_code`: its exit code, or 0.
    - `model`: `name`, `kind`, `weights`, `random`, `sha256`, `parameter_count`, `arguments`; null if it could not be
      loaded.
    - `inputs`: a list of `name`, `sha256`, `size` (width, height), `shape` (without the batch axis), `steps`.
    - `rules`: a list in the order of judgement, of `rule`: its identifier; `status`: "pass", "warn", "fail", "off" or
      "skipped"; `reason`: why it was skipped, or ""; `findings`: a list of `level` ("fail" or "warn"), `where` (label
      of a layer's output, name of a parameter or an input, "" for the whole) and `message`.
    - `warnings`: sentences; `seconds`: by phase, and "total"; `evidence`: a folder, or "".

    Names are exact, even hostile ones.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "exit_code": gravest(report.exit_code for report in reports),
        "checkpoints": [_checkpoint(report) for report in reports],
    }


def _checkpoint(report: CheckReport) -> dict[str, Any]:
    return {
        "checkpoint": report.checkpoint,
        "passed": report.passed,
        "exit_code": report.exit_code,
        "error": report.error,
        "error_code": report.error_code,
        "model": report.model and _model(report.model),
        "inputs": [asdict(record) for record in report.inputs],
        "rules": [_rule(outcome) for outcome in report.outcomes],
        "warnings": report.warnings,
        "seconds": report.seconds,
        "evidence": report.evidence,
    }


def _model(model: ModelInfo) -> dict[str, Any]:
    keys = ("name", "kind", "weights", "random", "sha256", "parameter_count", "arguments")
    return {key: getattr(model, key) for key in keys}


def _rule(outcome: RuleOutcome) -> dict[str, Any]:
    findings = [{"level": each.level, "where": each.where, "message": each.message} for each in outcome.findings]
    return {"rule": outcome.rule, "status": outcome.status, "reason": outcome.reason, "findings": findings}
