"""Compare gradients: the networks run forward and backward over each batch, one after the other."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hookscope.commands.diff.alignment import Pairing, containers_of
from hookscope.commands.diff.first_differences import exceeds, origin_of, rounding_limit
from hookscope.commands.diff.hooked_network import HookedNetwork
from hookscope.commands.diff.measures import Sums, coarser, sums_of
from hookscope.commands.diff.row_pairs import RowPair, pair_gradients, pair_parameters
from hookscope.commands.diff.values import A, Spool, Value, Versions, compared
from hookscope.inputs.batches import Batch
from hookscope.inspection.backward import inspect_gradients
from hookscope.inspection.device import cpu_threads
from hookscope.inspection.differentiation import LossFunction
from hookscope.results.differences import DifferenceRow, Match
from hookscope.results.gradients import GradientRow, Gradients
from hookscope.text import figure

# Rounding may turn the sign of a value near 0, which changes what ReLU or max pooling passes back. The probability is
# about the relative difference d of the value. In one case of 1,000, one of 1 / (1000 d) values turns: a relative L2 of
# sqrt(1000 d).
_CASES_PER_TURNED_SIGN = 1000


def _add(pair: RowPair, batch: RowPair, values: Sequence[Value | None], first_input: int = 0, count: int = -1) -> None:
    """Add the gradients that A, B and the reference have in a batch; `batch` has the rows of that batch."""
    present = [value for value in values if value is not None]
    if None not in values[:2]:
        pair.compared.merge(compared(present, first_input, count))
        return
    pair.compared.note = pair.compared.note or f"{'A' if values[0] is None else 'B'} has no gradient here"
    statuses = {getattr(row, "status", "") for row in (batch.a, batch.b)}
    if "not reached" in statuses:
        pair.one_sided = 0.0 if "zero" in statuses else math.inf


def _largest_difference(rows: Sequence[DifferenceRow]) -> float:
    """Return the largest relative L2 of inputs and outputs; infinite if rounding does not explain one of them."""
    norms = [(norm, row.limit) for row in rows for norm in (row.input_relative_l2, row.relative_l2) if norm is not None]
    return max((math.inf if exceeds(norm, limit) else norm for norm, limit in norms), default=0.0)


@dataclass(slots=True)
class GradientComparison:
    """The gradients of outputs, compared batch by batch, and of parameters, compared as sums over batches.

    Gradients of outputs are paired after both passes of a batch, and wait in a spool until then. Sums of gradients of
    parameters stay in memory, at least in float32: in half precision, sums over many batches stop growing.

    Attributes:
        networks: A, B and the optional reference.
        whole: B compiled in one piece; None unless B is compiled.
        loss: As for `inspect_gradients`.
        pairing: The partner in B of each call of A.
        notes: Sentences about the passes, as keys.
    """

    networks: Sequence[HookedNetwork]
    whole: HookedNetwork | None
    loss: LossFunction
    pairing: Pairing
    notes: dict[str, None] = field(default_factory=dict)
    _pairs: dict[str, RowPair] = field(default_factory=dict)
    _parameters: dict[str, RowPair] = field(default_factory=dict)
    _totals: tuple[dict[str, Tensor], ...] = field(default_factory=lambda: ({}, {}, {}, {}))
    _rows_of_a: tuple[GradientRow, ...] = ()

    def add(self, batch: Batch, first_input: int) -> None:
        """Differentiate the networks one after the other over a batch, and compare the gradients.

        Raises:
            PassError: If a network raises.
        """
        spool = Spool()
        networks = [*self.networks, *([] if self.whole is None else [self.whole])]
        passes = [_differentiate(network, batch, self.loss, spool) for network in networks]
        (first, ours), (other, theirs) = passes[:2]
        exact = [gradients for _, gradients in passes[2 : len(self.networks)]]
        self._rows_of_a = self._rows_of_a or first.gradients
        for rows in pair_gradients(first.gradients, other.gradients, self.pairing.partner):
            pair = self._pairs.setdefault(rows.label, rows)
            values = [ours.get(rows.label), theirs.get(rows.label_b), *(grads.get(rows.label) for grads in exact)]
            _add(pair, rows, values, first_input, len(batch.indices))
        calls = self.pairing.calls.items()
        by_order: dict[str, tuple[str, Match]] = {key[0]: (partner[0], "order") for key, partner in calls}
        paired = pair_parameters(first.parameters, other.parameters, {**self.pairing.names, **by_order})
        self._parameters |= {rows.label: rows for rows in paired}
        for total, (_, gradients) in zip(self._totals, passes, strict=False):
            for label, gradient in gradients.items():
                if label.endswith(" grad"):
                    added, wide = gradient.read(), torch.promote_types(gradient.dtype, torch.float32)
                    total[label] = total[label].to(wide) + added if label in total else added
        for letter, seen in (("A", first), ("B", other)):
            self.notes |= {f"{letter}: {text}": None for text in seen.warnings}

    def result(
        self, forward: Sequence[DifferenceRow], eps: float, has_row: Callable[[str, str], bool]
    ) -> tuple[tuple[DifferenceRow, ...], str]:
        """Return rows of gradients, and the label of the first gradient in the backward pass that differs.

        The rows are of outputs, then of parameters; of an input only if its gradient is the first to differ. The label
        is "" if no gradient differs beyond rounding, or if activations do.

        Args:
            forward: Rows of outputs, containers included.
            eps: As for `rounding_limit`.
            has_row: Whether an output of A, by its layer and label, has a row in the result.
        """
        parameters = [*self._parameters.values()]
        for pair in parameters:
            labels = pair.label, pair.label_b, pair.label
            gradients = [self._totals[at].get(labels[at]) for at in range(len(self.networks))]
            _add(pair, pair, [None if gradient is None else Value(gradient) for gradient in gradients])
            pair.compared.dtype = coarser(getattr(torch, pair.a.dtype), getattr(torch, pair.b.dtype))
        activations, pairs = _largest_difference(forward), [*self._pairs.values()]
        limit = rounding_limit(eps, 2 * len(self._rows_of_a))
        limit = max(limit, math.sqrt(_CASES_PER_TURNED_SIGN * activations)) if activations < math.inf else limit
        first = _first_to_differ(self._rows_of_a, pairs, parameters, limit) if activations < math.inf else ""
        listed = [
            pair
            for pair in pairs
            if pair.label == first
            or ((output := pair.label.removesuffix(" grad_output")) != pair.label and has_row(pair.a.layer, output))
        ]
        rows = [pair.difference(index=index, limit=limit) for index, pair in enumerate(listed)]
        rows += [pair.difference(limit=limit) for pair in parameters]
        rows = [replace(row, origin=origin_of(row, limit)) for row in rows]
        if self.whole is not None and not first and not any(row.origin == "begins" for row in forward):
            totals = self._totals[A], self._totals[len(self.networks)]
            self.notes |= dict.fromkeys(_warnings_about_whole(parameters, *totals, limit))
        return tuple(rows), first


def _warnings_about_whole(
    parameters: Sequence[RowPair], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], limit: float
) -> Iterator[str]:
    """Warn where B in one piece (`theirs`) differs from A (`ours`), though B in blocks (`parameters`) does not."""
    exceeding = []
    for pair in parameters:
        gradient, other = ours.get(pair.label), theirs.get(pair.label_b)
        sums = None if gradient is None or other is None else sums_of(gradient, other)
        if sums is None or pair.compared.measures is None:
            continue
        if exceeds(sums.relative_l2, max(limit, 2 * pair.sums.relative_l2)):
            exceeding.append((sums.relative_l2, pair.label))
    if exceeding:
        worst, label = max(exceeding)
        amount = f"relative L2 up to {figure(worst, 3)} at {label}"
        piece = f"Compiled in one piece, the network has other gradients, {amount}"
        yield f"{piece}, though no block does that is compiled by itself."


def _first_to_differ(
    rows_of_a: Sequence[GradientRow], pairs: Sequence[RowPair], parameters: Sequence[RowPair], limit: float
) -> str:
    """Return the label of the first gradient in the backward pass that differs by more than `limit`; "" without one.

    Containers are skipped: layers inside them take and return the same tensors.
    """
    layers = {site.layer for site in rows_of_a}
    containers = containers_of(layers)
    candidates: list[tuple[float, str]] = []
    arrived: dict[str, float] = dict.fromkeys(containers & layers, math.inf)
    for pair in pairs:
        layer, index = pair.a.layer, pair.b.backward_index if pair.a.backward_index is None else pair.a.backward_index
        if layer in containers or index is None:
            continue
        if pair.a.role == "output":
            arrived[layer] = max(arrived.get(layer, 0), index)
        if exceeds(pair.one_sided if pair.compared.note else pair.sums.relative_l2, limit):
            candidates.append((index, pair.label))
    for owner, owned in _by_owner(parameters, arrived).items():
        # Jointly: the gradient of a bias, before a normalisation or of attention's keys, may be 0 except for rounding.
        joint = sum((pair.sums for pair in owned), Sums()).relative_l2
        if any(pair.one_sided for pair in owned) or exceeds(joint, limit):
            most = max(owned, key=lambda pair: (pair.one_sided or 0.0, pair.sums.difference))
            # After the layer's outputs. For a container's own parameters the time of arrival is not known.
            candidates.append((arrived.get(owner, math.inf) + 0.5, most.label))
    return min(candidates, default=(0.0, ""))[1]


def _by_owner(parameters: Sequence[RowPair], layers: Collection[str]) -> dict[str, list[RowPair]]:
    """Group parameters by the nearest module around them that ran."""
    by_owner: dict[str, list[RowPair]] = {}
    for pair in parameters:
        owner = pair.a.layer
        while owner and owner not in layers:
            owner = owner.rpartition(".")[0]
        by_owner.setdefault(owner, []).append(pair)
    return by_owner


def _differentiate(
    network: HookedNetwork, batch: Batch, loss: LossFunction, spool: Spool
) -> tuple[Gradients, dict[str, Value]]:
    gradients: dict[str, Value] = {}
    versions = Versions(spool.keep)  # the gradient of an input is often the previous output's

    def keep(label: str, gradient: Tensor, _channel_axis: int | None) -> None:
        gradients[label] = versions.of(gradient.detach() if gradient.requires_grad else gradient)

    options = replace(network.options, hooked=frozenset(network.hooked))
    titled = replace(network.inspected, info=replace(network.inspected.info, name=network.title))  # named in errors
    with cpu_threads(network.cpu_threads):
        seen = inspect_gradients(titled, [network.batch_for(batch)], loss, options, on_tensor=keep)
    return seen, gradients
