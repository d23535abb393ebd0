"""Measure the other entries of a training checkpoint: states of optimisers and scalers, averaged copies of weights."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookscope.checkpoints.training_entries import AveragedCopy, TrainingEntries
from hookscope.commands.check.measuring.weight_structure import SUBNORMAL_BELOW, spread_beyond_chance
from hookscope.results.training_state import CopyValues, OptimiserValues, ScalerValues
from hookscope.rules.stored import RANDOM_SPREAD
from hookscope.rules.weights import TRAINED_SPREAD
from hookscope.statistics.storage import is_dense, stored_values, without_float8
from hookscope.text import figure, printable

# Means of squares in optimisers of torch and others; counters, which are not averaged.
_SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "sum", "acc_delta")
_COUNTERS = ("num_batches_tracked", "n_averaged", "decay", "num_updates", "initted", "step")
_RUNNING = ("running_mean", "running_var")

# torch's optimisers refuse infinite values of the first settings, and negative ones of the second. Some settings of
# other optimisers are infinite by default, such as Prodigy's growth_rate.
_FINITE = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "betas", "eps", "momentum", "weight_decay", "alpha"})
_NOT_NEGATIVE = _FINITE - {"min_lr"}

_RATE_TOLERANCE = 1e-6  # relative difference of equal learning rates: a schedule may round differently
_FEWEST_FOR_COSINE = 2048  # the same as in `spread_beyond_chance`
_Range = tuple[float, float] | None
_STARTS: tuple[_Range, _Range] = (1.0, 1.0), (0.0, 0.0)  # initial variance and mean of a BatchNorm
_PIECE_ELEMENTS = 2**18  # few enough to need little memory


def optimiser_values(entries: TrainingEntries | None) -> tuple[OptimiserValues, ...]:
    """Measure the states of optimisers in a training checkpoint."""
    if entries is None:
        return ()
    is_paired = len(entries.schedules) == len(entries.optimisers) == 1
    rates = _plain(dict.get(entries.schedules[0][1], "_last_lr")) if is_paired else []
    return tuple(_optimiser(key, state, rates) for key, state in entries.optimisers)


def scaler_values(entries: TrainingEntries | None) -> tuple[ScalerValues, ...]:
    """Read the states of GradScalers in a training checkpoint."""
    names = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    return tuple(
        ScalerValues(key, *((_plain(dict.get(state, name)) or [math.nan])[0] for name in names))
        for key, state in (entries.scalers if entries else ())
    )


def _optimiser(key: str, content: dict[Any, Any], rates: list[float]) -> OptimiserValues:
    count, live, broken, negative, steps = 0, 0, list[str](), list[str](), Counter[float]()
    groups, excess = groups_of(content), dict[str, float]()
    decays = {parameter: decay for group in groups for parameter, decay in _second_decays(group)}
    for parameter, entries in dict.items(dict.__getitem__(content, "state")):
        if not isinstance(entries, dict):
            continue
        faults = len(broken) + len(negative)
        for name, value in dict.items(entries):
            where = f"state.{_shown(parameter)}.{_shown(name)}"
            if name == "step":
                # As a key, NaN equals only itself.
                steps.update(math.nan if math.isnan(number) else number for number in _plain(value)[:1])
            if not isinstance(value, Tensor):
                continue
            count += 1
            extent = _range(value)
            live += name != "step" and extent != (0.0, 0.0)
            if extent is None:
                broken.append(where)
            elif name in _SECOND_MOMENTS and value.is_floating_point() and extent[0] < 0:
                negative.append(where)
        decay = decays.get(parameter) if isinstance(parameter, int | str) else None
        if decay is not None and len(broken) + len(negative) == faults:
            ratio = _excess(dict.get(entries, "exp_avg"), dict.get(entries, "exp_avg_sq"), decay)
            if ratio > 1:
                excess[f"state.{_shown(parameter)}.exp_avg"] = ratio
    return OptimiserValues(
        *(key, count, tuple(broken), tuple(negative), dict(steps)),
        wrong_settings=tuple(setting for at, group in enumerate(groups) for setting in _wrong_settings(at, group)),
        excess_moments=excess,
        other_rates=tuple(_other_rates(groups, rates)),
        rates=tuple(rate[0] for group in groups if len(rate := _plain(dict.get(group, "lr"))) == 1),
        live_count=live,
    )


def groups_of(content: dict[Any, Any]) -> list[dict[Any, Any]]:
    """Return the parameter groups in the state of an optimiser."""
    groups = dict.get(content, "param_groups")
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list | tuple) else []


def moves_by(group: dict[Any, Any]) -> list[str]:
    """Return what makes the optimiser of a parameter group move a parameter whose gradient is 0."""
    settings = {"momentum": ("momentum", "betas"), "weight decay": ("weight_decay",)}
    return [word for word, keys in settings.items() if any(any(_plain(dict.get(group, key))[:1]) for key in keys)]


def _second_decays(group: dict[Any, Any]) -> Iterator[tuple[int | str, float]]:
    """Yield parameters with their beta2, if the group is of torch's Adam or AdamW, which have `amsgrad`."""
    betas, parameters = _plain(dict.get(group, "betas")), dict.get(group, "params")
    if not dict.__contains__(group, "amsgrad") or len(betas) != 2 or not isinstance(parameters, list | tuple):
        return
    first, second = betas
    if 0 <= first < 1 and 0 < second < 1 and first <= 2 * second / (1 + second):  # see `_excess`
        yield from ((parameter, second) for parameter in parameters if isinstance(parameter, int | str))


def _excess(first: object, second: object, decay: float) -> float:
    """Return the greatest ratio of a first moment m of Adam to sqrt(v / (1 - b)); 0 for tensors that cannot be judged.

    No gradients g_k make it exceed 1. With the decays a and b of the two moments, m = (1 - a) sum a^k g_k and
    v = (1 - b) sum b^k g_k^2, so the Cauchy-Schwarz inequality gives m^2 <= c v / (1 - b), where c = (1 - a)^2 / (1 -
    a^2 / b). If a <= 2b / (1 + b), c is at most 1.
    """
    if not (isinstance(first, Tensor) and isinstance(second, Tensor) and first.shape == second.shape):
        return 0.0
    dtypes = (torch.float32, torch.float64, torch.bfloat16)  # where squares do not vanish
    if not all(moment.dtype in dtypes and is_dense(moment) for moment in (first, second)):
        return 0.0
    greatest = 0.0
    for moment, other in zip(_pieces(first), _pieces(second), strict=True):
        bound = (other.double().clamp(min=SUBNORMAL_BELOW) / (1 - decay)).sqrt()
        greatest = max(greatest, float((moment.double().abs() / bound).nan_to_num(0.0, 0.0).max()))
    return greatest


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(tensor.detach().reshape(-1), _PIECE_ELEMENTS)


def _wrong_settings(at: int, group: dict[Any, Any]) -> Iterator[str]:
    for name, value in dict.items(group):
        for number in _plain(value) if isinstance(name, str) and name != "params" else ():
            is_infinite = math.isinf(number) and name in _FINITE
            is_negative = number < 0 and name in _NOT_NEGATIVE
            if math.isnan(number) or is_infinite or is_negative or (name == "betas" and number >= 1):
                yield f"param_groups.{at}.{_shown(name)} is {figure(number, 6)}"


def _other_rates(groups: list[dict[Any, Any]], rates: list[float]) -> Iterator[str]:
    """Describe the groups whose learning rate differs from the rate that the schedule has set."""
    stored = [_plain(dict.get(group, "lr")) for group in groups]
    if len(stored) != len(rates) or any(len(numbers) != 1 for numbers in stored):
        return
    for at, ((rate,), scheduled) in enumerate(zip(stored, rates, strict=True)):
        if abs(rate - scheduled) > _RATE_TOLERANCE * max(abs(rate), abs(scheduled)):
            yield f"param_groups.{at}.lr is {rate:g}, and {scheduled:g} by the schedule"


def _plain(value: object) -> list[float]:
    """Return a number, or a list or tuple of numbers, as a list; an empty list for anything else."""
    several = value if isinstance(value, list | tuple) else (value,)
    numbers = []
    for item in several:
        if isinstance(item, Tensor) and item.numel() == 1 and not item.is_meta and not item.is_complex():
            numbers.append(float(item.detach()))
        elif isinstance(item, float) or (isinstance(item, int) and not isinstance(item, bool) and abs(item) < 2**64):
            numbers.append(float(item))
        else:
            return []
    return numbers


def copy_values(entries: TrainingEntries | None) -> Iterator[CopyValues]:
    """Measure averaged copies of the weights, and compare their names and shapes with the weights."""
    if entries is None:
        return
    loaded = {name: value for name, value in (entries.state or {}).items() if isinstance(value, Tensor)}
    learnt = [
        key for key, value in loaded.items() if value.is_floating_point() and _leaf(key) not in _COUNTERS + _RUNNING
    ]
    for copy in entries.copies:
        ranges = {name: _range(tensor) for name, tensor in copy.tensors.items()}
        paired = set(copy.names.values())
        reshaped = tuple(name for name, mine in copy.names.items() if copy.tensors[name].shape != loaded[mine].shape)
        alike = {name: (copy.tensors[name], loaded[mine]) for name, mine in copy.names.items() if name not in reshaped}
        matrices = [name for name, (_, mine) in alike.items() if mine.dim() > 1 and _varies(_range(mine))]
        large = {name: pair for name, pair in alike.items() if all(map(_is_large_matrix, pair))}
        yield CopyValues(
            copy.key,
            len(copy.tensors),
            tuple(name for name, extent in ranges.items() if extent is None),
            reshaped,
            tuple(name for name in learnt if name not in paired),
            tuple(name for name in copy.tensors if name not in copy.names and _leaf(name) not in _COUNTERS),
            cosines={name: near for name, pair in large.items() if (near := _cosine(*pair)) is not None},
            untrained=tuple(name for name, (average, mine) in large.items() if _is_stale(average, mine)),
            reset=tuple(_reset(copy, ranges, loaded)),
            single_valued=tuple(name for name in matrices if not _varies(ranges[name])),
            matrix_count=len(matrices),
            newer={name: counts for name, pair in alike.items() if (counts := _newer(name, *pair)) is not None},
        )


def _cosine(average: Tensor, weight: Tensor) -> float | None:
    """Return the cosine of two tensors of one shape; None if either is zero or not finite."""
    products = torch.zeros(3, dtype=torch.float64)
    for pair in zip(_pieces(average), _pieces(weight), strict=True):
        a, b = (piece.to("cpu", torch.float64) for piece in pair)
        products += torch.stack([a @ b, a @ a, b @ b])
    product, *squares = products.tolist()
    size = math.sqrt(math.prod(squares))
    return product / size if 0 < size < math.inf and math.isfinite(product) else None


def _is_stale(average: Tensor, weight: Tensor) -> bool:
    random = _spread(average)
    return random is not None and random < RANDOM_SPREAD and (_spread(weight) or 0.0) >= TRAINED_SPREAD


def _spread(weight: Tensor) -> float | None:
    filters = weight.detach().reshape(*weight.shape[:2], -1)
    return spread_beyond_chance(filters) if torch.isfinite(filters).all() else None


def _is_large_matrix(tensor: Tensor) -> bool:
    is_plain = tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return is_plain and is_dense(tensor) and tensor.dim() > 1 and tensor.numel() >= _FEWEST_FOR_COSINE


def _reset(copy: AveragedCopy, ranges: Mapping[str, _Range], loaded: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the BatchNorms whose statistics are initial in a copy, but have moved in the weights."""
    for name, mine in copy.names.items():
        layer, _, leaf = name.rpartition(".")
        mean = f"{layer}.running_mean" if layer else "running_mean"
        if leaf == "running_var" and (ranges[name], ranges.get(mean)) == _STARTS:
            own_mean = loaded.get(copy.names.get(mean, ""))
            if own_mean is not None and (_range(loaded[mine]), _range(own_mean)) != _STARTS:
                yield layer


def _varies(extent: _Range) -> bool:
    return extent is None or extent[0] != extent[1]  # NaN differs from everything


def _newer(name: str, average: Tensor, weight: Tensor) -> tuple[int, int] | None:
    if _leaf(name) != "num_batches_tracked":
        return None
    counts = [(*_plain(tensor), -1.0)[0] for tensor in (average, weight)]
    theirs, mine = (int(count) if math.isfinite(count) else -1 for count in counts)
    return (theirs, mine) if theirs > mine >= 0 else None


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _range(tensor: Tensor) -> _Range:
    """Return the least and the greatest value; None for NaN or Inf; 0 and Inf for an unreadable tensor."""
    low, high = math.inf, -math.inf
    try:
        values, _, zeros = stored_values(tensor.detach(), tuple(tensor.shape))
        if not values.numel():
            return 0.0, 0.0
        for piece in _pieces(torch.view_as_real(values) if values.is_complex() else without_float8(values)):
            least, most = map(float, torch.aminmax(piece))
            if not abs(least) + abs(most) < math.inf:
                return None
            low, high = min(low, least), max(high, most)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # on the meta device too
        return 0.0, math.inf
    return (min(low, 0.0), max(high, 0.0)) if zeros else (low, high)


def _shown(key: object) -> str:
    is_short = isinstance(key, str) or (isinstance(key, int) and abs(key) < 2**53)
    return printable(str(key), 80) if is_short else "?"
