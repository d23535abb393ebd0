"""Find the tensors in what modules take and return, however deep, and put others in their place."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def tensors_in(value: object) -> list[tuple[str, Tensor]]:
    """List the tensors of a nested value with the path to each.

    Walks tensors, mappings (Hugging Face outputs are mappings), named tuples, lists, tuples, dataclasses, and the
    attributes of other objects one level deep (torchvision's `ImageList`).

    Args:
        value: What a module took or returned.

    Returns:
        (path, tensor) in order: ("", t) for a bare tensor, ("[0]", t), ("['out']", t), (".boxes", t).
    """
    if isinstance(value, torch.Tensor):
        return [("", value)]
    found: list[tuple[str, Tensor]] = []
    _walk(value, "", found, set())
    return found


def tensors_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """List the tensors that a call was given, as `tensors_in` does: ("[0]", t), ("['mask']", t)."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # nearly always
        return [("[0]", args[0])]
    inputs = tensors_in(args)
    if kwargs:
        inputs += tensors_in(kwargs)
    return inputs


def _walk(value: object, path: str, found: list[tuple[str, Tensor]], parents: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        found.append((path, value))
        return
    if value is None or isinstance(value, str | bytes | int | float | complex) or id(value) in parents:
        return
    parents = parents | {id(value)}
    for step, child in _children(value):
        _walk(child, path + step, found, parents)


def _children(value: object) -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(f".{item.name}", getattr(value, item.name, None)) for item in dataclasses.fields(value)]
    if callable(getattr(type(value), "keys", None)) and callable(getattr(type(value), "items", None)):
        return [(f"[{key!r}]", child) for key, child in value.items()]  # type: ignore[attr-defined]
    attributes = {} if isinstance(value, nn.Module) else getattr(value, "__dict__", {})
    return [(f".{name}", child) for name, child in attributes.items() if isinstance(child, torch.Tensor)]


def with_tensors(value: object, replacements: Mapping[str, Tensor]) -> object:
    """Return the nested value with other tensors at some paths.

    Containers on the way to a replaced tensor are copied, shallowly; the others stay the objects they are.

    Args:
        value: What `tensors_in` was asked about.
        replacements: Tensors by its paths.

    Raises:
        TypeError: If a container on the way cannot be copied or does not take the tensor.
    """
    try:
        return _rebuilt(value, "", replacements, set())
    except (TypeError, AttributeError, ValueError, KeyError, RuntimeError) as error:
        raise TypeError(f"no tensor of a {type(value).__name__} can be replaced: {error}") from error


def _rebuilt(value: object, path: str, replacements: Mapping[str, Tensor], parents: set[int]) -> object:
    if isinstance(value, torch.Tensor):
        return replacements.get(path, value)
    if value is None or isinstance(value, str | bytes | int | float | complex) or id(value) in parents:
        return value
    parents = parents | {id(value)}
    children = _children(value)
    rebuilt = [_rebuilt(child, path + step, replacements, parents) for step, child in children]
    changed = [at for at, (_, child) in enumerate(children) if rebuilt[at] is not child]
    if not changed:
        return value
    return _assembled(value, children, rebuilt, changed)


def _assembled(
    value: Any, children: Sequence[tuple[str, object]], rebuilt: Sequence[object], changed: Sequence[int]
) -> object:
    """Return a copy of the container with other children, of which those at `changed` differ."""
    if isinstance(value, tuple):
        make = getattr(type(value), "_make", type(value))
        return make(rebuilt)
    copied = copy.copy(value)
    if isinstance(value, list):
        copied[:] = rebuilt
    elif children[0][0].startswith("["):
        keys = list(value.keys())
        for at in changed:
            copied[keys[at]] = rebuilt[at]
    else:
        for at in changed:
            object.__setattr__(copied, children[at][0][1:], rebuilt[at])
    return copied
