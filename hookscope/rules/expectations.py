"""The rule that compares predictions for named pictures with the configuration's expectations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hookscope.errors import UsageError, nearest
from hookscope.rules.rule import FindingTarget, RuleFinding, RuleTerms, required, rule
from hookscope.rules.settings import Expectation
from hookscope.text import counted, printable

if TYPE_CHECKING:
    from hookscope.results.check import CheckMeasurements
    from hookscope.results.comparison import Prediction


@rule("expectation", "fail", "expectations", ("non-finite-activation",))
def expectation(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """A named picture is not classified as expected.

    The configuration states what a picture must be classified as: top1, classes that the best k must contain,
    min_probability. A difference reveals shuffled classes, wrong preprocessing or a half-trained network, which other
    rules may miss. Compare class names and preprocessing with those of the training. Off until the configuration names
    expectations.
    """
    forward = required(measured.forward)
    inputs = [record.name for record in forward.inputs]
    predictions = {entry.input_index: entry for entry in forward.predictions}
    for expected in terms.settings.expectations:
        named = (*(() if expected.top1 is None else (expected.top1,)), *expected.contains)
        wanted = {label: _indices(label, measured.model.categories) for label in named}
        name = str(expected.image)
        prediction = predictions.get(inputs.index(name)) if name in inputs else None
        if prediction is not None and prediction.is_nan:
            messages = iter(["has NaN among its class scores, so no class is first."])
        elif prediction is not None:
            messages = _unmet(expected, wanted, prediction, measured.model.categories)
        elif name in inputs:
            reason = measured.unmeasured.get("expectation", "the network returned no class scores; name the output.")
            messages = iter([f"could not be checked: {reason.rstrip('.')}."])
        else:
            messages = iter(["is not among the inputs as a single one: name one picture, or a file of one input."])
        for message in messages:
            yield RuleFinding(FindingTarget(name), f"'{name}' {message}")


def _indices(wanted: str | int, categories: tuple[str, ...]) -> frozenset[int]:
    """Return the indices of a class; two of ImageNet's names, "crane" and "maillot", stand for two classes each."""
    if isinstance(wanted, int):
        if wanted < 0 or (categories and wanted >= len(categories)):
            bounds = f"the network has 0 to {len(categories) - 1}" if categories else "they count from 0"
            raise UsageError(f"The expectations name class {wanted}, but {bounds}.")
        return frozenset([wanted])
    named = f"The expectations name class '{printable(wanted, 80)}'"
    if not categories:
        raise UsageError(f"{named}, but the names of this network's classes are not known; give its index.")
    indices = frozenset(index for index, name in enumerate(categories) if name.casefold() == wanted.casefold())
    if not indices:
        raise UsageError(f"{named}, which the network does not have.{nearest(wanted, categories)}")
    return indices


def _unmet(
    expected: Expectation, wanted: dict[str | int, frozenset[int]], prediction: Prediction, categories: tuple[str, ...]
) -> Iterator[str]:
    ranked = prediction.class_indices
    first, share = ranked[0], prediction.probabilities[0]
    classified = f"is classified as {_class(first, categories)} with probability {share:.3f} ({prediction.reading}"
    if expected.top1 is not None and first not in wanted[expected.top1]:
        place = next((str(rank) for rank, index in enumerate(ranked, 1) if index in wanted[expected.top1]), "")
        rank = f"in place {place}" if place else f"not among the first {len(ranked)}"
        yield f"{classified}); expected first is {_named(expected.top1, categories)}, which is {rank}."
    elif expected.min_probability is not None and share < expected.min_probability:
        yield f"{classified}; limit: at least {expected.min_probability:g})."
    among = ranked[: expected.k]
    for contain in expected.contains:
        if wanted[contain].isdisjoint(among):
            got = ", ".join(_class(index, categories) for index in among[:5])
            yield (
                f"does not have {_named(contain, categories)} among its first"
                f" {counted(expected.k, 'class', 'classes')}: {got}{', …' if len(among) > 5 else ''}."
            )


def _class(index: int, categories: tuple[str, ...]) -> str:
    return f"'{categories[index]}' ({index})" if index < len(categories) else f"class {index}"


def _named(wanted: str | int, categories: tuple[str, ...]) -> str:
    return _class(wanted, categories) if isinstance(wanted, int) else f"'{wanted}'"
