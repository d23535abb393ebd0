"""Tell outputs with equal statistics apart: quantiles of each input, values at fixed places, moments of channels."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.hooks.observed import ModuleCall, version_of
from hookscope.hooks.pytree import tensors_in
from hookscope.inputs.batches import Batch
from hookscope.inspection.rows import OnCall, OnTensor
from hookscope.results.check import OutputSignature
from hookscope.results.statistics import QUANTILE_LEVELS
from hookscope.statistics.channels import channel_moments
from hookscope.statistics.kept_values import joined, kept_values
from hookscope.statistics.storage import as_real_floats, is_dense, plain_array


@dataclass(slots=True)
class _Part:
    """One output for one batch: quantiles times `count`, (7,), and sums of channels' values and squares, (2, C)."""

    kept: NDArray[np.floating] | None
    quantiles: NDArray[np.float64]
    count: int
    channels: NDArray[np.float64] | None
    channel_size: int


@dataclass(slots=True)
class OutputSignatures:
    """Signs every output given to `add`; a tensor that comes twice in a row is read once.

    Attributes:
        inputs: Number of inputs of the batch that is running.
        is_operation: Whether an operation returns the next output; baselines do not keep operations.
        input_values: The `kept_values` of all batches, by the path of an input tensor.
    """

    inputs: int = 1
    is_operation: bool = False
    seen: dict[str, list[_Part | None]] = field(default_factory=dict)
    input_values: dict[str, list[NDArray[np.floating]]] = field(default_factory=dict)
    _latest: tuple[weakref.ref[Tensor], int, tuple[int | None, int], _Part | None] | None = None

    def numbered(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches as the network needs them, and keep values of their inputs."""
        for batch in batches:
            self.inputs = max(len(batch.indices), 1)
            for path, tensor in tensors_in((batch.args, batch.kwargs)):
                kept = kept_values(tensor, None, self.inputs)
                if kept is not None:
                    self.input_values.setdefault(path, []).append(kept)
            yield batch

    def after(self, on_call: OnCall | None, on_tensor: OnTensor) -> tuple[OnCall, OnTensor]:
        """Return observers that call these, then this object."""

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
        """Add one output of a module; an unreadable output has no signature."""
        self.seen.setdefault(label, []).append(self._signed(tensor, channel_axis))

    def results(self) -> dict[str, OutputSignature]:
        """Return the signatures by output, and under "" the signature of the network's inputs."""
        inputs = [joined(batches) for batches in self.input_values.values()]
        if len({*map(len, inputs)}) > 1:
            inputs = [values.reshape(1, -1) for values in inputs]
        results = {"": OutputSignature(None, np.concatenate(inputs, 1))} if inputs else {}
        read = {label: [part for part in parts if part] for label, parts in self.seen.items() if all(parts)}
        return results | {label: _signature(parts) for label, parts in read.items()}

    def _signed(self, tensor: Tensor, axis: int | None) -> _Part | None:
        version = version_of(tensor)
        if self._latest is not None:
            latest, latest_version, latest_how, part = self._latest
            if latest() is tensor and version == latest_version >= 0 and latest_how == (axis, self.inputs):
                return part
        part = None
        if tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta and not tensor.is_quantized:
            with torch.no_grad():
                part = _part_of(tensor.detach(), self.inputs, axis)
        self._latest = (weakref.ref(tensor), version, (axis, self.inputs), part)
        return part


def _part_of(tensor: Tensor, inputs: int, axis: int | None) -> _Part:
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
    return _Part(kept, total, count, channels, channel_size)


def _signature(parts: Sequence[_Part]) -> OutputSignature:
    count = sum(part.count for part in parts)
    kept = [part.kept for part in parts if part.kept is not None]
    channels = [part.channels for part in parts if part.channels is not None]
    moments = None
    if len(channels) == len(parts) and len({sums.shape for sums in channels}) == 1:
        with np.errstate(all="ignore"):
            mean, squares = sum(channels[1:], channels[0]) / sum(part.channel_size for part in parts)
            moments = np.stack([mean, np.sqrt(np.maximum(squares - mean**2, 0.0))])
    return OutputSignature(
        tuple((np.sum([part.quantiles for part in parts], 0) / count).tolist()) if count else None,
        joined(kept) if len(kept) == len(parts) else None,
        moments,
    )


_NARROW = (torch.bfloat16, torch.float16)  # with 8 and 11 significant bits


def weights_precision(network: nn.Module) -> str:
    """Return the narrowest floating dtype that holds all parameters exactly: "bfloat16" for rounded weights."""
    dense = (parameter.detach() for parameter in network.parameters() if is_dense(parameter))
    parameters = [parameter for parameter in dense if parameter.is_floating_point()]
    for dtype in _NARROW if parameters else ():
        if all(torch.equal(tensor, tensor.to(dtype).to(tensor.dtype)) for tensor in parameters):
            return str(dtype).removeprefix("torch.")
    widest = max((tensor.dtype for tensor in parameters), key=lambda dtype: dtype.itemsize, default=torch.float32)
    return str(widest).removeprefix("torch.")
