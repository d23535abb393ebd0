"""Which code of a network is its own, not torch's, torchvision's or timm's, and the functions it consists of."""

import dis
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks.attributes import attribute_of

# Forward passes of torchvision and timm write to no parameter, and torch's own only where `Embedding` has a `max_norm`.
# Those of transformers do: RWKV rescales weights, Gemma 3n clamps them.
_NOT_READ = frozenset({"torch", "torchvision", "timm", "numpy", "hookscope", "builtins"})
_STANDARD_LIBRARY = str(Path(dis.__file__).parent)

ENTRY_POINTS = ("__call__", "__enter__", "__exit__", "forward", "backward")
"""Methods of an object that is no module that run without being named."""

_hooks: Callable[[Any], tuple[Any, ...]] = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)


def has_own_code(modules: Sequence[nn.Module]) -> bool:
    """Tell whether a network has code that is not torch's, torchvision's or timm's, hooks and scripts included."""
    kinds = {*map(type, modules)}
    return (
        any(issubclass(kind, torch.jit.ScriptModule) or kind.__module__.startswith("hookscope.") for kind in kinds)
        or any(map(is_read, kinds))
        or any(True for hook in hooks_on(modules) for _ in functions_behind(hook))
    )


def hooks_on(modules: Iterable[nn.Module]) -> list[Any]:
    """List the hooks that modules' calls run, forward and backward."""
    held = filter(None, chain.from_iterable(map(_hooks, map(vars, modules))))
    return [hook for hooks in held for hook in hooks.values()]


def is_read(kind: type) -> bool:
    """Tell whether the code of a class has to be read to know what it does."""
    return has_read_code(kind.__module__)


def has_read_code(module: str | None) -> bool:
    """Tell whether the code of a Python module, by its dotted name, has to be read to know what it does."""
    package = (module or "").partition(".")[0]
    return package not in _NOT_READ and not (package in sys.stdlib_module_names and _is_pythons(package))


@functools.cache
def _is_pythons(package: str) -> bool:
    """Tell whether a package of the standard library's name is it, and not a user's `test.py` or `code.py`."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is None or file.startswith(_STANDARD_LIBRARY)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Return the code of a function and of those inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes_in(const)


def unwrapped(value: Any) -> Any:
    """Return the function behind a method or a partial application; other values as they are."""
    while isinstance(value, functools.partial | MethodType | staticmethod | classmethod):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return value


def functions_behind(value: Any) -> Iterator[FunctionType]:
    """Find the functions to be read behind a callable, a property, a decorated function or an object."""
    while (value := unwrapped(value)) is not None:
        if isinstance(value, FunctionType):
            if has_read_code(value.__module__):
                yield value
            value = attribute_of(value, "__wrapped__")
        elif isinstance(value, property):
            for accessor in (value.fget, value.fset):
                yield from functions_behind(accessor)
            return
        elif isinstance(value, functools.cached_property):
            value = value.func
        else:
            if is_read(type(value)) and not isinstance(value, type | nn.Module | Tensor):
                for name in ENTRY_POINTS:
                    yield from functions_behind(getattr(type(value), name, None))
            return
