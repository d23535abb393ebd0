"""What one rule is held to: its level and limits, also where they differ between layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hookscope.checks.rules import Rule
from hookscope.checks.settings import CheckSettings, RuleSettings
from hookscope.hooks.patterns import Pattern, parse_pattern
from hookscope.results.activations import LayerRow
from hookscope.results.check import Finding, Level, StoredValues
from hookscope.text import safe_text


@dataclass(frozen=True, slots=True)
class Subject:
    """What a finding is about, as patterns see it.

    Attributes:
        where: For people: label of an output, name of a parameter; "" for the whole checkpoint.
        names: Dotted names, any of which a pattern may match; none for the whole checkpoint.
        kind: Class name of the module.
    """

    where: str = ""
    names: tuple[str, ...] = ()
    kind: str = ""


WHOLE = Subject()
"""The checkpoint itself: no pattern is about it."""


def output_of(row: LayerRow) -> Subject:
    """Return a layer's output; the layer's own name and its aliases count."""
    return Subject(row.label, (row.layer, *row.aliases), row.kind)


def stored_in(values: StoredValues) -> Subject:
    """Return a parameter or buffer; its own names count, and those of the modules that own it."""
    names = (values.name, *values.aliases)
    return Subject(values.name, (*names, *(name.rpartition(".")[0] for name in names)), values.kind)


@dataclass(frozen=True, slots=True)
class Terms:
    """What one rule is held to.

    Attributes:
        rule: The rule.
        level: Where no layer's settings say otherwise.
        settings: What the check was told.
        layers: What was changed for some layers; a later one goes over an earlier one.
    """

    rule: Rule
    level: Level
    settings: CheckSettings
    layers: Sequence[tuple[Pattern, RuleSettings]] = ()

    def level_of(self, subject: Subject) -> Level:
        """Return the level of findings about `subject`."""
        level = self.level
        for settings in self._layers_of(subject):
            level = settings.level or level
        return level

    def is_on(self, subject: Subject) -> bool:
        """Tell whether the rule is about `subject` at all."""
        return self.level_of(subject) != "off"

    def limit(self, name: str, subject: Subject = WHOLE) -> float:
        """Return a limit of the rule for `subject`."""
        changes = self.settings.rules.get(self.rule.identifier, RuleSettings())
        value = changes.limits.get(name, self.rule.limits[name].default)
        for settings in self._layers_of(subject):
            value = settings.limits.get(name, value)
        return value

    def object_to(self, subject: Subject, message: str, at_most: Literal["fail", "warn"] = "fail") -> Iterator[Finding]:
        """Yield the finding about `subject`; none where the rule is off for it.

        Args:
            subject: What it is about.
            message: One sentence with the measured value and the limit.
            at_most: "warn" keeps the finding from failing the check, whatever the level.
        """
        level = self.level_of(subject)
        if level != "off":
            # Names come from the file, and a finding goes into logs.
            message = safe_text(message)
            yield Finding(
                self.rule.identifier, "warn" if "warn" in (level, at_most) else "fail", subject.where, message
            )

    def _layers_of(self, subject: Subject) -> Iterator[RuleSettings]:
        """Yield what was changed for layers that `subject` is of, the last word last."""
        for pattern, settings in self.layers:
            if subject.names and any(pattern.matches(name, subject.kind) for name in subject.names) != pattern.exclude:
                yield settings


def terms_of(rule: Rule, settings: CheckSettings) -> Terms:
    """Return what a wanted rule is held to.

    A rule that is off everywhere is wanted because it was selected by name; then it fails. Where it is off but for some
    layers, it stays off for all others.

    Raises:
        UsageError: If a pattern of `settings` cannot be read.
    """
    layers = [
        (parse_pattern(layer.pattern), layer.rules[rule.identifier])
        for layer in settings.layers
        if rule.identifier in layer.rules
    ]
    level = level_for_all(rule, settings)
    if level == "off" and not is_on_for_some(rule, settings):
        level = "fail"
    return Terms(rule, level, settings, layers)


def level_for_all(rule: Rule, settings: CheckSettings) -> Level:
    """Return the level of a rule where no layer's settings say otherwise."""
    return settings.rules.get(rule.identifier, RuleSettings()).level or rule.level


def is_on_for_some(rule: Rule, settings: CheckSettings) -> bool:
    """Tell whether some layers' settings turn a rule on."""
    changes = (layer.rules.get(rule.identifier, RuleSettings()) for layer in settings.layers)
    return any(each.level not in (None, "off") for each in changes)
