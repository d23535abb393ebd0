"""Find the weights in what a file holds: a bare state dict, or one inside a larger training checkpoint.

Everything here comes from a stranger: methods are called through their class, since an object can shadow its own, and
nothing is followed without bounds.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import CheckpointError, ModelError, NothingMatchedError, UsageError
from hookscope.text import exception_line, printable

# Where training scripts put the weights inside a checkpoint.
_WEIGHTS_KEYS = {
    *("state_dict", "model_state_dict", "model_state", "model", "model_ema", "model_ema_state_dict", "state_dict_ema"),
    *("ema", "ema_state_dict", "ema_model", "module", "net", "network", "params", "params_ema", "weights"),
}

_OPTIMISER = {"state", "param_groups"}  # the keys of every torch optimiser's state dict

# Our choices: no training script nests deeper, and a file can refer to one dict any number of times.
_DEPTH_LIMIT = 4
_DICTS_LIMIT = 10_000

# Our choice: with more dicts of tensors than this they are a tree of parameters, one set of weights.
_SETS_LIMIT = 8

_Keys = tuple[object, ...]  # that lead from the whole content to a part of it


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by name, detached, what else stands among them, and notes on where they were and what else there is.

    `module` is the pickled Module that they are of, which only a trusted file can hold; else None.
    """

    state: "OrderedDict[str, Any]"
    module: nn.Module | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of what a file holds, with all the tensors in it.

    `key` is "" for the whole content, else keys joined by dots. An optimiser's state, for one, is no set of weights.
    `tensors` are detached and in the file's order, with names like "conv.weight", "state.0.exp_avg", "[2]" and
    "packed[0]"; `state` is the state dict itself, empty if it is none.
    """

    key: str
    is_weights: bool
    tensors: tuple[tuple[str, Tensor], ...]
    state: dict[str, Any]


def parts_of(content: object, name: str, key: str | None = None) -> list[Part]:
    """Return the parts of what a file holds that have tensors: every set of weights, then everything else.

    `name` is the file's in messages; with a `key`, as for `weights_in`, what is there is the only part. Raises
    CheckpointError if there are no tensors, NothingMatchedError if there is nothing at `key`.
    """
    if key is None:
        sets = {id(found): (_joined(keys), found) for keys, found in _sets(content)}
    else:
        keys, prefix = _walked(content, key, name)
        content, _ = _reach(content, keys, prefix)
        sets = {id(content): (".".join(filter(None, [_joined(keys), prefix.rstrip(".")])), content)}
    by_part: dict[tuple[str, bool], list[tuple[str, Tensor]]] = {(where, True): [] for where, _ in sets.values()}
    for place, path, tensor in _placed(content, {at: where for at, (where, _) in sets.items()}):
        by_part.setdefault(place, []).append((path, tensor))
    states = {where: found for where, found in sets.values() if isinstance(found, dict)}
    parts = [
        Part(where, is_weights, tuple(tensors), _by_name(states.get(where)) if is_weights else {})
        for (where, is_weights), tensors in by_part.items()
        if tensors
    ]
    if not parts:
        holds = f"{name} holds" if key is None else f"{name} has at '{printable(key, 80)}'"
        raise CheckpointError(f"{holds} no tensors: {_inside(content)}.")
    return parts


def _sets(content: object) -> list[tuple[_Keys, object]]:
    """Return the sets of weights in what a file holds, and the keys that lead to them: itself if it has none inside."""
    if is_optimiser(content):
        return []
    if isinstance(content, dict):
        candidates = list(_candidates(content))
        usual = [keys for keys, _ in candidates if keys[-1] in _WEIGHTS_KEYS]
        if usual or not _tensors(content):
            chosen = [each for each in candidates if not usual or each[0] in usual or _may_be_weights(*each)]
            if 0 < len(chosen) <= _SETS_LIMIT:
                return chosen
    return [((), content)]


def _may_be_weights(keys: _Keys, found: object) -> bool:
    """Say whether a dict beside the weights may be another set of them: floating values along an axis, no optimiser's.

    Our choice: what else training scripts keep are single numbers, and random states in bytes.
    """
    tensors = map(Tensor.detach, _tensors(found) if isinstance(found, dict) else ())
    named_so = any("optim" in key.lower() for key in keys if isinstance(key, str))
    return not named_so and any(each.dim() > 0 and each.is_floating_point() for each in tensors)


def other_sets(content: object, key: str | None) -> list[tuple[str, dict[Any, Any]]]:
    """Return the sets of weights that a file holds but for the one at `key`, or the only one, and where they are."""
    own = _walked(content, key, "")[0] if key is not None else None
    sets = [(keys, found) for keys, found in _sets(content) if keys and isinstance(found, dict)]
    if own is None:
        own = sets[0][0] if sets else ()
    return [(_dotted(keys), found) for keys, found in sets if keys != own]


def _placed(content: object, sets: Mapping[int, str]) -> Iterator[tuple[tuple[str, bool], str, Tensor]]:
    """Yield every tensor of nested dicts, lists and tuples: which part it is of, its path there, and itself, detached.

    `sets` says where each set of weights is, by the id of what holds it.
    """
    seen: set[int] = set()
    waiting: list[tuple[object, tuple[str, bool], str]] = [(content, ("", False), "")]
    while waiting:
        value, (where, is_weights), path = waiting.pop()
        if id(value) in sets:
            where, is_weights, path = sets[id(value)], True, ""
        if isinstance(value, Tensor):
            yield (where, is_weights), path or "(tensor)", Tensor.detach(value)
        if not isinstance(value, dict | list | tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        if path and (is_optimiser(value) if is_weights else not where):  # everything else, by its top-level entry
            where, is_weights, path = ".".join(filter(None, [where, path])), False, ""
        for step, child in reversed(_members(value)):
            waiting.append((child, (where, is_weights), path + step if path else step.removeprefix(".")))


def _members(value: object) -> list[tuple[str, object]]:
    """Return what a dict, list or tuple holds, each with what it adds to the path."""
    if isinstance(value, dict):
        return [(f".{_named(key)}", child) for key, child in dict.items(value)]
    return [(f"[{at}]", child) for at, child in enumerate(value)] if isinstance(value, list | tuple) else []


def _named(key: object) -> str:
    """Return a key as a part of a path."""
    if isinstance(key, tuple) and 0 < len(key) < 5 and all(isinstance(each, str | int) for each in key):
        return f"({', '.join(map(_named, key))})"
    return key if isinstance(key, str) else _shown(key)


def _by_name(found: object) -> dict[str, Any]:
    """Return what stands under names in a dict, tensors detached."""
    pairs = dict.items(found) if isinstance(found, dict) else ()
    return {
        key: Tensor.detach(value) if isinstance(value, Tensor) else value
        for key, value in pairs
        if isinstance(key, str)
    }


def _joined(keys: _Keys) -> str:
    return ".".join(map(str, keys))


def weights_in(content: object, name: str, key: str | None = None) -> Weights:
    """Return the weights in what a file holds, `name` in messages.

    `key` says where they are: keys joined by dots, which keys may contain themselves; what all names of the weights
    start with may follow, or be it. Raises CheckpointError if there are no weights, or some without data, or that claim
    more than their storage has; UsageError if there are several and no `key`; NothingMatchedError if there is nothing
    at `key`; ModelError if a trusted Module raises.
    """
    keys, prefix = (_find(content, name), "") if key is None else _walked(content, key, name)
    found, ignored = _reach(content, keys, prefix)
    where = ".".join(filter(None, [_dotted(keys), printable(prefix.rstrip("."), 80)]))
    module = found if isinstance(found, nn.Module) else None
    holds = f"{name} has at '{where}'" if where else f"{name} holds"
    state = _checked(_state_dict(module, name) if module else found, holds)
    rest = f"; ignored: {_listed(ignored)}" if ignored else ""
    notes = (f"{name}: weights taken from its key '{where}'{rest}.",) if where else ()
    return Weights(state, module, notes)


def _reach(content: object, keys: _Keys, prefix: str) -> tuple[object, list[str]]:
    """Return what `keys` lead to, of which only what starts with `prefix`, and what is left behind, for a message."""
    found, ignored = content, []
    if keys and isinstance(content, dict):
        ignored = [_shown(key) for key in dict.keys(content) if key is not keys[0]]
    for key in keys:
        found = dict.__getitem__(found, key) if isinstance(found, dict) else None
    if not (prefix and isinstance(found, dict)):
        return found, ignored
    inner = {key for key in dict.keys(found) if isinstance(key, str) and key.startswith(prefix)}
    ignored += [_shown(key) for key in dict.keys(found) if key not in inner]
    return {key.removeprefix(prefix): value for key, value in dict.items(found) if key in inner}, ignored


def _state_dict(module: nn.Module, name: str) -> object:
    try:
        return module.state_dict()
    except Exception as error:
        kind = type(module).__name__
        raise ModelError(f"{name} holds a {kind} without a state dict: {exception_line(error)}") from error


def _find(content: object, name: str) -> _Keys:
    """Return the keys that lead to the only weights there are; () for the content itself."""
    if not isinstance(content, dict):
        return ()
    if is_optimiser(content):
        raise CheckpointError(f"{name} is an optimiser's state, not a network's; give the file of its state dict.")
    candidates = list(_candidates(content))
    usual = [keys for keys, _ in candidates if keys[-1] in _WEIGHTS_KEYS]
    if not usual and (_tensors(content) or not candidates):
        return ()
    chosen = [(keys, found) for keys, found in candidates if not usual or keys in usual]
    if len({_identity(found) for _, found in chosen}) > 1:
        shown = [f"{_dotted(keys)} ({_size(found)})" for keys, found in chosen]
        first = _dotted(chosen[0][0])
        raise UsageError(f"{name} holds several weights: {_listed(shown)}; choose with --key, such as --key {first}.")
    return chosen[0][0]


def _candidates(content: dict[Any, Any]) -> Iterator[tuple[_Keys, object]]:
    """Yield what could be weights, the nearest first: dicts with tensors, and Modules."""
    level: list[tuple[_Keys, dict[Any, Any]]] = [((), content)]
    seen = {id(content)}
    for _ in range(_DEPTH_LIMIT):
        deeper: list[tuple[_Keys, dict[Any, Any]]] = []
        for keys, parent in level:
            for key, value in dict.items(parent):
                if not isinstance(key, str | int) or not isinstance(value, dict | nn.Module):
                    continue
                if id(value) in seen or len(seen) > _DICTS_LIMIT:
                    continue
                seen.add(id(value))
                if isinstance(value, nn.Module) or _tensors(value):
                    yield (*keys, key), value
                elif not is_optimiser(value):
                    deeper.append(((*keys, key), value))
        level = deeper


def _walked(content: object, key: str, name: str) -> tuple[_Keys, str]:
    way = next(_walks(content, key), None)
    if way is None:
        raise NothingMatchedError(f"--key '{printable(key)}' names nothing in {name}, which holds {_inside(content)}.")
    return way


def _walks(content: object, dotted: str) -> Iterator[tuple[_Keys, str]]:
    """Yield the ways to follow `dotted` into nested dicts, those with the longest keys first, and the rest as a prefix.

    The prefix is what names start with; empty if `dotted` ends at a key.
    """
    if not isinstance(content, dict):
        return
    keys = sorted((each for each in dict.keys(content) if isinstance(each, str)), key=len, reverse=True)
    for key in keys:
        if dotted == key:
            yield (key,), ""
        elif dotted.startswith(f"{key}."):
            for rest, prefix in _walks(dict.__getitem__(content, key), dotted[len(key) + 1 :]):
                yield (key, *rest), prefix
    prefix = dotted.rstrip(".") + "."
    if any(key.startswith(prefix) for key in keys):
        yield (), prefix


def _checked(state: object, where: str) -> "OrderedDict[str, Any]":
    """Return a state dict of detached tensors, without what a file may have hung on it but module versions."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{where} a {type(state).__name__}, not a state dict (tensors by name).")
    if not _tensors(state):
        if any(is_optimiser(value) for value in dict.values(state)):
            raise CheckpointError(f"{where} an optimiser's state, but no weights: {_inside(state)}.")
        raise CheckpointError(f"{where} no tensors by name: {_inside(state)}.")
    plain: OrderedDict[str, Any] = OrderedDict()
    for key, value in dict.items(state):
        if isinstance(key, str):
            plain[key] = Tensor.detach(value) if isinstance(value, Tensor) else value
        elif isinstance(value, Tensor):
            raise CheckpointError(f"{where} tensors under keys that are no names, such as {_shown(key)}.")
    for key, tensor in plain.items():
        if isinstance(tensor, Tensor):
            _check_tensor(tensor, f"{where} '{printable(key, 80)}'")
    if isinstance(state, OrderedDict) and (versions := _versions(vars(state).get("_metadata"))):
        vars(plain)["_metadata"] = versions
    return plain


def _check_tensor(tensor: Tensor, what: str) -> None:
    if tensor.is_meta:
        raise CheckpointError(f"{what} without data: a shape only (on the meta device); save it from a real device.")
    if tensor.layout is not torch.strided:
        return
    claimed, there = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if claimed > there:
        raise CheckpointError(
            f"{what}, a tensor that claims {claimed} bytes of a storage of {there}; save it again after .contiguous()."
        )


def _versions(metadata: object) -> dict[str, dict[str, int]]:
    """Return torch's versions of modules, copied out of whatever a file puts in their place."""
    if not isinstance(metadata, dict):
        return {}
    by_module = {key: value for key, value in dict.items(metadata) if isinstance(key, str) and isinstance(value, dict)}
    return {
        key: {name: number for name, number in dict.items(value) if name == "version" and isinstance(number, int)}
        for key, value in by_module.items()
    }


def is_optimiser(content: object) -> bool:
    """Say whether a part of a file has the keys of an optimiser's state dict."""
    return isinstance(content, dict) and set(dict.keys(content)) >= _OPTIMISER


def _tensors(content: dict[Any, Any]) -> list[Tensor]:
    """Return the tensors that stand directly in a dict."""
    return [value for value in dict.values(content) if isinstance(value, Tensor)]


def _identity(found: object) -> object:
    """Return something that is equal for dicts of the very same tensors."""
    if not isinstance(found, dict):
        return id(found)
    return frozenset((str(key), id(value)) for key, value in dict.items(found) if isinstance(value, Tensor))


def _size(found: object) -> str:
    return f"{len(_tensors(found))} tensors" if isinstance(found, dict) else f"a {type(found).__name__}"


def _dotted(keys: _Keys) -> str:
    return printable(".".join(str(each) if isinstance(each, str | int) else type(each).__name__ for each in keys), 80)


def _inside(content: object) -> str:
    if not isinstance(content, dict):
        return f"a {type(content).__name__}"
    keys = [_shown(key) for key in dict.keys(content)]
    return f"only {_listed(keys)}" if keys else "nothing"


def _shown(key: object) -> str:
    """Return a key for a message; the text of anything but plain keys can be as long and deep as its maker likes."""
    if isinstance(key, int) and abs(key) > 10**9:
        return "a large int"
    return printable(str(key), 40) if isinstance(key, str | int | float) else f"a {type(key).__name__}"


def _listed(members: Sequence[str], shown: int = 5) -> str:
    return f"{', '.join(members[:shown])}{', …' if len(members) > shown else ''}"
