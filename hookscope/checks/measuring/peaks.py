"""Watch the outputs of smooth activation functions for channels that stay next to zero."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.results.activations import row_label

# What goes to zero for negative inputs without being zero over a range of them: x·Φ(x), x/(1+e^-x), x·tanh(log(1+e^x)),
# log(1+e^x), under the names that torch, torchvision, timm and transformers give them. Not Hardswish, which is exactly
# zero below -3 as a ReLU is; nor ELU, CELU and SELU, which go to a constant other than zero.
SMOOTH = frozenset(
    {
        *("GELU", "GELUTanh", "QuickGELU", "PytorchGELUTanh"),
        *("GELUActivation", "NewGELUActivation", "QuickGELUActivation", "FastGELUActivation"),
        *("SiLU", "SiLUActivation", "Swish", "Mish", "MishActivation", "Softplus"),
    }
)


@dataclass(slots=True)
class ChannelPeaks:
    """The greatest magnitude of each channel so far, by label, (C,), on the network's device."""

    smooth: frozenset[str]
    _peaks: dict[str, Tensor] = field(default_factory=dict)

    def see(self, label: str, tensor: Tensor, channel_axis: int | None) -> None:
        """Look at an output: what `inspect` calls in the hook."""
        if label.partition("#")[0] not in self.smooth or channel_axis is None:
            return
        if not tensor.is_floating_point() or tensor.layout != torch.strided or not tensor.numel():
            return
        others = [axis for axis in range(tensor.dim()) if axis != channel_axis]
        peaks = torch.maximum(tensor.amax(others), -tensor.amin(others))
        known = self._peaks.get(label)
        if known is not None and known.shape == peaks.shape:
            peaks = torch.maximum(known, peaks)
        self._peaks[label] = peaks

    def by_label(self) -> Mapping[str, NDArray[np.float32]]:
        """Return the peaks by label, each (C,)."""
        return {label: peaks.float().cpu().numpy() for label, peaks in self._peaks.items()}


def channel_peaks(modules: Mapping[str, nn.Module]) -> ChannelPeaks:
    """Return what watches the smooth activation functions among the modules."""
    return ChannelPeaks(
        frozenset(row_label(name, 0, "") for name, module in modules.items() if type(module).__name__ in SMOOTH)
    )
