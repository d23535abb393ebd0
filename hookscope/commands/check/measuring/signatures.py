"""Tell outputs with equal statistics apart: quantiles of each input, values at fixed places, moments of channels."""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.hooks.observed import ModuleCall, version_of
from hookscope.hooks.pytree import tensors_in
from hookscope.inputs import Batch
from hookscope.inspection.rows import OnCall, OnTensor
from hookscope.results.check import OutputSignature
from hookscope.results.statistics import QUANTILE_LEVELS
from hookscope.statistics.channels import channel_moments
from hookscope.statistics.kept_values import as_array, joined, kept_values
from hookscope.statistics.storage import as_real_floats, plain_array


@dataclass(slots=True)
class _Sums:
    """Over the batches so far.

    `kept` are the `kept_values` of each batch, `quantiles` sums of each input's times its count of finite values, (7,),
    `channels` those of the values of each channel and of their squares, (2, C), and `channel_size` how many they are.
    """

    kept: tuple[NDArray[np.floating], ...] | None
    quantiles: NDArray[np.float64]
    count: int
    channels: NDArray[np.float64] | None
    channel_size: int


@dataclass(slots=True)
class OutputSignatures:
    """Signs every output that `add` is called with; the same tensor twice in a row is read once.

    Attributes:
        inputs: How many inputs are in the network.
        is_operation: Whether the call whose output comes next is of an operation, which no baseline keeps.
        given: The `kept_values` of each batch, of each tensor that the network is given.
    """

    inputs: int = 1
    is_operation: bool = False
    seen: dict[str, _Sums | None] = field(default_factory=dict)
    given: dict[str, list[NDArray[np.floating]]] = field(default_factory=dict)
    _latest: tuple[weakref.ref[Tensor], int, int | None, _Sums | None] | None = None

    def numbered(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches, each when the network has seen the one before."""
        for batch in batches:
            self.inputs = max(len(batch.indices), 1)
            for path, tensor in tensors_in((batch.args, batch.kwargs)):
                kept = kept_values(tensor, None, self.inputs)
                if kept is not None:
                    self.given.setdefault(path, []).append(as_array(kept))
            yield batch

    def after(self, on_call: OnCall | None, on_tensor: OnTensor) -> tuple[OnCall, OnTensor]:
        """Return these observers with this one called after them."""

        def calls(call: ModuleCall) -> None:
            self.is_operation = call.operation is not None
            if on_call is not None:
                on_call(call)

        def tensors(label: str, tensor: Tensor, axis: int | None) -> None:
            on_tensor(label, tensor, axis)
            if not self.is_operation:
                self.add(label, tensor, axis)

        return calls, tensors

    def add(self, label: str, tensor: Tensor, channel_axis: int | None = None) -> None:
        """Add one output of a module; what cannot be read has no signature."""
        sums = self._signed(tensor, channel_axis)
        if label not in self.seen:
            self.seen[label] = sums
            return
        total = self.seen[label]
        self.seen[label] = None if total is None or sums is None else _added(total, sums)

    def results(self) -> dict[str, OutputSignature]:
        """Return the signatures of all outputs that have one, and under "" that of the network's input."""
        inputs = [joined(batches) for batches in self.given.values()]
        if len({*map(len, inputs)}) > 1:
            inputs = [values.reshape(1, -1) for values in inputs]
        return {
            **({"": OutputSignature(None, np.concatenate(inputs, 1))} if inputs else {}),
            **{
                label: OutputSignature(
                    tuple((sums.quantiles / sums.count).tolist()) if sums.count else None,
                    None if sums.kept is None else joined(sums.kept),
                    _moments(sums),
                )
                for label, sums in self.seen.items()
                if sums is not None
            },
        }

    def _signed(self, tensor: Tensor, axis: int | None) -> _Sums | None:
        version = version_of(tensor)
        if self._latest is not None:
            latest, latest_version, latest_axis, sums = self._latest
            if latest() is tensor and version == latest_version >= 0 and axis == latest_axis:
                return sums
        sums = None
        if tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta and not tensor.is_quantized:
            with torch.no_grad():
                sums = _sums_of(tensor.detach(), self.inputs, axis)
        self._latest = (weakref.ref(tensor), version, axis, sums)
        return sums


def _sums_of(tensor: Tensor, inputs: int, axis: int | None) -> _Sums:
    slices = inputs if tensor.dim() and inputs == tensor.shape[0] else 1
    values = plain_array(as_real_floats(tensor.reshape(-1).resolve_neg()).cpu()).reshape(slices, -1)
    total, count = np.zeros(len(QUANTILE_LEVELS)), 0
    for value in values:
        finite = value if np.isfinite(value).all() else value[np.isfinite(value)]
        if finite.size:
            total += np.quantile(finite.astype(np.float64), QUANTILE_LEVELS) * finite.size
            count += finite.size
    channels, channel_size = None, 0
    if axis is not None and tensor.is_floating_point() and tensor.numel():
        mean, variance = (moment.cpu().double().numpy() for moment in channel_moments(tensor, axis))
        channel_size = tensor.numel() // len(mean)
        with np.errstate(all="ignore"):
            channels = np.stack([mean, variance + mean**2]) * channel_size
    kept = kept_values(tensor, axis, inputs)
    return _Sums(None if kept is None else (as_array(kept),), total, count, channels, channel_size)


def _added(sums: _Sums, other: _Sums) -> _Sums:
    kept = None if sums.kept is None or other.kept is None else sums.kept + other.kept
    channels = None
    if sums.channels is not None and other.channels is not None and sums.channels.shape == other.channels.shape:
        channels = sums.channels + other.channels
    size = sums.channel_size + other.channel_size
    return _Sums(kept, sums.quantiles + other.quantiles, sums.count + other.count, channels, size)


def _moments(sums: _Sums) -> NDArray[np.float64] | None:
    if sums.channels is None:
        return None
    with np.errstate(all="ignore"):
        mean, squares = sums.channels / sums.channel_size
        return np.stack([mean, np.sqrt(np.maximum(squares - mean**2, 0.0))])


# From the finest to the coarsest: float16 has 11 significant bits, bfloat16 8.
_NARROW = (torch.bfloat16, torch.float16)


def weights_precision(network: nn.Module) -> str:
    """Return the narrowest floating dtype that holds all parameters exactly: "bfloat16" for rounded weights."""
    parameters = [
        parameter.detach()
        for parameter in network.parameters()
        if parameter.is_floating_point() and not parameter.is_meta
    ]
    for dtype in _NARROW:
        if parameters and all(torch.equal(tensor, tensor.to(dtype).to(tensor.dtype)) for tensor in parameters):
            return str(dtype).removeprefix("torch.")
    return str(max((tensor.dtype for tensor in parameters), key=_bits, default=torch.float32)).removeprefix("torch.")


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits
