"""How messages name a parameter: --input-shape on the command line, `input_shape` where Python calls a function."""

import threading
from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from hookscope.errors import nearest

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.Lock()
_python_calls = 0  # under way in this process: threads that read inputs belong to one, too


def arg(name: str) -> str:
    """Return a parameter as the caller writes it."""
    return f"`{name}`" if _python_calls else f"--{name.replace('_', '-')}"


def listing(*, ops: bool = False) -> str:
    """Return the command that lists layers, or operations too, as the caller writes it."""
    if _python_calls:
        return f"`hookscope.layers(model{', ops=True' if ops else ''})`"
    return f"`hookscope layers MODEL{' --ops' if ops else ''}`"


def called_from_python(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function with messages that name its parameters, and the nearest name to one that it does not have."""
    parameters = cache(signature)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        global _python_calls  # noqa: PLW0603 - who is calling is a fact about the process
        try:
            parameters(function).bind(*args, **kwargs)
        except TypeError as error:
            accepted = parameters(function).parameters
            unknown = [name for name in kwargs if name not in accepted]
            close = nearest(unknown[0], accepted, 1) if unknown else ""
            raise TypeError(f"{function.__name__}() {error}{f'.{close}' if close else ''}") from None
        with _lock:
            _python_calls += 1
        try:
            return function(*args, **kwargs)
        finally:
            with _lock:
                _python_calls -= 1

    called.__module__ = "hookscope"  # where pickle finds it
    return called
