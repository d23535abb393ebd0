"""The parameters of one watched step: weights before it, gradients at the optimiser, and updates."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from hookscope.commands.watch.gradients import norms_of
from hookscope.commands.watch.shards import ShardedNorms, is_sharded
from hookscope.commands.watch.transfers import Transfer
from hookscope.results.statistics import TensorStatistics
from hookscope.results.training import WatchedParameter
from hookscope.statistics.reducer import Measured, Reducer, collect, summarise


@dataclass(slots=True)
class ParameterMeasurement:
    """Measures `parameters` during a watched step; after `finish`, they are those whose numbers are known."""

    parameters: Mapping[str, Tensor]
    _weights: dict[str, Tensor] = field(default_factory=dict)
    _gradients: dict[str, Measured] = field(default_factory=dict)
    _scales: dict[str, Tensor] = field(default_factory=dict)
    _updates: dict[str, Tensor] = field(default_factory=dict)
    _before: dict[int, list[tuple[str, Tensor, Tensor]]] = field(default_factory=dict)
    _reducer: Reducer = field(default_factory=Reducer)

    def measure_weights(self) -> None:
        """Measure the norms of all weights, once, before any optimiser steps."""
        if not self._weights:
            measured = {name: parameter for name, parameter in self.parameters.items() if _has_norm(parameter)}
            self._weights = dict(
                zip(measured, norms_of([tensor.detach() for tensor in measured.values()]), strict=True)
            )

    def measure_gradients(self, names: Iterable[str], scale: Tensor | None) -> None:
        """Measure the gradients at an optimiser; a GradScaler has multiplied them by `scale`."""
        for name in names:
            parameter = self.parameters.get(name)
            if parameter is None or parameter.grad is None or name in self._gradients or is_sharded([parameter]):
                continue
            self._gradients[name] = self._reducer.reduce(parameter.grad)
            if scale is not None:
                self._scales[name] = scale

    def keep(self, optimizer: int, names: Iterable[str]) -> None:
        """Copy the weights that an optimiser is about to change."""
        kept = [(name, tensor) for name in names if (tensor := self.parameters.get(name)) is not None]
        kept = [(name, tensor) for name, tensor in kept if not is_sharded([tensor])]
        self._before[optimizer] = [(name, tensor, tensor.detach().clone()) for name, tensor in kept]

    def measure_updates(self, optimizer: int) -> None:
        """Measure the norms of the changes that an optimiser has made."""
        kept = self._before.pop(optimizer, [])
        if not kept:
            return
        changes = [after.detach() - before for _, after, before in kept]
        self._updates.update(zip([name for name, _, _ in kept], norms_of(changes), strict=True))

    def finish(self, shared: Sequence[ShardedNorms]) -> "ParameterNumbers":
        """Return the numbers, after waiting for the device. `shared` has the norms of the sharded parameters."""
        self._reducer.settle()
        self._before.clear()
        reductions = collect([*self._gradients.values()])
        gradients = dict(zip(self._gradients, summarise(reductions), strict=True))
        norms: dict[str, Tensor] = {}
        for shard in shared:
            self._weights |= self._known(shard.weights)
            norms |= self._known(shard.gradients)
            self._updates |= self._known(shard.updates)
        self.parameters = {
            name: parameter
            for name, parameter in self.parameters.items()
            if name in self._weights or not parameter.requires_grad or not is_sharded([parameter])
        }
        tables = (self._weights, self._updates, self._scales, norms)
        numbers = iter(Transfer([tensor for table in tables for tensor in table.values()]).read())
        weights, updates, scales, norm_values = ({name: next(numbers) for name in table} for table in tables)
        return ParameterNumbers(weights, updates, gradients, scales, norm_values)

    def _known(self, norms: Mapping[int, Tensor]) -> dict[str, Tensor]:
        return {name: norms[id(parameter)] for name, parameter in self.parameters.items() if id(parameter) in norms}


@dataclass(frozen=True, slots=True)
class ParameterNumbers:
    """Weight norms, update norms, statistics of gradients and their scales, by name; of shards the gradients' norms."""

    weights: Mapping[str, float]
    updates: Mapping[str, float]
    gradients: Mapping[str, TensorStatistics]
    scales: Mapping[str, float]
    norms: Mapping[str, float]

    def row(self, name: str, parameter: Tensor) -> WatchedParameter:
        """Return the row of one parameter."""
        if name in self.norms:
            weight, update = self.weights.get(name), self.updates.get(name)
            return WatchedParameter(name, "gradient", weight, gradient_norm=self.norms[name], update_norm=update)
        gradient = self.gradients.get(name)
        status: Literal["gradient", "no gradient", "frozen"] = "no gradient" if parameter.requires_grad else "frozen"
        if gradient is None or gradient.unmeasured is not None:
            return WatchedParameter(name, status if gradient is None else "gradient", self.weights.get(name))
        scale = self.scales.get(name, 1.0)
        nonfinite = (gradient.nan_count or 0) + (gradient.inf_count or 0)
        broken = None if not nonfinite else math.nan if gradient.nan_count else math.inf
        return WatchedParameter(
            name,
            "gradient" if parameter.requires_grad else "frozen",
            self.weights.get(name),
            gradient_norm=broken or _scaled(gradient.l2, scale),
            gradient_max=broken or _scaled(gradient.max_abs, scale),
            gradient_zero_fraction=gradient.zero_fraction,
            gradient_nonfinite_count=nonfinite,
            update_norm=self.updates.get(name),
        )


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value / scale


def _has_norm(parameter: Tensor) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not is_sharded([parameter])
