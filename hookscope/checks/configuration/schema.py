"""The keys of a configuration file, the setting that each becomes, and how values are read."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hookscope.checks.configuration.document import Entry, find
from hookscope.checks.rules import RULES, Rule
from hookscope.checks.settings import CheckSettings, Expectation, LayerSettings, RuleSettings
from hookscope.errors import UsageError, nearest
from hookscope.hooks.patterns import parse_pattern
from hookscope.text import printable

Reader = Callable[[Entry], Any]
"""Reads the value of an entry; raises the entry's UsageError if it is wrong."""

_TENSOR_SUFFIXES = (".npy", ".pt", ".pth", ".safetensors")
_PIXELS = re.compile(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})?|none")


def _text(entry: Entry) -> str:
    if not isinstance(entry.value, str) or not entry.value or "\0" in entry.value:
        raise entry.mistyped("a string that is not empty")
    return entry.value


def _one_of(*names: str) -> Reader:

    def read(entry: Entry) -> str:
        if not isinstance(entry.value, str) or entry.value not in names:
            raise entry.mistyped(f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}")
        return entry.value

    return read


def _whole(lowest: int, wanted: str = "") -> Reader:
    """Return the reader of a whole number that fits into 64 bits; `wanted` is how messages call it."""

    def read(entry: Entry) -> int:
        if not _is_whole(entry.value) or not lowest <= entry.value < 2**63:
            raise entry.mistyped(wanted or f"a whole number from {lowest}")
        return int(entry.value)

    return read


def _number(lowest: float = -math.inf, highest: float = math.inf) -> Reader:
    """Return the reader of a finite number."""

    def read(entry: Entry) -> float:
        fits = _is_whole(entry.value) or isinstance(entry.value, float)
        # 1e300: an int of any length compares with a float, but does not convert; infinity is no limit.
        if not fits or not lowest <= entry.value <= highest or not abs(entry.value) <= 1e300:
            start = "" if math.isinf(lowest) else f" from {lowest:g}"
            raise entry.mistyped(f"a number{start}" + ("" if math.isinf(highest) else f" to {highest:g}"))
        return float(entry.value)

    return read


def _list_of(read: Reader) -> Reader:

    def read_all(entry: Entry) -> tuple[Any, ...]:
        if not isinstance(entry.value, list):
            raise entry.mistyped("a list")
        return tuple(read(entry.at(index)) for index in range(len(entry.value)))

    return read_all


def _path(entry: Entry) -> Path:
    """Read a path, relative to the configuration."""
    return entry.document.folder / _text(entry)


def _dotted(entry: Entry) -> str:
    """Read a name, or FILE.py:NAME with the file relative to the configuration."""
    source, colon, name = _text(entry).rpartition(":")
    return f"{entry.document.folder / source}:{name}" if colon and source.endswith(".py") else _text(entry)


def _target(entry: Entry) -> str:
    """Read what `--target` takes; a file of targets is relative to the configuration."""
    if isinstance(entry.value, str):
        return str(_path(entry)) if entry.value.lower().endswith(_TENSOR_SUFFIXES) else _text(entry)
    return str(_class_name(entry))


def _class_name(entry: Entry) -> str | int:
    read = _text if isinstance(entry.value, str) else _whole(0, "a class, by name or index")
    return read(entry)


def _arguments(entry: Entry) -> tuple[str, ...]:
    """Read a table of arguments into what `--model-arg` takes: Python literals, so that a string stays one."""
    if not isinstance(entry.value, dict):
        raise entry.mistyped("a table of names and values")
    for name, value in entry.value.items():
        if not name.isidentifier():
            raise entry.at(name).wrong(f"'{printable(name)}' cannot be the name of an argument.")
        if not _is_literal(value):
            raise entry.at(name).mistyped("a string, finite number, true, false, or a list of these")
    return tuple(f"{name}={value!r}" for name, value in entry.value.items())


def _named_inputs(entry: Entry) -> tuple[str, ...]:
    """Read a table of inputs by name into what `--input` takes; a string is a file, relative to the configuration."""
    found = _arguments(entry)
    files = {name: _path(entry.at(name)) for name, value in entry.value.items() if isinstance(value, str)}
    return tuple(
        f"{name}={files[name]}" if name in files else text for name, text in zip(entry.value, found, strict=True)
    )


def _batch_axis(entry: Entry) -> str:
    """Read what `--batch-axis` takes: an axis, "auto" or "none"."""
    if _is_whole(entry.value) and abs(entry.value) < 100:
        return str(entry.value)
    return str(_one_of("auto", "none")(entry))


def _shape(entry: Entry) -> tuple[int, ...]:
    """Read the shape of noise: at most 2**28 values, as for `--input-shape`."""
    sizes: tuple[int, ...] = _list_of(_whole(1))(entry)
    if not sizes or math.prod(sizes) > 2**28:
        raise entry.wrong(f"shape in [input] must have 1 to {2**28} values. Give one like [2, 3, 224, 224].")
    return sizes


def _output_size(entry: Entry) -> int | str:
    read = _whole(0, "a size, 'N' for the number of inputs, or '*' for any size")
    return str(entry.value) if entry.value in ("N", "*") else read(entry)


def _pixels(entry: Entry) -> str:
    """Read what `--resize` and `--crop` take."""
    size = str(entry.value) if _is_whole(entry.value) and 0 < entry.value < 2**63 else entry.value
    if not isinstance(size, str) or not _PIXELS.fullmatch(size):
        raise entry.mistyped("pixels like 224, 'HEIGHTxWIDTH' like '192x256', or 'none'")
    return size


def _mean(entry: Entry) -> str:
    """Read one number, one for each channel, or "none" into what `--mean` takes."""
    if entry.value == "none":
        return "none"
    values = _list_of(_number())(entry) if isinstance(entry.value, list) else (_number()(entry),)
    if not values:
        raise entry.mistyped("a number, one for each channel, or 'none'")
    return ",".join(map(repr, values))


def _std(entry: Entry) -> str:
    """Read one number above 0, one for each channel, or "none" into what `--std` takes."""
    values = _mean(entry)
    if values != "none" and min(map(float, values.split(","))) <= 0:
        raise entry.wrong("std in [input] must be above 0: it is the standard deviation of each channel.")
    return values


def _pattern(entry: Entry) -> str:
    """Read a pattern that selects each layer by itself: one without a position."""
    written = _text(entry)
    try:
        parsed = parse_pattern(written)
    except UsageError as error:
        raise entry.wrong(f"pattern in [[layers]]: {printable(str(error).removeprefix('--layer '))}") from error
    if parsed.position is not None:
        raise entry.wrong(
            f"pattern in [[layers]] is '{printable(parsed.text)}', which picks by position. Name the layers instead."
        )
    return parsed.text


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_literal(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_literal, value))
    if isinstance(value, int):
        return abs(value) < 2**63
    return isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


Keys = Mapping[str, tuple[str, Reader]]
"""By key of a table: the name of the setting, and the function that reads its value."""

_DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"),
)

SECTIONS: Mapping[str, Keys] = {
    "model": {
        "arch": ("arch", _dotted),
        "arguments": ("model_arguments", _arguments),
        "key": ("key", _text),
        "allow-missing": ("allow_missing", _list_of(_text)),
        "allow-unexpected": ("allow_unexpected", _list_of(_text)),
        "allow-global": ("allow_global", _list_of(_text)),
        "classes": ("classes", _path),
    },
    "input": {
        "images": ("images", _list_of(_path)),
        "data": ("data", _path),
        "shape": ("shape", _shape),
        "resize": ("resize", _pixels),
        "crop": ("crop", _pixels),
        "mean": ("mean", _mean),
        "std": ("std", _std),
        "max-pixels": ("max_pixels", _whole(1)),
        "batch-axis": ("batch_axis", _batch_axis),
        "named": ("named", _named_inputs),
        "batch-size": ("batch_size", _whole(1)),
        "seed": ("seed", _whole(0)),
    },
    "output": {
        "shape": ("output_shape", _list_of(_output_size)),
        "dtype": ("output_dtype", _one_of(*_DTYPES)),
        "key": ("output_key", _text),
    },
    "gradients": {
        "loss": ("loss", _dotted),
        "target": ("target", _target),
        "mode": ("mode", _one_of("eval", "train")),
    },
    "baseline": {"file": ("baseline", _path)},
}
"""The tables that hold settings one by one."""

_EXPECT: Keys = {
    "image": ("image", _path),
    "top1": ("top1", _class_name),
    "contains": ("contains", _list_of(_class_name)),
    "k": ("k", _whole(1)),
    "min-probability": ("min_probability", _number(0, 1)),
}

# What rules look at that no pattern over layers can single out a part of.
_ABOUT_ALL = ("file", "network", "outputs", "expectations", "labels")

_level = _one_of("fail", "warn", "off")


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
        "layers": ("layers", _list_of(_layers)),
        "expect": ("expectations", _list_of(_expectation)),
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
    """Read [rules]; what only repeats the defaults is left out."""
    changed = {}
    for name, settings in _rule_table(entry).items():
        rule = RULES[name]
        limits = {each: limit for each, limit in settings.limits.items() if limit != rule.limits[each].default}
        changed[name] = RuleSettings(None if settings.level == rule.level else settings.level, limits)
    return {name: settings for name, settings in changed.items() if settings != RuleSettings()}


def _rule_table(entry: Entry, *also: str) -> dict[str, RuleSettings]:
    """Read the rules in a table, which may also hold the keys `also`."""
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
    limits = {limit_key(name): (name, _number(0, most)) for name, most in highest.items()}
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
    return LayerSettings(_pattern(entry.at("pattern")), rules)


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
