"""Select modules by name, type and position: what `--layer` means."""

import re
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from hookscope.errors import LayerNotFoundError, UsageError, nearest
from hookscope.patterns import Pattern, parse_pattern


def module_index(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, tuple[str, ...]]]:
    """Return every module once, by its first dotted name, and the further names of those that have several."""
    first: dict[int, str] = {}
    modules: dict[str, nn.Module] = {}
    aliases: dict[str, tuple[str, ...]] = {}

    def walk(name: str, module: nn.Module) -> None:  # as `named_modules`, without a generator for each level
        known = first.setdefault(id(module), name)
        if known == name:
            modules[name] = module
        else:
            aliases[known] = (*aliases.get(known, ()), name)
        for child_name, child in module._modules.items():
            if child is not None:
                walk(f"{name}.{child_name}" if name else child_name, child)

    walk("", model)
    return modules, aliases


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
        patterns: `--layer` values, see `parse_pattern`. Without one that includes, every leaf is meant.
        execution_order: Gives the names of all modules in the order in which they first finish; asked only when a
            pattern chooses by position.

    Returns:
        Modules by dotted name, in the order of `named_modules()`.

    Raises:
        LayerNotFoundError: If a pattern, or all together, select nothing.
        UsageError: If a pattern is malformed, or needs the execution order and none can be had.
    """
    return select_from(*module_index(model), patterns, execution_order)


def select_from(
    modules: Mapping[str, nn.Module],
    aliases: Mapping[str, tuple[str, ...]],
    patterns: Sequence[str],
    execution_order: Callable[[], Sequence[str]] | None,
) -> dict[str, nn.Module]:
    """Return what `select_layers` does, for whoever has the `module_index` already."""
    parsed = [parse_pattern(text) for text in patterns]
    kinds = {name: type(module).__name__ for name, module in modules.items()}
    order: Sequence[str] | None = None
    selected: set[str] = set()
    if all(pattern.exclude for pattern in parsed):
        selected.update(name for name, module in modules.items() if _is_leaf(module))
    for pattern in sorted(parsed, key=lambda pattern: pattern.exclude):
        matching = [
            name
            for name, kind in kinds.items()
            if (pattern.matches(name, kind) or any(pattern.matches(other, kind) for other in aliases.get(name, ())))
            and (not pattern.leaves_only or _is_leaf(modules[name]))
        ]
        if not matching:
            raise LayerNotFoundError(_no_match(pattern.text, modules, kinds))
        if pattern.position is not None:
            if order is None:
                if execution_order is None:
                    raise UsageError(f"--layer {pattern.text!r} chooses by execution order, which is not known here.")
                order = execution_order()
            matching = [_at(pattern, matching, order)]
        if pattern.exclude:
            selected.difference_update(matching)
        else:
            selected.update(matching)
    if not selected:
        raise LayerNotFoundError(f"The patterns {', '.join(map(repr, patterns))} leave no layer: drop an exclusion.")
    return {name: module for name, module in modules.items() if name in selected}


def _is_leaf(module: nn.Module) -> bool:
    return all(part is None for part in module._modules.values())


def _at(pattern: Pattern, matching: Sequence[str], order: Sequence[str]) -> str:
    """Return the matching name at the pattern's position among those that run."""
    running = [name for name in order if name in set(matching)]
    position = pattern.position or 0
    if not running:
        raise LayerNotFoundError(f"--layer {pattern.text!r} asks for a position, but 0 matching layers run as modules.")
    if not -len(running) <= position < len(running):
        raise LayerNotFoundError(
            f"--layer {pattern.text!r} asks for position {position}, but {len(running)} matching layers run: "
            f"positions go from {-len(running)} to {len(running) - 1}."
        )
    return running[position]


def _no_match(text: str, modules: Mapping[str, nn.Module], kinds: Mapping[str, str]) -> str:
    body = re.sub(r"^!?(name:|type:)?", "", text).strip("/*")
    parts = {part for name in modules for part in (*name.split("."), *re.split(r"[._]", name))}  # "_conv_stem": "conv"
    known = sorted({*modules, *kinds.values(), *parts} - {""}, key=lambda name: (len(name), name))
    return f"No layer matches {text!r}.{nearest(body, known)} List them with `hookscope layers MODEL`."
