"""Compare gradients: each network forward and backward over a batch, one after the other, then the next batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hookscope.differences.measures import Sums, coarser, comparable
from hookscope.differences.stored_pairs import Found, pair_gradients, pair_parameters, pair_rows
from hookscope.inputs import Batch
from hookscope.inspection.backward import PassError, inspect_gradients
from hookscope.inspection.differentiation import LossFunction
from hookscope.inspection.network import BatchQueue
from hookscope.models import LoadedModel
from hookscope.results.differences import DifferenceRow
from hookscope.results.gradients import Gradients

_PARAMETER = " grad"


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A network, and how it is differentiated.

    Attributes:
        brought: Makes a copy of a batch where and in which dtype the network takes it.
        options: Of `inspect_gradients`.
        threads: Of the CPU; None for as many as torch takes.
    """

    loaded: LoadedModel
    brought: Callable[[Batch], Batch]
    options: dict[str, Any]
    threads: int | None = None


@dataclass(slots=True)
class _Pair:
    """Two gradients, and their sums over batches."""

    found: Found
    sums: Sums = field(default_factory=Sums)
    errors: tuple[Sums, Sums] | None = None  # of A and B, beside the reference
    dtype: torch.dtype = torch.float32
    note: str = ""

    def add(
        self, a: Tensor | None, b: Tensor | None, exact: Tensor | None = None, *, first_input: int = 0, count: int = -1
    ) -> None:
        if a is None or b is None:
            self.note = self.note or f"{'A' if a is None else 'B'} has no gradient here"
            return
        self.note = self.note or comparable(a, b)
        if not self.note:
            by_input = bool(a.dim()) and a.shape[0] == count
            self.dtype = coarser(a, b)
            self.sums.add(a, b, first_input if by_input else 0)
            if exact is not None and not comparable(a, exact):
                self.errors = self.errors or (Sums(), Sums())
                for sums, each in zip(self.errors, (a, b), strict=True):
                    sums.add(each, exact)

    def row(self) -> DifferenceRow:
        row = self.found.measured(None if self.note else self.sums.measured(self.dtype), self.note)
        return row if self.errors is None else replace(row, error=self.errors[0].error, error_b=self.errors[1].error)


def compare_gradients(
    a: Differentiated,
    b: Differentiated,
    queue: BatchQueue,
    loss: LossFunction,
    maps: Sequence[str],
    reference: Differentiated | None = None,
) -> tuple[tuple[DifferenceRow, ...], tuple[str, ...]]:
    """Differentiate two networks and compare the gradients of outputs, and the sums over batches of parameters'.

    The gradients of all outputs over one batch are held, on both sides, and those of all parameters.

    Args:
        a: The network A.
        b: The network B.
        queue: Batches of the inputs.
        loss: What is differentiated, as for `inspect_gradients`.
        maps: As for `--map`.
        reference: A in higher precision, for the errors of both sides.

    Returns:
        A row for each pair, outputs first; and notes about the passes.

    Raises:
        PassError: If a network raised and `queue` leaves out no inputs, or on every input.
    """
    pairs: dict[tuple[str, str], _Pair] = {}
    parameters: dict[str, Found] = {}
    sides = (a, b) if reference is None else (a, b, reference)
    totals: tuple[dict[str, Tensor], ...] = ({}, {}, {})
    notes: dict[str, None] = {}
    first_input = 0
    failed: PassError | None = None
    for batch in queue:
        try:
            passes = [_differentiate(side, batch, loss) for side in sides]
        except PassError as error:
            if queue.on_error is None or error.__cause__ is None:
                raise
            failed = failed or error
            queue.set_aside(batch, str(error), error.__cause__)
            continue
        (one, ours), (other, theirs) = passes[:2]
        exact = passes[2][1] if reference is not None else {}
        rows, _ = pair_rows(one.rows, other.rows, maps)
        for found in pair_gradients(one.gradients, other.gradients, rows):
            pair = pairs.setdefault((found.label, found.label_b), _Pair(found))
            three = ours.get(found.label), theirs.get(found.label_b), exact.get(found.label)
            pair.add(*three, first_input=first_input, count=len(batch.indices))
        parameters |= {each.label: each for each in pair_parameters(one.parameters, other.parameters, rows)}
        for total, gradients in zip(totals, (ours, theirs, exact), strict=True):
            for label, gradient in gradients.items():
                if label.endswith(_PARAMETER):
                    total[label] = total[label] + gradient if label in total else gradient
        notes |= {f"{letter}: {text}": None for letter, each in (("A", one), ("B", other)) for text in each.warnings}
        first_input += len(batch.indices)
    if failed is not None and not first_input:
        raise failed
    summed = [_Pair(found) for found in parameters.values()]
    for each in summed:
        label, label_b = each.found.label, each.found.label_b
        each.add(totals[0].get(label), totals[1].get(label_b), totals[2].get(label))
    return tuple(each.row() for each in (*pairs.values(), *summed)), tuple(notes)


def _differentiate(side: Differentiated, batch: Batch, loss: LossFunction) -> tuple[Gradients, dict[str, Tensor]]:
    """Run a network forward and backward over a batch; return what was seen, and its gradients by label."""
    gradients: dict[str, Tensor] = {}

    def keep(label: str, gradient: Tensor) -> None:
        gradients[label] = gradient.detach().clone()

    with _threads(side.threads):
        seen = inspect_gradients(side.loaded, [side.brought(batch)], loss, on_tensor=keep, **side.options)
    return seen, gradients


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads in the block."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
