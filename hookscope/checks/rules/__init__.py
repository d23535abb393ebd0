"""The rules of `hookscope check` and `hookscope grads`: a function each, in files by what they look at.

Nothing here loads NumPy or torch, for `hookscope grads --help` names rules: these files import results for annotations
only.
"""

from collections.abc import Iterable, Mapping

from hookscope.checks.rules import (
    accuracy,
    activations,
    batch_norm,
    drift,
    expectations,
    float8,
    forward,
    gradients,
    learning,
    stored,
    training_state,
    weights,
)
from hookscope.checks.rules.rule import Limit, Rule
from hookscope.errors import UsageError, nearest

_FILES = (
    *(stored, weights, float8, training_state),
    *(forward, batch_norm, activations, expectations, drift, accuracy, gradients, learning),
)

RULES: Mapping[str, Rule] = {
    each.identifier: each for file in _FILES for each in vars(file).values() if isinstance(each, Rule)
}
"""By identifier, in the order in which they are judged and reported: that of the files, and within each."""

GRADS_RULES = (
    *("non-finite-loss", "non-finite-activation", "non-finite-gradient", "zero-gradient", "dead-gradient"),
    *("vanishing-gradient", "exploding-gradient", "unused-parameter", "saturated-activation", "dead-channels"),
    "gradient-imbalance",
)
"""What `hookscope grads` judges, in the order in which it reports: causes first."""

ACTIVATIONS_RULES = ("non-finite-activation", "constant-activation", "dead-channels")
"""What `hookscope activations` judges, in the order in which it reports."""


def grads_limits() -> dict[str, tuple[Rule, str]]:
    """Return for each name of `hookscope grads --limit` the rule, and the limit's own name."""
    rules = [RULES[name] for name in GRADS_RULES]
    return {limit.grads_name: (rule, name) for rule in rules for name, limit in rule.limits.items()}


def limits_from_text(texts: Iterable[str]) -> dict[str, float]:
    """Return all limits of `hookscope grads` by name: the defaults, and what `--limit NAME=VALUE` gives instead."""
    limits = {name: rule.limits[own].default for name, (rule, own) in grads_limits().items()}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in limits:
            raise UsageError(
                f"--limit {text!r} names no limit.{nearest(name, limits)} Give one of {', '.join(limits)}."
            )
        try:
            limits[name] = float(value)
        except ValueError as error:
            raise UsageError(f"--limit {text!r} has no number. Give, for example, --limit {name}=0.5.") from error
        if not 0 < limits[name] < float("inf"):
            raise UsageError(f"--limit {text!r} is not a positive number. Give, for example, --limit {name}=0.5.")
    return limits


__all__ = ["ACTIVATIONS_RULES", "GRADS_RULES", "RULES", "Limit", "Rule", "grads_limits", "limits_from_text"]
