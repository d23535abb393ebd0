"""Parse `--layer` values into patterns over the names and types of layers and operations."""

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hookscope.errors import UsageError
from hookscope.parameters import arg

_GLOB = re.compile(r"[*?\[\]]")
_POSITION = re.compile(r"(?P<body>.*)@(?P<position>-?\d+)\Z", re.DOTALL)

CONSTANTS = frozenset(
    {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "arange"}
    | {"linspace", "eye", "tensor", "as_tensor"}
)
"""Operations whose values do not depend on those of an input."""

NOT_JUDGED = CONSTANTS | frozenset(
    {"view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "permute", "transpose", "t", "T", "mT", "H"}
    | {"mH", "movedim", "moveaxis", "swapaxes", "swapdims", "squeeze", "unsqueeze", "expand", "expand_as", "getitem"}
    | {"broadcast_to", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "narrow", "select", "contiguous"}
    | {"clone", "detach", "data", "to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool"}
    | {"cpu", "cuda", "repeat", "roll", "flip", "unfold", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"}
    | {"meshgrid", "from_numpy"}
)
"""Operations that verdicts leave out: their values are those of the input, in another order or shape, or constants."""

ACTIVATION_FUNCTIONS = frozenset(
    {"relu", "relu_", "relu6", "leaky_relu", "prelu", "rrelu", "threshold", "threshold_", "hardtanh", "hardtanh_"}
    | {"clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_", "maximum", "elu", "celu", "selu", "gelu", "silu"}
    | {"mish", "softplus", "sigmoid", "sigmoid_", "tanh", "tanh_", "hardswish", "hardsigmoid", "glu"}
)
"""Operations that stand for an activation module, or for a rectifier made of others."""

FILLING = frozenset(
    {"masked_fill", "fill", "where", "setitem", "index_fill", "index_put", "masked_scatter", "scatter", "full"}
    | {"full_like", "new_full", "tensor", "as_tensor", "triu", "tril"}
)
"""Operations that write given values: Inf from these is intended, such as -Inf in attention's masks."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One parsed `--layer` value.

    Attributes:
        text: As the user wrote it.
        matches: Tells whether a (dotted name, class name) matches.
        is_word: Whether it is a plain word, which may occur anywhere in a name.
        exclude: Whether matching modules are excluded.
        position: Which of the matching modules, in execution order; None for all.
        by_position_alone: Whether it is a bare position, which counts among the default layers.
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
    position in execution order; `@3` alone counts among the default layers.

    Raises:
        UsageError: If the pattern is empty, or its regular expression is not one.
    """
    exclude, body = text.startswith("!"), text.removeprefix("!")
    position = None
    if match := _POSITION.match(body):
        body, position = match["body"], int(match["position"])
    in_name, in_type = not body.startswith("type:"), not body.startswith("name:")
    body = body if in_name and in_type else body[len("name:") :]
    if not body and position is None:
        raise UsageError(
            f"{arg('layer')} {text!r} is empty: give a part of a layer's name or type, e.g. {arg('layer')} conv."
        )
    try:
        test = name_test(body)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{arg('layer')} {text!r} is not a regular expression: {error}.") from error
    return Pattern(
        text,
        lambda name, kind: (in_name and test(name)) or (in_type and test(kind)),
        not (_is_regex(body) or _GLOB.search(body)),
        exclude,
        position,
        not body,
    )


@dataclass(frozen=True, slots=True)
class OperationPattern:
    """One parsed `--layer` value that selects operations.

    Attributes:
        text: As the user wrote it.
        matches: Tells whether (dotted name of the module, "(model)" for the root; name of the operation) matches.
        exclude: Whether matching operations are excluded.
        call: Which call of the operation in a forward pass, from 0; None for all.
    """

    text: str
    matches: Callable[[str, str], bool]
    exclude: bool
    call: int | None


_CALL = re.compile(r"(?P<body>.*)#(?P<call>\d+)\Z", re.DOTALL)


def is_operation_pattern(text: str) -> bool:
    """Tell whether a `--layer` value selects operations: "op:relu", "layer1.0:add", "!layer3.*:cat"."""
    body = text.removeprefix("!")
    return ":" in body and not body.startswith(("name:", "type:", "/", "param:"))


def parse_operation_pattern(text: str) -> OperationPattern:
    """Parse a `--layer` value that selects operations: `op:NAME`, or `MODULE:NAME` as rows are labelled.

    NAME is the whole name of the operation, or a glob. MODULE is matched like the name of a layer: a word is a part of
    it in any case, with `*?[]` it is a glob over the whole. A leading `!` excludes, a trailing `#1` takes the second
    call of each operation.

    Raises:
        UsageError: If the name of the operation, or of the module, is missing.
    """
    exclude, body = text.startswith("!"), text.removeprefix("!")
    call = None
    if match := _CALL.match(body):
        body, call = match["body"], int(match["call"])
    module, _, name = body.rpartition(":")
    if not module or not name:
        raise UsageError(
            f"{arg('layer')} {text!r} is half a pattern: give op:NAME or MODULE:NAME, e.g. {arg('layer')} op:relu."
        )
    if _POSITION.match(name):
        raise UsageError(
            f"{arg('layer')} {text!r}: operations are not chosen by position. Give a call: op:relu#1 is the second."
        )
    in_module = (lambda _candidate: True) if module == "op" else name_test(module)
    wanted = re.compile(fnmatch.translate(name))
    return OperationPattern(
        text, lambda layer, operation: bool(wanted.match(operation)) and in_module(layer), exclude, call
    )


def exact_operation(label: str) -> OperationPattern:
    """Return the pattern of all calls of one operation, by its label without a call number: "layer1.0:add"."""
    module, _, name = label.rpartition(":")
    return OperationPattern(label, lambda layer, operation: (layer, operation) == (module, name), False, None)


ACTIVATIONS = OperationPattern(
    "activation functions", lambda _layer, operation: operation in ACTIVATION_FUNCTIONS, False, None
)
"""All calls of activation functions; it may match nothing."""


def _is_regex(body: str) -> bool:
    return len(body) > 2 and body.startswith("/") and body.endswith("/")


def name_test(body: str) -> Callable[[str], bool]:
    """Return a predicate over names: a word matches any part, ignoring case; a glob or `/regex/` matches as usual.

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


def refuse_positions(texts: Iterable[str]) -> None:
    """Refuse patterns that choose by execution order, which is not known before a network runs.

    Raises:
        UsageError: For such a pattern, or one that cannot be parsed.
    """
    for text in texts:
        if parse_pattern(text).position is not None:
            raise UsageError(
                f"{arg('layer')} {text!r} selects by execution order, which is not known before the training starts."
            )
