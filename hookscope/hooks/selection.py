"""Select modules by name, type and position, as `--layer` does, and the default layers without it."""

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from inspect import isbuiltin, isroutine

import torch
from torch import nn
from torch.nn.utils import parametrize

from hookscope.errors import LayerNotFoundError, UsageError, nearest
from hookscope.hooks.patterns import Pattern, parse_pattern
from hookscope.parameters import arg, listing
from hookscope.text import counted

_SIGNS_OF_LABELS = re.compile(r"[.#\[{(:']")


def module_index(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, tuple[str, ...]]]:
    """Return every module once by its first dotted name, and the other names of modules that have several.

    Names are those of `named_modules()`, unless two modules or rows would share one: see `name_of_part`.
    """
    modules: dict[str, nn.Module] = {"": model}
    aliases: dict[str, tuple[str, ...]] = {}
    first = {id(model): ""}

    def walk(prefix: str, module: nn.Module) -> None:  # like `named_modules`, but without a generator for each level
        for child_name, child in module._modules.items():
            if child is None:
                continue
            name = prefix + name_of_part(child_name, module._modules)
            canonical = first.setdefault(id(child), name)
            if canonical == name:
                modules[name] = child
            else:
                aliases[canonical] = (*aliases.get(canonical, ()), name)
            if child._modules:
                walk(f"{name}.", child)

    walk("", model)
    return modules, aliases


def name_of_part(name: str, siblings: Container[str]) -> str:
    """Return the name of a part of a module, quoted if it could be taken for another part.

    A key with a dot looks like a nested module; `r#1`, `r[0]`, `r()` and `r:add` beside `r` look like its second call,
    an output of it, and an operation that it calls; `(model)` is the whole model.
    """
    if name.isidentifier() or name.isdecimal() or _SIGNS_OF_LABELS.search(name) is None:  # nearly always
        return name
    begins = (name[: sign.start()] for sign in _SIGNS_OF_LABELS.finditer(name))
    if "." in name or name.startswith(("(model)", "'")) or any(begin in siblings for begin in begins):
        return repr(name).replace(".", r"\x2e")
    return name


def parameters_by_name(model: nn.Module) -> dict[str, tuple[nn.Parameter, nn.Module]]:
    """Return each parameter by all of its names, with the layer that computes with it.

    A parametrised weight belongs to its layer, not to the `ParametrizationList` that holds it.
    """
    modules, aliases = module_index(model)
    named = {}
    for name, module in modules.items():
        is_inside = isinstance(module, parametrize.ParametrizationList)
        layer = modules[name.rpartition(".parametrizations.")[0]] if is_inside else module
        for key, parameter in module._parameters.items():
            if parameter is not None:
                part = name_of_part(key, module._modules)
                prefixes = (name, *aliases.get(name, ()))
                named.update({f"{prefix}.{part}" if prefix else part: (parameter, layer) for prefix in prefixes})
    return named


def unwrap(model: nn.Module) -> nn.Module:
    """Return the network inside `torch.compile`, `DataParallel` and `DistributedDataParallel`."""
    while True:
        if "_orig_mod" in model._modules:
            inner = model._modules["_orig_mod"]
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        else:
            return model
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def select_layers(
    model: nn.Module, patterns: Sequence[str] = (), execution_order: Callable[[], Sequence[str]] | None = None
) -> dict[str, nn.Module]:
    """Return the modules that the patterns select.

    Args:
        model: The network; names are those of its `named_modules()`.
        patterns: `--layer` values, see `parse_pattern`. If a plain word such as "conv" matches a layer, parts inside it
            that have no parameters and do not match themselves, such as padding, are left out. Without an including
            pattern, modules that own parameters and leaves are selected.
        execution_order: Returns the names of all modules in the order in which they first finish; called only if a
            pattern selects by position.

    Returns:
        Modules by dotted name, in the order of `named_modules()`.

    Raises:
        LayerNotFoundError: If a pattern, or all patterns together, select nothing.
        UsageError: If a pattern is malformed, or selects by position without an `execution_order`.
    """
    return select_from(*module_index(model), patterns, execution_order)


def select_from(
    modules: Mapping[str, nn.Module],
    aliases: Mapping[str, tuple[str, ...]],
    patterns: Sequence[str],
    execution_order: Callable[[], Sequence[str]] | None,
) -> dict[str, nn.Module]:
    """Select layers as `select_layers` does, from a `module_index`."""
    parsed = [parse_pattern(text) for text in patterns]
    kinds = {name: type(module).__name__ for name, module in modules.items()}
    order: Sequence[str] | None = None
    only_excludes = all(pattern.exclude for pattern in parsed)
    wanted = only_excludes or any(pattern.by_position_alone for pattern in parsed)
    default = default_layers(modules) if wanted else set()
    selected = set(default) if only_excludes else set()
    for pattern in sorted(parsed, key=lambda pattern: pattern.exclude):
        matching = [
            name
            for name, kind in kinds.items()
            if (pattern.matches(name, kind) or any(pattern.matches(other, kind) for other in aliases.get(name, ())))
            and (not pattern.by_position_alone or name in default)
        ]
        if pattern.is_word and not pattern.exclude:
            matching = _without_inner_parts(matching, pattern, modules)
        if not matching:
            raise LayerNotFoundError(_no_match(pattern.text, modules, kinds))
        if pattern.position is not None:
            if order is None:
                if execution_order is None:
                    raise UsageError(
                        f"{arg('layer')} {pattern.text!r} selects by execution order, which is not known here."
                    )
                order = execution_order()
            matching = [_name_at_position(pattern, matching, order)]
        if pattern.exclude:
            selected.difference_update(matching)
        else:
            selected.update(matching)
    if not selected:
        raise LayerNotFoundError(f"The patterns {', '.join(map(repr, patterns))} leave no layer: drop an exclusion.")
    return {name: module for name, module in modules.items() if name in selected}


def _without_inner_parts(matching: Sequence[str], pattern: Pattern, modules: Mapping[str, nn.Module]) -> list[str]:
    """Drop modules without parameters that a word matches only through the name of the layer around them.

    The padding inside a convolution does not match "conv". Only layers that own parameters and match by themselves drop
    their parts: "layer1" still selects everything below it.
    """

    def matches_by_itself(name: str) -> bool:
        return pattern.matches(name.rpartition(".")[2], type(modules[name]).__name__)

    def is_inner(name: str) -> bool:
        around = name.rpartition(".")[0]
        return (
            around in modules
            and bool(_parameters(modules[around]))
            and next(modules[name].parameters(), None) is None
            and matches_by_itself(around)
            and not matches_by_itself(name)
        )

    return [name for name in matching if not is_inner(name)]


def default_layers(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of the layers selected by default: modules that own parameters, and leaves.

    Modules that only hold parts of another one are excluded: a ModuleList or ParameterList, and any other module
    without a forward; a parametrisation (`torch.nn.utils.parametrize`), whose output is a weight; a projection that
    MultiheadAttention uses without calling it. Their parameters count as the holder's, so that a convolution with
    weight normalisation is a single row.

    Args:
        modules: Every module of a network by name, as `module_index` gives them.
    """
    chosen: set[int] = set()
    reached = {id(modules[""]): modules[""]}
    waiting = [*reached.values()]
    while waiting:
        module = waiting.pop()
        if not module._modules:
            if _has_forward(module):
                chosen.add(id(module))
            continue
        parts = _uncalled_parts(module)
        held = {id(part) for part in parts}
        called = [child for part in parts for _, child in _children(part) if id(child) not in held]
        if _has_forward(module) and (not called or any(_parameters(part) for part in parts)):
            chosen.add(id(module))
        new = {id(child): child for child in called if id(child) not in reached}
        reached |= new
        waiting += new.values()
    return {name for name, module in modules.items() if id(module) in chosen}


def owned_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a module owns, including those of its ParameterLists and its parametrised ones."""
    owned = _parameters(module)
    for name, child in _children(module):
        if isinstance(child, nn.ParameterList | nn.ParameterDict) or _is_parametrisation(module, name):
            owned += child.parameters()
    return owned


def _uncalled_parts(module: nn.Module) -> list[nn.Module]:
    """Return a module and the modules in it that it never calls, such as containers and parametrisations."""
    parts = [module]
    weights = {id(module): False}
    for part in parts:  # the list grows in the loop
        for name, child in _children(part):
            if id(child) not in weights:
                is_weight = weights[id(part)] or (name in _WEIGHTS and _is_weight(part, name))
                if is_weight or not _has_forward(child):
                    weights[id(child)] = is_weight
                    parts.append(child)
    return parts


_WEIGHTS = frozenset({"parametrizations", "out_proj", "_packed_params"})


def _is_weight(module: nn.Module, name: str) -> bool:
    """Tell whether a child holds or computes a weight of its module, and no activation."""
    return (
        _is_parametrisation(module, name)
        or (name == "out_proj" and getattr(type(module), "forward", None) is nn.MultiheadAttention.forward)
        or (name == "_packed_params" and type(module).__module__.startswith("torch.ao.nn."))
    )


def _is_parametrisation(module: nn.Module, name: str) -> bool:
    return name == "parametrizations" and parametrize.is_parametrized(module)


def _has_forward(module: nn.Module) -> bool:
    # A scripted class has a forward, but no class attribute of that name.
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


def _children(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _name_at_position(pattern: Pattern, matching: Sequence[str], order: Sequence[str]) -> str:
    running = [name for name in order if name in set(matching)]
    position = pattern.position or 0
    if not running:
        raise LayerNotFoundError(
            f"{arg('layer')} {pattern.text!r} asks for a position, but no matching layer runs as a module."
        )
    if not -len(running) <= position < len(running):
        ran = counted(len(running), "matching layer")
        raise LayerNotFoundError(
            f"{arg('layer')} {pattern.text!r} asks for position {position}, but {ran} ran: positions go from "
            f"{-len(running)} to {len(running) - 1}."
        )
    return running[position]


def _no_match(text: str, modules: Mapping[str, nn.Module], kinds: Mapping[str, str]) -> str:
    body = re.sub(r"^!?(name:|type:)?", "", text).strip("/*")
    parts = {part for name in modules for part in (*name.split("."), *re.split(r"[._]", name))}  # "_conv_stem": "conv"
    names = sorted({*modules, *kinds.values(), *parts} - {""}, key=lambda name: (len(name), name))
    is_function = isroutine(getattr(nn.functional, body, None)) or isbuiltin(getattr(torch, body, None))
    operation = f" For the operation: {arg('layer')} op:{body}." if is_function else ""
    return f"No layer matches {text!r}.{nearest(body, names)}{operation} List them with {listing()}."
