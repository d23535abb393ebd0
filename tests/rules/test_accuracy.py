"""How many labelled pictures must be right: what fails, what passes, and what is too little to tell."""

from dataclasses import replace
from pathlib import Path

import pytest

from hookscope.errors import UsageError
from hookscope.results.accuracy import LabelledResult
from hookscope.results.check import CheckReport
from hookscope.rules.baseline import Baseline, baseline_of, baseline_text, read_baseline
from hookscope.rules.judging import judge
from hookscope.rules.settings import CheckSettings, RuleSettings
from tests.commands.check.measurements import HEALTHY, findings, labelled_result, outcomes

RULES = frozenset({"accuracy", "class-accuracy"})


def report_of(result: LabelledResult, rules: frozenset[str] = RULES, **limits: float) -> CheckReport:
    """Judge by the limits of rules, "accuracy" and so on by their names with "_"."""
    named = {name.replace("_", "-"): limit for name, limit in limits.items()}
    kinds = {"accuracy-drop": "max_fraction"}
    settings = CheckSettings(
        data=Path("val"),
        rules={name: RuleSettings(limits={kinds.get(name, "min_fraction"): limit}) for name, limit in named.items()},
    )
    return judge("net.pt", replace(HEALTHY, labelled=result), settings, rules)


def of(right: int, count: int) -> LabelledResult:
    return labelled_result(("otter", 5, right, count))


@pytest.mark.parametrize(
    ("right", "count", "least", "level"),
    [
        (96, 100, 0.9, "pass"),  # the 95% interval is 90.07% to 98.90%
        (95, 100, 0.9, "warn"),  # 88.72% to 98.36%
        (83, 100, 0.9, "fail"),  # 74.18% to 89.77%
        (84, 100, 0.9, "warn"),  # 75.32% to 90.57%
        (9, 10, 1.0, "fail"),
        (10, 10, 1.0, "pass"),
        (10, 10, 0.9, "warn"),
        (0, 1, 0.5, "warn"),
        (0, 10, 0.5, "fail"),
    ],
)
def test_the_interval_decides(right: int, count: int, least: float, level: str) -> None:
    report = report_of(of(right, count), accuracy=least)
    assert outcomes(report)["accuracy"].status == level
    assert report.exit_code == (level == "fail")
    assert outcomes(report)["class-accuracy"].status == "pass"


def test_a_finding_has_the_share_the_interval_the_limit_and_the_lowest_class() -> None:
    result = labelled_result(("otter", 5, 50, 50), ("tram", 3, 33, 50))
    (finding,) = report_of(result, accuracy=0.9).findings
    assert finding.message == (
        "83 of 100 labelled pictures (83.0%) are classified right, "
        "and of all such pictures 74.2% to 89.8% (95% confidence); "
        "the limit is at least 90%. Lowest: 'tram' 33 of 50."
    )


def test_thin_evidence_says_how_many_pictures_would_do() -> None:
    (finding,) = report_of(of(10, 10), accuracy=0.9).findings
    assert finding.level == "warn"
    assert finding.message == (
        "10 of 10 labelled pictures (100%) are classified right, "
        "and of all such pictures 69.2% to 100% (95% confidence); "
        "too few pictures to tell whether it is at least 90%. About 36 pictures would be enough, at this share."
    )
    (even,) = report_of(of(9, 10), accuracy=0.9).findings
    assert "About" not in even.message  # no number of pictures tells 90% from 90%


def test_without_a_limit_guessing_is_a_warning() -> None:
    assert report_of(of(60, 100)).findings == ()
    (finding,) = report_of(of(20, 100)).findings
    assert finding.level == "warn"
    assert "indistinguishable from guessing one of 6 classes, 16.7%. About " in finding.message
    assert "About" not in report_of(of(10, 100)).findings[0].message


def test_worse_than_guessing_is_not_called_indistinguishable_from_it() -> None:
    """None of 60 right has an interval up to 1 - 0.025^(1/60), 6.0 %, and guessing one of 6 is 16.7 %."""
    (finding,) = report_of(of(0, 60)).findings
    assert finding.level == "warn"
    assert finding.message == (
        "0 of 60 labelled pictures (0%) are classified right, "
        "and of all such pictures 0% to 6.0% (95% confidence), "
        "worse than guessing one of 6 classes, 16.7%. Are the classes in the order of the labels?"
    )
    # 5 of 60 reach up to 18.4 %, by Clopper and Pearson.
    assert "indistinguishable from guessing" in report_of(of(5, 60)).findings[0].message


def test_a_lost_class_fails_where_the_accuracy_hardly_shows_it() -> None:
    classes = [(f"class {index}", index, 50, 50) for index in range(9)]
    result = labelled_result(*classes, ("lynx", 9, 20, 50), class_count=10)
    report = report_of(result, accuracy=0.9, class_accuracy=0.7)
    assert findings(report) == [("class-accuracy", "fail", "")]
    assert report.findings[0].message == "1 of 10 labels is right less often than the limit, 70%: 'lynx' 20 of 50."


def test_of_many_classes_none_fails_by_chance() -> None:
    # 31 of 50 is below 80% with 95% confidence for a single class, but not for a thousand together.
    one = labelled_result(("lynx", 0, 31, 50), class_count=1000)
    assert [finding.level for finding in report_of(one, class_accuracy=0.8).findings] == ["fail"]
    others = [(str(index), index, 50, 50) for index in range(1, 1000)]
    many = labelled_result(("lynx", 0, 31, 50), *others, class_count=1000)
    (finding,) = report_of(many, class_accuracy=0.8).findings
    assert finding.level == "warn"
    assert finding.message.startswith("Too few pictures to tell for 1 of 1,000 labels whether at least ")
    assert "'lynx' 31 of 50. About " in finding.message


# Against the baseline


def baseline(result: LabelledResult | None, path: Path) -> Baseline:
    """Write a baseline, and read it back."""
    written = baseline_of(replace(HEALTHY, labelled=result, gradients=None))
    (path / "baseline.json").write_text(baseline_text(written), encoding="utf-8")
    read = read_baseline(path / "baseline.json")
    assert read == written
    return read


def compared(before: LabelledResult | None, now: LabelledResult, path: Path, most: float = 0.01) -> CheckReport:
    settings = CheckSettings(data=Path("val"), rules={"accuracy-drop": RuleSettings(limits={"max_fraction": most})})
    wanted = frozenset({"accuracy-drop", "integrity"})
    return judge("net.pt", replace(HEALTHY, labelled=now), settings, wanted, baseline(before, path))


def test_a_loss_that_is_no_chance_fails(tmp_path: Path) -> None:
    before = labelled_result(("otter", 5, 50, 50), ("tram", 3, 40, 50))
    report = compared(before, labelled_result(("otter", 5, 44, 50), ("tram", 3, 40, 50)), tmp_path)
    (finding,) = report.findings
    assert (finding.level, report.exit_code) == ("fail", 1)
    assert finding.message == (
        "90 of 100 pictures of the baseline were right, 90.0%, and now 84 are, 84.0%: 6 lost and 0 gained, "
        "a loss of 6.0% (limit 1%; McNemar's exact test: p = 0.031). The label 'otter' loses most: 6."
    )


def test_a_loss_that_may_be_chance_warns_and_says_how_many_would_show_it(tmp_path: Path) -> None:
    (finding,) = compared(of(50, 50), of(45, 50), tmp_path).findings
    assert finding.level == "warn"
    assert "which may be chance. About 54 pictures would be enough, at this share." in finding.message


@pytest.mark.parametrize(("before", "now"), [(50, 50), (45, 50), (100, 99)])
def test_no_loss_or_one_within_the_limit_passes(before: int, now: int, tmp_path: Path) -> None:
    assert compared(of(before, 100), of(now, 100), tmp_path).findings == ()


def test_pictures_that_are_gone_or_have_another_label_are_told(tmp_path: Path) -> None:
    before = labelled_result(("otter", 5, 50, 50))
    after = labelled_result(("otter", 5, 40, 40))
    moved = LabelledResult(after.accuracy, {**after.pictures, (3,): {"5-44": True}})
    (finding,) = compared(before, moved, tmp_path).findings
    assert finding.level == "warn"
    assert finding.message == "Pictures in the baseline: 9 are not in the data and 1 has another label."


def test_a_baseline_of_other_pictures_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none of its labelled pictures is in the data\. Write a new one"):
        compared(labelled_result(("otter", 4, 5, 5)), of(5, 5), tmp_path)


def test_without_labelled_pictures_in_both_nothing_is_compared(tmp_path: Path) -> None:
    without = compared(None, of(5, 5), tmp_path)
    assert outcomes(without)["accuracy-drop"].reason == "the baseline was written without labelled pictures (--data)"
    wanted = frozenset({"accuracy-drop", "integrity"})
    expected = baseline(of(5, 5), tmp_path)
    unlabelled = judge("net.pt", replace(HEALTHY, labelled=None), CheckSettings(), wanted, expected)
    assert outcomes(unlabelled)["accuracy-drop"].status == "skipped"
    assert "none are given: --data FOLDER" in outcomes(unlabelled)["accuracy-drop"].reason
    neither = judge("net.pt", replace(HEALTHY, labelled=None), CheckSettings(), wanted, baseline(None, tmp_path))
    assert outcomes(neither)["accuracy-drop"].status == "off"


@pytest.mark.parametrize(
    "held",
    [
        "{}",
        "[3]",
        '[{"label": "otter", "classes": [5], "right": []}]',
        '[{"label": 3, "classes": [5], "right": [], "wrong": []}]',
        '[{"label": "otter", "classes": [-1], "right": [], "wrong": []}]',
        '[{"label": "otter", "classes": [true], "right": [], "wrong": []}]',
        '[{"label": "otter", "classes": [5], "right": "a", "wrong": []}]',
        '[{"label": "otter", "classes": [5], "right": [5], "wrong": []}]',
    ],
)
@pytest.mark.sample("{}", '[{"label": "otter", "classes": [-1], "right": [], "wrong": []}]')
def test_a_damaged_record_of_labelled_pictures_is_refused(held: str, tmp_path: Path) -> None:
    text = baseline_text(baseline(None, tmp_path)).rstrip().removesuffix("}").rstrip()
    (tmp_path / "damaged.json").write_text(f'{text},\n"labelled": {held}}}', encoding="utf-8")
    with pytest.raises(UsageError, match=r": labelled\b"):
        read_baseline(tmp_path / "damaged.json")
