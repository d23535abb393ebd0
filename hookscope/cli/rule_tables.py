"""The rules of `hookscope check` as Rich renderables: all of them as a table, one of them explained."""

from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hookscope.reporting.columns import Drawn, draw, fitted
from hookscope.rules import RULES
from hookscope.rules.rule import Needs, Rule

_STYLES = {"fail": "red", "warn": "yellow", "off": "dim"}
_LEAST_MEANING = 30  # cells; with less room, the meaning stands below the name

NEEDS: dict[Needs, str] = {
    "file": "the file",
    "network": "the file and the network",
    "stored": "parameters and buffers",
    "forward": "a forward pass",
    "outputs": "the outputs of several forward passes",
    "gradients": "a forward and a backward pass",
    "expectations": "expectations on named pictures",
    "labels": "predictions for labelled pictures",
    "baseline": "a baseline",
}


def rules_table(width: int) -> RenderableType:
    """Return all rules in the order in which they are judged: identifier, default level, what it needs, meaning."""
    rules = [*RULES.values()]
    columns = [
        Drawn("rule", [Text(rule.identifier) for rule in rules], rank=0, words=True),
        Drawn("level", [Text(rule.level, style=_STYLES[rule.level]) for rule in rules], rank=1, words=True),
        Drawn("needs", [Text(rule.needs) for rule in rules], rank=3, words=True),
        Drawn("meaning", [Text(rule.meaning) for rule in rules], rank=2, words=True, max_width=_LEAST_MEANING),
    ]
    return draw(fitted(columns, width), width, [""] * len(rules), range(len(rules)))


def rule_explanation(rule: Rule) -> RenderableType:
    """Return everything about a rule: meaning, level, limits with their basis, causes and remedies."""
    parts: list[RenderableType] = [
        Text(rule.identifier, style="bold"),
        Text(rule.meaning),
        Text(f"Default level: {rule.level}. Looks at {NEEDS[rule.needs]}."),
    ]
    if rule.followers:
        parts.append(Text(f"One finding names the first {rule.followers} and counts those that follow."))
    for name, limit in rule.limits.items():
        # As a configuration names it.
        parts += ["", Text(f"Limit {name.replace('_', '-')} = {limit.default:.10g}", style="bold")]
        sentences = (limit.meaning, *((f"Basis: {limit.basis}",) if limit.basis else ()))
        parts += [Padding(Text(sentence), (0, 0, 0, 2), expand=False) for sentence in sentences]
    for paragraph in filter(None, rule.explanation.split("\n\n")):
        parts += ["", Text(paragraph)]
    return Group(*parts)


def rule_help(rule: Rule) -> str:
    """Return what `rule_explanation` shows as plain text, a paragraph on a line."""
    text = StringIO()
    Console(file=text, width=100_000, color_system=None, highlight=False).print(rule_explanation(rule))
    return text.getvalue().rstrip("\n")
