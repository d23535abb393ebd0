"""Compare gradients: each network forward and backward over a batch, one after the other, then the next batch."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hookscope.differences.alignment import Pairing
from hookscope.differences.backward_births import (
    Compared,
    ComparedParameter,
    backward_births,
    missing,
    owners,
    with_arriving,
)
from hookscope.differences.births import exceeds, rounding_limit
from hookscope.differences.measures import Sums, coarser, comparable
from hookscope.differences.stored_pairs import Found, pair_parameters, pair_sites
from hookscope.inputs import Batch
from hookscope.inspection.backward import PassError, inspect_gradients
from hookscope.inspection.differentiation import LossFunction
from hookscope.inspection.network import BatchQueue
from hookscope.models import LoadedModel
from hookscope.results.activations import LayerRow
from hookscope.results.differences import Birth, DifferenceRow, Match
from hookscope.results.gradients import GradientRow, Gradients, ParameterRow, parameter_owner

_PARAMETER = " grad"


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A network, and how it is differentiated.

    Attributes:
        brought: Makes a copy of a batch where and in which dtype the network takes it.
        options: Of `inspect_gradients`.
        edited: The layers whose outputs' gradients are edited.
        around: Entered for each pass, to compile the network.
        threads: Of the CPU; None for as many as torch takes.
    """

    loaded: LoadedModel
    brought: Callable[[Batch], Batch]
    options: dict[str, Any]
    threads: int | None = None
    edited: frozenset[str] = frozenset()
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(slots=True)
class _Pair:
    """Two gradients, and their sums over batches."""

    found: Found
    sums: Sums = field(default_factory=Sums)
    errors: tuple[Sums, Sums] | None = None  # of A and B, beside the reference
    dtype: torch.dtype = torch.float32
    note: str = ""
    missing: float | None = None  # what stands for a gradient that one side alone has

    def add(
        self,
        a: Tensor | None,
        b: Tensor | None,
        exact: Tensor | None,
        found: Found,
        *,
        first_input: int = 0,
        count: int = -1,
    ) -> None:
        if a is None or b is None:
            self.note = self.note or f"{'A' if a is None else 'B'} has no gradient here"
            if not (isinstance(found.a, LayerRow) or isinstance(found.b, LayerRow)):
                self.missing = missing(found.a, found.b)
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

    @property
    def relative_l2(self) -> float | None:
        """As `Compared.relative_l2`."""
        return self.missing if self.note else self.sums.relative_l2

    def row(self) -> DifferenceRow:
        row = self.found.measured(None if self.note else self.sums.measured(self.dtype), self.note)
        return row if self.errors is None else replace(row, error=self.errors[0].error, error_b=self.errors[1].error)


@dataclass(frozen=True, slots=True)
class GradientDifferences:
    """What differs between the gradients of two networks.

    Attributes:
        rows: Outputs that are listed, then parameters; inputs only where a difference is born.
        births: In the order of the backward pass.
        notes: About the passes.
    """

    rows: tuple[DifferenceRow, ...] = ()
    births: tuple[Birth, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Forward:
    """What the passes without gradients have shown.

    Attributes:
        pairing: Which call of A belongs to which of B.
        rows: Those of outputs, containers included.
        eps: Machine epsilon of the coarsest dtype that the networks compute in.
        lists: Tells whether rows of a layer of A are listed.
    """

    pairing: Pairing
    rows: Sequence[DifferenceRow]
    eps: float
    lists: Callable[[str], bool]


def compare_gradients(
    sides: Sequence[Differentiated],
    queue: BatchQueue,
    loss: LossFunction,
    forward: Forward,
    whole: Differentiated | None = None,
) -> GradientDifferences:
    """Differentiate two networks and compare the gradients of outputs, and the sums over batches of parameters'.

    The gradients of all inputs and outputs over one batch are held, on both sides, and those of all parameters.

    Args:
        sides: A, B and, for the errors of both, A in higher precision.
        queue: Batches of the inputs.
        loss: What is differentiated, as for `inspect_gradients`.
        forward: What the passes without gradients have shown.
        whole: B, compiled in one piece, where B is compiled block by block.

    Raises:
        PassError: If a network raised and `queue` leaves out no inputs, or on every input.
    """
    pairs: dict[tuple[str, str], _Pair] = {}
    parameters: dict[str, Found] = {}
    totals: tuple[dict[str, Tensor], ...] = ({}, {}, {}, {})
    notes: dict[str, None] = {}
    sites: tuple[GradientRow, ...] = ()
    first_input = 0
    failed: PassError | None = None
    for batch in queue:
        try:
            passes = [_differentiate(side, batch, loss) for side in sides]
            of_whole = {} if whole is None else _differentiate(whole, batch, loss)[1]
        except PassError as error:
            if queue.on_error is None or error.__cause__ is None:
                raise
            failed = failed or error
            queue.set_aside(batch, str(error), error.__cause__)
            continue
        (one, ours), (other, theirs) = passes[:2]
        exact = passes[2][1] if len(passes) > 2 else {}
        sites = sites or one.gradients
        for found in pair_sites(one.gradients, other.gradients, forward.pairing):
            pair = pairs.setdefault((found.label, found.label_b), _Pair(found))
            three = ours.get(found.label), theirs.get(found.label_b), exact.get(found.label)
            pair.add(*three, found, first_input=first_input, count=len(batch.indices))
        found_parameters = pair_parameters(one.parameters, other.parameters, _layers(forward.pairing))
        parameters |= {each.label: each for each in found_parameters}
        for total, gradients in zip(totals, (ours, theirs, exact, of_whole), strict=True):
            _add_parameters(total, gradients)
        notes |= {f"{letter}: {text}": None for letter, each in (("A", one), ("B", other)) for text in each.warnings}
        first_input += len(batch.indices)
    if failed is not None and not first_input:
        raise failed
    summed = [_Pair(found) for found in parameters.values()]
    for each in summed:
        label, label_b = each.found.label, each.found.label_b
        each.add(totals[0].get(label), totals[1].get(label_b), totals[2].get(label), each.found)
    result = _judged(sites, [*pairs.values()], summed, forward, sides[1].edited, tuple(notes))
    if whole is None or result.births or any(row.origin == "born" for row in forward.rows):
        return result
    return replace(result, notes=(*result.notes, *_of_whole(summed, totals[0], totals[3], result.rows)))


def _add_parameters(total: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Add the gradients of parameters over a batch to those before."""
    for label, gradient in gradients.items():
        if label.endswith(_PARAMETER):
            total[label] = total[label] + gradient if label in total else gradient


def _of_whole(
    parameters: Sequence[_Pair], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], rows: Sequence[DifferenceRow]
) -> list[str]:
    """Return a warning if gradients of parameters differ by the network in one piece, and by no block."""
    known = {row.label: row for row in rows}
    found = []
    for each in parameters:
        one, other = ours.get(each.found.label), theirs.get(each.found.label_b)
        by_blocks = known[each.found.label]
        if one is None or other is None or comparable(one, other) or by_blocks.measures is None:
            continue
        sums = Sums()
        sums.add(one, other)
        limit = max(by_blocks.limit, 2 * by_blocks.measures.relative_l2)
        if exceeds(sums.relative_l2, limit):
            found.append((sums.relative_l2, each.found.label))
    if not found:
        return []
    worst, label = max(found)
    piece = f"Compiled in one piece, the network has other gradients, relative L2 up to {worst:.3g} at {label}"
    return [f"{piece}, though no block does that is compiled by itself."]


def _judged(
    sites: Sequence[GradientRow],
    pairs: Sequence[_Pair],
    parameters: Sequence[_Pair],
    forward: Forward,
    edited_b: Collection[str],
    notes: tuple[str, ...],
) -> GradientDifferences:
    """Find where differences are born, and return the rows that are listed."""
    by_key = {(each.layer, each.call, each.slot, each.role): each for each in sites}
    compared = []
    for each in pairs:
        site = each.found.a
        if isinstance(site, GradientRow) and (site.layer, site.call, site.slot, site.role) in by_key:
            known = by_key[site.layer, site.call, site.slot, site.role]
            compared.append(Compared(known, each.row(), each.relative_l2))
    names = {
        each.found.label: parameter_owner(each.found.a.name, each.found.a.kind)
        for each in parameters
        if isinstance(each.found.a, ParameterRow)
    }
    owned = owners(names, {each.layer for each in sites})
    compared_parameters = [
        ComparedParameter(owned[each.found.label], each.row(), each.relative_l2, (each.sums.a, each.sums.difference))
        for each in parameters
    ]
    edited = {found.call[0] for found in (each.found for each in pairs) if found.call_b[0] in edited_b}
    births, arriving = backward_births(sites, compared, compared_parameters, forward.rows, forward.eps, edited)
    limit = rounding_limit(forward.eps, len(sites))
    born = {each.row for each in births}
    rows = [
        with_arriving(each.row, arriving.get(each.site.layer) if each.site.role == "input" else None, born, limit)
        for each in compared
        if each.row.label in born or (each.site.role == "output" and forward.lists(each.site.layer))
    ]
    rows = [replace(row, index=index) for index, row in enumerate(rows)]
    rows += [with_arriving(each.row, arriving.get(each.owner), born, limit) for each in compared_parameters]
    return GradientDifferences(tuple(rows), births, notes)


def _layers(pairing: Pairing) -> dict[str, tuple[str, Match]]:
    """Return the layers of B by those of A, and how they were matched."""
    by_order: dict[str, tuple[str, Match]] = {key[0]: (partner[0], "order") for key, partner in pairing.calls.items()}
    return {**pairing.names, **by_order}


def _differentiate(side: Differentiated, batch: Batch, loss: LossFunction) -> tuple[Gradients, dict[str, Tensor]]:
    """Run a network forward and backward over a batch; return what was seen, and its gradients by label."""
    gradients: dict[str, Tensor] = {}
    latest: list[tuple[Tensor, int, Tensor]] = []  # what arrives at an input is often what left the next layer

    def keep(label: str, gradient: Tensor) -> None:
        if not (latest and latest[0][0] is gradient and latest[0][1] == gradient._version):
            latest[:] = [(gradient, gradient._version, gradient.detach().clone())]
        gradients[label] = latest[0][2]

    with _threads(side.threads), side.around():
        seen = inspect_gradients(
            side.loaded, [side.brought(batch)], loss, on_tensor=keep, include_inputs=True, **side.options
        )
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
