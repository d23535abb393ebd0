"""The entries of a training checkpoint other than its weights: optimisers, scalers, schedules, averaged copies."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor

from hookscope.checkpoints.locate_state_dict import Weights
from hookscope.checkpoints.weight_sets import COUNTER, dotted, entries_at, is_averaged, is_optimiser, sets_of
from hookscope.checkpoints.wrapped_names import stripped_forms
from hookscope.text import printable

# The keys in the state dicts of torch's GradScaler and of its learning-rate schedulers.
_SCALER = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"})
_SCHEDULE = frozenset({"last_epoch", "_last_lr"})

# No training script nests an optimiser deeper, and a file can refer to one dict any number of times.
_DEPTH_LIMIT = 3
_MEMBERS_LIMIT = 10_000

# What training scripts call the number of an epoch or a step; Lightning's, mmengine's and timm's names among them.
_COUNTERS = ("epoch", "current_epoch", "global_step", "step", "iteration", "iter", "it", "num_updates")

# Where mmengine and others keep the counters, instead of beside the weights.
_COUNTED_IN = ("meta", "progress", "trainer_state")

_GREATEST_COUNT = 2**53  # exact as a float
_RUNNING = ("running_mean", "running_var")  # buffers of BatchNorm, which lists of averaged parameters lack


@dataclass(frozen=True, slots=True)
class AveragedCopy:
    """An averaged copy of the weights that are loaded.

    `tensors` are by their names in the file, `names` maps them to the loaded weights that they are copies of.
    """

    key: str
    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TrainingEntries:
    """The entries of a training checkpoint other than its weights, each with its place in the file.

    `optimisers`, `scalers` and `schedules` are states as torch's classes return them, unchecked; `state` is what is
    loaded; `counters` are the numbers of epochs and steps, by the names that the file has for them.
    """

    optimisers: tuple[tuple[str, dict[Any, Any]], ...] = ()
    scalers: tuple[tuple[str, dict[Any, Any]], ...] = ()
    schedules: tuple[tuple[str, dict[Any, Any]], ...] = ()
    copies: tuple[AveragedCopy, ...] = ()
    state: Mapping[str, Any] | None = None
    counters: Mapping[str, int] = field(default_factory=dict)


def training_entries(content: object, weights: Weights, key: str | None) -> TrainingEntries:
    """Return the entries of a file other than the weights that were found at `key`."""
    parts = [*_states(content)]
    return TrainingEntries(
        tuple(part for part in parts if is_optimiser(part[1])),
        tuple(part for part in parts if dict.keys(part[1]) >= _SCALER),
        tuple(part for part in parts if dict.keys(part[1]) >= _SCHEDULE),
        tuple(_copies(content, weights, key)),
        weights.state,
        dict(_counters(content)),
    )


def _counters(content: object) -> Iterator[tuple[str, int]]:
    if not isinstance(content, dict):
        return
    inside: list[tuple[str, object]] = [(key, dict.get(content, key)) for key in _COUNTED_IN]
    for where, entries in [("", content), *inside]:
        for name in _COUNTERS:
            if isinstance(entries, dict) and (count := _count(dict.get(entries, name))) is not None:
                yield f"{where}.{name}" if where else name, count


def _count(value: object) -> int | None:
    if isinstance(value, Tensor):
        with suppress(RuntimeError):  # several elements, no data, a dtype without arithmetic
            value = Tensor.detach(value).item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value < _GREATEST_COUNT else None


def _states(content: object) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the states of optimisers, scalers and schedules with their places, but no state inside another one."""
    waiting: deque[tuple[tuple[str, ...], object]] = deque([((), content)])
    for _ in range(_MEMBERS_LIMIT + 1):
        if not waiting:
            return
        path, value = waiting.popleft()
        if isinstance(value, dict) and path and is_optimiser(value):
            if isinstance(dict.get(value, "state"), dict):
                yield printable(".".join(path), 80), value
        elif isinstance(value, dict) and path and (dict.keys(value) >= _SCALER or dict.keys(value) >= _SCHEDULE):
            yield printable(".".join(path), 80), value
        elif isinstance(value, dict | list | tuple) and len(path) < _DEPTH_LIMIT:
            members = dict.items(value) if isinstance(value, dict) else enumerate(value)
            named = ((str(key), member) for key, member in members if isinstance(key, str | int))
            room = _MEMBERS_LIMIT - len(waiting)  # a small file may refer to one list a million times
            waiting.extend(((*path, step), member) for step, member in islice(named, room))


def _copies(content: object, weights: Weights, key: str | None) -> Iterator[AveragedCopy]:
    if is_averaged(key or ""):  # the copy itself is loaded
        return
    loaded, sets = {name for name, value in weights.state.items() if isinstance(value, Tensor)}, sets_of(content)
    if (copy := weights.copy) is not None and loaded.issuperset(copy.names.values()):
        around, _ = entries_at(content, weights.keys, "")
        tensors = {name: value for name, value in _tensors(around).items() if name in copy.names}
        yield AveragedCopy(copy.place(dotted(weights.keys)), tensors, {name: copy.names[name] for name in tensors})
    yield from _listed_copies(content, weights.state)
    for keys, entries in sets:
        if not keys or keys == weights.keys or not is_averaged(dotted(keys)):
            continue
        tensors = _tensors(entries)
        names = _paired(tensors, loaded)
        if 2 * len(names) >= len(loaded - {name for name in loaded if name.endswith(COUNTER)}):
            yield AveragedCopy(dotted(keys), tensors, names)


def _tensors(entries: object) -> dict[str, Tensor]:
    named = dict.items(entries) if isinstance(entries, dict) else ()
    return {name: Tensor.detach(value) for name, value in named if isinstance(name, str) and isinstance(value, Tensor)}


def _listed_copies(content: object, state: Mapping[str, Any]) -> Iterator[AveragedCopy]:
    """Yield averaged copies that are lists of the parameters in their order, as torch_ema saves them."""
    learnt = {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point() and not name.endswith(_RUNNING)
    }
    shapes = [value.shape for value in learnt.values()]
    outer = dict.items(content) if isinstance(content, dict) else ()
    inner = [
        (f"{key}.{name}", entry) for key, value in outer if isinstance(value, dict) for name, entry in dict.items(value)
    ]
    for where, listed in [*((str(key), value) for key, value in outer), *inner]:
        if not learnt or not is_averaged(where) or not isinstance(listed, list | tuple):
            continue
        if [item.shape if isinstance(item, Tensor) else None for item in listed] == shapes:
            tensors = {name: Tensor.detach(tensor) for name, tensor in zip(learnt, listed, strict=True)}
            yield AveragedCopy(printable(where, 80), tensors, {name: name for name in learnt})


def _paired(tensors: Mapping[str, Tensor], loaded: set[str]) -> dict[str, str]:
    best: dict[str, str] = {}
    for _, mine in stripped_forms(loaded):
        plain = {short: name for name, short in mine.items()}
        for _, theirs in stripped_forms(tensors):
            pairs = {name: plain[short] for name, short in theirs.items() if short in plain}
            best = max(best, pairs, key=len)
            if len(best) == min(len(loaded), len(tensors)):
                return best
    return best
