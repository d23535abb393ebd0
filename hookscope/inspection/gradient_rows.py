"""From gradients to rows: merge them over batches, give each its status, measure those of parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hookscope.hooks.autograd import consumers, plain_arithmetic
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import GradientSite, RowKey, SiteKey
from hookscope.hooks.selection import parameters_by_name
from hookscope.hooks.step_gradients import StepGradient, by_layer
from hookscope.inspection.batch_shapes import BatchShapes
from hookscope.inspection.losses.formulas import LossValue
from hookscope.inspection.network import InspectedNetwork
from hookscope.inspection.rows import OnTensor, Recorder, same_values, with_whole_shape
from hookscope.results.activations import LayerRow
from hookscope.results.gradients import GradientRow, GradientStatus, LossRecord, ParameterRow, StepsRow
from hookscope.results.network import row_label
from hookscope.results.statistics import TensorStatistics
from hookscope.statistics.native import square_sums
from hookscope.statistics.reducer import Measured, Reducer, collect, summarise
from hookscope.statistics.reduction import Reduction, merge
from hookscope.statistics.storage import as_real_floats, gathered, stored_values


@dataclass(slots=True)
class Gradient:
    """The gradient of one site over the batches so far; `site` comes from `batch`, the first in which it got one."""

    site: GradientSite[Measured]
    reduction: Reduction | None
    batch: int
    shapes: BatchShapes = field(default_factory=BatchShapes)


def merge_gradients(
    gradients: dict[SiteKey, Gradient], sites: Sequence[GradientSite[Measured]], batch: int, input_count: int
) -> None:
    """Merge the gradients of one batch of so many inputs into those before."""
    reductions = iter(collect([site.value for site in sites if site.value is not None]))
    for site in sites:
        reduction = None if site.value is None else next(reductions)
        key = site.key
        gradient = gradients.get(key)
        if gradient is None or (gradient.reduction is None and reduction is not None):
            gradients[key] = Gradient(site, reduction, batch, BatchShapes() if gradient is None else gradient.shapes)
        elif gradient.reduction is not None and reduction is not None:
            gradient.reduction = merge(gradient.reduction, reduction)
        gradients[key].shapes.add(input_count, site.shape if reduction is None else reduction.shape)


def _status(statistics: TensorStatistics | None, *, tracked: bool, raised: bool) -> GradientStatus:
    if statistics is not None:
        return "zero" if statistics.zero_fraction == 1 else "gradient"
    if not tracked:
        return "no gradient path"
    return "unknown" if raised else "not reached"


def _no_statistics(shape: tuple[int, ...], dtype: torch.dtype | None) -> TensorStatistics:
    return TensorStatistics(tuple(shape), "none" if dtype is None else str(dtype).removeprefix("torch."), 0)


Steps = dict[tuple[str, int], StepGradient]
"""Gradients over time by layer and number of steps."""


def merge_steps(steps: Steps, gradients: Sequence[StepGradient]) -> None:
    """Merge the gradients over time of one batch into those before: the greatest at each step."""
    for layer, step in by_layer(gradients).items():
        key = (layer, len(step.largest))
        previous = steps.get(key)
        steps[key] = step if previous is None else step._replace(largest=torch.maximum(previous.largest, step.largest))


def step_rows(steps: Steps) -> tuple[StepsRow, ...]:
    """Turn gradients over time into results; gradients of a single step are left out."""
    return tuple(
        StepsRow(layer, step.kind, str(step.dtype).removeprefix("torch."), tuple(step.largest.double().tolist()))
        for (layer, count), step in steps.items()
        if count > 1
    )


@dataclass(slots=True)
class GradientRecorder:
    """The observer of gradients given to `capture`: reduces each, and clones what is to be drawn.

    Attributes:
        maps: Keeps what is to be drawn, and reads channel axes.
        axes: The axis that counts channels, by output of the latest batch.
        waiting: Copies for `on_tensor`, kept until the pass is known to count; None where nothing has to wait.
        nodes: The nodes of autograd's graph that computed the tensors whose gradients arrived in the latest batch.
    """

    maps: Recorder
    on_tensor: OnTensor | None
    axes: dict[RowKey, int | None] = field(default_factory=dict)
    waiting: list[tuple[str, Tensor, int | None]] | None = None
    nodes: dict[SiteKey, Node | None] = field(default_factory=dict)

    def observe(self, site: GradientSite[Measured], gradient: Tensor) -> Measured:
        """Reduce one gradient in the hook."""
        if type(gradient) is not Tensor:
            gradient = gathered(gradient)
        key = (site.layer, site.call, site.slot)
        self.nodes[site.key] = torch._C._current_autograd_node()
        is_kept = (self.on_tensor or self.maps.grids_for) and self.maps.lists(site) and not missing_memory(gradient)
        if site.role == "output":
            axis = self.axes.get(key)
            if is_kept and self.maps.grids_for:
                self.maps.keep(key, gradient, axis)
        else:
            axis = None if gradient.is_nested else self.maps.axes.channel_axis(site.maker, tuple(gradient.shape))
        if is_kept and self.on_tensor is not None:
            label = f"{row_label(*key)} grad_{site.role}"
            if self.waiting is None:
                self.on_tensor(label, gradient, axis)
            else:
                self.waiting.append((label, gradient.detach().clone(), axis))
        return self.maps.reducer.reduce(gradient, axis, len(self.maps.indices))

    def release(self) -> None:
        """Call `on_tensor` with the waiting copies."""
        waiting, self.waiting = self.waiting or (), None
        for label, gradient, axis in waiting:
            if self.on_tensor is not None:
                self.on_tensor(label, gradient, axis)


def gradient_rows(
    inspected: InspectedNetwork,
    gradients: Mapping[SiteKey, Gradient],
    activations: Sequence[LayerRow],
    loss: Tensor | None,
    nodes: Mapping[SiteKey, Node | None],
    *,
    raised: bool,
) -> tuple[GradientRow, ...]:
    """Turn the gradients of all batches into results, in forward order; `activations` are rows of the same passes.

    `loss` is that of one pass, as it was differentiated, None if none was; `nodes` computed the tensors whose gradients
    arrived in it. `raised` tells whether the pass raised before all gradients could arrive.
    """
    arrived = [gradient for gradient in gradients.values() if gradient.reduction is not None]
    arrived.sort(key=lambda grad: (grad.batch, grad.site.arrival))
    positions = {id(grad): position for position, grad in enumerate(arrived)}
    # A container shares the reduction of its last child.
    reductions = {id(grad.reduction): grad.reduction for grad in arrived if grad.reduction is not None}
    measured = dict(zip(reductions, summarise([*reductions.values()]), strict=True))
    statuses = {
        key: _status(measured.get(id(grad.reduction)), tracked=not grad.site.untracked, raised=raised)
        for key, grad in gradients.items()
    }
    takers: dict[SiteKey, tuple[str, ...]] = {}  # labels of the outputs that use each output
    if loss is not None and "zero" in statuses.values():
        in_order = {key: node for key in gradients if (node := nodes.get(key)) is not None}
        for key, users in consumers(loss, in_order).items():
            takers[key] = tuple("" if user is None else row_label(*user[:3]) for user in users)
    rows = []
    for index, (key, gradient) in enumerate(gradients.items()):
        site, operation, status = gradient.site, gradient.site.operation, statuses[key]
        statistics = measured.get(id(gradient.reduction)) or _no_statistics(site.shape, site.dtype)
        rows.append(
            GradientRow(
                index=index,
                backward_index=positions.get(id(gradient)),
                layer=site.layer,
                kind=type(site.module).__name__ if operation is None else operation.name,
                call=site.call,
                slot=site.slot,
                role=site.role,
                status=status,
                gradient=with_whole_shape(statistics, gradient.shapes),
                remark=site.untracked or ("unused, or cut off further on" if status == "not reached" else ""),
                aliases=inspected.aliases.get(site.layer, ()),
                owner=None if operation is None else operation.owner,
                source="" if operation is None else operation.source,
                taken_by=takers.get(key),
            )
        )
    return _with_repeats(rows, activations)


def _with_repeats(rows: Sequence[GradientRow], activations: Sequence[LayerRow]) -> tuple[GradientRow, ...]:
    """Mark the rows of pass-through modules whose gradient an earlier row of the same tensor also has."""
    repeated = {(row.layer, row.call, row.slot): row.duplicate_of for row in activations if row.duplicate_of}
    outputs = [row for row in rows if row.role == "output"]
    of_one_tensor = {row.label: [row] for row in outputs}
    of_calls: dict[tuple[str, int], GradientRow] = {}
    repeats: dict[int, str] = {}
    for row in outputs:
        group = of_one_tensor.get(repeated.get((row.layer, row.call, row.slot), ""), [])
        first = next((earlier for earlier in group if _same_gradient(earlier, row)), None)
        if first is not None:
            repeats[row.index] = first.label
            of_calls[row.layer, row.call] = row
        else:
            group.append(row)
    for row in rows:
        output = of_calls.get((row.layer, row.call))
        if row.role == "input" and output is not None and _same_gradient(output, row):
            repeats[row.index] = repeats[output.index]
    return tuple(replace(row, duplicate_of=repeats[row.index]) if row.index in repeats else row for row in rows)


def _same_gradient(first: GradientRow, second: GradientRow) -> bool:
    return first.status == second.status and same_values(first.gradient, second.gradient)


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter of a network after its backward pass."""

    parameter: nn.Parameter
    names: list[str]
    kind: str  # class name of the first layer that it belongs to
    gradient: Tensor | None  # what `.grad` holds, before that is restored


def named_parameters(network: nn.Module) -> list[NamedParameter]:
    """List each parameter once, those that the forward pass has registered among them."""
    by_id: dict[int, NamedParameter] = {}
    for name, (parameter, layer) in parameters_by_name(network).items():
        entry = NamedParameter(parameter, [], type(layer).__name__, parameter.grad)
        by_id.setdefault(id(parameter), entry).names.append(name)
    return [*by_id.values()]


def parameter_rows(
    parameters: Sequence[NamedParameter], on_tensor: OnTensor | None, reducer: Reducer, *, raised: bool
) -> tuple[ParameterRow, ...]:
    """Measure parameters and their gradients; `on_tensor` is called with "NAME grad" and each gradient.

    `raised` as for `gradient_rows`.
    """
    gradients = [(index, param.gradient) for index, param in enumerate(parameters) if param.gradient is not None]
    with plain_arithmetic():
        norms = _l2_norms([parameter.parameter for parameter in parameters])
        measured = [reducer.reduce(gradient) for _, gradient in gradients]
        statistics = dict(zip((index for index, _ in gradients), summarise(collect(measured)), strict=True))
    rows = []
    for index, (parameter, norm) in enumerate(zip(parameters, norms, strict=True)):
        gradient = statistics.get(index)
        name, *aliases = parameter.names
        if on_tensor is not None and parameter.gradient is not None and not missing_memory(parameter.gradient):
            on_tensor(f"{name} grad", gathered(parameter.gradient), None)
        rows.append(
            ParameterRow(
                index=index,
                name=name,
                kind=parameter.kind,
                trainable=parameter.parameter.requires_grad,
                status=_status(gradient, tracked=parameter.parameter.requires_grad, raised=raised),
                gradient=gradient or _no_statistics(parameter.parameter.shape, parameter.parameter.dtype),
                weight_l2=norm,
                ratio=gradient.l2 / norm if gradient is not None and gradient.l2 is not None and norm else None,
                aliases=tuple(aliases),
            )
        )
    return tuple(rows)


def _l2_norms(parameters: Sequence[nn.Parameter]) -> list[float | None]:
    """Return the L2 norm of each parameter; None if it holds no values, or if the norm is not finite.

    Compiled code sums squares of float32 in float64. What it cannot read is summed where it lies; there float64 values
    are scaled first, because float64 may not hold their squares. Apple's GPUs have no float64.
    """
    totals = square_sums(parameters)
    norms = [None if total is None else math.sqrt(total) for total in totals]
    others: dict[int, Tensor] = {}
    for index, parameter in enumerate(parameters):
        if totals[index] is not None or parameter.is_meta or missing_memory(parameter):
            continue
        values = as_real_floats(stored_values(parameter.detach(), ())[0])
        if values.numel() and values.dtype == torch.float64:
            scale = values.abs().max().clamp_min(5e-324)
            others[index] = torch.linalg.vector_norm(values / scale) * scale
        elif values.numel():
            wide = torch.float32 if values.device.type == "mps" else torch.float64
            others[index] = torch.linalg.vector_norm(values, dtype=wide)
    first = next(iter(others.values()), None)
    fetched = [] if first is None else torch.stack([norm.to(first) for norm in others.values()]).cpu().tolist()
    for index, norm in zip(others, fetched, strict=True):
        norms[index] = norm
    return [norm if norm is not None and math.isfinite(norm) else None for norm in norms]


def loss_record(losses: Sequence[tuple[LossValue, float]]) -> LossRecord | None:
    """Describe the losses of all batches, with their sum; None if there is none."""
    if not losses:
        return None
    first, _ = losses[0]
    differ = len({value.target for value, _ in losses}) > 1
    target = f"{first.target} in the first of {len(losses)} batches" if differ and first.target else first.target
    return LossRecord(first.name, target, math.fsum(amount for _, amount in losses), first.outputs)
