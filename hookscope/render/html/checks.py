"""Reports on checkpoints as one self-contained HTML page, with the pictures of what failed.

Those are read from where `hookscope check --evidence` left them. The folder may be gone or changed: what cannot be
shown is counted, and is no error. No file outside the folder is read, and no link is followed.
"""

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from PIL import Image

from hookscope.errors import InputError
from hookscope.render.check_report import (
    by_severity,
    level_counts,
    readable,
    summary,
    total_seconds,
    untold_error,
    verdict,
)
from hookscope.render.html.layers import ShownFinding
from hookscope.render.html.page import render_page
from hookscope.render.html.pictures import BUDGET
from hookscope.render.run_facts import model_facts
from hookscope.results.accuracy import Accuracy, ClassAccuracy, WrongPicture, accuracy_words
from hookscope.results.binomial import Interval, interval
from hookscope.results.check import CheckReport, RuleOutcome
from hookscope.results.runs.reading import read_inside
from hookscope.results.runs.record import RunRecord
from hookscope.results.runs.store import checked, parse_json
from hookscope.text import counted, input_shape_text, shape_text, slug

# The page shows this many findings of one checkpoint, the others a click away: what a screen has room for.
_FEW_FINDINGS = 20

# Classes that are listed, the lowest first.
_MOST_CLASSES = 20

# Inputs that are described; of thousands, the others are counted.
_MOST_INPUTS = 32

_MAX_RECORD_BYTES = 64 * 2**20

_VERDICTS = ("fail", "warn", "pass")
_NO_VERDICTS = ("skipped", "off")
_STATUS_WORDS = {"fail": "failed", "warn": "warned", "pass": "passed"}


class EvidencePicture(NamedTuple):
    """One picture as the page shows it."""

    layer: str  # whose feature maps it shows; "" for a wrong picture
    alternative: str
    uri: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a folder holds to be shown: grids in execution order; wrong pictures by their place."""

    pictures: Sequence[EvidencePicture] = ()
    wrong: Mapping[int, EvidencePicture] = field(default_factory=dict)
    byte_count: int = 0  # of their files together
    remarks: Sequence[str] = ()  # on what is not shown


class ClassShare(NamedTuple):
    """The accuracy on one class, and where it lies with 95% confidence, for this class by itself."""

    accuracy: ClassAccuracy
    interval: Interval


class LabelledSection(NamedTuple):
    """What a page shows of labelled pictures: how many are right, the lowest classes, the wrong pictures."""

    words: str
    classes: list[ClassShare]
    worst: Sequence[tuple[WrongPicture, EvidencePicture | None]]
    multi_label: bool


def checks_html(
    reports: Sequence[CheckReport],
    *,
    meanings: Mapping[str, str],
    holds: Mapping[str, str],
    seconds: float | None = None,
) -> str:
    """Return the page of the verdicts on all checkpoints, the most severe first.

    A rule, a finding and a picture can be linked as `#rule=dead-channels`, `#rule=dead-channels&finding=2` and
    `#picture=1`, among several checkpoints behind `checkpoint=model.pt&`. A picture that cannot be read leaves a
    remark. By its name, `meanings` has what each rule objects to, and `holds` what holds where it passes; `seconds`
    is as in `summary`.
    """
    ordered = by_severity(reports)
    several = len(ordered) != 1
    checked: list[dict[str, Any]] = []
    room = BUDGET
    for report, name in zip(ordered, _anchors(ordered), strict=True):
        worst = () if report.accuracy is None else report.accuracy.worst
        evidence = read_evidence(Path(report.evidence), room, worst) if report.evidence else Evidence()
        room -= evidence.byte_count
        shown = readable(report)
        labelled = None if shown.accuracy is None else _labelled_section(shown.accuracy, evidence)
        checked.append(_checked(shown, name, evidence, several=several) | {"labelled": labelled})
    heading, *rest = summary(reports, seconds).split(" · ")
    return render_page(
        "checks.html",
        {"level_counts": level_counts, "status_counts": _status_counts, "error": untold_error, "verdict": verdict},
        title=f"{counted(len(ordered), 'checkpoint')} · check" if several else f"{checked[0]['name']} · check",
        heading=heading,
        summary=" · ".join(rest),
        several=several,
        checkpoints=checked,
        few=_FEW_FINDINGS,
        sentence=lambda rule: (holds if rule.status == "pass" else meanings).get(rule.rule, ""),
    )


def _labelled_section(accuracy: Accuracy, evidence: Evidence) -> LabelledSection:
    lowest = accuracy.by_share[:_MOST_CLASSES]
    left = len(accuracy.classes) - len(lowest)
    rest = f" Of {counted(len(accuracy.classes), 'label')} the lowest are listed." if left else ""
    classes = [ClassShare(each, interval(each.right, each.count)) for each in lowest]
    worst = [(wrong, evidence.wrong.get(place)) for place, wrong in enumerate(accuracy.worst)]
    return LabelledSection(f"{accuracy_words(accuracy)}.{rest}", classes, worst, accuracy.multi_label)


def _anchors(reports: Sequence[CheckReport]) -> list[str]:
    names: list[str] = []
    for report in reports:
        name = slug(report.checkpoint)
        candidates = (name, *(f"{name}-{number}" for number in range(2, len(reports) + 2)))
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return names


def _checked(report: CheckReport, name: str, evidence: Evidence, *, several: bool) -> dict[str, Any]:
    prefix = f"checkpoint={name}&" if several else ""
    pictures = [(f"{prefix}picture={number}", picture) for number, picture in enumerate(evidence.pictures, 1)]
    by_layer = {picture.layer: anchor for anchor, picture in reversed(pictures)}
    judged, unjudged = (
        [outcome for status in statuses for outcome in report.outcomes if outcome.status == status]
        for statuses in (_VERDICTS, _NO_VERDICTS)
    )
    return {
        "report": report,
        # A link must have something to click on.
        "name": report.checkpoint if report.checkpoint.strip() else f"'{report.checkpoint}'",
        "model": report.model.name.removeprefix(f"{PurePath(report.checkpoint).name} ") if report.model else "",
        "prefix": prefix,
        "anchor": f"checkpoint={name}",
        "facts": _facts(report),
        "findings": _findings(report.outcomes, prefix, by_layer),
        "evidence": evidence,
        "pictures": pictures,
        "judged": judged,
        "unjudged": unjudged,
        "origin": _origin(report),
    }


def _findings(outcomes: Sequence[RuleOutcome], prefix: str, by_layer: Mapping[str, str]) -> list[ShownFinding]:
    found = []
    for outcome in outcomes:
        rule = f"{prefix}rule={outcome.rule}"
        for number, each in enumerate(outcome.findings, 1):
            # "layer1.0.conv1.weight" is about layer1.0.conv1.
            picture = by_layer.get(each.where) or by_layer.get(each.where.rpartition(".")[0])
            href, anchor = f"#{picture}" if picture else "", f"{rule}&finding={number}"
            found.append(ShownFinding(**asdict(each), href=href, anchor=anchor, rule_href=f"#{rule}"))
    return sorted(found, key=lambda finding: finding.level != "fail")


def _status_counts(rules: Sequence[RuleOutcome]) -> str:
    counts = Counter(rule.status for rule in rules)
    return ", ".join(f"{count} {_STATUS_WORDS.get(status, status)}" for status, count in counts.items())


def _facts(report: CheckReport) -> list[tuple[str, str, bool]]:
    facts = model_facts(report.model) if report.model else []
    if report.inputs:
        shapes = {shape_text(each.shape) for each in report.inputs}
        of_noise = " of noise" if all(each.is_noise for each in report.inputs) else ""
        words = [f"{counted(len(report.inputs), 'input')}{of_noise}", *(shapes if len(shapes) == 1 else ())]
        facts.append(("Inputs", ", ".join(words), False))
    phases = ", ".join(f"{name} {spent:.2f}" for name, spent in report.seconds.items() if name != "total")
    facts.append(("Time", f"{total_seconds(report):.2f} s{f' ({phases})' if phases else ''}", False))
    if report.evidence:
        facts.append(("Evidence", report.evidence, False))
    return facts


def _origin(report: CheckReport) -> list[tuple[str, str]]:
    origin = [("Weights SHA-256", report.model.sha256)] if report.model and report.model.sha256 else []
    for each in report.inputs[:_MOST_INPUTS]:
        size = f"{each.size[0]} × {each.size[1]} pixels" if each.size else ""
        network = f"to the network as {input_shape_text(each.shape)}"
        sha256 = f"SHA-256 {each.sha256}" if each.sha256 else ""
        words = ", ".join(filter(None, (size, *each.steps, network, sha256)))
        origin.append((each.name, words))
    if len(report.inputs) > _MOST_INPUTS:
        origin.append(("More inputs", f"{len(report.inputs) - _MOST_INPUTS:,}"))
    return origin


def read_evidence(folder: Path, room: int, worst: Sequence[WrongPicture] = ()) -> Evidence:
    """Read the pictures in `CheckReport.evidence`, up to `room` bytes, with those of the `worst` labelled pictures."""
    try:
        record = _contents(folder)
    except InputError as error:
        return Evidence(remarks=(f"Its pictures are not shown. {error}",))
    wanted: list[tuple[str, str, str]] = []
    for grid in record.grids:
        name = readable(grid.label)
        wanted.append((grid.path, name, f"Feature maps of {name}: {', '.join(grid.caption)}"))
    places = {f"pictures/{place}.png": place for place in range(len(worst))}
    wanted += [
        (path, "", f"{readable(worst[place].name)}, as the network got it")
        for path, place in places.items()
        if path in record.files
    ]
    pictures: list[EvidencePicture] = []
    wrong: dict[int, EvidencePicture] = {}
    taken = left_out = unreadable = 0
    for path, layer, alternative in wanted:
        try:
            png = read_inside(folder, path, room)
        except InputError:
            unreadable += 1
            continue
        picture = _picture(png, layer, alternative)
        if picture is None:
            unreadable += 1
        elif taken + len(png) > room:
            left_out += 1
        else:
            taken += len(png)
            if path in places:
                wrong[places[path]] = picture
            else:
                pictures.append(picture)
    remarks = (
        f"{counted(left_out, 'picture')} did not fit here and are in the folder only." if left_out else "",
        f"{counted(unreadable, 'picture')} of the folder cannot be read any more." if unreadable else "",
    )
    return Evidence(pictures, wrong, taken, tuple(filter(None, remarks)))


def _contents(folder: Path) -> RunRecord:
    """Return the contents of `run.json`; an InputError if it is missing, or not as hookscope writes it."""
    try:
        if folder.is_symlink():
            raise InputError("The folder of the evidence has become a link.")
        document = parse_json(read_inside(folder, "run.json", _MAX_RECORD_BYTES))
        record: RunRecord = checked(RunRecord, document or {})
        return record  # noqa: TRY300 - in one place with what reads it
    except OSError as error:
        raise InputError("The folder of the evidence cannot be read.") from error
    except (ValueError, RecursionError) as error:
        raise InputError("The run.json in the folder of the evidence is damaged.") from error


def _picture(png: bytes, layer: str, alternative: str) -> EvidencePicture | None:
    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as file:
            size = file.size
            file.verify()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    uri = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
    return EvidencePicture(layer, alternative, uri, *size)
