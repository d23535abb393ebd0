"""A check as a document: the verdict on each checkpoint, findings, labelled pictures, evidence, and every rule."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from PIL import Image

from hookscope.parameters import shows_all
from hookscope.reporting.check_report import (
    accuracy_line,
    by_severity,
    level_counts,
    readable,
    remarks,
    summary,
    total_seconds,
    unreported_error,
    verdict,
)
from hookscope.reporting.columns import Column, integer_text, probability_text
from hookscope.reporting.depth_charts import depth_charts
from hookscope.reporting.document import (
    Document,
    Facts,
    Findings,
    Level,
    Maps,
    Part,
    Picture,
    Pictures,
    Section,
    Table,
    Text,
    line_of,
)
from hookscope.reporting.run_facts import model_facts, size_words
from hookscope.results.accuracy import Accuracy, WrongPicture
from hookscope.results.binomial import interval
from hookscope.results.check import CheckReport, OverviewParts, RuleOutcome
from hookscope.results.findings import Finding
from hookscope.results.grids import Grid
from hookscope.results.runs.directory import OVERVIEW
from hookscope.rules import RULES
from hookscope.text import counted, percent_text, shape_text, some_of

_MOST_INPUTS = 32  # described one by one; the others are counted
_FEW_RULES = 3
_ACROSS = 4  # wrong pictures side by side
_STATUSES = {"fail": "failed", "warn": "warned", "pass": "passed", "skipped": "skipped", "off": "off"}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a page shows of the folder with the evidence.

    Attributes:
        grids: Of the layers that fail, in execution order.
        pictures: Data URIs by path: of the grids, and of wrong pictures, "pictures/0.png".
        byte_count: Size of their files together.
    """

    grids: Sequence[Grid] = ()
    pictures: Mapping[str, str] = field(default_factory=dict)
    byte_count: int = 0
    remarks: Sequence[str] = ()


def describe_checks(
    reports: Sequence[CheckReport], *, evidence: Mapping[str, Evidence] | None = None, seconds: float | None = None
) -> Document:
    """Describe the verdicts on all checkpoints, the most severe first.

    Args:
        reports: Of every checkpoint.
        evidence: Evidence by its folder.
        seconds: As in `summary`.
    """
    ordered = [*_each_error_once(by_severity(reports))]
    documents = [describe_check(report, (evidence or {}).get(report.evidence)) for report in ordered]
    if len(documents) == 1:
        return documents[0]
    levels = [*map(_level, ordered)]
    columns = [
        Column("", "verdict", shown=lambda row: verdict(row[0]), words=True),
        Column("", "checkpoint", rank=0, shown=lambda row: row[1].title, words=True),
        Column("", "network", shown=lambda row: _network(readable(row[0])), words=True, usual=""),
        Column("", "findings", shown=lambda row: _level_counts_and_rules(row[0].findings) or "-", words=True),
    ]
    rows = [*zip(ordered, documents, strict=True)]
    table = Table(title="Verdicts", columns=columns, rows=rows, levels=levels, is_extra=True)
    total = sum(map(total_seconds, reports)) if seconds is None else seconds
    return Document(
        title="Checkpoints",
        page_title=f"{counted(len(ordered), 'checkpoint')} · check",
        answer=[summary(reports, seconds)],
        level=next((level for level in ("fail", "warn") if level in levels), "good"),
        sections=[Section("verdicts", "Verdicts", [table])],
        making=[("Time", f"{total:.2f} s")],
        main="verdicts",
        documents=documents,
    )


def _each_error_once(reports: Sequence[CheckReport]) -> Iterator[CheckReport]:
    """Yield reports; an error that differs from an earlier one only in the checkpoint's name refers to it."""
    names: dict[str, str] = {}
    for report in reports:
        error = unreported_error(report).replace(PurePath(report.checkpoint).name, "")
        first = names.setdefault(error, report.checkpoint)
        is_repeated = error and first != report.checkpoint
        yield replace(report, error=f"the same as for {first}") if is_repeated else report


def describe_check(report: CheckReport, evidence: Evidence | None = None) -> Document:
    """Describe the verdict on one checkpoint."""
    folder, parts = report.evidence, report.overview_parts or OverviewParts()
    report = readable(report)
    name = _seen(report.checkpoint)
    error, failing = unreported_error(report), {row.label for row in parts.failing}
    pointed_at = ("fails a rule", [row.label in failing for row in parts.rows])
    described: dict[str, list[Part]] = {
        "Findings": _findings(report),
        "Labelled pictures": [*_labelled(report.accuracy, folder)] if report.accuracy else [],
        "Evidence": [*_evidence(report, folder, evidence or Evidence())],
        "Over depth": [Maps(maps=parts.summaries), *depth_charts(parts.rows, ground=pointed_at)],
        "Rules": [_rules(report.outcomes)],
    }
    sections = [Section(title.lower().replace(" ", "-"), title, shown) for title, shown in described.items()]
    model = report.model
    return Document(
        title=name,
        subtitle="" if model is None else f"{model.name}, weights: {model.weights}",
        page_title=f"{name} · check",
        about=[(f"error: {error}", "fail")] if error else [],
        answer=[_headline(report, name), *filter(None, [accuracy_line(report)])],
        level=_level(report),
        notes=[words if kind == "note" else f"{kind}: {words}" for kind, words in remarks(report) if kind != "data"],
        facts=_facts(report),
        sections=sections,
        making=_making(report),
        main="findings" if report.findings else "rules",
    )


def _level(report: CheckReport) -> Level:
    return "fail" if not report.passed else "warn" if report.findings else "good"


def _seen(name: str) -> str:
    """Return a name in quotes if it is blank, so that it can be seen and clicked on."""
    return name if name.strip() else f"'{name}'"


def _headline(report: CheckReport, name: str) -> str:
    passed = counted(sum(outcome.status == "pass" for outcome in report.outcomes), "rule")
    is_random = report.model is not None and report.model.random
    untrained = ", untrained" if is_random else ", looks untrained" if report.looks_untrained else ""
    accuracy = report.accuracy if any(finding.rule == "accuracy" for finding in report.findings) else None
    parts = (
        f"{name}: {verdict(report)}{untrained if report.passed else ''}",
        *(_cause(finding.message) for finding in report.findings if finding.rule == "non-finite-activation"),
        "" if accuracy is None else f"{accuracy.right:,} of {counted(accuracy.count, 'picture')} right",
        level_counts(report.findings) or (passed if report.passed else ""),
        _network(report),
        "RANDOM WEIGHTS" if is_random else "",
        _inputs(report),
        f"{total_seconds(report):.1f} s",
    )
    return " · ".join(filter(None, parts))


def _cause(message: str) -> str:
    """Return where NaN or Inf starts: "NaN starts at '(model):log' (net.py:17)"."""
    start = re.match(r"(NaN|Inf) starts .*?(['\)]|modules)(?=[:,] )", message)
    return start[0] if start else ""


def _level_counts_and_rules(findings: Sequence[Finding]) -> str:
    rules = some_of([*dict.fromkeys(finding.rule for finding in findings)], _FEW_RULES)
    return f"{level_counts(findings)}: {rules}" if findings else ""


def _network(report: CheckReport) -> str:
    """Return the network's name: of "model.pt (resnet18)" only "resnet18", because the line begins with the file."""
    if report.model is None or report.model.name == report.checkpoint:
        return ""
    file, parenthesis, network = report.model.name.partition(" (")
    return network.removesuffix(")") if parenthesis and file == PurePath(report.checkpoint).name else report.model.name


def _inputs(report: CheckReport) -> str:
    of_noise = " of noise" if all(record.is_noise for record in report.inputs) else ""
    return f"{counted(len(report.inputs), 'input')}{of_noise}" if report.inputs else ""


def _findings(report: CheckReport) -> list[Part]:
    findings = [line_of(finding, where=f"'{finding.where}'" if finding.where else "") for finding in report.findings]
    return [Findings(findings=findings, all_in="--format json", shown_by=shows_all("--format json lists all"))]


def _labelled(accuracy: Accuracy, folder: str) -> Iterator[Part]:
    multi_label = accuracy.multi_label
    columns = [
        Column("label", "label", rank=0, words=True),
        Column("right", "right", text=integer_text),
        Column("count", "of", text=integer_text),
        Column("share", "recall" if multi_label else "share", text=percent_text),
        Column("", "95% interval", value=lambda row: interval(row.right, row.count), text=str),
        *([Column("f1", "F1", text="{:.3f}".format)] if multi_label else []),
        Column(
            *("", "instead, mostly" if multi_label else "mostly taken for"),
            shown=lambda row: f"{row.mistaken_for} ({row.mistaken_count:,})" if row.mistaken_count else "",
            words=True,
        ),
    ]
    yield Table(title="Labels, the lowest first", columns=columns, rows=accuracy.by_share, is_extra=True)
    pictures = [
        Picture(
            name=_seen(wrong.name),
            caption=f"{wrong.name}, as the network got it",
            file=f"{folder}/pictures/{place}.png",
            lines=_wrong_lines(wrong, multi_label=multi_label),
        )
        for place, wrong in enumerate(accuracy.worst)
    ]
    yield Pictures("Wrong pictures", "The most confident first, as the network got them.", pictures, _ACROSS)


def wrong_pictures(report: CheckReport) -> dict[str, Image.Image]:
    """Return the wrong pictures as the network got them, by the files that the document has for them."""
    pictures = report.overview_parts.pictures if report.overview_parts else ()
    return {
        f"{report.evidence}/pictures/{place}.png": Image.fromarray(pixels).convert("RGB")
        for place, pixels in enumerate(pictures)
        if pixels is not None
    }


def _wrong_lines(wrong: WrongPicture, *, multi_label: bool) -> list[str]:
    has, taken = ("missed with", "given") if multi_label else ("probability", "taken for")
    label = f"labelled {wrong.label}"
    if wrong.label_probability is not None:
        label += f" ({has} {probability_text(wrong.label_probability)})"
    if wrong.probability is not None:
        return [label, f"{taken} {wrong.taken_for} (probability {probability_text(wrong.probability)})"]
    if wrong.label_probability is not None:
        return [label, f"{taken} {wrong.taken_for}"]
    return [label, "scores with NaN" if wrong.taken_for == "NaN" else f"{taken} {wrong.taken_for}, scores with Inf"]


def _evidence(report: CheckReport, folder: str, evidence: Evidence) -> Iterator[Part]:
    if report.evidence:
        yield Text([f"See {PurePath(report.evidence, OVERVIEW)}"])
    yield Text(evidence.remarks, is_extra=True)
    pictures = []
    for grid in evidence.grids:
        name = readable(grid.label) or "(model)"
        caption = f"Feature maps of {name}: {', '.join(grid.caption)}"
        pictures.append(Picture(name=name, caption=caption, file=f"{folder}/{grid.path}"))
    yield Pictures("Feature maps", "", pictures)


def _rules(outcomes: Sequence[RuleOutcome]) -> Table:
    ordered = sorted(outcomes, key=lambda outcome: [*_STATUSES].index(outcome.status))
    counts = Counter(outcome.status for outcome in ordered)
    meanings = {name: rule.meaning for name, rule in RULES.items()}  # a report may have rules of another version
    return Table(
        title=", ".join(f"{count} {_STATUSES[status]}" for status, count in counts.items()),
        columns=[
            Column("status", "status", words=True),
            Column("rule", "rule", rank=0, words=True),
            Column("", "findings", shown=lambda outcome: level_counts(outcome.findings), words=True, usual=""),
            Column(
                "",
                "looks for",
                shown=lambda outcome: meanings.get(outcome.rule, ""),
                words=True,
                max_width=60,
                usual="",
            ),
            Column("reason", "why it was skipped", words=True, max_width=60, usual=""),
        ],
        rows=ordered,
        levels=["fail" if outcome.status == "fail" else "" for outcome in ordered],
        remark="`hookscope check --explain RULE` explains a rule, its limits and what to do.",
        is_extra=True,
    )


def _facts(report: CheckReport) -> Facts:
    facts = model_facts(report.model) if report.model else []
    if report.inputs:
        shapes = {shape_text(record.shape) for record in report.inputs}
        facts.append(("Inputs", ", ".join([_inputs(report), *(shapes if len(shapes) == 1 else ())]), False))
    return facts


def _making(report: CheckReport) -> list[tuple[str, str]]:
    made = [("Weights SHA-256", report.model.sha256)] if report.model and report.model.sha256 else []
    for record in report.inputs[:_MOST_INPUTS]:
        sha256 = [f"SHA-256 {record.sha256}"] if record.sha256 else []
        made.append((record.name, ", ".join([size_words(record, *record.steps), *sha256])))
    if len(report.inputs) > _MOST_INPUTS:
        made.append(("More inputs", f"{len(report.inputs) - _MOST_INPUTS:,}"))
    phases = ", ".join(f"{name} {spent:.2f}" for name, spent in report.seconds.items() if name != "total")
    return [*made, ("Time", f"{total_seconds(report):.2f} s{f' ({phases})' if phases else ''}")]
