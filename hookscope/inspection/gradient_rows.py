"""From gradients to rows: merge over batches, tell what became of each, measure those of parameters."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hookscope.hooks.dataflow import takers
from hookscope.hooks.gradient_hooks import GradientSite, SiteKey, plain_arithmetic
from hookscope.inspection.network import Subject
from hookscope.inspection.rows import same_values
from hookscope.losses import LossValue
from hookscope.results.activations import LayerRow
from hookscope.results.frozen import quick_constructor
from hookscope.results.gradients import GradientRow, GradientStatus, LossRecord, ParameterRow
from hookscope.results.labels import row_label
from hookscope.results.statistics import TensorStatistics
from hookscope.statistics import Fused, Measured, Reading, Reducer, Reduction, collect, merge, plain, summarise
from hookscope.statistics.storage import as_real_floats, stored_values

T = TypeVar("T")

_new_gradient_row, _new_parameter_row = quick_constructor(GradientRow), quick_constructor(ParameterRow)


@dataclass(slots=True)
class Gradient:
    """What one site has shown so far, over batches.

    Attributes:
        site: As the first batch met it that gave it a gradient.
        reduction: Over all batches; None without a gradient.
        batch: Which batch that was.
    """

    site: GradientSite[Measured]
    reduction: Reduction | Fused | None
    batch: int


def absorb_gradients(gradients: dict[SiteKey, Gradient], sites: Sequence[GradientSite[Measured]], batch: int) -> None:
    """Merge the gradients of one batch into those before."""
    reductions = iter(collect([site.value for site in sites if site.value is not None]))
    for site in sites:
        reduction = None if site.value is None else next(reductions)
        key = site.key
        known = gradients.get(key)
        if known is None or (known.reduction is None and reduction is not None):
            gradients[key] = Gradient(site, reduction, batch)
        elif known.reduction is not None and reduction is not None:
            known.reduction = merge(plain(known.reduction), plain(reduction))


def _status(tracked: bool, statistics: TensorStatistics | None) -> GradientStatus:
    if statistics is not None:
        return "zero" if statistics.zero_fraction == 1 else "gradient"
    return "not reached" if tracked else "no gradient path"


def _without(shape: tuple[int, ...], dtype: torch.dtype | None) -> TensorStatistics:
    """Return what stands for the statistics of a gradient where there is none."""
    return TensorStatistics(tuple(shape), "none" if dtype is None else str(dtype).removeprefix("torch."), 0)


@dataclass(slots=True)
class Graph:
    """Autograd's graph of the latest batch, for what asks how the gradients came about.

    Attributes:
        loss: As it was differentiated; None before there is one.
        nodes: Those that computed the tensors whose gradients arrived.
    """

    loss: Tensor | None = None
    nodes: dict[SiteKey, Node | None] = field(default_factory=dict)

    def forget(self) -> None:
        """Let the graph go: another batch begins."""
        self.loss = None
        self.nodes.clear()


def gradient_rows(
    subject: Subject, gradients: Mapping[SiteKey, Gradient], activations: Sequence[LayerRow], graph: Graph
) -> tuple[GradientRow, ...]:
    """Turn gradients into results, in forward order.

    Args:
        subject: The network.
        gradients: Of all batches.
        activations: The rows of the same passes.
        graph: Of one of them.
    """
    arrived = [each for each in gradients.values() if each.reduction is not None]
    arrived.sort(key=lambda each: (each.batch, each.site.arrival))
    positions = {id(each): position for position, each in enumerate(arrived)}
    # A container shares the reduction of its last child.
    reductions = {id(each.reduction): each.reduction for each in arrived if each.reduction is not None}
    measured = dict(zip(reductions, summarise([*reductions.values()]), strict=True))
    rows = []
    for index, each in enumerate(gradients.values()):
        site = each.site
        statistics = measured.get(id(each.reduction))
        status = _status(not site.untracked, statistics)
        rows.append(
            _new_gradient_row(
                index,
                positions.get(id(each)),
                site.layer,
                type(site.module).__name__,
                site.call,
                site.slot,
                site.role,
                status,
                statistics or _without(site.shape, site.dtype),
                site.untracked or ("the loss does not depend on it" if status == "not reached" else ""),
                subject.aliases.get(site.layer, ()),
            )
        )
    if graph.loss is not None and any(row.status == "zero" for row in rows):
        rows = _with_takers(rows, graph.loss, graph.nodes)
    return _with_repeats(rows, activations)


def _with_takers(rows: Sequence[GradientRow], loss: Tensor, nodes: Mapping[SiteKey, Node | None]) -> list[GradientRow]:
    """Say of each output what takes it; rows come in the order of the forward pass, and so do labels."""
    in_order = {key: node for key in map(_site, rows) if (node := nodes.get(key)) is not None}
    known = {
        key: tuple("" if each is None else row_label(*each[:3]) for each in found)
        for key, found in takers(loss, in_order).items()
    }
    return [replace(row, taken_by=known.get(_site(row))) for row in rows]


def _site(row: GradientRow) -> SiteKey:
    return row.layer, row.call, row.slot, row.role


def _with_repeats(rows: Sequence[GradientRow], activations: Sequence[LayerRow]) -> tuple[GradientRow, ...]:
    """Mark the rows of pass-through modules whose gradient an earlier row of the same tensor has, too."""
    repeated = {(row.layer, row.call, row.slot): row.repeats for row in activations if row.repeats}
    if not repeated:
        return tuple(rows)
    outputs = [row for row in rows if row.role == "output"]
    of_one_tensor = {row.label: [row] for row in outputs}
    of_calls: dict[tuple[str, int], GradientRow] = {}
    repeats: dict[int, str] = {}
    for row in outputs:
        group = of_one_tensor.get(repeated.get((row.layer, row.call, row.slot), ""), [])
        first = next((each for each in group if _same_gradient(each, row)), None)
        if first is not None:
            repeats[row.index] = first.label
            of_calls[row.layer, row.call] = row
        else:
            group.append(row)
    for row in rows:
        output = of_calls.get((row.layer, row.call))
        if row.role == "input" and output is not None and _same_gradient(output, row):
            repeats[row.index] = repeats[output.index]
    return tuple(replace(row, repeats=repeats[row.index]) if row.index in repeats else row for row in rows)


def _same_gradient(first: GradientRow, second: GradientRow) -> bool:
    return first.status == second.status and same_values(first.gradient, second.gradient)


def parameter_rows(
    network: nn.Module,
    listed: Sequence[nn.Parameter],
    on_tensor: Callable[[str, Tensor], None] | None,
    reducer: Reducer,
    meanwhile: Callable[[], T],
) -> tuple[tuple[ParameterRow, ...], T]:
    """Measure the network's parameters and the gradients that they hold.

    Args:
        network: The model.
        listed: Its parameters before it ran; the forward pass may have registered more.
        on_tensor: Called with "NAME grad" and each gradient.
        reducer: For measuring what needs torch.
        meanwhile: Called while they are being read; must not write to them.

    Returns:
        The rows, and what `meanwhile` returned.
    """
    parameters = {id(each): each for each in listed}
    gradients = {known: parameter.grad for known, parameter in parameters.items() if parameter.grad is not None}
    reading = Reading([*gradients.values()], listed, distributions=reducer.distributions)

    def while_reading() -> tuple[dict[int, tuple[nn.Parameter, list[str], str]], T]:
        owned = _owned(network)
        for known, (parameter, _, _) in owned.items():
            if known not in parameters:
                parameters[known] = parameter
                if parameter.grad is not None:
                    gradients[known] = parameter.grad
        return owned, meanwhile()

    def finished() -> dict[int, TensorStatistics]:
        with plain_arithmetic():
            fused = dict(zip_longest(gradients, reading.reductions()))
            left = [known for known, each in fused.items() if each is None]
            left.sort(key=lambda known: str(gradients[known].shape))  # those alike are reduced together
            others = {known: reducer.reduce(gradients[known]) for known in left}
            reducer.settle()
        measured = collect([each or others[known] for known, each in fused.items()])
        return dict(zip(gradients, summarise(measured), strict=True))

    (owned, result), statistics = reading.run(while_reading, finished)
    with plain_arithmetic():
        sizes = dict(zip(parameters, _l2_norms([*parameters.values()], reading.square_sums()), strict=True))
    rows = []
    for index, (known, (parameter, (name, *aliases), kind)) in enumerate(owned.items()):
        gradient, size = statistics.get(known), sizes[known]
        if on_tensor is not None and known in gradients:
            on_tensor(f"{name} grad", gradients[known])
        rows.append(
            _new_parameter_row(
                index,
                name,
                kind,
                parameter.requires_grad,
                _status(parameter.requires_grad, gradient),
                gradient or _without(parameter.shape, parameter.dtype),
                size,
                gradient.l2 / size if gradient is not None and gradient.l2 is not None and size else None,
                tuple(aliases),
            )
        )
    return tuple(rows), result


def _owned(network: nn.Module) -> dict[int, tuple[nn.Parameter, list[str], str]]:
    """Return each parameter with its dotted names and the class name of the first module that owns it, by id."""
    owned: dict[int, tuple[nn.Parameter, list[str], str]] = {}
    for prefix, module in network.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                _, names, _ = owned.setdefault(id(parameter), (parameter, [], type(module).__name__))
                names.append(f"{prefix}.{name}" if prefix else name)
    return owned


def _l2_norms(parameters: Sequence[nn.Parameter], square_sums: Sequence[float | None]) -> list[float | None]:
    """Return the root of the sum of squares of each; None where it cannot be told (meta) or is not finite.

    Those that are not known (None, or none at the end) are summed in float64 over rows of axis 0, within which the
    tensor's own float32 or better is good to 1e-5.
    """
    norms = [None if known is None else math.sqrt(known) for _, known in zip_longest(parameters, square_sums)]
    told, rows = [], []
    for index, parameter in enumerate(parameters):
        if norms[index] is None and not parameter.is_meta:
            values = as_real_floats(stored_values(parameter.detach(), ())[0])
            if values.numel():
                told.append(index)
                rows.append(torch.linalg.vector_norm(values.reshape(len(values) if values.dim() > 1 else 1, -1), dim=1))
    if rows:
        squares = torch.cat([each.to(rows[0].device) for each in rows]).cpu().numpy().astype(np.float64) ** 2
        sums = np.add.reduceat(squares, np.cumsum([0, *map(len, rows[:-1])]))
        for index, total in zip(told, sums.tolist(), strict=True):
            norms[index] = math.sqrt(total) if math.isfinite(total) else None
    return norms


def loss_record(losses: Sequence[tuple[LossValue, float]]) -> LossRecord | None:
    """Describe the losses of all batches, with their sum; None if there is none."""
    if not losses:
        return None
    first, _ = losses[0]
    targets = dict.fromkeys(value.target for value, _ in losses if value.target)
    return LossRecord(first.name, "; ".join(targets), math.fsum(amount for _, amount in losses), first.outputs)
