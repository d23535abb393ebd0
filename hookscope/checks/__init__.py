"""Judge what was measured of a checkpoint, or in a run of `hookscope grads`, by rules with names, levels and limits.

Everything is loaded on first use, so that `--help` does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookscope.checks.judging import judge, judge_gradients, refused, wanted_rules
    from hookscope.checks.rules import GRADS_RULES, RULES, Limit, Rule, grads_limits, limits_from_text
    from hookscope.checks.settings import CheckSettings, Expectation, LayerSettings, RuleSettings

__all__ = [
    "GRADS_RULES",
    "RULES",
    "CheckSettings",
    "Expectation",
    "LayerSettings",
    "Limit",
    "Rule",
    "RuleSettings",
    "grads_limits",
    "judge",
    "judge_gradients",
    "limits_from_text",
    "refused",
    "wanted_rules",
]

_NAMES_BY_HOME = {
    "judging": ("judge", "judge_gradients", "refused", "wanted_rules"),
    "rules": ("GRADS_RULES", "RULES", "Limit", "Rule", "grads_limits", "limits_from_text"),
    "settings": ("CheckSettings", "Expectation", "LayerSettings", "RuleSettings"),
}


def __getattr__(name: str) -> object:
    home = next((home for home, names in _NAMES_BY_HOME.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'hookscope.checks' has no attribute {name!r}")
    return getattr(import_module(f"hookscope.checks.{home}"), name)
