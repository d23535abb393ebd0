"""Judge what was measured of a checkpoint by rules that have names, levels and limits.

The rules are files by what they look at: stored (parameters and buffers), finite, activations, outputs, expectations,
drift, gradients. All but `RULES` and its kin is loaded on first use, so that `--help`, which names rules, does not wait
for NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hookscope.checks.rules import RULES, Limit, Rule

if TYPE_CHECKING:
    from hookscope.checks.judging import judge, refused
    from hookscope.checks.selection import wanted_rules
    from hookscope.checks.settings import CheckSettings, Expectation, LayerSettings, RuleSettings

__all__ = [
    "RULES",
    "CheckSettings",
    "Expectation",
    "LayerSettings",
    "Limit",
    "Rule",
    "RuleSettings",
    "judge",
    "refused",
    "wanted_rules",
]

_HOME_BY_NAME = {
    "CheckSettings": "settings",
    "Expectation": "settings",
    "LayerSettings": "settings",
    "RuleSettings": "settings",
    "judge": "judging",
    "refused": "judging",
    "wanted_rules": "selection",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_BY_NAME:
        raise AttributeError(f"module 'hookscope.checks' has no attribute {name!r}")
    return getattr(import_module(f"hookscope.checks.{_HOME_BY_NAME[name]}"), name)
