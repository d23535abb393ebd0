"""Changes of weights that something other than the optimiser makes between two of its steps.

torch counts the writes to every tensor, and the counts are compared at each step. Writes through `.data` are not
counted: before steps that are measured in full, some values of each weight are compared as well.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from torch import Tensor
from torch.optim import Optimizer

from hookscope.commands.watch.gradients import can_be_measured, norms_of, parameters_of, some_values

_VALUES = 256

# A weight that is written to more often is clipped, averaged or restored as part of the training.
_FEW_WRITES = 3

_version_of = attrgetter("_version")


@dataclass(frozen=True, slots=True)
class OutsideReading:
    """Weights that may have been changed before one step of an optimiser; biases and scales are exempt.

    Attributes:
        written: Weights that have been written to since the optimiser's last step, but not habitually.
        compared: The first four fields of `OutsideChange`, for each weight that is compared.
        numbers: The last four fields of `OutsideChange` for these weights, as one vector.
    """

    written: Sequence[str]
    compared: Sequence[tuple[str, int, bool, bool]]
    numbers: Tensor

    def changes(self, numbers: Iterator[float]) -> "list[OutsideChange]":
        """Return the weights with their numbers, which are taken from the iterator."""
        tables = [[*islice(numbers, len(self.compared))] for _ in range(4)]
        return [OutsideChange(*weight, *norms) for weight, *norms in zip(self.compared, *tables, strict=True)]


@dataclass(frozen=True, slots=True)
class OutsideChange:
    """One weight of an `OutsideReading`.

    Attributes:
        since: The step after which the earlier values were read.
        is_fresh: Whether the optimiser has not stepped since then.
        change: L2 norm of the change of some values; `before` and `now` are the norms of these values.
        norm: L2 norm of the whole weight.
    """

    name: str
    since: int
    is_fresh: bool
    is_written: bool
    change: float
    before: float
    now: float
    norm: float


@dataclass(slots=True)
class _AfterStep:
    """The weights of an optimiser after its last step; `count` is the number of all its parameters."""

    step: int
    count: int
    weights: Sequence[Tensor]
    versions: Sequence[int]


class OutsideWrites:
    """Compares the weights of every optimiser before a step with those after its last step."""

    def __init__(self, names_of: Callable[[Sequence[Tensor]], Sequence[str]]) -> None:
        """Know no weight yet."""
        self._names_of = names_of
        self._after_steps: dict[int, _AfterStep] = {}
        self._samples: dict[int, tuple[int, Tensor]] = {}  # with the step, by `id` of the weight
        self._writes: Counter[int] = Counter()

    def step_ends(self, optimizer: Optimizer, step: int, *, samples: bool) -> None:
        """Note what a step has left; with `samples`, also some values of each weight."""
        parameters = parameters_of(optimizer)
        last = self._after_steps.get(id(optimizer))
        if last is None or last.count != len(parameters):
            measured = [tensor for tensor in parameters if tensor.is_floating_point() and can_be_measured(tensor)]
            weights = [tensor for tensor in measured if has_axes(tensor)]  # one step may change biases and scales much
            last = self._after_steps[id(optimizer)] = _AfterStep(step, len(parameters), weights, ())
        last.step, last.versions = step, _versions(last.weights)
        if samples:
            self._samples |= {id(weight): (step, some_values(weight, _VALUES)) for weight in last.weights}

    def step_begins(
        self, optimizer: Optimizer, step: int, all_optimizers: Sequence[Optimizer], *, is_measured: bool
    ) -> OutsideReading | None:
        """Compare weights before a step; those that were not written to only if the step is measured in full.

        Weights that two optimizers share are left out.
        """
        last = self._after_steps.get(id(optimizer))
        if last is None:
            return None
        versions = _versions(last.weights)
        if versions == last.versions and not is_measured:  # true at nearly every step
            return None
        theirs = {id(tensor) for other in all_optimizers if other is not optimizer for tensor in parameters_of(other)}
        counts = zip(last.weights, versions, last.versions, strict=False)  # inference tensors have no counts
        changed = [tensor for tensor, after, before in counts if after != before and id(tensor) not in theirs]
        self._writes.update(map(id, changed))
        written = [tensor for tensor in changed if self._writes[id(tensor)] <= _FEW_WRITES]
        compared = [weight for weight in last.weights if id(weight) not in theirs] if is_measured else written
        sampled = [
            (tensor, *self._samples[id(tensor)], some_values(tensor, _VALUES))
            for tensor in compared
            if id(tensor) in self._samples
        ]
        sampled = [row for row in sampled if row[2].device == row[3].device and row[2].shape == row[3].shape]
        weights, since, before, now = zip(*sampled, strict=True) if sampled else ((), (), (), ())
        changes = [after - earlier for earlier, after in zip(before, now, strict=True)]
        tables = (changes, before, now, [weight.detach() for weight in weights])
        ids = {*map(id, written)}
        self._samples |= {id(tensor): (step - 1, after) for tensor, _, _, after in sampled if id(tensor) in ids}
        return OutsideReading(
            written=self._names_of(written),
            compared=[
                (name, at, at == last.step, id(weight) in ids)
                for name, weight, at in zip(self._names_of(weights), weights, since, strict=True)
            ],
            numbers=norms_of([tensor for table in tables for tensor in table]),
        )

    def forget(self) -> None:
        """Forget the weights of earlier steps, because edits have just been made."""
        self._after_steps.clear()
        self._samples.clear()


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    try:
        return [*map(_version_of, parameters)]
    except RuntimeError:  # inference tensors have no version
        return []


def has_axes(tensor: Tensor) -> bool:
    """Tell whether at least two axes are longer than 1: a weight, not a bias or scale."""
    return sum(size > 1 for size in tensor.shape) >= 2
