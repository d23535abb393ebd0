"""Errors for Python callers: they name the argument `input_shape` where the command line has `--input-shape`.

Messages are written for the command line. The functions that `hookscope` offers rename options in what they raise; the
commands call those in `hookscope.api`, which do not.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass, replace
from functools import cache, wraps
from inspect import isfunction, signature
from typing import Any, ParamSpec, TypeVar

from hookscope import api
from hookscope.errors import HookscopeError

P = ParamSpec("P")
T = TypeVar("T")

# An option; or a command in backticks, which stays one.
_OPTION = re.compile(r"`[^`\n]*`|(?<![\w-])--([a-z]+(?:-[a-z]+)*)(?![\w-])")

# The fields of a report on a checkpoint that hold why it failed.
_REASONS = ("error", "warnings", "outcomes", "reason", "findings", "message")


def naming_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function with errors that name its arguments: those it raises, passes to `on_error`, and reports."""

    def known() -> set[str]:
        return {*argument_names(), *signature(function).parameters}

    @wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> T:
        on_error: Any = kwargs.get("on_error")
        if on_error is not None:
            kwargs["on_error"] = lambda error: on_error(_renamed_error(error, known()))
        try:
            result = function(*args, **kwargs)
        except HookscopeError as error:
            _renamed_error(error, known())
            raise
        return _renamed(result, known()) if function is api.check else result

    named.__module__ = "hookscope"  # where pickle finds it
    return named


@cache
def argument_names() -> frozenset[str]:
    """Return the names of all arguments of the functions in `hookscope.api`."""
    public = (each for name, each in vars(api).items() if isfunction(each) and not name.startswith("_"))
    functions = [each for each in public if each.__module__ == api.__name__]
    return frozenset(name for each in functions for name in signature(each).parameters)


def with_argument_names(text: str, known: Collection[str]) -> str:
    """Return a message in which the options that are `known` arguments stand as such: "give `input_shape`"."""

    def argument(found: re.Match[str]) -> str:
        name = (found[1] or "").replace("-", "_")
        return f"`{name}`" if name in known else found[0]

    return _OPTION.sub(argument, text)


def _renamed_error(error: HookscopeError, known: Collection[str]) -> HookscopeError:
    error.args = tuple(_renamed(each, known) for each in error.args)
    if hasattr(error, "reason"):
        error.reason = with_argument_names(error.reason, known)
    return error


def _renamed(value: Any, known: Collection[str]) -> Any:
    if isinstance(value, str):
        return with_argument_names(value, known)
    if isinstance(value, tuple):
        return tuple(_renamed(each, known) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        reasons = [field.name for field in fields(value) if field.name in _REASONS]
        return replace(value, **{name: _renamed(getattr(value, name), known) for name in reasons})
    return value
