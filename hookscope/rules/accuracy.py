"""Rules about labelled pictures: accuracy over all, by class, and in comparison with a baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hookscope.errors import UsageError
from hookscope.parameters import arg
from hookscope.results.accuracy import accuracy_words, class_words, lowest_words
from hookscope.results.binomial import CONFIDENCE, Interval, interval, mcnemar, pairs_needed, pictures_needed
from hookscope.rules.rule import WHOLE_NETWORK, RuleFinding, RuleTerms, limit, required, rule
from hookscope.rules.settings import RENEW
from hookscope.text import are, counted, figure, percent_text, printable, some_of

if TYPE_CHECKING:
    from hookscope.results.accuracy import Accuracy, ClassAccuracy, LabelledResult
    from hookscope.results.check import CheckMeasurements
    from hookscope.rules.baseline import BaselineClass

_NONE = "yours to set: how often a network may be wrong depends on what it is for; 0 sets no limit"
_NAMED = 3  # classes that a finding names


@rule("accuracy", "fail", "labels", ("non-finite-activation",))
@limit("min_fraction", 0.0, "share of the labelled pictures that must be classified right, 0-1", _NONE)
def accuracy(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """Too few labelled pictures are classified right.

    A picture counts as right if its label has the greatest score. The rule fails if even the upper end of the 95%
    interval (Clopper and Pearson's, which is exact) lies below the limit, and passes if its lower end does not. In
    between there are too few pictures to decide: a warning states about how many would be enough. Without a limit, the
    accuracy is reported, with a warning if it is indistinguishable from guessing, or worse: then labels, classes or
    preprocessing do not belong together, or the network is not trained. Off until `--data` or `data` below [input]
    names pictures.

    With `--multi-label` a picture has any number of labels. It is right if exactly its labels have a sigmoid above 0.5
    (the exact match ratio, scikit-learn's `accuracy_score` of label sets). Guessing then means giving every label as
    often as the network does, but to random pictures.
    """
    overall = required(measured.labelled).accuracy
    least = terms.limit("min_fraction")
    words = accuracy_words(overall)
    if not least and overall.multi_label:
        positives, hits = sum(label.count for label in overall.classes), sum(label.right for label in overall.classes)
        by_chance = sum(label.count * (label.right + label.false_positives) for label in overall.classes)
        guessing = by_chance / (overall.count * positives)
        bounds = interval(hits, positives)
        if bounds.low <= guessing:
            odds = _chance_words(bounds, guessing, "giving each label as often to any pictures")
            recalled = f"{hits:,} of their {counted(positives, 'label')} are given, {odds}"
            yield RuleFinding(WHOLE_NETWORK, f"{words}. {recalled}", "warn")
    elif not least:
        guessing = 1 / overall.class_count
        if overall.interval.low <= guessing:
            needed = _enough(pictures_needed(overall.share, guessing)) if overall.share > guessing else ""
            odds = _chance_words(overall.interval, guessing, f"guessing one of {overall.class_count:,} classes")
            yield RuleFinding(WHOLE_NETWORK, f"{words}, {odds}{needed}", "warn")
    elif overall.interval.high < least:
        yield RuleFinding(WHOLE_NETWORK, f"{words}; the limit is at least {_percent(least)}.{lowest_words(overall)}")
    elif overall.interval.low < least and not overall.share == least == 1:
        needed = _enough(pictures_needed(overall.share, least))
        thin = f"too few pictures to tell whether it is at least {_percent(least)}"
        yield RuleFinding(WHOLE_NETWORK, f"{words}; {thin}.{needed}{lowest_words(overall)}", "warn")


def _chance_words(bounds: Interval, guessing: float, how: str) -> str:
    """Compare an accuracy with guessing, whose share must lie in the accuracy's 95% interval or above it."""
    if bounds.high < guessing:
        return f"worse than {how}, {percent_text(guessing)}. Are the classes in the order of the labels?"
    return f"indistinguishable from {how}, {percent_text(guessing)}."


@rule("class-accuracy", "fail", "labels", ("non-finite-activation",))
@limit("min_fraction", 0.0, "share of the pictures of each label that must be classified right, 0-1", _NONE)
def class_accuracy(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """Too few labelled pictures of one class are classified right.

    Two swapped classes, or a class that was lost in fine-tuning, hardly change the overall accuracy. Look at the
    classes that the label is mistaken for. The rule checks every label like `accuracy`, but its intervals are valid for
    all classes together with 95% confidence (Bonferroni's correction: each leaves out 5% divided by the number of
    labels), so that even among a thousand classes none fails by chance. Classes with too few pictures to tell make one
    warning. Without a limit, the lowest accuracy is only reported.

    With `--multi-label` the share is the recall: the share of the pictures with the label to which the network gives
    it. Labels given to pictures without them lower F1 and `accuracy`.
    """
    least = terms.limit("min_fraction")
    overall = required(measured.labelled).accuracy
    confidence = 1 - (1 - CONFIDENCE) / len(overall.classes)
    failing: list[ClassAccuracy] = []
    thin: list[ClassAccuracy] = []
    for entry in overall.by_share if least else ():
        low, high = interval(entry.right, entry.count, confidence)
        if high < least:
            failing.append(entry)
        elif low < least and not entry.share == least == 1:
            thin.append(entry)
    of_labels = f"of {counted(len(overall.classes), 'label')}"
    if failing:
        words = f"{len(failing):,} {of_labels} {are(len(failing))} right less often than the limit"
        yield RuleFinding(WHOLE_NETWORK, f"{words}, {_percent(least)}: {_listed(failing, overall)}.")
    if thin:
        needed = _enough(pictures_needed(thin[0].share, least, confidence), f" of '{printable(thin[0].label, 80)}'")
        words = f"Too few pictures to tell for {len(thin):,} {of_labels} whether at least {_percent(least)} are right"
        yield RuleFinding(WHOLE_NETWORK, f"{words}: {_listed(thin, overall)}.{needed}", "warn")


@rule("accuracy-drop", "fail", "labels", ("non-finite-activation",))
@limit(
    "max_fraction",
    0.01,
    "how much the share of wrong labelled pictures may grow from that in the baseline, 0-1",
    "rounding its weights changes the class that the demo network gives, right or wrong, for 1 of 400 crops of "
    "photographs in float16, 9 in bfloat16 and 28 in int8; 12 networks trained for seconds lose up to 0.005 of 1,000 "
    "new pictures in bfloat16, 0.002 with weights in int8, 0.001 in float16, and none with another thread count, "
    "memory format or kernel",
)
def accuracy_drop(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """More labelled pictures are classified wrong than in the baseline.

    The same pictures, recognised by the digest of their content, are compared one by one: some that were right are
    wrong now, others the reverse. The rule fails if the share of wrong pictures grew by more than the limit and
    McNemar's exact test rules out chance (p at most 0.05, two-sided). Growth above the limit that may be chance is a
    warning, which states about how many pictures would decide. Pictures of the baseline that are missing in the data
    are also a warning. Write the baseline with `--data --update-baseline`; unless both have labelled pictures, the rule
    is off.
    """
    baseline, labelled = required(terms.baseline), required(measured.labelled)
    if baseline.multi_label != labelled.accuracy.multi_label:
        how = f"{'with' if baseline.multi_label else 'without'} {arg('multi_label')}"
        raise UsageError(f"The baseline does not fit: its labelled pictures were counted {how}. {RENEW}")
    count, before, lost_by_label, gained, remarks = _paired(baseline.labelled, labelled)
    lost = lost_by_label.total()
    drop, most, p = (lost - gained) / count, terms.limit("max_fraction"), mcnemar(lost, gained)
    if drop > most:
        label, worst = lost_by_label.most_common(1)[0]
        now = before - lost + gained
        were = "was" if before == 1 else "were"
        words = (
            f"{before:,} of {counted(count, 'picture')} of the baseline {were} right, {percent_text(before / count)}, "
            f"and now {now:,} {are(now)}, {percent_text(now / count)}: {lost:,} lost and {gained:,} gained, a loss of "
            f"{percent_text(drop)} (limit {_percent(most)}; McNemar's exact test: p = {figure(p)})"
        )
        most_lost = f" The label '{label}' loses most: {worst:,}."
        if p <= 1 - CONFIDENCE:
            yield RuleFinding(WHOLE_NETWORK, f"{words}.{most_lost}")
        else:
            needed = _enough(pairs_needed(lost, gained, count))
            yield RuleFinding(WHOLE_NETWORK, f"{words}, which may be chance.{needed}{most_lost}", "warn")
    if remarks:
        yield RuleFinding(WHOLE_NETWORK, f"Pictures in the baseline: {' and '.join(remarks)}.", "warn")


def _paired(
    baseline: Sequence[BaselineClass], now: LabelledResult
) -> tuple[int, int, Counter[str], int, Sequence[str]]:
    """Compare pictures that have the same digest and class; raises UsageError if there are none.

    Returns how many were compared and how many of them were right before, those lost by label, those gained, remarks.
    """
    compared = before = gained = absent = relabelled = 0
    lost: Counter[str] = Counter()
    digests = {digest for pictures in now.pictures.values() for digest in pictures}
    for entry in baseline:
        pictures = now.pictures.get(entry.classes, {})
        for digest, was_right in (*((sha, True) for sha in entry.right), *((sha, False) for sha in entry.wrong)):
            is_right = pictures.get(digest)
            if is_right is None:
                relabelled += digest in digests
                absent += digest not in digests
                continue
            compared += 1
            before += was_right
            lost[printable(entry.label, 80)] += was_right and not is_right
            gained += is_right and not was_right
    if not compared:
        raise UsageError(f"The baseline does not fit: none of its labelled pictures is in the data. {RENEW}")
    remarks = [f"{absent:,} {are(absent)} not in the data"] if absent else []
    remarks += [f"{relabelled:,} {'has' if relabelled == 1 else 'have'} another label"] if relabelled else []
    return compared, before, lost, gained, remarks


def _enough(count: int | None, suffix: str = "") -> str:
    return "" if count is None else f" About {counted(count, 'picture')}{suffix} would be enough, at this share."


def _percent(share: float) -> str:
    return f"{share * 100:.6g}%"


def _listed(classes: Sequence[ClassAccuracy], overall: Accuracy) -> str:
    return some_of([class_words(label, multi_label=overall.multi_label) for label in classes], _NAMED)
