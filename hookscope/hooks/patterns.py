"""Patterns over layers: what a `--layer` value says about a name and a type."""

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass

from hookscope.errors import UsageError

_GLOB = re.compile(r"[*?\[\]]")
_POSITION = re.compile(r"(?P<body>.*)@(?P<position>-?\d+)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Pattern:
    """One parsed `--layer` value.

    Attributes:
        text: As the user wrote it.
        matches: Tells whether a (dotted name, class name) is meant.
        is_word: Whether it is a plain word, which may stand anywhere in a name.
        exclude: Whether matching modules are taken away instead.
        position: Which of the matching modules, in execution order; None for all.
        by_position_alone: Whether it is a bare position, which counts among what is selected without a pattern.
    """

    text: str
    matches: Callable[[str, str], bool]
    is_word: bool
    exclude: bool
    position: int | None
    by_position_alone: bool


def parse_pattern(text: str) -> Pattern:
    """Parse a `--layer` value.

    A plain word matches a case-insensitive part of the dotted name or the class name; see `select_layers` for what it
    leaves out. `*?[]` make it a glob over the whole of either, `/…/` a regular expression searched in either. `name:`
    and `type:` narrow it to one of them, a leading `!` excludes, a trailing `@3` or `@-1` takes one match by its
    position in execution order; `@3` alone counts among what is selected without a pattern.

    Raises:
        UsageError: If the pattern is empty, or its regular expression is not one.
    """
    exclude, body = text.startswith("!"), text.removeprefix("!")
    position = None
    if found := _POSITION.match(body):
        body, position = found["body"], int(found["position"])
    in_name, in_type = True, True
    for prefix in ("name:", "type:"):
        if body.startswith(prefix):
            body = body.removeprefix(prefix)
            in_name, in_type = prefix == "name:", prefix == "type:"
            break
    if not body and position is None:
        raise UsageError(f"--layer {text!r} is empty: give a part of a layer's name or type, e.g. --layer conv.")
    try:
        test = name_test(body)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"--layer {text!r} is not a regular expression: {error}.") from error
    return Pattern(
        text,
        lambda name, kind: (in_name and test(name)) or (in_type and test(kind)),
        not (_is_regex(body) or _GLOB.search(body)),
        exclude,
        position,
        not body,
    )


def _is_regex(body: str) -> bool:
    body = body.removeprefix("name:").removeprefix("type:")
    return len(body) > 2 and body.startswith("/") and body.endswith("/")


def name_test(body: str) -> Callable[[str], bool]:
    """Return the test that a name is put to: a word is a part of it in any case, a glob or a `/.../` is as it says.

    Raises:
        re.error, OverflowError, RecursionError: If a regular expression is not one.
    """
    if _is_regex(body):
        expression = re.compile(body[1:-1])
        return lambda candidate: expression.search(candidate) is not None
    folded = body.lower()
    if _GLOB.search(body):
        whole = re.compile(fnmatch.translate(folded))
        return lambda candidate: whole.match(candidate.lower()) is not None
    return lambda candidate: folded in candidate.lower()
