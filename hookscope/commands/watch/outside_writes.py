"""Changes of weights between two steps of an optimiser, which something other than the optimiser has made.

torch counts the writes to every tensor, and the counts are compared at each step. Writes through `.data` are not
counted: before steps that are measured in full, some values of each weight are compared as well.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import torch
from torch import Tensor
from torch.optim import Optimizer

from hookscope.commands.watch.gradients import norms_of, parameters_of, together

_VALUES = 256

# A weight that is written to more often is clipped, averaged or restored as part of the training.
_FEW_WRITES = 3

_version_of = attrgetter("_version")


@dataclass(frozen=True, slots=True)
class OutsideReading:
    """Weights that may have been changed before one step of an optimiser; biases and scales are exempt.

    Attributes:
        written: Weights that have been written to since the optimiser's last step, but not habitually.
        names: Weights of which some values are compared with earlier ones.
        since: The step after which the earlier values were read, by weight.
        is_fresh: Whether the optimiser has not stepped since then, by weight.
        numbers: For every weight the L2 norms of the change, of the earlier values, of the values now, and of the whole
            weight, as one vector.
    """

    written: Sequence[str]
    names: Sequence[str]
    since: Sequence[int]
    is_fresh: Sequence[bool]
    numbers: Tensor

    def changes(self, numbers: Iterator[float]) -> "list[OutsideChange]":
        """Return the weights with their numbers, which are taken from the iterator."""
        tables = [[*islice(numbers, len(self.names))] for _ in range(4)]
        written = [name in self.written for name in self.names]
        return [*map(OutsideChange, self.names, self.since, self.is_fresh, written, *tables)]


@dataclass(frozen=True, slots=True)
class OutsideChange:
    """One weight of an `OutsideReading`; `change`, `before` and `now` are norms of some of its values."""

    name: str
    since: int
    is_fresh: bool
    is_written: bool
    change: float
    before: float
    now: float
    norm: float


@dataclass(slots=True)
class _Left:
    """The weights of an optimiser as its last step has left them; `count` is the number of all its parameters."""

    step: int
    count: int
    weights: Sequence[Tensor]
    versions: Sequence[int]


class OutsideWrites:
    """Compares the weights of every optimiser before a step with what its last step has left."""

    def __init__(self, names_of: Callable[[Sequence[Tensor]], Sequence[str]]) -> None:
        """Know no weight yet."""
        self._names_of = names_of
        self._left: dict[int, _Left] = {}
        self._samples: dict[int, tuple[int, Tensor]] = {}  # with the step, by `id` of the weight
        self._writes: Counter[int] = Counter()

    def step_ends(self, optimizer: Optimizer, step: int, *, samples: bool) -> None:
        """Note what a step has left; with `samples`, also some values of each weight."""
        parameters = parameters_of(optimizer)
        left = self._left.get(id(optimizer))
        if left is None or left.count != len(parameters):
            left = self._left[id(optimizer)] = _Left(step, len(parameters), _weights(parameters), ())
        left.step, left.versions = step, _versions(left.weights)
        if samples:
            self._samples |= {id(weight): (step, _some(weight)) for weight in left.weights}

    def step_begins(
        self, optimizer: Optimizer, step: int, all_optimizers: Sequence[Optimizer], *, is_measured: bool
    ) -> OutsideReading | None:
        """Compare weights before a step; those that were not written to only if the step is measured in full.

        Weights that two optimizers share are left out.
        """
        left = self._left.get(id(optimizer))
        if left is None:
            return None
        versions = _versions(left.weights)
        if versions == left.versions and not is_measured:  # as at nearly every step
            return None
        theirs = {id(tensor) for other in all_optimizers if other is not optimizer for tensor in parameters_of(other)}
        counts = zip(left.weights, versions, left.versions, strict=False)  # none of inference tensors
        changed = [tensor for tensor, after, before in counts if after != before and id(tensor) not in theirs]
        self._writes.update(map(id, changed))
        written = [tensor for tensor in changed if self._writes[id(tensor)] <= _FEW_WRITES]
        compared = [weight for weight in left.weights if id(weight) not in theirs] if is_measured else written
        sampled = [
            (tensor, *self._samples[id(tensor)], _some(tensor)) for tensor in compared if id(tensor) in self._samples
        ]
        sampled = [row for row in sampled if row[2].device == row[3].device and row[2].shape == row[3].shape]
        changes = [now - before for _, _, before, now in sampled]
        tables = (
            changes,
            [row[2] for row in sampled],
            [row[3] for row in sampled],
            [row[0].detach() for row in sampled],
        )
        ids = {*map(id, written)}
        self._samples |= {id(tensor): (step - 1, now) for tensor, _, _, now in sampled if id(tensor) in ids}
        return OutsideReading(
            written=self._names_of(written),
            names=self._names_of([row[0] for row in sampled]),
            since=[row[1] for row in sampled],
            is_fresh=[row[1] == left.step for row in sampled],
            numbers=together([norm for table in tables for norm in norms_of(table)]),
        )

    def forget(self) -> None:
        """Take the parameters as they are: edits have just been made."""
        self._left.clear()
        self._samples.clear()


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    try:
        return [*map(_version_of, parameters)]
    except RuntimeError:  # of inference tensors
        return []


def _weights(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters without biases and scales, which one step may change much."""
    dense = [tensor for tensor in parameters if tensor.layout is torch.strided and tensor.is_floating_point()]
    return [tensor for tensor in dense if sum(size > 1 for size in tensor.shape) >= 2]


def _some(values: Tensor) -> Tensor:
    flat = values.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _VALUES)].clone()
