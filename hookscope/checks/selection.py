"""Which rules to judge by: levels in the settings, `--select` and `--ignore`."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from hookscope.checks.context import is_on_for_some, level_for_all
from hookscope.checks.rules import RULES
from hookscope.checks.settings import CheckSettings, RuleSettings
from hookscope.errors import UsageError, nearest
from hookscope.text import printable


def wanted_rules(settings: CheckSettings, select: Sequence[str] = (), ignore: Sequence[str] = ()) -> frozenset[str]:
    """Return the identifiers of the rules to judge by.

    Without `select` those are all that are not off, or that some layers' settings turn on. With it they are the
    selected ones and no others; one that is off everywhere is then judged at level "fail". `ignore` takes rules away,
    selected ones too.

    Args:
        settings: What the check was told.
        select: Identifiers, or globs over them.
        ignore: Likewise.

    Raises:
        UsageError: If one of `select` or `ignore` matches no rule, no rule is left, or the settings name a rule or a
            limit that there is not.
    """
    _refuse_unknown(settings)
    on = {
        name for name, rule in RULES.items() if level_for_all(rule, settings) != "off" or is_on_for_some(rule, settings)
    }
    chosen = _matching("--select", select) if select else on
    left = frozenset(chosen - _matching("--ignore", ignore))
    if not left:
        raise UsageError("No rule is left to check; leave out --ignore, or turn rules on in the configuration.")
    return left


def _matching(option: str, patterns: Iterable[str]) -> set[str]:
    """Return the rules that any of the patterns matches; each must match one."""
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in RULES if fnmatchcase(name, pattern)}
        if not matched:
            hint = nearest(pattern, RULES)
            raise UsageError(
                f"{option} '{printable(pattern, 80)}' is no rule.{hint} List them with `hookscope check --rules`."
            )
        found |= matched
    return found


def _refuse_unknown(settings: CheckSettings) -> None:
    given = [*settings.rules.items(), *(each for layer in settings.layers for each in layer.rules.items())]
    for name, changes in given:
        _refuse_unknown_names(name, changes)


def _refuse_unknown_names(name: str, changes: RuleSettings) -> None:
    if name not in RULES:
        raise UsageError(f"The settings name a rule '{printable(name, 80)}' that there is not.{nearest(name, RULES)}")
    for limit in changes.limits:
        if limit not in RULES[name].limits:
            hint = nearest(limit, RULES[name].limits)
            raise UsageError(f"The rule {name} has no limit '{printable(limit, 80)}'.{hint}")
