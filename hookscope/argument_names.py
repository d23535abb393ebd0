"""Errors for Python callers: they name the argument `input_shape` where the command line has `--input-shape`.

Messages are written for the command line. The functions that `hookscope` offers rename options in what they raise; the
commands call those in `hookscope.commands`, which do not. Notes and warnings of results are renamed too.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, wraps
from inspect import isfunction, signature
from typing import Any, ParamSpec, TypeVar

from hookscope import api
from hookscope.errors import HookscopeError, nearest

P = ParamSpec("P")
T = TypeVar("T")

# An option; or a command in backticks, which stays one.
_OPTION = re.compile(r"`[^`\n]*`|(?<![\w-])--([a-z]+(?:-[a-z]+)*)(?![\w-])")

# Commands that messages name, as calls.
_CALLS = {
    "`hookscope layers MODEL`": "`hookscope.layers(model)`",
    "`hookscope layers MODEL --ops`": "`hookscope.layers(model, ops=True)`",
}

# The fields of a report on a checkpoint that hold why it failed.
_REASONS = ("error", "warnings", "outcomes", "reason", "findings", "message", "meaning")


def naming_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function with errors, notes and warnings that name its arguments."""

    def known() -> set[str]:
        return {*argument_names(), *_signature(function).parameters}

    @wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> T:
        on_error: Any = kwargs.get("on_error")
        if on_error is not None:
            kwargs["on_error"] = lambda error: on_error(_renamed_error(error, known()))
        _refuse_other_names(function, args, kwargs)
        try:
            result = function(*args, **kwargs)
        except HookscopeError as error:
            _renamed_error(error, known())
            raise
        renamed: T = _renamed(result, known()) if function is api.check else _with_renamed_remarks(result, known)
        return renamed

    named.__module__ = "hookscope"  # where pickle finds it
    return named


def _refuse_other_names(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    parameters = _signature(function)
    try:
        parameters.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in parameters.parameters]
        close = nearest(unknown[0], parameters.parameters, 1) if unknown else ""
        raise TypeError(f"{function.__name__}() {error}{f'.{close}' if close else ''}") from None


_signature = cache(signature)


@cache
def argument_names() -> frozenset[str]:
    """Return the names of all arguments of the functions in `hookscope.api`."""
    public = (each for name, each in vars(api).items() if isfunction(each) and not name.startswith("_"))
    functions = [each for each in public if each.__module__ == api.__name__]
    return frozenset(name for each in functions for name in signature(each).parameters)


def with_argument_names(text: str, known: Collection[str]) -> str:
    """Return a message in which the options that are `known` arguments stand as such: "give `input_shape`".

    A command that lists layers becomes a call.
    """

    def argument(found: re.Match[str]) -> str:
        name = (found[1] or "").replace("-", "_")
        return f"`{name}`" if name in known else _CALLS.get(found[0], found[0])

    return _OPTION.sub(argument, text)


def _renamed_error(error: HookscopeError, known: Collection[str]) -> HookscopeError:
    error.args = tuple(_renamed(each, known) for each in error.args)
    if hasattr(error, "reason"):
        error.reason = with_argument_names(error.reason, known)
    return error


def _with_renamed_remarks(result: Any, known: Callable[[], Collection[str]]) -> Any:
    """Rename options in the notes and warnings of a result, and in what tests of maps mean."""
    if not is_dataclass(result) or isinstance(result, type):
        return result
    remarks = {name: getattr(result, name, ()) for name in ("notes", "warnings", "sanity")}
    options = {name: texts for name, texts in remarks.items() if "--" in repr(texts)}
    return replace(result, **{name: _renamed(texts, known()) for name, texts in options.items()}) if options else result


def _renamed(value: Any, known: Collection[str]) -> Any:
    if isinstance(value, str):
        return with_argument_names(value, known)
    if isinstance(value, tuple):
        return tuple(_renamed(each, known) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        reasons = [field.name for field in fields(value) if field.name in _REASONS]
        return replace(value, **{name: _renamed(getattr(value, name), known) for name in reasons})
    return value
