"""What may stand in a configuration file, and which setting each key comes to."""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hookscope.checks.configuration import values
from hookscope.checks.configuration.document import Entry, find
from hookscope.checks.configuration.values import Reader
from hookscope.checks.rules import RULES, Rule
from hookscope.checks.settings import CheckSettings, Expectation, LayerSettings, RuleSettings
from hookscope.errors import UsageError, nearest
from hookscope.text import printable

Keys = Mapping[str, tuple[str, Reader]]
"""Of a table: for each key the name of its setting and the reader of its value."""

_DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"),
)

SECTIONS: Mapping[str, Keys] = {
    "model": {
        "arch": ("arch", values.dotted),
        "arguments": ("model_arguments", values.arguments),
        "key": ("key", values.text),
        "allow-missing": ("allow_missing", values.list_of(values.text)),
        "allow-unexpected": ("allow_unexpected", values.list_of(values.text)),
    },
    "input": {
        "images": ("images", values.list_of(values.path)),
        "shape": ("shape", values.shape),
        "resize": ("resize", values.pixels),
        "crop": ("crop", values.pixels),
        "mean": ("mean", values.mean),
        "std": ("std", values.std),
        "max-pixels": ("max_pixels", values.whole(1)),
        "batch-axis": ("batch_axis", values.batch_axis),
        "named": ("named", values.named_inputs),
        "batch-size": ("batch_size", values.whole(1)),
        "seed": ("seed", values.whole(0)),
    },
    "output": {
        "shape": ("output_shape", values.list_of(values.output_size)),
        "dtype": ("output_dtype", values.one_of(*_DTYPES)),
        "key": ("output_key", values.text),
    },
    "gradients": {
        "loss": ("loss", values.dotted),
        "target": ("target", values.target),
        "mode": ("mode", values.one_of("eval", "train")),
    },
    "baseline": {"file": ("baseline", values.path)},
}
"""The tables that hold settings one by one."""

_EXPECT: Keys = {
    "image": ("image", values.path),
    "top1": ("top1", values.class_name),
    "contains": ("contains", values.list_of(values.class_name)),
    "k": ("k", values.whole(1)),
    "min-probability": ("min_probability", values.number(0, 1)),
}

# What rules look at that no pattern over layers can single out a part of.
_ABOUT_ALL = ("file", "network", "outputs", "expectations")

_level = values.one_of("fail", "warn", "off")


def read_settings(config: Path | None, folder: Path) -> CheckSettings:
    """Return the settings that a configuration file holds; paths in them begin at its folder.

    Args:
        config: The file, relative to the working directory; of a "pyproject.toml" its table [tool.hookscope]. None for
            "hookscope.toml" in `folder`, else the table [tool.hookscope] of its "pyproject.toml", else the defaults.
        folder: Where to look if `config` is None.

    Raises:
        UsageError: If the file cannot be read, is not TOML, or holds an unknown key or a value that cannot be right.
    """
    try:
        top = find(config, folder)
        return CheckSettings() if top is None else _settings(top)
    except RecursionError as error:
        name = printable(str(config or folder))
        raise UsageError(
            f"The configuration of {name} is nested too deeply. Lists in tables are all it needs."
        ) from error


def _settings(top: Entry) -> CheckSettings:
    tables: dict[str, tuple[str, Reader]] = {
        **{name: (name, partial(_table, keys=keys)) for name, keys in SECTIONS.items()},
        "rules": ("rules", _rules),
        "layers": ("layers", values.list_of(_layers)),
        "expect": ("expectations", values.list_of(_expectation)),
    }
    found = _table(top, tables)
    flat: dict[str, Any] = {}
    for name, value in found.items():
        flat |= value if name in SECTIONS else {name: value}
    settings = CheckSettings(**flat, source=top.document.name)
    if settings.shape is not None and (settings.images or settings.expectations):
        raise top.at("input").at("shape").wrong("shape in [input] is that of noise, but pictures are named. Drop one.")
    return settings


def limit_key(name: str) -> str:
    """Return how a configuration spells the name of a limit: "max-fraction" for "max_fraction"."""
    return name.replace("_", "-")


def _table(entry: Entry, keys: Keys, *, hint: str = "") -> dict[str, Any]:
    """Return the values of a table by the names of their settings; `hint` is for keys that are like none."""
    if not isinstance(entry.value, dict):
        raise entry.mistyped("a table")
    for key in entry.value:
        if key not in keys:
            raise entry.unknown(key, _hint(key, keys) or hint or f" Known: {', '.join(map(repr, keys))}.")
    return {keys[key][0]: keys[key][1](entry.at(key)) for key in entry.value}


def _hint(key: str, known: Iterable[str]) -> str:
    """Return where an unknown key would be right, else which key is nearest; "" if there is none."""
    tables: Mapping[str, Iterable[str]] = {**SECTIONS, "rules": RULES, "[expect]": _EXPECT}
    homes = [f"[{table}]" for table, keys in tables.items() if key in keys]
    return f" It belongs in {' or '.join(homes)}." if homes else nearest(key, known, count=1)


def _rules(entry: Entry) -> dict[str, RuleSettings]:
    """Read [rules]; what only repeats the defaults is no change, and is left out."""
    changed = {}
    for name, settings in _rule_table(entry).items():
        rule = RULES[name]
        limits = {each: limit for each, limit in settings.limits.items() if limit != rule.limits[each].default}
        changed[name] = RuleSettings(None if settings.level == rule.level else settings.level, limits)
    return {name: settings for name, settings in changed.items() if settings != RuleSettings()}


def _rule_table(entry: Entry, *also: str) -> dict[str, RuleSettings]:
    """Read the rules in a table that may hold keys `also` that are none."""
    keys: Keys = {name: (name, partial(_rule, rule=rule)) for name, rule in RULES.items()}
    others: Keys = {name: (name, lambda _: None) for name in also}
    found = _table(entry, {**keys, **others}, hint=" `hookscope check --rules` lists the rules.")
    return {name: settings for name, settings in found.items() if name not in also}


def _rule(entry: Entry, rule: Rule) -> RuleSettings:
    if isinstance(entry.value, str):
        return RuleSettings(_level(entry))
    if not isinstance(entry.value, dict):
        raise entry.mistyped("a level ('fail', 'warn' or 'off') or a table of level and limits")
    # What is called a fraction is at most 1.
    highest = {name: 1 if "fraction" in name.split("_") else math.inf for name in rule.limits}
    limits = {limit_key(name): (name, values.number(0, most)) for name, most in highest.items()}
    found = _table(entry, {"level": ("level", _level), **limits})
    return RuleSettings(found.pop("level", None), found)


def _layers(entry: Entry) -> LayerSettings:
    rules = _rule_table(entry, "pattern")
    if "pattern" not in entry.value:
        raise entry.wrong("[[layers]] lacks a pattern. Say which layers are meant, for example pattern = 'layer4.*'.")
    for name, settings in rules.items():
        if RULES[name].needs in _ABOUT_ALL:
            raise entry.at(name).wrong(f"'{name}' is about the whole checkpoint, not about layers. Set it in [rules].")
        if RULES[name].needs == "gradients" and settings.limits:
            raise entry.at(name).wrong(f"the limits of '{name}' are about the whole network. Set them in [rules].")
    if not rules:
        raise entry.wrong("[[layers]] changes no rule. Add one, for example dead-channels = 'off'.")
    return LayerSettings(values.pattern(entry.at("pattern")), rules)


def _expectation(entry: Entry) -> Expectation:
    found = _table(entry, _EXPECT)
    if "image" not in found:
        raise entry.wrong("[[expect]] lacks an image. Name the picture, for example image = 'cat.jpg'.")
    if found.keys() <= {"image", "k"}:
        raise entry.wrong("[[expect]] expects nothing. Add top1, contains or min-probability.")
    expectation = Expectation(**found)
    if "k" in found and not expectation.contains:
        raise entry.at("k").wrong("k in [[expect]] is how many places 'contains' looks at, and there is none. Add it.")
    if len(expectation.contains) > expectation.k:
        raise entry.at("contains").wrong(
            f"contains in [[expect]] names {len(expectation.contains)} classes, more than the first {expectation.k} "
            "can hold. Raise k."
        )
    return expectation
