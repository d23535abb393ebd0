"""Findings of a check, as its page shows them."""

from dataclasses import dataclass

from hookscope.results.findings import Finding


@dataclass(frozen=True, slots=True)
class ShownFinding(Finding):
    """A finding with what it leads to; "" for nothing."""

    href: str = ""  # the layer's page or picture, unless that is where the finding stands
    anchor: str = ""  # its own identifier: "rule=dead-channels&finding=2"
    rule_href: str = ""  # the rule, further down
