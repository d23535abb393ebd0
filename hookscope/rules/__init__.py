"""The rules of `check`, `grads` and `activations`: one function per rule, in files by the measurements they need.

Importing them loads neither NumPy nor torch, because `hookscope grads --help` lists rules: modules that load either are
imported for annotations only.
"""

from collections.abc import Iterator, Mapping
from sys import float_info

from hookscope.errors import UsageError, nearest
from hookscope.options import Limits
from hookscope.parameters import arg
from hookscope.rules import (
    accuracy,
    activations,
    batch_norm,
    drift,
    expectations,
    forward,
    gradients,
    learning,
    stored,
    training_state,
    weights,
)
from hookscope.rules.rule import Rule
from hookscope.text import number_in

_FILES = (
    *(stored, weights, training_state),
    *(forward, batch_norm, activations, expectations, drift, accuracy, gradients, learning),
)

RULES: Mapping[str, Rule] = {
    rule.identifier: rule for file in _FILES for rule in vars(file).values() if isinstance(rule, Rule)
}
"""All rules by identifier, in the order of judging and reporting: by file, in the order of `_FILES`."""

GRADS_RULES = (
    *("non-finite-loss", "non-finite-activation", "non-finite-gradient", "zero-gradient", "dead-gradient"),
    *("vanishing-gradient", "exploding-gradient", "unused-parameter", "saturated-activation", "dead-channels"),
    *("gradient-imbalance", "gradient-over-time"),
)
"""The rules of `hookscope grads` in the order of its report: causes first."""

ACTIVATIONS_RULES = ("non-finite-activation", "constant-activation", "dead-channels")
"""The rules of `hookscope activations` in the order of its report."""

HISTORY_RULES = {
    "dead-filters-appear": "a weight or scale has more output channels that are zero than in the first file",
    "norm-jump": "a norm grew by a factor of 10 (of a variance by 100; only if its root mean square times √inputs"
    " exceeds 3), or a weight's or scale's fell by 10",
    "weights-traded": "weights of one shape exchanged their values; copies do not count",
    "weight-jump": "a weight or scale moved by half of its norm, and four times as far as before, later, and as others"
    " of its kind (a scale also by 0.5 in root mean square); not judged in the second file",
    "weight-stops": "a weight that moved has exactly the previous values, while most others moved",
    "frozen-weight-moves": "a parameter of `requires_grad` False changed; usually by `zero_grad(set_to_none=False)`",
    "statistics-reset": "a BatchNorm is back at mean 0 and variance 1, or counted fewer batches",
    "tensors-change": "a tensor is missing, new, or has another shape; fails if only one differs, unless it is new",
    "dtype-change": "a tensor has another dtype",
    "optimizer-reset": "an optimiser's state is missing (except in the last file), newly empty or zero, or counted"
    " fewer steps",
}
"""What the rules of `hookscope history` report; the six after the first compare each file with the one before it."""


def grads_limits() -> dict[str, tuple[Rule, str]]:
    """Return, for each limit name in `hookscope grads --limit`, the rule and the limit's name in the rule."""
    rules = [RULES[name] for name in GRADS_RULES]
    return {limit.grads_name: (rule, name) for rule in rules for name, limit in rule.limits.items()}


def limits_of_grads(overrides: Limits) -> dict[str, float]:
    """Return all limits of `hookscope grads` by name: the default, or the value that `--limit NAME=VALUE` gives."""
    limits = {name: rule.limits[limit].default for name, (rule, limit) in grads_limits().items()}
    for text, name, value in _named_limits(overrides):
        if name not in limits:
            remedy = f"{nearest(name, limits)} Give one of {', '.join(limits)}."
            raise UsageError(f"{arg('limit')} {text!r} names no limit.{remedy}")
        limits[name] = _limit_value(text, name, value, *grads_limits()[name], least=float_info.min)
    return limits


def check_limits(overrides: Limits) -> dict[str, dict[str, float]]:
    """Return limits by rule and name, of values by "RULE.LIMIT" or texts "RULE.LIMIT=VALUE"; UsageError if wrong."""
    limits: dict[str, dict[str, float]] = {}
    choices = {f"{name}.{key.replace('_', '-')}": (rule, key) for name, rule in RULES.items() for key in rule.limits}
    for text, written, value in _named_limits(overrides):
        name = written.replace("_", "-")
        if name not in choices:
            raise UsageError(f"{arg('limit')} {text!r} names no limit.{_limit_hint(name, choices)}")
        rule, limit = choices[name]
        limits.setdefault(rule.identifier, {})[limit] = _limit_value(text, name, value, rule, limit)
    return limits


def _named_limits(overrides: Limits) -> Iterator[tuple[str, str, str | float]]:
    if isinstance(overrides, Mapping):
        yield from ((f"{name}={value}", str(name), value) for name, value in overrides.items())
    else:
        for text in [overrides] if isinstance(overrides, str) else overrides:
            name, _, value = text.partition("=")
            yield text, name, value


def _limit_hint(name: str, choices: Mapping[str, tuple[Rule, str]]) -> str:
    """Return a sentence, after a space, that suggests limits for a name that no limit has."""
    rule_name = name.partition(".")[0]
    of_grads = {key.replace("_", "-"): f"{rule.identifier}.{limit}" for key, (rule, limit) in grads_limits().items()}
    if name in of_grads:
        return f" In `check` it is {of_grads[name].replace('_', '-')}."
    if of_rule := [choice for choice in choices if choice.startswith(f"{rule_name}.")]:
        return f" Give one of {', '.join(of_rule)}."
    if rule_name in RULES:
        return f" The rule {rule_name} has no limits."
    return f"{nearest(name, choices)} Give RULE.LIMIT=VALUE, such as dead-channels.max-fraction=0.5."


def _limit_value(text: str, name: str, value: str | float, rule: Rule, limit: str, least: float = 0) -> float:
    is_share = "fraction" in limit
    example = f"Give, for example, {arg('limit')} {name}={0.5 if is_share else rule.limits[limit].default:g}."
    try:
        number = number_in(value, float)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{arg('limit')} {text!r} has no number. {example}") from error
    if is_share and not 0 <= number <= 1:
        raise UsageError(f"{arg('limit')} {text!r} is not between 0 and 1. {example}")
    if not least <= number < float("inf"):
        raise UsageError(f"{arg('limit')} {text!r} is not a positive, finite number. {example}")
    return number
