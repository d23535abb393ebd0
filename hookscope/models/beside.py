"""What a training checkpoint holds beside the weights that are loaded: optimisers' states and averaged copies."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hookscope.models.network_table import COUNTER
from hookscope.models.weight_sets import is_optimiser, other_sets
from hookscope.models.wrapped_names import stripped_forms
from hookscope.text import printable

# Names of keys of averaged weights: exponential and stochastic averages, and the shadows of older scripts.
_AVERAGED = ("ema", "averag", "swa", "shadow")

# Our choices: no training script nests an optimiser deeper, and a file can refer to one dict any number of times.
_DEPTH_LIMIT = 3
_MEMBERS_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class AveragedCopy:
    """An averaged copy of the weights that are loaded.

    `tensors` are by their names in the file, `names` says which of the loaded weights each is the copy of.
    """

    key: str
    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Beside:
    """What stands beside the weights in their file.

    `optimisers` are states as `torch.optim.Optimizer.state_dict` returns them, unchecked, each with its place in the
    file; `state` is what is loaded.
    """

    optimisers: tuple[tuple[str, dict[Any, Any]], ...] = ()
    copies: tuple[AveragedCopy, ...] = ()
    state: Mapping[str, Any] | None = None


def beside_weights(content: object, state: Mapping[str, Any], key: str | None) -> Beside:
    """Return what a file holds beside the weights at `key`, which are `state`; all tensors detached, nothing copied."""
    return Beside(tuple(_optimisers(content)), tuple(_copies(content, state, key)), state)


def _optimisers(content: object) -> Iterator[tuple[str, dict[Any, Any]]]:
    level, seen = [("", content)], 0
    for _ in range(_DEPTH_LIMIT):
        deeper: list[tuple[str, object]] = []
        for path, value in level:
            members: list[tuple[str, object]] = []
            if isinstance(value, dict):
                members = [(str(key), each) for key, each in dict.items(value) if isinstance(key, str | int)]
            elif isinstance(value, list | tuple):
                members = [(str(at), each) for at, each in enumerate(value)]
            for step, each in members:
                seen += 1
                where = f"{path}.{step}" if path else step
                if seen > _MEMBERS_LIMIT or not isinstance(each, dict | list | tuple):
                    continue
                if is_optimiser(each) and isinstance(each, dict):
                    if isinstance(dict.get(each, "state"), dict):
                        yield printable(where, 80), each
                else:
                    deeper.append((where, each))
        level = deeper


def _copies(content: object, state: Mapping[str, Any], key: str | None) -> Iterator[AveragedCopy]:
    if _is_averaged(key or ""):  # the copy itself is loaded
        return
    own = {name for name, value in state.items() if isinstance(value, Tensor)}
    for where, found in other_sets(content, key):
        if not _is_averaged(where):
            continue
        tensors = {
            name: Tensor.detach(value)
            for name, value in dict.items(found)
            if isinstance(name, str) and isinstance(value, Tensor)
        }
        names = _paired(tensors, own)
        if 2 * len(names) >= len(own - {name for name in own if name.endswith(COUNTER)}):
            yield AveragedCopy(where, tensors, names)


def _is_averaged(key: str) -> bool:
    return any(word in key.lower() for word in _AVERAGED)


def _paired(tensors: Mapping[str, Tensor], own: set[str]) -> dict[str, str]:
    """Return the names of a copy with those of the weights, ignoring wrapping prefixes of either."""
    best: dict[str, str] = {}
    for _, mine in stripped_forms(own):
        plain = {short: name for name, short in mine.items()}
        for _, theirs in stripped_forms(tensors):
            pairs = {name: plain[short] for name, short in theirs.items() if short in plain}
            best = max(best, pairs, key=len)
            if len(best) == min(len(own), len(tensors)):
                return best
    return best
