"""Statistics of the inputs of BatchNorm over the pictures, and the statistics that BatchNorm stored in training."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from hookscope.hooks.attributes import attribute_of
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import ModuleCall
from hookscope.results.check import BatchNormInput
from hookscope.rules.batch_norm import FEWEST_INPUTS, FEWEST_VALUES, is_as_new
from hookscope.statistics.channels import channel_moments
from hookscope.statistics.storage import plain_array


class _Moments(NamedTuple):
    """The number of values per channel in the input of one call, and the channels' means and variances, (C,)."""

    value_count: int
    mean: Tensor
    variance: Tensor


@dataclass(slots=True)
class BatchNormInputs:
    """Accumulates mean and variance of the inputs of `norms`, in the order in which they first ran."""

    norms: Mapping[str, nn.Module]
    seen: dict[str, list[_Moments]] = field(default_factory=dict)

    def add(self, call: ModuleCall) -> None:
        """Add the input of a BatchNorm's call; ignore other calls, and inputs that are not (N, C, …)."""
        if call.operation is not None or call.layer not in self.norms or not call.inputs:
            return
        values = call.inputs[0][1].detach()
        channels = self.norms[call.layer].running_mean.numel()  # type: ignore[operator]
        if not values.is_floating_point() or values.layout != torch.strided or not values.numel():
            return
        if values.dim() < 2 or values.shape[1] != channels or missing_memory(values):
            return
        moments = _Moments(values.numel() // channels, *channel_moments(values, 1))
        self.seen.setdefault(call.layer, []).append(moments)

    def results(self) -> tuple[BatchNormInput, ...]:
        """Return the statistics of each layer that ran, in execution order."""
        return tuple(self._result(layer, moments) for layer, moments in self.seen.items())

    def _result(self, layer: str, moments: Sequence[_Moments]) -> BatchNormInput:
        norm, total = self.norms[layer], _count(moments)
        shares = torch.tensor([[part.value_count / total] for part in moments], dtype=torch.float64)
        means = torch.stack([part.mean for part in moments]).cpu().double()
        variances = torch.stack([part.variance for part in moments]).cpu().double()
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        stored = (norm.running_mean, norm.running_var, mean, variance)
        arrays = (plain_array(tensor.detach().cpu().double()) for tensor in stored)  # type: ignore[operator]
        return BatchNormInput(layer, total, float(norm.eps), *arrays, _start_share(norm))  # type: ignore[call-arg, arg-type]

    def reason_to_skip(self, input_count: int, *, is_noise: bool, is_new: bool) -> str:
        """Return why no BatchNorm can be judged, in a sentence; "" if one can. `is_new`: see `statistics_are_new`."""
        few = f"{input_count} {'was' if input_count == 1 else 'were'} given"
        reasons = {
            "No BatchNorm stores statistics, or its eps is not known (TorchScript, exported programs).": not self.norms,
            "The input is noise, which BatchNorm was not trained on: give pictures.": is_noise,
            f"At least {FEWEST_INPUTS} pictures are needed; {few}.": input_count < FEWEST_INPUTS,
            "BatchNorm statistics are at their initial values: mean 0, variance 1.": is_new
            and all(map(is_as_new, self.norms.values())),
            "No BatchNorm was seen to run, as in TorchScript.": not self.seen,
            f"No BatchNorm was given {FEWEST_VALUES} values in each channel: give more or larger pictures.": all(
                _count(moments) < FEWEST_VALUES for moments in self.seen.values()
            ),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


def with_statistics(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that normalise by stored statistics: torch's BatchNorms, torchvision's frozen ones, others."""
    return {name: module for name, module in modules.items() if _stores_statistics(module)}


def _stores_statistics(module: nn.Module) -> bool:
    mean, variance = (attribute_of(module, name) for name in ("running_mean", "running_var"))
    return (
        isinstance(mean, Tensor)
        and isinstance(variance, Tensor)
        and mean.dim() == 1
        and mean.shape == variance.shape
        and mean.numel() > 0
        and isinstance(attribute_of(module, "eps"), float)
        and not isinstance(module, _InstanceNorm)
    )


def _start_share(norm: nn.Module) -> float:
    """Return the share of the initial values in the statistics, (1 - momentum)**batches; 0 if it is unknown."""
    batches, momentum = attribute_of(norm, "num_batches_tracked"), attribute_of(norm, "momentum")
    if not isinstance(batches, Tensor) or batches.numel() != 1 or not isinstance(momentum, float):
        return 0.0
    count = float(batches)
    return (1 - momentum) ** count if count > 0 and 0 < momentum < 1 else 0.0


def _count(moments: Iterable[_Moments]) -> int:
    return sum(part.value_count for part in moments)
