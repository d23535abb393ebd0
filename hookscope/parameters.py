"""Names of parameters in messages: --input-shape on the command line, `input_shape` for Python callers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from hookscope.errors import nearest

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.Lock()
_python_calls = 0  # active calls in this process; not per thread, because a call has threads that read inputs


def arg(name: str) -> str:
    """Return a parameter's name as the caller writes it."""
    return f"`{name}`" if _python_calls else f"--{name.replace('_', '-')}"


def shows_all(command_line: str = "--full shows all") -> str:
    """Return how the caller sees what a text leaves out."""
    return "the result has all" if _python_calls else command_line


def listing(*, ops: bool = False) -> str:
    """Return the command that lists layers, and operations with `ops`, as the caller writes it."""
    if _python_calls:
        return f"`hookscope.layers(model{', ops=True' if ops else ''})`"
    return f"`hookscope layers MODEL{' --ops' if ops else ''}`"


@contextmanager
def words_for_python() -> Iterator[None]:
    """Name parameters in the block's messages as Python does."""
    global _python_calls  # noqa: PLW0603 - shared by all threads of the process
    with _lock:
        _python_calls += 1
    try:
        yield
    finally:
        with _lock:
            _python_calls -= 1


def called_from_python(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function: messages then use Python's names of parameters, and wrong names get a suggestion."""
    parameters = cache(signature)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            parameters(function).bind(*args, **kwargs)
        except TypeError as error:
            accepted = parameters(function).parameters
            unknown = [name for name in kwargs if name not in accepted]
            close = nearest(unknown[0], accepted, 1) if unknown else ""
            raise TypeError(f"{function.__name__}() {error}{f'.{close}' if close else ''}") from None
        with words_for_python():
            return function(*args, **kwargs)

    called.__module__ = "hookscope"  # where pickle finds it
    return called
