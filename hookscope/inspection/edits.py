"""Parse edit expressions such as `relu:grad:clamp(min=0)` and apply them to tensors.

    EXPRESSION := ["param:"] PATTERN ":" PLACE ":" OPERATION ["(" [ARGUMENT {"," ARGUMENT}] ")"]
                | "param:" PATTERN ":freeze"
    PLACE      := "input" | "output" | "grad" | "value"
    ARGUMENT   := [NAME "="] NUMBER | [NAME "="] NUMBER {"," NUMBER} | [NAME "="] DTYPE

A pattern may hold colons itself (`type:conv`, `/re:gex/`): the last `:PLACE:` counts. `(model)` is the whole network.
Several numbers are for `channels` alone, which takes all up to the next name, ranges with both ends:
`scale(2, channels=3,8-15)`. Only a training can freeze.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import L1Unstructured

from hookscope.errors import LayerNotFoundError, UsageError, nearest
from hookscope.hooks.patterns import name_test
from hookscope.hooks.selection import module_index, parameters_by_name, select_from
from hookscope.results.network import row_label
from hookscope.text import safe_text, shape_text

EditSite = Literal["input", "output", "grad", "parameter grad", "value", "freeze"]


@dataclass(frozen=True, slots=True)
class Edit:
    """One parsed edit expression.

    Attributes:
        pattern: Which layers, as for `--layer`, or which parameters.
        place: What is edited: a layer's input, its output, or the gradient of the loss with respect to its output; once
            the edit is bound to a parameter, the parameter's gradient; "value" for the parameter itself.
        parameters_only: Whether the pattern was written with `param:`.
        operation: A name in `OPERATIONS`, or "freeze".
        arguments: Numbers by name, only those given.
        channels: Which channels are edited; empty for all of them.
        dtype: What `round` rounds to.
        turns: The positions of a batch's inputs, each of which is edited by itself, or the step of a training.
    """

    text: str
    pattern: str
    place: EditSite
    parameters_only: bool
    operation: str
    arguments: Mapping[str, float]
    channels: tuple[int, ...] = ()
    seed: int = 0
    dtype: str = ""
    turns: tuple[int, ...] = (0,)

    def apply(self, tensor: Tensor, channel_axis: int | None) -> Tensor:
        """Return a new tensor with the edit made, of the same shape, dtype and device, with a graph.

        The tensor itself is returned if it cannot be edited: integers, booleans, complex numbers, sparse
        and nested layouts.

        Raises:
            UsageError: If the edit names channels that the tensor does not have.
        """
        if not tensor.is_floating_point() or tensor.layout != torch.strided or tensor.is_nested:
            return tensor
        mask = self._mask(tensor.shape, channel_axis)
        values = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
        edited = OPERATIONS[self.operation].apply(values, self)
        if mask is not None:
            edited = torch.where(mask.to(tensor.device), edited, values)
        return edited.to(tensor.dtype)

    def _mask(self, shape: Sequence[int], axis: int | None) -> Tensor | None:
        """Return where the named channels are, to be broadcast to `shape`; None for everywhere."""
        if not self.channels:
            return None
        highest = max(self.channels)
        problem = f"Edit '{safe_text(self.text)}' names channel {highest}, but a tensor of shape {shape_text(shape)}"
        if axis is None:
            raise UsageError(f"{problem} has no axis that counts its channels.")
        if highest >= shape[axis]:
            raise UsageError(f"{problem} has {shape[axis]} on axis {axis}, counted from 0.")
        mask = torch.zeros(shape[axis], dtype=torch.bool, device="cpu")
        mask[list(self.channels)] = True
        return mask.reshape([count if index == axis % len(shape) else 1 for index, count in enumerate(shape)])


def bind_edits(
    edits: Sequence[Edit], network: nn.Module, execution_order: Callable[[], Sequence[str]] | None = None
) -> tuple[tuple[str, Edit], ...]:
    """Return (name of layer or parameter, edit) for each layer and parameter that an edit selects.

    An edit of a gradient whose pattern selects no layer is about parameters, with the place "parameter grad"; their
    names are matched as names of layers are, for the places "value" and "freeze" too. A tied parameter has its first
    name. Noise has another seed for each name, so that equal shapes do not get equal noise. Edits keep their order;
    `execution_order` is as for `select_layers`.

    Raises:
        LayerNotFoundError: If an edit selects nothing.
        UsageError: If a pattern is malformed.
    """
    bound: list[tuple[str, Edit]] = []
    done: set[tuple[str, int]] = set()
    if not edits:
        return ()
    parameters = parameters_by_name(network)
    layers = partial(select_from, *module_index(network), execution_order=execution_order)
    for edit in edits:
        names, place = _selected(edit, layers, [*parameters])
        for name in names:
            if place in ("parameter grad", "value", "freeze"):
                if (key := (edit.text, id(parameters[name][0]))) in done:
                    continue
                done.add(key)
            seed = (edit.seed + zlib.crc32(name.encode(errors="surrogatepass"))) % 2**63
            bound.append((name, replace(edit, place=place, seed=seed)))
    return tuple(bound)


def _selected(
    edit: Edit, layers: Callable[[Sequence[str]], Iterable[str]], parameter_names: Sequence[str]
) -> tuple[Iterable[str], EditSite]:
    missing = f"Edit '{safe_text(edit.text)}' matches no parameter."
    if edit.pattern == row_label("", 0, ""):
        return [""], edit.place
    if not edit.parameters_only:
        try:
            return layers([edit.pattern]), edit.place
        except LayerNotFoundError as error:
            if edit.place != "grad":
                raise
            missing = f"{error} No parameter matches either."
    try:
        test = name_test(edit.pattern)
    except (re.error, OverflowError, RecursionError) as error:
        _fail(edit.text, edit.text.find(edit.pattern), f"this is not a regular expression ({error})")
    names = [name for name in parameter_names if test(name)]
    if not names:
        raise LayerNotFoundError(f"{missing}{safe_text(nearest(edit.pattern, parameter_names))}")
    return names, "parameter grad" if edit.place == "grad" else edit.place


# --- Operations ------------------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """An operation on values in float32 or float64."""

    apply: Callable[[Tensor, Edit], Tensor]
    numbers: Mapping[str, Literal["finite", "not negative", "positive", "a fraction"]]  # in order
    required: int  # how many of them have to be given, whichever they are
    extra: tuple[Literal["seed", "dtype"], ...] = ()  # arguments after them
    by_channel: bool = True  # whether it takes channels, as its last argument

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all arguments in order."""
        return (*self.numbers, *self.extra, *(["channels"] if self.by_channel else []))


def _clip_norm(values: Tensor, edit: Edit) -> Tensor:
    """Scale the whole tensor to an L2 norm of `max` if it has a larger one."""
    # In float64: an exploding gradient, which this is for, would overflow when squared. Apple's GPUs have no float64.
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    factor = edit.arguments["max"] / norm.clamp_min(edit.arguments["max"])
    return values * factor.to(values.dtype)


def _by_turn(values: Tensor, edit: Edit, change: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Change the part of each turn by itself, so that an input does not depend on the others in its batch.

    Parts are equal shares of axis 0, which may count windows, or of axis 1 of (T, N, D); else the first turn has all.
    """
    count = len(edit.turns)
    axis = 1 if values.dim() == 3 and values.shape[0] != count == values.shape[1] else 0
    if count == 1 or not values.dim() or values.shape[axis] % count:
        return change(values, edit.turns[0])
    parts = zip(values.tensor_split(count, axis), edit.turns, strict=True)
    return torch.cat([change(part, turn) for part, turn in parts], axis)


def _noise(values: Tensor, edit: Edit) -> Tensor:
    """Add normal noise, drawn on the CPU in float32, so that it is the same everywhere."""

    def add(part: Tensor, turn: int) -> Tensor:
        generator = torch.Generator().manual_seed((edit.seed + turn * 0x9E3779B9) % 2**63)  # far from people's seeds
        noise = torch.randn(part.shape, generator=generator, dtype=torch.float32, device="cpu")
        return part + noise.to(part) * edit.arguments["std"]

    return _by_turn(values, edit, add)


def _prune(values: Tensor, edit: Edit) -> Tensor:
    """Set a fraction of the values to 0, those of the smallest magnitudes."""

    def prune(part: Tensor, _turn: int) -> Tensor:
        mask = L1Unstructured(edit.arguments["fraction"]).compute_mask(part.detach(), torch.ones_like(part))  # type: ignore[no-untyped-call]
        return part.masked_fill(mask == 0, 0)

    return _by_turn(values, edit, prune)


def _round(values: Tensor, edit: Edit) -> Tensor:
    """Round to what a dtype can hold; a gradient passes as if nothing was rounded.

    For int8 the largest finite magnitude is 127 steps away from 0, and halves are rounded to even.
    """
    exact = values.detach()
    finite = exact.nan_to_num(0.0, 0.0, 0.0)
    if edit.dtype == "int8":
        rounded = _by_turn(exact, edit, _to_int8)
    else:
        rounded = exact.to(getattr(torch, edit.dtype)).to(exact.dtype)
    # The difference carries the gradient. It is 0, but NaN or Inf where a value is: Inf minus Inf would be NaN.
    return rounded + (values - finite) if values.requires_grad else rounded


def _to_int8(exact: Tensor, _turn: int) -> Tensor:
    step = exact.nan_to_num(0.0, 0.0, 0.0).abs().amax() / 127 if exact.numel() else exact.new_ones(())
    return torch.where((step > 0) & exact.isfinite(), (exact / step).round() * step, exact)


ROUNDED = ("int8", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The dtypes that `round` takes."""

OPERATIONS: Mapping[str, Operation] = {
    # Not a fresh tensor of zeros: the graph goes on, with a gradient of 0.
    "zero": Operation(lambda values, _edit: values.masked_fill(values.new_ones((), dtype=torch.bool), 0), {}, 0),
    "scale": Operation(lambda values, edit: values * edit.arguments["by"], {"by": "finite"}, 1),
    "add": Operation(lambda values, edit: values + edit.arguments["value"], {"value": "finite"}, 1),
    "clamp": Operation(
        lambda values, edit: values.clamp(edit.arguments.get("min"), edit.arguments.get("max")),
        {"min": "finite", "max": "finite"},
        1,
    ),
    "clip-norm": Operation(_clip_norm, {"max": "positive"}, 1, by_channel=False),
    "noise": Operation(_noise, {"std": "not negative"}, 1, ("seed",)),
    "prune": Operation(_prune, {"fraction": "a fraction"}, 1, by_channel=False),
    "round": Operation(_round, {}, 0, ("dtype",)),
}

# --- The grammar -----------------------------------------------------------------------------------------------------


_PLACE = re.compile(r"(?=:[ \t]*(input|output|grad|value)[ \t]*(:))")
_FREEZE = re.compile(r"\s*param:(.*):[ \t]*(freeze)\s*", re.DOTALL)
_OPERATION_START = r"[ \t]*[A-Za-z_][A-Za-z0-9_-]*[ \t]*(?:\(|$)"
_HIGHEST_CHANNEL = 2**31 - 1
_LONGEST_RANGE = 2**16  # more channels than layers have, and no more memory than a few MB

_NAME = r"(?P<name>[A-Za-z_][A-Za-z0-9_-]*)"
_OPERATION = re.compile(rf"[ \t]*{_NAME}?[ \t]*(?P<opens>\(?)")
_NO_ARGUMENTS = re.compile(r"[ \t]*\)")
_ARGUMENT = re.compile(rf"[ \t]*(?:{_NAME}[ \t]*=[ \t]*)?(?P<value>[^,()= \t]*)[ \t]*(?P<end>[,)]?)")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def parsed_edits(edits: Sequence[str | Edit]) -> list[Edit]:
    """Parse those edits that are expressions; UsageError if one is malformed."""
    return [parse_edit(edit) if isinstance(edit, str) else edit for edit in edits]


def parse_edit(text: str, *, training: bool = False) -> Edit:
    """Parse an edit expression, see the top of this file.

    Args:
        text: The expression.
        training: Whether it is for a training, where parameters can be frozen.

    Raises:
        UsageError: If it is malformed. The message has three lines: what is wrong, the expression, and a caret under
            the place.
    """
    places = list(_PLACE.finditer(text))
    freeze = None if places else _FREEZE.fullmatch(text)
    if freeze and not training:
        _fail(text, freeze.start(2), "only a training can be frozen: give it to hookscope.watch, or grad:zero")
    if not places and not freeze:
        _refuse_place(text)
    end = freeze.end(1) if freeze else places[-1].start()
    parameters_only = text[:end].strip().startswith("param:")
    pattern = text[:end].strip().removeprefix("param:").strip()
    kind: EditSite = "freeze" if freeze else places[-1][1]  # type: ignore[assignment] # the expression has one of four
    if parameters_only and kind in ("input", "output"):
        _fail(text, places[-1].start(1), f"a parameter has no {kind}: give grad or value")
    if kind == "value" and not parameters_only:
        _fail(text, 0, "only a parameter has a value: begin with param:")
    if not pattern:
        _fail(text, end, "the pattern of layers or parameters is missing")
    if freeze:
        return Edit(text, pattern, kind, parameters_only, "freeze", {})
    name, arguments = _read_call(text, places[-1].end(2))
    others = {key: arguments.pop(key) for key in ("channels", "seed", "dtype") if key in arguments}
    return Edit(text, pattern, kind, parameters_only, name, arguments, **others)


def _fail(text: str, position: int, message: str) -> NoReturn:
    before, after = safe_text(text[:position]), safe_text(text[position:])
    raise UsageError(f"Bad edit: {safe_text(message).rstrip('.')}.\n{before}{after}\n{' ' * len(before)}^")


def _refuse_place(text: str) -> NoReturn:
    if match := re.search(rf":(?P<place>[^:()]*):{_OPERATION_START}", text):
        place = match["place"].strip()
        hint = nearest(place, ("input", "output", "grad", "value"), count=1)
        _fail(text, match.start("place"), f"there is no place '{place}', only input, output, grad and value.{hint}")
    if match := re.search(f":{_OPERATION_START}", text):
        _fail(text, match.start() + 1, "before the operation a place is missing: input, output, grad or value")
    _fail(text, len(text), "an edit is PATTERN:PLACE:OPERATION, such as 'relu:grad:clamp(min=0)'")


def _read_call(text: str, start: int) -> tuple[str, dict[str, Any]]:
    call = _OPERATION.match(text, start)
    if call is None or not call["name"]:
        at = start if call is None else call.start("opens")
        _fail(text, at, f"an operation is missing here. Give {', '.join(OPERATIONS)}")
    name = call["name"]
    if name not in OPERATIONS:
        hint = nearest(name, OPERATIONS) or f" Give {', '.join(OPERATIONS)}"
        _fail(text, call.start("name"), f"there is no operation '{name}'.{hint}")
    arguments, end = _read_arguments(text, call.end(), name) if call["opens"] else ({}, call.end())
    if rest := text[end:].lstrip(" \t"):
        _fail(text, len(text) - len(rest), "the expression should have ended here")
    operation = OPERATIONS[name]
    missing = [number for number in operation.numbers if number not in arguments]
    last = end - 1 if call["opens"] else end
    if len(missing) > len(operation.numbers) - operation.required:
        _fail(text, last, f"{name} needs {' or '.join(missing)}: {name}({missing[0]}=...)")
    if "dtype" in operation.extra and "dtype" not in arguments:
        _fail(text, last, f"{name} needs a dtype, {', '.join(ROUNDED)}: {name}({ROUNDED[0]})")
    return name, arguments


def _read_arguments(text: str, position: int, operation: str) -> tuple[dict[str, Any], int]:
    """Parse the arguments up to the closing parenthesis: return them by name, and the position after it."""
    if empty := _NO_ARGUMENTS.match(text, position):
        return {}, empty.end()
    arguments: dict[str, Any] = {}
    is_named = False
    while match := _ARGUMENT.match(text, position):  # matches any text
        at, position, is_named = match.start("value"), match.end(), is_named or bool(match["name"])
        parameter = _parameter_of(text, match, operation, [*arguments], is_named=is_named)
        value = _read_value(text, at, match["value"], parameter, operation)
        arguments[parameter] = (*arguments.get(parameter, ()), *value) if parameter == "channels" else value
        if arguments.get("min", -math.inf) > arguments.get("max", math.inf):
            _fail(text, at, "min is above max")
        if match["end"] == ")":
            break
        if not match["end"]:
            _fail(text, position, "a comma or a closing parenthesis is missing here")
    return arguments, position


def _parameter_of(text: str, argument: re.Match[str], operation: str, before: Sequence[str], *, is_named: bool) -> str:
    """Return the parameter that an argument is for; `before` has those of earlier arguments."""
    parameters, name, at = OPERATIONS[operation].parameters, argument["name"], argument.start("value")
    if name and name not in parameters:
        message = f"{operation} takes no '{name}', only {', '.join(parameters)}.{nearest(name, parameters)}"
        _fail(text, argument.start("name"), message)
    if name in before:
        _fail(text, argument.start("name"), f"{name} is given twice")
    if name or before[-1:] == ["channels"]:  # channels take all numbers up to the next name
        return name or "channels"
    if is_named:
        _fail(text, at, "arguments after a named one need names")
    if len(before) == len(parameters):
        _fail(text, at, f"{operation} takes no more than {', '.join(parameters)}")
    return parameters[len(before)]


def _read_value(text: str, at: int, value: str, parameter: str, operation: str) -> Any:
    """Parse the value of an argument, which begins at position `at` of the text."""
    if parameter == "channels":
        first, dash, last = value.partition("-")
        begin = _read_whole(text, at, first, "a channel", _HIGHEST_CHANNEL)
        end = _read_whole(text, at, last, "a channel", _HIGHEST_CHANNEL) if dash else begin
        if not begin <= end < begin + _LONGEST_RANGE:
            limits = f"between {begin} and {begin + _LONGEST_RANGE - 1}"
            _fail(text, at + len(first), f"a range from channel {begin} must end {limits}")
        return range(begin, end + 1)
    if parameter == "seed":
        return _read_whole(text, at, value, "a seed", 2**63 - 1)
    if parameter == "dtype":
        if value not in ROUNDED:
            _fail(text, at, f"there is no dtype '{value}' to round to, only {', '.join(ROUNDED)}")
        return value
    if not _NUMBER.fullmatch(value):
        _fail(text, at, f"{parameter} has to be a number")
    number, rule = float(value), OPERATIONS[operation].numbers[parameter]
    fits = {"finite": True, "not negative": number >= 0, "positive": number > 0, "a fraction": 0 <= number <= 1}
    if not math.isfinite(number) or not fits[rule]:
        _fail(text, at, f"{parameter} has to be {rule}{' from 0 to 1' if rule == 'a fraction' else ''}")
    return number


def _read_whole(text: str, at: int, value: str, subject: str, most: int) -> int:
    if not re.fullmatch("[0-9]{1,19}", value) or int(value) > most:
        _fail(text, at, f"{subject} is a whole number from 0 to {most}")
    return int(value)
