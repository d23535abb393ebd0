"""How far weights moved from one file to another, and which of them have traded places."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hookscope.commands.diff.measures import Sums, comparable, plain, sums_of
from hookscope.statistics.storage import without_float8

# Below this drift a weight has not been replaced: two unrelated tensors of one norm are sqrt(2) apart.
LEAST_OF_REPLACED = 0.5

# Tensor a comes from tensor b if a is at most this share as far from b's old values as from its own.
_NEARER = 0.5

# Smaller tensors, and vectors, may be near each other by chance, or start with the same values.
_FEWEST_ELEMENTS = 64

# Elements compared to find candidates; then all elements are compared.
_SAMPLE = 1024

_CPU = torch.device("cpu")


def drifts(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Return the drift of each floating-point tensor in both files: L2 norm of the change over the norm before.

    It is infinite where zeros changed, and None where the tensors cannot be compared or a value is not finite.
    """
    sums = {
        name: _sums(before[name], tensor)
        for name, tensor in now.items()
        if name in before and _has_norm(before[name]) and _has_norm(tensor)
    }
    norms = {name: None if both is None else both.relative_l2 for name, both in sums.items()}
    return {name: None if norm is None or math.isnan(norm) else norm for name, norm in norms.items()}


def _sums(a: Tensor, b: Tensor) -> Sums | None:
    if comparable(a, b):
        return None
    first, other = (without_float8(plain(tensor, _CPU)) for tensor in (a, b))
    return sums_of(first, other)


def norm_of(tensor: Tensor) -> float | None:
    """Return the L2 norm over the finite values; None for a tensor that is not floating-point or not dense."""
    sums = _sums(tensor, tensor) if _has_norm(tensor) else None
    return None if sums is None else sums.norm


def _has_norm(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized


def traded_places(
    before: Mapping[str, Tensor], now: Mapping[str, Tensor], moved: Mapping[str, float | None]
) -> dict[str, str]:
    """Return the origin of each weight that exchanged values with others, in pairs or longer cycles, by name.

    Weight a comes from weight b if a is at most half as far from b's old values as from its own. Only closed cycles
    count: copies of a weight, as in momentum encoders and target networks, exchange nothing.
    `moved` is what `drifts` returns for the two files.
    """
    groups: dict[object, list[str]] = {}
    for name, drift in moved.items():
        shape = tuple(now[name].shape)
        if drift is not None and drift >= LEAST_OF_REPLACED and sum(size > 1 for size in shape) >= 2:
            groups.setdefault((shape, now[name].dtype, before[name].shape), []).append(name)
    origins = {
        name: origin
        for names in groups.values()
        if len(names) > 1 and now[names[0]].numel() >= _FEWEST_ELEMENTS
        for name, origin in _origins(names, before, now)
    }
    while True:  # until every remaining weight is an origin
        sources = {*origins.values()}
        turns = {name: origin for name, origin in origins.items() if origin in origins and name in sources}
        if turns == origins:
            return turns
        origins = turns


def _origins(names: list[str], before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    was, has = (torch.stack([_sampled(side[name]) for name in names]) for side in (before, now))
    distances = torch.cdist(has, was)
    for at, name in enumerate(names):
        near = int(distances[at].argmin())
        if near == at or not distances[at, near] <= _NEARER * distances[at, at]:
            continue
        same, other = (_sums(before[source], now[name]) for source in (name, names[near]))
        if same is not None and other is not None and other.difference**0.5 <= _NEARER * same.difference**0.5:
            yield name, names[near]


def _sampled(tensor: Tensor) -> Tensor:
    flat = without_float8(plain(tensor, _CPU)).reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE].double()


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine between two tensors of one shape, by a sample of their elements; NaN if one is not finite."""
    return float(torch.nn.functional.cosine_similarity(_sampled(a), _sampled(b), dim=0))
