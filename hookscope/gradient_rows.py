"""From gradients to rows: merge over batches, tell what became of each, measure those of parameters."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.gradient_watch import GradientSite, SiteKey
from hookscope.losses import LossValue
from hookscope.measure import Reducer, Reduction, collect, merge, summarise
from hookscope.recording import Measured
from hookscope.results import GradientRow, GradientStatus, LossRecord, ParameterRow, TensorStatistics
from hookscope.subject import Subject


@dataclass(slots=True)
class Gradient:
    """What one site has shown so far, over batches.

    Attributes:
        site: As the first batch met it that gave it a gradient.
        reduction: Over all batches; None without a gradient.
        batch: Which batch that was.
    """

    site: GradientSite[Measured]
    reduction: Reduction | None
    batch: int


def absorb_gradients(gradients: dict[SiteKey, Gradient], sites: Sequence[GradientSite[Measured]], batch: int) -> None:
    """Merge the gradients of one batch into those before."""
    reductions = iter(collect([site.value for site in sites if site.value is not None]))
    for site in sites:
        reduction = None if site.value is None else next(reductions)
        known = gradients.get(site.key)
        if known is None or (known.reduction is None and reduction is not None):
            gradients[site.key] = Gradient(site, reduction, batch)
        elif known.reduction is not None and reduction is not None:
            known.reduction = merge(known.reduction, reduction)


def _status(tracked: bool, statistics: TensorStatistics | None) -> GradientStatus:
    if statistics is not None:
        return "zero" if statistics.zero_fraction == 1 else "gradient"
    return "not reached" if tracked else "no gradient path"


def gradient_rows(subject: Subject, gradients: Mapping[SiteKey, Gradient]) -> tuple[GradientRow, ...]:
    """Turn gradients into results, in forward order."""
    arrived = [each for each in gradients.values() if each.reduction is not None]
    arrived.sort(key=lambda each: (each.batch, each.site.arrival))
    positions = {each.site.key: position for position, each in enumerate(arrived)}
    measured = iter(summarise([each.reduction for each in gradients.values() if each.reduction is not None]))
    rows = []
    for index, (key, each) in enumerate(gradients.items()):
        site = each.site
        statistics = None if each.reduction is None else next(measured)
        status = _status(not site.untracked, statistics)
        rows.append(
            GradientRow(
                index,
                positions.get(key),
                site.layer,
                type(site.module).__name__,
                site.call,
                site.slot,
                site.role,
                status,
                statistics or TensorStatistics(site.shape, site.dtype, 0),
                site.untracked or ("the loss does not depend on it" if status == "not reached" else ""),
                subject.aliases.get(site.layer, ()),
            )
        )
    return tuple(rows)


def parameter_rows(
    subject: Subject, on_tensor: Callable[[str, Tensor], None] | None, reducer: Reducer
) -> tuple[ParameterRow, ...]:
    """Measure the gradients that the network's parameters hold.

    Args:
        subject: The network.
        on_tensor: Called with "NAME grad" and each gradient.
        reducer: For measuring.
    """
    names: dict[int, list[str]] = {}
    kinds: dict[int, str] = {}
    parameters: dict[int, nn.Parameter] = {}
    for prefix, module in subject.network.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(id(parameter), []).append(f"{prefix}.{name}" if prefix else name)
            kinds.setdefault(id(parameter), type(module).__name__)
            parameters[id(parameter)] = parameter
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    with torch.no_grad():
        measured = [reducer.reduce(gradient) for gradient in gradients.values()]
        reducer.settle()
        statistics = dict(zip(gradients, summarise(collect(measured)), strict=True))
        sizes = dict(zip(parameters, _l2_norms(list(parameters.values())), strict=True))
    rows = []
    for index, (known, parameter) in enumerate(parameters.items()):
        name, *aliases = names[known]
        gradient, size = statistics.get(known), sizes[known]
        if on_tensor is not None and parameter.grad is not None:
            on_tensor(f"{name} grad", parameter.grad)
        rows.append(
            ParameterRow(
                index,
                name,
                kinds[known],
                parameter.requires_grad,
                _status(parameter.requires_grad, gradient),
                gradient or TensorStatistics(tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), 0),
                size,
                gradient.l2 / size if gradient is not None and gradient.l2 is not None and size else None,
                tuple(aliases),
            )
        )
    return tuple(rows)


def _l2_norms(parameters: Sequence[Tensor]) -> list[float | None]:
    """Return the root of the sum of squares of each; None where it cannot be told (meta) or is not finite.

    Summed in float64 over rows of axis 0, within which the parameter's own float32 or better is good to 1e-5.
    """
    norms: list[float | None] = [None] * len(parameters)
    told = [index for index, each in enumerate(parameters) if not each.is_meta and each.numel()]
    rows = []
    for index in told:
        wide = parameters[index].detach()
        wide = wide if wide.itemsize >= 4 else wide.float()
        rows.append(torch.linalg.vector_norm(wide.reshape(len(wide) if wide.dim() > 1 else 1, -1), dim=1))
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
