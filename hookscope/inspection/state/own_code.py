"""Which code of a network is its own, not torch's, torchvision's or timm's, and which parameters it may overwrite.

To copy every parameter takes a quarter of a forward pass and their memory again: up to 64 MiB, 61 MB and 20 to 50 ms of
a resnet34. So for a large network, only those are copied that are named by a function whose bytecode also writes:
by an in-place method (`mul_`), `.data`, `out=`, an assignment to items or an augmented one.
"""

import dis
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from hookscope.hooks.attributes import attribute_of
from hookscope.hooks.calls import Hook
from hookscope.hooks.pytree import tensors_in

# Forward passes of torchvision and timm write to no parameter, and torch's own only where `Embedding` has a `max_norm`.
# Those of transformers do: RWKV rescales weights, Gemma 3n clamps them.
_NOT_READ = frozenset({"torch", "torchvision", "timm", "numpy", "hookscope", "builtins"})
_STANDARD_LIBRARY = str(Path(dis.__file__).parent)

# Methods of an object that is no module that run without being named.
_ENTRY_POINTS = ("__call__", "__enter__", "__exit__", "forward", "backward")

_IN_PLACE = re.compile(r"(?!__)\w*[a-z0-9]_\Z")
_CHANGES_NO_VALUE = frozenset({"requires_grad_", "detach_", "share_memory_"})
_WRITES = frozenset({"data", "out", "max_norm", "load_state_dict", "vector_to_parameters"})
_EVERY_PARAMETER = frozenset(
    {"parameters", "named_parameters", "state_dict", "load_state_dict", "vector_to_parameters"}
)
_GRADIENTS = frozenset({"grad", "_grad", "zero_grad", "clip_grad_norm_", "clip_grad_value_"})
# Methods of a module that run without being named.
_OF_A_MODULE = ("forward", "train", "eval", "__call__", "__setattr__", "__getattr__", "__getattribute__")

_STORES = frozenset({dis.opmap["STORE_SUBSCR"], dis.opmap.get("STORE_SLICE")})  # STORE_SLICE exists from Python 3.12 on
_BINARY = dis.opmap["BINARY_OP"]
_AUGMENTED = range(13, 26)  # arguments of BINARY_OP that stand for +=, -= and so on; from Python 3.14 on, 26 is x[i]
_IS, _FIXED = dis.opmap["IS_OP"], frozenset({dis.opmap["LOAD_CONST"], dis.opmap["LOAD_GLOBAL"]})

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
    """List the hooks that modules' calls run, forward and backward, but not hookscope's own."""
    held = filter(None, chain.from_iterable(map(_hooks, map(vars, modules))))
    return [hook for hooks in held for hook in hooks.values() if type(hook) is not Hook]


def is_read(kind: type) -> bool:
    """Tell whether the code of a class has to be read to know what it does."""
    return has_read_code(kind.__module__)


def has_read_code(module: str | None) -> bool:
    """Tell whether the code of a Python module, by its dotted name, has to be read to know what it does."""
    package = (module or "").partition(".")[0]
    return package not in _NOT_READ and not (package in sys.stdlib_module_names and _is_pythons(package))


@functools.cache
def _is_pythons(package: str) -> bool:
    """Tell whether a package with a name of the standard library is Python's, not a user's `test.py` or `code.py`."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is None or file.startswith(_STANDARD_LIBRARY)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes_in(const)


def _unwrapped(value: Any) -> Any:
    """Return the function behind a method or a partial application; other values as they are."""
    while isinstance(value, functools.partial | MethodType | staticmethod | classmethod):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return value


def functions_behind(value: Any) -> Iterator[FunctionType]:
    """Find the functions to be read behind a callable, a property, a decorated function or an object."""
    while (value := _unwrapped(value)) is not None:
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
                for name in _ENTRY_POINTS:
                    yield from functions_behind(getattr(type(value), name, None))
            return


class Overwritten(NamedTuple):
    """The tensors that a network may overwrite while it runs."""

    tensors: AbstractSet[int]  # identities of parameters, and of tensors in plain attributes
    gradients: bool  # whether its code may write to `.grad`


def overwritten(modules: Sequence[nn.Module], *, own_code: bool) -> Overwritten:
    """Find what a network may overwrite while it runs: `modules` lists all of its modules, each once."""
    embeddings = [layer for layer in modules if issubclass(type(layer), nn.Embedding | nn.EmbeddingBag)]
    clipped = [layer for layer in embeddings if attribute_of(layer, "max_norm", 0) is not None]
    written = {id(attribute_of(layer, "weight")) for layer in clipped}  # a subclass may have none
    if not own_code:
        return Overwritten(written, gradients=False)
    statements = statements_of(modules)
    through_data = any("data" in statement.names for statement in statements)
    for statement in statements:
        if statement.writes or through_data:
            written.update(map(id, _named(modules, statement.owner, statement.names)))
    writers = {statement.owner for statement in statements if statement.writes} - {nn.Module}
    for module in modules:
        if isinstance(module, ParametrizationList):  # calls its parts with its parameters
            bases = {base for part in module._modules.values() for base in type(part).__mro__}
            written.update(() if bases.isdisjoint(writers) else map(id, module._parameters.values()))
    gradients = any(
        "backward" in statement.names or (statement.writes and not statement.names.isdisjoint(_GRADIENTS))
        for statement in statements
    )
    return Overwritten(written, gradients)


class Statement(NamedTuple):
    """A function's code, and for modules of which class it is.

    Attributes:
        names: Globals, attributes and keywords that it uses.
        writes: Whether it may write to a tensor.
        asks: Whether it compares two objects by identity.
    """

    owner: type
    names: frozenset[str]
    writes: bool
    asks: bool


def statements_of(modules: Collection[nn.Module]) -> tuple[Statement, ...]:
    """Read the code of modules' own classes, of functions in their attributes, and of hooks on any of them."""
    read = frozenset(kind for kind in {*map(type, modules)} if is_read(kind))
    held = {id(value): value for module in modules if type(module) in read for value in vars(module).values()}
    functions = {function for value in chain(held.values(), hooks_on(modules)) for function in functions_behind(value)}
    # Functions are not remembered: they may hold on to a network.
    return _statements(read, functions) if functions else _known_statements(read)


def _statements(kinds: AbstractSet[type], functions: Iterable[FunctionType]) -> tuple[Statement, ...]:
    """Read the methods that modules of these classes run, `functions`, and the functions that these name in turn."""
    owners = [*dict.fromkeys(base for kind in kinds for base in kind.__mro__ if is_read(base))]
    waiting: list[tuple[type, FunctionType]] = [(nn.Module, function) for function in functions]
    for owner in owners:
        waiting += [(owner, method) for name in _OF_A_MODULE for method in functions_behind(vars(owner).get(name))]
    seen: set[CodeType] = set()
    statements = []
    while waiting:
        owner, function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        statements.append(_statement(owner, function.__code__))
        names = statements[-1].names
        attributes = {name for name in names if not name.startswith("__")}
        for holder in owners:
            meant = [vars(holder)[name] for name in attributes & vars(holder).keys()]
            waiting += [(holder, callee) for value in meant for callee in functions_behind(value)]
        for value in _globals_of(function, names):
            waiting += [(nn.Module, callee) for callee in functions_behind(value)]
            if isinstance(value, type) and is_read(value) and not issubclass(value, nn.Module):
                bases = [base for base in value.__mro__ if is_read(base) and base not in owners]
                owners += bases
                entries = [vars(base).get(name) for base in bases for name in ("__init__", *_ENTRY_POINTS)]
                waiting += [(nn.Module, callee) for entry in entries for callee in functions_behind(entry)]
    return tuple(statements)


@functools.lru_cache(maxsize=32)
def _known_statements(kinds: frozenset[type]) -> tuple[Statement, ...]:
    return _statements(kinds, ())


def _statement(owner: type, code: CodeType) -> Statement:
    names: set[str] = set()
    writes = asks = False
    for body in _codes_in(code):
        names.update(body.co_names)
        steps = [pair for pair in zip(body.co_code[::2], body.co_code[1::2], strict=True) if pair[0]]  # 0 is a cache
        writes |= any(step in _STORES or (step == _BINARY and argument in _AUGMENTED) for step, argument in steps)
        asks |= any(step == _IS and before not in _FIXED for (before, _), (step, _) in pairwise(steps))
        for constant in body.co_consts:
            if isinstance(constant, tuple):  # keywords of a call
                names.update(name for name in constant if isinstance(name, str))
    writes |= not names.isdisjoint(_WRITES) or any(map(_IN_PLACE.match, names - _CHANGES_NO_VALUE))
    return Statement(owner, frozenset(names), writes, asks)


def _globals_of(function: FunctionType, names: AbstractSet[str]) -> Iterator[Any]:
    """Find what the names in a function stand for outside it."""
    for cell in function.__closure__ or ():
        yield getattr(cell, "cell_contents", None)  # an empty one has none
    for value in [function.__globals__[name] for name in names & function.__globals__.keys()]:
        yield value
        if isinstance(value, ModuleType) and has_read_code(value.__name__):
            yield from (vars(value)[name] for name in names & vars(value).keys())


def _named(modules: Sequence[nn.Module], owner: type, names: AbstractSet[str]) -> Iterator[Tensor]:
    """Find the parameters, and tensors in attributes, that the names in a function may stand for.

    They belong to the owner's modules or to modules below. `self.head.weight` is the weight of `head`; if none of the
    modules with a `weight` is named, it may be the weight of any.
    """
    if owner is nn.Module:  # may hold any type
        inner = {id(child) for module in modules for child in module._modules.values()}
        waiting = [(module, False) for module in modules if id(module) not in inner]
    else:
        waiting = [(module, True) for module in modules if isinstance(module, owner)]
    seen = {id(module) for module, _ in waiting}
    reached: list[nn.Module] = []
    near: defaultdict[str, list[Tensor]] = defaultdict(list)
    far: defaultdict[str, list[Tensor]] = defaultdict(list)
    while waiting:
        module, is_named = waiting.pop()
        reached.append(module)
        for name, tensor in _tensors_by_name(module, names):
            (near if is_named else far)[name].append(tensor)
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append((child, name in names or (name.isdigit() and is_named)))
    for name in near.keys() | far.keys():
        yield from near[name] or far[name]
    if not names.isdisjoint(_EVERY_PARAMETER):
        yield from (param for module in reached for param in module._parameters.values() if param is not None)


def _tensors_by_name(module: nn.Module, names: AbstractSet[str]) -> Iterator[tuple[str, Tensor]]:
    """Find the parameters of one module, and tensors in its attributes, that have one of the names."""
    for name, parameter in module._parameters.items():
        if parameter is not None and name in names:
            yield name, parameter
    for name in names & vars(module).keys():
        if isinstance(vars(module)[name], Tensor | list | tuple | dict):
            yield from ((name, tensor) for _, tensor in tensors_in(vars(module)[name]))
