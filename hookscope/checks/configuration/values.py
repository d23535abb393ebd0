"""Readers of single values: each returns a setting, or raises the error that says where and how a value is wrong."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hookscope.checks.configuration.document import Entry
from hookscope.errors import UsageError
from hookscope.hooks.patterns import parse_pattern
from hookscope.text import printable

Reader = Callable[[Entry], Any]
"""Raises UsageError, as built by the entry, if the value cannot be right."""

_TENSOR_SUFFIXES = (".npy", ".pt", ".pth", ".safetensors")
_PIXELS = re.compile(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})?|none")


def text(entry: Entry) -> str:
    """Read a string that is not empty."""
    if not isinstance(entry.value, str) or not entry.value or "\0" in entry.value:
        raise entry.mistyped("a string that is not empty")
    return entry.value


def one_of(*names: str) -> Reader:
    """Return the reader of one of several strings."""

    def read(entry: Entry) -> str:
        if not isinstance(entry.value, str) or entry.value not in names:
            raise entry.mistyped(f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}")
        return entry.value

    return read


def whole(lowest: int, wanted: str = "") -> Reader:
    """Return the reader of a whole number that fits into 64 bits; `wanted` says what it is for."""

    def read(entry: Entry) -> int:
        if not _is_whole(entry.value) or not lowest <= entry.value < 2**63:
            raise entry.mistyped(wanted or f"a whole number from {lowest}")
        return int(entry.value)

    return read


def number(lowest: float = -math.inf, highest: float = math.inf) -> Reader:
    """Return the reader of a finite number."""

    def read(entry: Entry) -> float:
        fits = _is_whole(entry.value) or isinstance(entry.value, float)
        # 1e300: an int of any length compares with a float, but does not convert; infinity is no limit.
        if not fits or not lowest <= entry.value <= highest or not abs(entry.value) <= 1e300:
            start = "" if math.isinf(lowest) else f" from {lowest:g}"
            raise entry.mistyped(f"a number{start}" + ("" if math.isinf(highest) else f" to {highest:g}"))
        return float(entry.value)

    return read


def list_of(read: Reader) -> Reader:
    """Return the reader of a list of what `read` reads, into a tuple."""

    def read_all(entry: Entry) -> tuple[Any, ...]:
        if not isinstance(entry.value, list):
            raise entry.mistyped("a list")
        return tuple(read(entry.at(index)) for index in range(len(entry.value)))

    return read_all


def path(entry: Entry) -> Path:
    """Read a path, relative to the configuration."""
    return entry.document.folder / text(entry)


def dotted(entry: Entry) -> str:
    """Read a name, or FILE.py:NAME with the file relative to the configuration."""
    source, colon, name = text(entry).rpartition(":")
    return f"{entry.document.folder / source}:{name}" if colon and source.endswith(".py") else text(entry)


def target(entry: Entry) -> str:
    """Read what `--target` takes; a file of targets is relative to the configuration."""
    if isinstance(entry.value, str):
        return str(path(entry)) if entry.value.lower().endswith(_TENSOR_SUFFIXES) else text(entry)
    return str(class_name(entry))


def class_name(entry: Entry) -> str | int:
    """Read a class, by name or index."""
    read = text if isinstance(entry.value, str) else whole(0, "a class, by name or index")
    return read(entry)


def arguments(entry: Entry) -> tuple[str, ...]:
    """Read a table of arguments into what `--model-arg` takes: Python literals, so that a string stays one."""
    if not isinstance(entry.value, dict):
        raise entry.mistyped("a table of names and values")
    for name, value in entry.value.items():
        if not name.isidentifier():
            raise entry.at(name).wrong(f"'{printable(name)}' cannot be the name of an argument.")
        if not _is_literal(value):
            raise entry.at(name).mistyped("a string, finite number, true, false, or a list of these")
    return tuple(f"{name}={value!r}" for name, value in entry.value.items())


def named_inputs(entry: Entry) -> tuple[str, ...]:
    """Read a table of inputs by name into what `--input` takes; a string is a file, relative to the configuration."""
    found = arguments(entry)
    files = {name: path(entry.at(name)) for name, value in entry.value.items() if isinstance(value, str)}
    return tuple(
        f"{name}={files[name]}" if name in files else text for name, text in zip(entry.value, found, strict=True)
    )


def batch_axis(entry: Entry) -> str:
    """Read what `--batch-axis` takes: an axis, "auto" or "none"."""
    if _is_whole(entry.value) and abs(entry.value) < 100:
        return str(entry.value)
    return str(one_of("auto", "none")(entry))


def shape(entry: Entry) -> tuple[int, ...]:
    """Read the shape of noise: at most 2**28 values, as for `--input-shape`."""
    sizes: tuple[int, ...] = list_of(whole(1))(entry)
    if not sizes or math.prod(sizes) > 2**28:
        raise entry.wrong(f"shape in [input] must have 1 to {2**28} values. Give one like [2, 3, 224, 224].")
    return sizes


def output_size(entry: Entry) -> int | str:
    """Read one size of an expected shape."""
    read = whole(0, "a size, 'N' for the number of inputs, or '*' for any size")
    return str(entry.value) if entry.value in ("N", "*") else read(entry)


def pixels(entry: Entry) -> str:
    """Read what `--resize` and `--crop` take."""
    size = str(entry.value) if _is_whole(entry.value) and 0 < entry.value < 2**63 else entry.value
    if not isinstance(size, str) or not _PIXELS.fullmatch(size):
        raise entry.mistyped("pixels like 224, 'HEIGHTxWIDTH' like '192x256', or 'none'")
    return size


def mean(entry: Entry) -> str:
    """Read one number, one for each channel, or "none" into what `--mean` takes."""
    if entry.value == "none":
        return "none"
    values = list_of(number())(entry) if isinstance(entry.value, list) else (number()(entry),)
    if not values:
        raise entry.mistyped("a number, one for each channel, or 'none'")
    return ",".join(map(repr, values))


def std(entry: Entry) -> str:
    """Read what `--std` takes, likewise."""
    values = mean(entry)
    if values != "none" and min(map(float, values.split(","))) <= 0:
        raise entry.wrong("std in [input] must be above 0: it is the standard deviation of each channel.")
    return values


def pattern(entry: Entry) -> str:
    """Read a pattern that says of each layer by itself whether it is meant: one without a position."""
    written = text(entry)
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
