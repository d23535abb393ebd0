"""Turn text of unknown origin into text that is safe to print, to write as JSON, and to name a file with."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from numbers import Integral, Real
from typing import Any, TypeVar

N = TypeVar("N")

# GitHub's runner acts on a line that starts with "::", and on "##[" anywhere in a line. A renderer may break a line at
# any white space, so a "::" after white space may become the start of a line.
_WORKFLOW_COMMAND = re.compile(r"(?:(?<=\s)|^):(?=:)|#(?=#\[)")


def safe_text(text: str) -> str:
    r"""Return `text` on one line, with visible escapes for everything that could control a terminal or a log.

    Control characters, line ends, ANSI sequences, bidirectional and invisible formatting, unassigned code points and
    lone surrogates become escapes such as ``\x1b``; so does the first character of a GitHub workflow command. All other
    characters that Python calls printable are kept. A second call changes nothing.
    """
    if not text.isprintable():
        text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    return _WORKFLOW_COMMAND.sub(lambda match: f"\\x{ord(match.group()):x}", text)


def printable(text: str, limit: int = 200) -> str:
    """Return `text` on one line that is safe to show, cut after `limit` characters."""
    return safe_text(text if len(text) <= limit else text[: limit - 1] + "…")


def layer_words(label: str) -> str:
    """Return the label of a layer for a sentence, with "layer" before a number, as in nn.Sequential: "layer 3"."""
    name = printable(label or "(model)", 80)
    return name if any(map(str.isalpha, name)) else f"layer {name}"


def one_line(message: object, limit: int = 160) -> str:
    """Return a message of unknown origin on one line that is safe to show; its type's name if the message is empty."""
    return printable(" ".join(str(message).split()) or type(message).__name__, limit)


def exception_line(error: BaseException, limit: int = 1000) -> str:
    """Return "TypeName: first line of the message", safe to show; only the name if there is no message."""
    lines = str(error).strip().splitlines()
    return printable(f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__, limit)


def shape_text(shape: Iterable[int]) -> str:
    """Return a tensor's shape as "1x64x112x112", or "scalar" without axes."""
    return "x".join(str(size) for size in shape) or "scalar"


def input_shape_text(shape: Sequence[int]) -> str:
    """Return the shape of one input: "3x224x224", "20 values", "a number"."""
    if len(shape) == 1:
        return counted(shape[0], "value")
    return "x".join(map(str, shape)) or "a number"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 row", "1,234 rows"; `plural` is for nouns that do not just add an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or noun + 's'}"


def an(name: str) -> str:
    """Return the name of a class with its article: "an int", "a Linear", "an LSTM"."""
    return f"an {name}" if re.match("[AEIOaeio]|[Uu](p|n(?!e|i[dfotv]))|[FHLMNRSX][A-Z]", name) else f"a {name}"


def figure(value: float, digits: int = 2) -> str:
    """Return a number as people write it: "1,580", "0.053", "6.4e-10", "8.3e9", "0", "NaN"."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    if not -4 < int(power) < 6:
        return f"{float(mantissa):g}e{int(power)}"
    decimals = max(0, digits - 1 - int(power))
    whole, point, part = f"{float(f'{value:.{digits}g}'):z,.{decimals}f}".partition(".")
    return whole + (point + part).rstrip("0.") if point else whole


def percent_text(fraction: float | None, decimals: int = 1) -> str:
    """Return a percentage that is 0% or 100% only when that is exact: "86.0%", "<0.1%", ">99.9%"; "-" for None."""
    if fraction is None or not math.isfinite(fraction):
        return "-" if fraction is None else figure(fraction)
    least = 10.0 ** -(2 + decimals)
    if 0 < fraction < least:
        return f"<{least:.{decimals}%}"
    if 1 - least < fraction < 1:
        return f">{1 - least:.{decimals}%}"
    return f"{fraction:.{0 if fraction in (0, 1) else decimals}%}"


def scaled_text(value: float | None, unit: str = "") -> str:
    """Return three digits with a decimal prefix: "1.81 G", "118 MB", "64 B"; "0" is exactly zero, "-" is None."""
    if not value:
        return "-" if value is None else "0"
    prefixes = ("", "k", "M", "G", "T", "P")
    power = 0
    while power + 1 < len(prefixes) and value / 1000**power >= 999.5:
        power += 1
    digits = three_digits(value / 1000**power) if power else f"{value:.0f}"
    return f"{digits} {prefixes[power]}{unit}".rstrip()


def three_digits(number: float) -> str:
    """Return a number from 1 to 999 in three digits."""
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


def share_in_words(text: str) -> str:
    """Return a percentage in words: "less than 0.1%" for "<0.1%"."""
    return text.replace("<", "less than ").replace(">", "more than ")


def are(count: int) -> str:
    """Return "is" for 1, else "are"."""
    return "is" if count == 1 else "are"


def some_of(names: Sequence[object], most: int) -> str:
    """Return the first `most` names and the number of others: "a, b, c and 4 more"."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def in_words(words: Sequence[str]) -> str:
    """Return "a, b and c"; "" for none."""
    return "".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} and {words[-1]}"


def once_per_file(sentences: Iterable[tuple[str, str]]) -> list[str]:
    """Merge sentences, given as pairs of file name and sentence, that differ only in the name."""
    alike: dict[str, list[str]] = {}
    for name, sentence in sentences:
        alike.setdefault(sentence.replace(name, ""), []).append(sentence)
    return [
        f"{group[0]} The same holds for {counted(len(group) - 1, 'more file')}." if group[1:] else group[0]
        for group in alike.values()
    ]


def told_apart(values: Sequence[float]) -> list[str]:
    """Return probabilities with two to six decimals, enough to distinguish different ones: "0.41", "0.0127"."""
    for decimals in range(2, 7):
        texts = [
            f"{number:.{decimals}f}" if number >= 0.1 or not number else f"{number:.{decimals + 1}g}"
            for number in values
        ]
        if len({*texts}) == len({*values}):
            break
    return texts


def slug(text: str, max_bytes: int = 80) -> str:
    """Return `text` as part of a file name: letters, digits and ``._-``, nothing else.

    It never starts with a dot or a dash and is never empty; different texts may get the same slug. A slug of more than
    `max_bytes` in UTF-8 is cut in the middle; file systems allow 255 for a name.
    """
    kept = re.sub(r"[^\w.-]+", "-", text).strip("-.")
    encoded = kept.encode()
    if len(encoded) > max_bytes:
        half = (max_bytes - 2) // 2
        ends = (part.decode(errors="ignore").strip("-.") for part in (encoded[:half], encoded[-half:]))
        kept = "--".join(filter(None, ends))
    return kept or "unnamed"


def distinct_names(wanted: Iterable[str]) -> list[str]:
    """Return distinct names for files: a number is appended where a name is taken, whatever its case."""
    names: dict[str, str] = {}  # by what some file systems compare
    for stem in wanted:
        numbered = (f"{stem}-{number}" for number in count(2))
        name = next(name for name in chain([stem], numbered) if name.casefold() not in names)
        names[name.casefold()] = name
    return [*names.values()]


def strict_json(document: Mapping[str, Any]) -> str:
    r"""Return `document` as JSON that every parser accepts: one key a line, one item of a top-level list a line.

    The text is ASCII and ends in a line end; keys keep their order. NaN and infinities, which JSON lacks, become the
    texts "NaN", "Infinity" and "-Infinity"; null means that there is no value. A lone surrogate in a string becomes a
    visible escape, because strict parsers refuse it. Values of types that JSON lacks become their `str()`. "##[", which
    GitHub's runner acts on anywhere in a line, is written "#\u0023[", which means the same.
    """
    entries = [f"  {json.dumps(key)}: {_entry(value)}" for key, value in plain(document).items()]
    return ("{\n" + ",\n".join(entries) + "\n}\n").replace("##[", "#\\u0023[")


def _entry(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"    {json.dumps(item, allow_nan=False)}" for item in value) + "\n  ]"
    return json.dumps(value, allow_nan=False)


def number_in(value: Any, kind: Callable[[Any], N]) -> N:
    """Return a text or number as a number; ValueError also for underscores, which Python skips: "0_5" would be 5."""
    if isinstance(value, str) and "_" in value:
        raise ValueError(value)
    return kind(value)


def json_number(value: float) -> float | str:
    """Return a finite number unchanged; NaN and infinities as "NaN", "Infinity" and "-Infinity", which JSON lacks."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def plain(value: Any) -> Any:
    """Return a value in the types of JSON, without lone surrogates; NaN and infinities are texts."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return json_number(float(value))
    if isinstance(value, Mapping):
        return {_without_surrogates(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return _without_surrogates(str(value))


def _without_surrogates(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def position_text(position: tuple[int | None, ...]) -> str:
    """Return an index as Python writes it, `[2, :]`; "" for ()."""
    return f"[{', '.join(':' if at is None else str(at) for at in position)}]" if position else ""


def input_text(index: int, name: str) -> str:
    """Return an input's index and name: "2 ('cat.jpg')"; only "2" without a name, as for a tensor in memory."""
    return str(index) if name in ("", f"tensor[{index}]") else f"{index} ('{name}')"
