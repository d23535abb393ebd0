"""The parameters of one watched step: weights before it, gradients at the optimiser, and updates."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from hookscope.commands.watch.gradients import Transfer, can_be_measured, norms_of
from hookscope.commands.watch.shards import ShardedNorms, is_sharded
from hookscope.results.statistics import TensorStatistics
from hookscope.results.training import WatchedParameter
from hookscope.statistics.reducer import Measured, Reducer, collect, summarise
from hookscope.statistics.storage import without_float8


@dataclass(slots=True)
class ParameterMeasurement:
    """Measures `parameters` during a watched step."""

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
            whole = {name: tensor for name, tensor in self.parameters.items() if not is_sharded([tensor])}
            measured = {name: tensor for name, tensor in whole.items() if can_be_measured(tensor)}
            norms = norms_of([tensor.detach() for tensor in measured.values()])
            self._weights = dict(zip(measured, norms.unbind(), strict=True))

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
        kept = [(name, self.parameters[name]) for name in names if name in self._weights]
        self._before[optimizer] = [(name, tensor, tensor.detach().clone()) for name, tensor in kept]

    def measure_updates(self, optimizer: int) -> None:
        """Measure the norms of the changes that an optimiser has made."""
        kept = self._before.pop(optimizer, [])
        if not kept:
            return
        changes = [without_float8(after.detach()) - without_float8(before) for _, after, before in kept]
        self._updates.update(zip([name for name, _, _ in kept], norms_of(changes).unbind(), strict=True))

    def finish(self, shared: Sequence[ShardedNorms]) -> tuple[WatchedParameter, ...]:
        """Return the rows, after waiting for the device. `shared` has the norms of the sharded parameters."""
        self._before.clear()
        reductions = collect([*self._gradients.values()])
        gradients = dict(zip(self._gradients, summarise(reductions), strict=True))
        sharded: dict[str, Tensor] = {}
        for shard in shared:
            self._weights |= self._by_name(shard.weights)
            sharded |= self._by_name(shard.gradients)
            self._updates |= self._by_name(shard.updates)
        tables = (self._weights, self._updates, self._scales, sharded)
        numbers = iter(Transfer([tensor for table in tables for tensor in table.values()]).read())
        weights, updates, scales, norms = ({name: next(numbers) for name in table} for table in tables)
        return tuple(
            _row(name, parameter, weights.get(name), updates.get(name), gradients.get(name), scales.get(name, 1.0))
            if name not in norms
            else WatchedParameter(name, "gradient", weights.get(name), norms[name], update_norm=updates.get(name))
            for name, parameter in self.parameters.items()
            if name in weights or not parameter.requires_grad or not is_sharded([parameter])
        )

    def _by_name(self, norms: Mapping[int, Tensor]) -> dict[str, Tensor]:
        return {name: norms[id(parameter)] for name, parameter in self.parameters.items() if id(parameter) in norms}


def _row(
    name: str,
    parameter: Tensor,
    weight: float | None,
    update: float | None,
    gradient: TensorStatistics | None,
    scale: float,
) -> WatchedParameter:
    status: Literal["gradient", "no gradient", "frozen"] = "no gradient" if parameter.requires_grad else "frozen"
    if gradient is None or gradient.unmeasured is not None:
        return WatchedParameter(name, status if gradient is None else "gradient", weight)
    nonfinite = (gradient.nan_count or 0) + (gradient.inf_count or 0)
    broken = None if not nonfinite else math.nan if gradient.nan_count else math.inf
    return WatchedParameter(
        name,
        "gradient" if parameter.requires_grad else "frozen",
        weight,
        gradient_norm=broken or _unscaled(gradient.l2, scale),
        gradient_max=broken or _unscaled(gradient.max_abs, scale),
        gradient_zero_fraction=gradient.zero_fraction,
        gradient_nonfinite_count=nonfinite,
        update_norm=update,
    )


def _unscaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value / scale
