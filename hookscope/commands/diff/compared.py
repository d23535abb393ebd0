"""What tensors of A and B, and of the reference, differ by over batches: outputs of layers, gradients, results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch

from hookscope.commands.diff.measures import Sums, coarser, comparable
from hookscope.commands.diff.spool import Value
from hookscope.inspection.batch_shapes import BatchShapes
from hookscope.results.differences import Measures

A, B, REFERENCE = range(3)
"""Positions of the networks in all that has one entry for each."""


@dataclass(slots=True)
class Compared:
    """Tensors at one place of the networks.

    Attributes:
        sums: By pair of networks.
        dtype: The coarser floating dtype of A and B.
        note: Why there are no sums of A and B.
        shapes: Those of A's tensor and of B's in the batches.
    """

    sums: dict[tuple[int, int], Sums] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    note: str = ""
    shapes: tuple[BatchShapes, BatchShapes] = field(default_factory=lambda: (BatchShapes(), BatchShapes()))

    def add(self, values: Sequence[Value], first_input: int, count: int, channel_axis: int | None = None) -> None:
        """Compare the values of a batch; the arguments are those of `Value.less`."""
        self.dtype = coarser(values[A].dtype, values[B].dtype)
        for shapes, value in zip(self.shapes, values, strict=False):
            shapes.add(count, value.shape)
        for first, other in combinations(range(len(values)), 2):
            axis = channel_axis if (first, other) == (A, B) else None
            sums = values[first].less(values[other], first_input, count, axis)
            if sums is not None:
                self._add((first, other), sums)
        if (A, B) not in self.sums:
            self.note = self.note or comparable(values[A].read(), values[B].read())

    def merge(self, other: "Compared") -> None:
        """Merge what other batches have shown."""
        for pair, sums in other.sums.items():
            self._add(pair, sums)
        self.dtype, self.note = other.dtype, self.note or other.note
        for shapes, others in zip(self.shapes, other.shapes, strict=True):
            shapes.merge(others)

    def _add(self, pair: tuple[int, int], sums: Sums) -> None:
        self.sums[pair] = self.sums[pair] + sums if pair in self.sums else sums

    @property
    def measures(self) -> Measures | None:
        """The measures of A and B; None if they were not compared."""
        return self.sums[A, B].measured(self.dtype) if (A, B) in self.sums else None

    @property
    def errors(self) -> tuple[float | None, float | None]:
        """The relative L2 errors of A and of B against the reference; None where it was not compared."""
        error, error_b = (self.sums.get((network, REFERENCE)) for network in (A, B))
        return None if error is None else error.error, None if error_b is None else error_b.error
