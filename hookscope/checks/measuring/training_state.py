"""Measure what a training checkpoint holds beside the weights: optimisers' states, and averaged copies."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hookscope.models.beside import Beside
from hookscope.results.check import CopyValues, OptimiserValues
from hookscope.statistics.storage import stored_values
from hookscope.text import printable

# Means of squares, under the names that torch's optimisers and others give them.
_SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "sum", "acc_delta")

# The counter of the averaging itself, and BatchNorm's, which is not averaged.
_COUNTERS = ("num_batches_tracked", "n_averaged", "decay", "num_updates", "initted", "step")

_RUNNING = ("running_mean", "running_var")

_PIECE_ELEMENTS = 2**18  # our choice: few enough to need little memory


def optimiser_values(beside: Beside | None) -> tuple[OptimiserValues, ...]:
    """Measure the states of the optimisers beside the weights; each value is read once."""
    return tuple(_optimiser(key, state) for key, state in (beside.optimisers if beside else ()))


def _optimiser(key: str, content: dict[Any, Any]) -> OptimiserValues:
    count, broken, negative, steps = 0, list[str](), list[str](), Counter[float]()
    for parameter, entries in dict.items(dict.__getitem__(content, "state")):
        if not isinstance(entries, dict):
            continue
        for name, value in dict.items(entries):
            where = f"state.{_shown(parameter)}.{_shown(name)}"
            if name == "step" and (step := _number(value)) is not None:
                steps[step] += 1
            if not isinstance(value, Tensor):
                continue
            count += 1
            bounds = _bounds(value)
            if bounds is None:
                broken.append(where)
            elif name in _SECOND_MOMENTS and bounds[0] < 0:
                negative.append(where)
    return OptimiserValues(key, count, tuple(broken), tuple(negative), dict(steps))


def copy_values(beside: Beside | None) -> tuple[CopyValues, ...]:
    """Measure the averaged copies beside the weights, and compare their names and shapes with the weights'."""
    return tuple(_copies(beside)) if beside else ()


def _copies(beside: Beside) -> Iterator[CopyValues]:
    own = {name: value for name, value in (beside.state or {}).items() if isinstance(value, Tensor)}
    for copy in beside.copies:
        paired = set(copy.names.values())
        yield CopyValues(
            copy.key,
            len(copy.tensors),
            tuple(name for name, value in copy.tensors.items() if _bounds(value) is None),
            tuple(name for name, mine in copy.names.items() if copy.tensors[name].shape != own[mine].shape),
            tuple(name for name, value in own.items() if name not in paired and _is_learnt(name, value)),
            tuple(name for name in copy.tensors if name not in copy.names and _leaf(name) not in _COUNTERS),
        )


def _is_learnt(name: str, value: Tensor) -> bool:
    return value.is_floating_point() and _leaf(name) not in (*_COUNTERS, *_RUNNING)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _bounds(tensor: Tensor) -> tuple[float, float] | None:
    """Return the smallest and greatest value, 0 for what cannot be read; None if there is NaN or Inf."""
    low = high = 0.0
    try:
        values, _, _ = stored_values(tensor.detach(), tuple(tensor.shape))
        if values.is_meta or not (values.is_floating_point() or values.is_complex()):
            return 0.0, 0.0
        flat = torch.view_as_real(values).reshape(-1) if values.is_complex() else values.reshape(-1)
        for begin in range(0, flat.numel(), _PIECE_ELEMENTS):
            piece = flat[begin : begin + _PIECE_ELEMENTS]
            least, most = map(float, torch.aminmax(piece.float() if piece.itemsize < 2 else piece))
            if not abs(least) + abs(most) < float("inf"):
                return None
            low, high = min(low, least), max(high, most)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return 0.0, 0.0
    return low, high


def _number(value: object) -> float | None:
    if isinstance(value, Tensor):
        if value.is_meta or value.numel() != 1 or value.is_complex():
            return None
        return float(value.detach())
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    return None


def _shown(key: object) -> str:
    return printable(str(key), 80) if isinstance(key, str | int) and (isinstance(key, str) or abs(key) < 2**53) else "?"
