"""A rule is a function from measurements to findings, with a level and limits; and helpers to read results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hookscope.hooks.patterns import Pattern, parse_pattern
from hookscope.results.findings import Finding, Level
from hookscope.rules.settings import CheckSettings, RuleSettings
from hookscope.text import counted, safe_text, some_of

if TYPE_CHECKING:  # `hookscope grads --help` must not load NumPy
    from hookscope.results.activations import LayerRow
    from hookscope.results.check import CheckMeasurements, StoredValues
    from hookscope.results.gradients import GradientRow, Gradients, ParameterRow
    from hookscope.results.statistics import TensorStatistics
    from hookscope.rules.baseline import Baseline

T = TypeVar("T")

Needs = Literal["file", "network", "stored", "forward", "outputs", "gradients", "expectations", "labels", "baseline"]
"""The part of `CheckMeasurements` that a rule needs."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The value beyond which a rule reports a problem.

    Attributes:
        meaning: The measured value that is compared with it, and its unit, for people.
        basis: The standard, paper or experiment behind the number; "" for none.
        grads_name: Its name in `hookscope grads --limit`; "" if `grads` does not use it.
    """

    default: float
    meaning: str
    basis: str
    grads_name: str = ""


@dataclass(frozen=True, slots=True)
class FindingTarget:
    """The subject of a finding: `where`, or "" for the whole network; patterns match `names` and the class `kind`."""

    where: str = ""
    names: tuple[str, ...] = ()
    kind: str = ""


WHOLE_NETWORK = FindingTarget()
"""The whole network: no pattern matches it."""


def output_of(row: LayerRow | GradientRow) -> FindingTarget:
    """Return the target of a row: patterns match the layer's name and its aliases."""
    return FindingTarget(row.label, (row.layer, *row.aliases), row.kind)


def stored_in(values: StoredValues) -> FindingTarget:
    """Return the target of a parameter or buffer: patterns match its names and the names of its modules."""
    names = (values.name, *values.aliases)
    return FindingTarget(values.name, (*names, *(name.rpartition(".")[0] for name in names)), values.kind)


@dataclass(frozen=True, slots=True)
class RuleFinding:
    """A problem that a rule yields: one sentence about a target, with the measured value and the limit.

    It becomes a `Finding` at the level of the rule, but at most `at_most`; if the user has set no other level, at least
    `at_least`.
    """

    target: FindingTarget
    message: str
    at_most: Literal["fail", "warn"] = "fail"
    at_least: Literal["fail", "warn"] = "warn"


Evaluate = Callable[["CheckMeasurements", "RuleTerms"], Iterator[RuleFinding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        identifier: Stable name: "dead-channels".
        level: Level in `hookscope check`, unless the user sets a different one.
        needs: The measurements that it needs; it is skipped without them.
        evaluate: Yields problems. Its docstring gives the meaning and the explanation.
        silenced_by: Rules whose findings cause this rule's findings; it is then skipped.
        followers: Noun for the targets ("layer") if the first finding of a level lists all others; else "".
        yields_to: Rules that report the same. Where one of them has a finding as severe, this rule reports nothing.
    """

    identifier: str
    level: Level
    needs: Needs
    evaluate: Evaluate
    silenced_by: tuple[str, ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=dict)
    followers: str = ""
    yields_to: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """The problem, in one sentence."""
        return self._paragraphs[0]

    @property
    def explanation(self) -> str:
        """Causes, limits and remedies of the problem; paragraphs are separated by an empty line."""
        return "\n\n".join(self._paragraphs[1:])

    @property
    def _paragraphs(self) -> list[str]:
        return [" ".join(paragraph.split()) for paragraph in (self.evaluate.__doc__ or "").split("\n\n")]


_LIMITS: dict[Evaluate, dict[str, Limit]] = {}


def limit(name: str, default: float, meaning: str, basis: str, grads_name: str = "") -> Callable[[Evaluate], Evaluate]:
    """Return a decorator that adds a limit to the function of a rule. See `Limit` for the arguments."""

    def noted(function: Evaluate) -> Evaluate:
        _LIMITS[function] = {name: Limit(default, meaning, basis, grads_name), **_LIMITS.get(function, {})}
        return function

    return noted


def rule(
    identifier: str, level: Level, needs: Needs, silenced_by: tuple[str, ...] = (), **kwargs: Any
) -> Callable[[Evaluate], Rule]:
    """Return a decorator that makes a function a rule. See `Rule` for the arguments."""
    return lambda function: Rule(identifier, level, needs, function, silenced_by, _LIMITS.get(function, {}), **kwargs)


@dataclass(frozen=True, slots=True)
class RuleTerms:
    """The level and limits of one rule, for the network and for some layers, and the baseline to compare with."""

    rule: Rule
    level: Level
    settings: CheckSettings
    layers: Sequence[tuple[Pattern, RuleSettings]] = ()
    baseline: Baseline | None = None

    def level_of(self, target: FindingTarget) -> Level:
        """Return the level of findings about a target."""
        _, *of_layers = self._changes(target)
        return next((change.level for change in reversed(of_layers) if change.level), self.level)

    def is_on(self, target: FindingTarget) -> bool:
        """Tell whether the rule is on for a target."""
        return self.level_of(target) != "off"

    def limit(self, name: str, target: FindingTarget = WHOLE_NETWORK) -> float:
        """Return a limit of the rule for a target."""
        value = self.rule.limits[name].default
        for change in self._changes(target):
            value = change.limits.get(name, value)
        return value

    def findings(
        self, problems: Iterable[RuleFinding], reported_by: Mapping[str, Iterable[Finding]] | None = None
    ) -> list[Finding]:
        """Return findings with levels, where the rule is on and does not yield; with `followers`, one per level."""
        others = chain.from_iterable((reported_by or {}).get(name, ()) for name in self.rule.yields_to)
        reported_at = {(place, other.level) for other in others for place in other.places}
        reported = [finding for problem in problems if (finding := self._finding(problem, reported_at)) is not None]
        if not self.rule.followers:
            return reported
        by_level: dict[Level, list[Finding]] = {}
        for finding in reported:
            by_level.setdefault(finding.level, []).append(finding)
        return [self._with_followers(first, rest) for first, *rest in by_level.values()]

    def _finding(self, problem: RuleFinding, reported_at: Collection[tuple[str, str]]) -> Finding | None:
        level = self.level_of(problem.target)
        if level == "off":
            return None
        message = safe_text(problem.message)  # names come from the file, and findings go into logs
        if problem.at_least == "fail" and not any(change.level for change in self._changes(problem.target)):
            level = "fail"
        level = "warn" if "warn" in (level, problem.at_most) else "fail"
        where = problem.target.where
        is_known = (where, "fail") in reported_at or (where, level) in reported_at
        return None if is_known else Finding(self.rule.identifier, level, where, message)

    def _with_followers(self, first: Finding, rest: Sequence[Finding]) -> Finding:
        if not rest:
            return first
        names = tuple(finding.where for finding in rest)
        counts = f"{counted(len(rest), f'more {self.rule.followers}')} follow{'s' if len(rest) == 1 else ''}"
        message = safe_text(f"{first.message} {counts}: {listed(names)}.")
        return replace(first, message=message, followed_by=names)

    def _changes(self, target: FindingTarget) -> Iterator[RuleSettings]:
        """Yield the user's changes for the whole network, then for layers; a later change overrides."""
        yield self.settings.rules.get(self.rule.identifier, RuleSettings())
        for pattern, settings in self.layers:
            if target.names and any(pattern.matches(name, target.kind) for name in target.names) != pattern.exclude:
                yield settings


def terms_of(rule: Rule, settings: CheckSettings, baseline: Baseline | None = None) -> RuleTerms:
    """Return the level and limits of a wanted rule; raises UsageError if a layer pattern cannot be read.

    A rule that is off everywhere was selected by name, so its level is "fail". A rule that is on for some layers is off
    for all others.
    """
    layers = [
        (parse_pattern(layer.pattern), layer.rules[rule.identifier])
        for layer in settings.layers
        if rule.identifier in layer.rules
    ]
    level = _level_for_all(rule, settings) if is_on(rule, settings) else "fail"
    return RuleTerms(rule, level, settings, layers, baseline)


def is_on(rule: Rule, settings: CheckSettings) -> bool:
    """Tell whether a rule is on for the whole network, or for some layers."""
    of_layers = (layer.rules.get(rule.identifier, RuleSettings()).level for layer in settings.layers)
    return _level_for_all(rule, settings) != "off" or any(level not in (None, "off") for level in of_layers)


def _level_for_all(rule: Rule, settings: CheckSettings) -> Level:
    return settings.rules.get(rule.identifier, RuleSettings()).level or rule.level


def required(value: T | None) -> T:
    """Return a measurement or baseline, which exists because rules that need it are skipped otherwise."""
    assert value is not None  # noqa: S101
    return value


def arrived_outputs(gradients: Gradients, *, of_operations: bool = False) -> list[GradientRow]:
    """Return the outputs that received a gradient, zero or not, in forward order; by default of modules only."""
    arrived = [row for row in gradients.gradients if row.role == "output" and row.status in ("gradient", "zero")]
    return [row for row in arrived if of_operations or row.owner is None]


def of_modules(rows: Iterable[LayerRow]) -> list[LayerRow]:
    """Return the rows of modules, without operations."""
    return [row for row in rows if row.owner is None]


def quoted(row: LayerRow | GradientRow) -> str:
    """Return the label of a row in quotes; for an operation, with the line that calls it."""
    return f"'{row.label}'" + (f" ({row.source})" if row.source else "")


def named(row: LayerRow | GradientRow) -> str:
    """Return the name of a row in messages: "'relu' (ReLU)", or "'(model):relu' (net.py:14)" for an operation."""
    return f"'{row.label}' ({row.source or row.kind})"


def module_of(row: LayerRow | GradientRow) -> str:
    """Return the dotted name of a row's module; for an operation, of the module that calls it."""
    return row.layer if row.owner is None else row.owner


def in_forward_order(gradients: Gradients) -> list[ParameterRow]:
    """Sort parameters in the order in which modules ran; if a module has no row, after the preceding parameter."""
    positions = {row.layer: row.index for row in reversed(gradients.rows)}
    keyed: list[tuple[int, ParameterRow]] = []
    position = -1
    for parameter in gradients.parameters:
        position = positions.get(parameter.layer, position)
        keyed.append((position, parameter))
    return [parameter_row for _, parameter_row in sorted(keyed, key=lambda pair: pair[0])]


def parameter_of(parameter: ParameterRow) -> FindingTarget:
    """Return the target of a parameter: patterns match its name and the name of its module."""
    return FindingTarget(parameter.name, (parameter.name, parameter.layer), parameter.kind)


def is_within(layer: str, ancestor: str) -> bool:
    """Tell whether a module is `ancestor` or lies inside it, by their dotted names."""
    return layer == ancestor or not ancestor or layer.startswith(f"{ancestor}.")


def non_finite_count(statistics: TensorStatistics) -> int:
    """Return how many elements are NaN or Inf."""
    return (statistics.nan_count or 0) + (statistics.inf_count or 0)


def non_finite_words(statistics: TensorStatistics) -> str:
    """Return the counts of NaN and Inf in words: "3 NaN and 0 Inf in 10 values"."""
    values = counted(statistics.element_count, "value")
    return f"{statistics.nan_count or 0:,} NaN and {statistics.inf_count or 0:,} Inf in {values}"


def listed(names: Sequence[str]) -> str:
    """Return the first three names in quotes and how many more there are."""
    return some_of([f"'{name}'" for name in names], 3)
