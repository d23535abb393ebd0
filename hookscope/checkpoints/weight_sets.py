"""Find the sets of weights in what a file holds, a bare state dict or a larger training checkpoint. No torch is needed.

Everything here comes from a stranger: methods are called through their class, since an object can shadow its own, and
nothing is followed without bounds.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hookscope.checkpoints.nested import ModuleLike, TensorLike, is_floating_point, values_in
from hookscope.checkpoints.stand_ins import kind_of
from hookscope.errors import CheckpointError, NothingMatchedError, UsageError
from hookscope.parameters import arg
from hookscope.text import an, counted, printable

COUNTER = "num_batches_tracked"  # old files do not have it, and evaluation does not use it

# Where training scripts put the weights inside a checkpoint.
_WEIGHTS_KEYS = {
    *("state_dict", "model_state_dict", "model_state", "model", "model_ema", "model_ema_state_dict", "state_dict_ema"),
    *("ema", "ema_state_dict", "ema_model", "module", "net", "network", "params", "params_ema", "weights"),
}

# Names of keys of averaged weights: exponential and stochastic averages, and the shadows of older scripts.
_AVERAGED = re.compile(r"(?<![a-z])(ema|swa)|(ema|swa)(?![a-z])|averag|shadow")  # not "semantic"

_OPTIMISER = {"state", "param_groups"}  # the keys of every torch optimiser's state dict

# No training script nests deeper, and a file can refer to one dict any number of times.
_DEPTH_LIMIT = 4
_DICTS_LIMIT = 10_000

_SETS_LIMIT = 8  # more dicts of tensors than this are a tree of parameters, one set of weights

Keys = tuple[object, ...]  # the path from the whole content to a part


@dataclass(frozen=True, slots=True)
class Part:
    """A part of what a file holds, with all the tensors in it.

    `key` is "" for the whole content, else keys joined by dots. `tensors` are in the file's order, with names like
    "conv.weight", "state.0.exp_avg", "[2]" and "packed[0]"; `state` is the state dict itself, empty if it is none.
    """

    key: str
    is_weights: bool
    tensors: tuple[tuple[str, TensorLike], ...]
    state: dict[str, Any]


def parts_of(content: object, name: str, key: str | None) -> list[Part]:
    """Return the parts of a file's content that have tensors: sets of weights, then everything else.

    Messages call the file `name`. With a `key`, as for `weights_in`, the content there is the only part. Raises
    CheckpointError if there are no tensors, NothingMatchedError if there is nothing at `key`.
    """
    if key is None:
        sets = {id(weights): (_joined(keys), weights) for keys, weights in sets_of(content)}
    else:
        keys, prefix = resolved_key(content, key, name)
        content, _ = entries_at(content, keys, prefix)
        sets = {id(content): (".".join(filter(None, [_joined(keys), prefix.rstrip(".")])), content)}
    by_part: dict[tuple[str, bool], list[tuple[str, TensorLike]]] = {(where, True): [] for where, _ in sets.values()}
    for place, path, tensor in _tensors_by_part(content, {at: where for at, (where, _) in sets.items()}):
        by_part.setdefault(place, []).append((path, tensor))
    states = {
        where: {name: value for name, value in dict.items(weights) if isinstance(name, str)}
        for where, weights in sets.values()
        if isinstance(weights, dict)
    }
    parts = [
        Part(where, is_weights, tuple(tensors), states.get(where, {}) if is_weights else {})
        for (where, is_weights), tensors in by_part.items()
        if tensors
    ]
    if not parts:
        holds = f"{name} holds" if key is None else f"{name} has at '{printable(key, 80)}'"
        raise CheckpointError(f"{holds} no tensors: {summary_of(content)}.")
    return parts


def sets_of(content: object) -> list[tuple[Keys, object]]:
    """Return a file's sets of weights with their keys: the content itself if none is inside, [] for an optimiser."""
    if is_optimiser(content):
        return []
    if isinstance(content := by_position(content), dict):
        candidates, usual = weight_candidates(content)
        if usual or not tensors_of(content):
            others = [candidate for candidate in candidates if candidate[0] in usual or _may_be_weights(*candidate)]
            chosen = others if usual else candidates
            if 0 < len(chosen) <= _SETS_LIMIT:
                return chosen
    return [((), content)]


def place_of_weights(content: object, key: str | None, name: str) -> tuple[Keys, str, list[str]]:
    """Return the keys of the weights, the prefix of their names, and the places of averaged copies next to them.

    The weights are those at `key`, else the only ones that are no averaged copy. Messages call the file `name`. Raises
    as `weights_in`.
    """
    if key is not None:
        return *resolved_key(content, key, name), []
    if not isinstance(content := by_position(content), dict):
        return (), "", []
    if is_optimiser(content):
        raise CheckpointError(f"{name} is an optimiser's state, not a network's; give the file of its state dict.")
    candidates, usual = weight_candidates(content)
    if not usual and (tensors_of(content) or not candidates):
        return (), "", []
    chosen = [(keys, state) for keys, state in candidates if not usual or keys in usual]
    raw = [(keys, state) for keys, state in chosen if not is_averaged(dotted(keys))] or chosen
    same = {_identity(state) for _, state in raw}
    if len(same) > 1:
        shown = [f"{dotted(keys)} ({_size(state)})" for keys, state in chosen]
        first = dotted(chosen[0][0])
        raise UsageError(
            f"{name} holds several sets of weights: {listed(shown)}; choose with {arg('key')}, such as "
            f"{arg('key')} {first}."
        )
    copies = [dotted(keys) for keys, state in chosen if _identity(state) not in same]
    return raw[0][0], "", copies


def _identity(state: object) -> object:
    if not isinstance(state, dict):
        return id(state)
    return frozenset((str(key), _memory(value)) for key, value in dict.items(state) if isinstance(value, TensorLike))


def _memory(tensor: Any) -> object:
    kind = type(tensor)
    has_memory = kind.__name__ in ("Tensor", "Parameter") and str(tensor.layout) == "torch.strided"
    begin = kind.data_ptr(tensor) if has_memory and not tensor.is_meta else 0
    return (begin, tensor.dtype, tuple(tensor.shape), kind.stride(tensor)) if begin else id(tensor)


def _size(state: object) -> str:
    return counted(len(tensors_of(state)), "tensor") if isinstance(state, dict) else an(type(state).__name__)


def _may_be_weights(keys: Keys, content: object) -> bool:
    """Return whether a dict next to the weights may be another set: it has floating-point tensors, no optimiser's."""
    tensors = tensors_of(content) if isinstance(content, dict) else []
    has_weights = any(tuple(tensor.shape) and is_floating_point(tensor) for tensor in tensors)
    return has_weights and not any("optim" in key.lower() for key in keys if isinstance(key, str))


def _tensors_by_part(content: object, sets: Mapping[int, str]) -> Iterator[tuple[tuple[str, bool], str, TensorLike]]:
    """Yield every tensor with its part and its path there; `sets` has the places of weights by id."""
    seen: set[int] = set()
    waiting: list[tuple[object, tuple[str, bool], str]] = [(content, ("", False), "")]
    while waiting:
        value, (where, is_weights), path = waiting.pop()
        if id(value) in sets:
            where, is_weights, path = sets[id(value)], True, ""
        if isinstance(value, TensorLike):
            yield (where, is_weights), path or "(tensor)", value
        if not isinstance(value, dict | list | tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        if path and (is_optimiser(value) if is_weights else not where):  # everything else, by its top-level entry
            where, is_weights, path = ".".join(filter(None, [where, path])), False, ""
        for step, child in reversed(_members(value)):
            waiting.append((child, (where, is_weights), path + step if path else step.removeprefix(".")))


def _members(value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f".{_path_part(key)}", child) for key, child in dict.items(value)]
    return [(f"[{at}]", child) for at, child in enumerate(value)] if isinstance(value, list | tuple) else []


def _path_part(key: object) -> str:
    if isinstance(key, tuple) and 0 < len(key) < 5 and all(isinstance(part, str | int) for part in key):
        return f"({', '.join(map(_path_part, key))})"
    return key if isinstance(key, str) else shown_key(key)


def _joined(keys: Keys) -> str:
    return ".".join(map(str, keys))


def entries_at(content: object, keys: Keys, prefix: str) -> tuple[object, list[str]]:
    """Return the entries at `keys` whose names start with `prefix`, and the other keys for a message."""
    entries, others = content, []
    if keys and isinstance(outer := by_position(content), dict):
        others = [shown_key(key) for key in dict.keys(outer) if key is not keys[0]]
    for key in keys:
        inner = by_position(entries)
        entries = dict.__getitem__(inner, key) if isinstance(inner, dict) else None
    if not (prefix and isinstance(entries, dict)):
        return entries, others
    names = {key for key in dict.keys(entries) if isinstance(key, str) and key.startswith(prefix)}
    others += [shown_key(key) for key in dict.keys(entries) if key not in names]
    return {key.removeprefix(prefix): value for key, value in dict.items(entries) if key in names}, others


def by_position(content: object) -> object:
    """Return a list or tuple with sets of weights as a dict by position; anything else as it is."""
    if not isinstance(content, list | tuple) or len(content) > _SETS_LIMIT:
        return content
    parts = [part for entry in content for part in (entry, *values_in(entry))]
    has_weights = any(isinstance(part, ModuleLike) or _may_be_weights((), part) for part in parts)
    return dict(enumerate(content)) if has_weights else content


def weight_candidates(content: dict[Any, Any]) -> tuple[list[tuple[Keys, object]], list[Keys]]:
    """Return possible weights, the outermost first: dicts with tensors, and Modules; and the keys of usual names."""
    candidates = [*_candidates(content)]
    return candidates, [keys for keys, _ in candidates if keys[-1] in _WEIGHTS_KEYS]


def _candidates(content: dict[Any, Any]) -> Iterator[tuple[Keys, object]]:
    level: list[tuple[Keys, dict[Any, Any]]] = [((), content)]
    seen = {id(content)}
    for _ in range(_DEPTH_LIMIT):
        deeper: list[tuple[Keys, dict[Any, Any]]] = []
        for keys, parent in level:
            for key, value in dict.items(parent):
                inner = by_position(value)
                if not isinstance(key, str | int) or not isinstance(inner, dict | ModuleLike):
                    continue
                if id(value) in seen or len(seen) > _DICTS_LIMIT:
                    continue
                seen.add(id(value))
                if isinstance(inner, ModuleLike) or tensors_of(inner):
                    yield (*keys, key), inner
                elif not is_optimiser(inner):
                    deeper.append(((*keys, key), inner))
        level = deeper


def resolved_key(content: object, key: str, name: str) -> tuple[Keys, str]:
    """Return the keys of a dotted `key`, and the prefix of names there; NothingMatchedError if it names nothing.

    `key` may leave out the place of a set of weights if it names something in that set only.
    """
    ways = [*islice(_ways_to(content, key), 1)]
    if not ways:
        within = [(keys, [*islice(_ways_to(weights, key), 1)]) for keys, weights in sets_of(content)]
        ways = [((*outer, *keys), prefix) for outer, inner in within for keys, prefix in inner]
    if len(ways) != 1:
        raise NothingMatchedError(
            f"{arg('key')} '{printable(key)}' names nothing in {name}, which holds {summary_of(content)}."
        )
    return ways[0]


def _ways_to(content: object, dotted_key: str) -> Iterator[tuple[Keys, str]]:
    """Yield the keys by which `dotted_key` leads into nested dicts, longest first, and the remaining prefix or ""."""
    if not isinstance(content := by_position(content), dict):
        return
    keys = {str(key): key for key in dict.keys(content) if isinstance(key, str | int)}
    for text in sorted(keys, key=len, reverse=True):
        if dotted_key == text:
            yield (keys[text],), ""
        elif dotted_key.startswith(f"{text}."):
            for rest, prefix in _ways_to(dict.__getitem__(content, keys[text]), dotted_key[len(text) + 1 :]):
                yield (keys[text], *rest), prefix
    prefix = dotted_key.rstrip(".") + "."
    if any(isinstance(key, str) and key.startswith(prefix) for key in keys.values()):
        yield (), prefix


def is_averaged(key: str) -> bool:
    """Return whether a key is one for averaged weights."""
    return _AVERAGED.search(key.lower()) is not None


def is_optimiser(content: object) -> bool:
    """Return whether a part of a file has the keys of an optimiser's state dict."""
    return isinstance(content, dict) and set(dict.keys(content)) >= _OPTIMISER


def tensors_of(content: dict[Any, Any]) -> list[TensorLike]:
    """Return the tensors that stand directly in a dict."""
    return [value for value in dict.values(content) if isinstance(value, TensorLike)]


def dotted(keys: Keys) -> str:
    """Return keys as messages show them."""
    return printable(".".join(str(key) if isinstance(key, str | int) else type(key).__name__ for key in keys), 80)


def summary_of(content: object) -> str:
    """Return what a file holds, for messages: its kind, or the first keys."""
    if not isinstance(content, dict):
        return an(kind_of(content))
    keys = [shown_key(key) for key in dict.keys(content)]
    return f"only {listed(keys)}" if keys else "an empty dict"


def shown_key(key: object) -> str:
    """Return a key for a message; the text of anything but plain keys can be as long and deep as its maker likes."""
    if isinstance(key, int) and abs(key) > 10**9:
        return "a large int"
    return printable(str(key), 40) if isinstance(key, str | int | float) else an(kind_of(key))


def listed(members: Sequence[str], most: int = 5) -> str:
    """Return the first members for a message: "a, b, c, …"."""
    return f"{', '.join(members[:most])}{', …' if members[most:] else ''}"
