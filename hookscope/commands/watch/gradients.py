"""The gradients that reach an optimiser: their norms are read before the step, and copied without waiting."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import attrgetter
from types import NoneType

import torch
from torch import Tensor
from torch.optim import Optimizer

from hookscope.statistics.native import square_sums
from hookscope.statistics.storage import without_float8

_gradient_of = attrgetter("grad")
HALF = frozenset({torch.float16, torch.bfloat16})
_DOUBLE = frozenset({torch.float64, torch.complex128})


@dataclass(frozen=True, slots=True)
class GradientReading:
    """The gradients of one optimiser at one step.

    Attributes:
        parameters: Parameters with a gradient, in the optimiser's order.
        names: Names of `parameters`.
        norms: L2 norm of each gradient, multiplied by `scale`: numbers if they are known at once, else a tensor (P,) on
            the device of the first.
        without: Names of trainable parameters without a gradient.
        frozen: Names of parameters with `requires_grad=False`.
        rates: Learning rate of each group.
        scale: Factor of the GradScaler that gradients still have, for fused optimisers; None for 1.
        found_inf: Above 0 if a fused optimiser skips the step; None without a GradScaler.
    """

    parameters: Sequence[Tensor]
    names: Sequence[str]
    norms: list[float] | Tensor
    without: Sequence[str]
    frozen: Sequence[str]
    rates: Sequence[float | Tensor]
    scale: Tensor | None
    found_inf: Tensor | None


def read_gradients(
    optimizer: Optimizer,
    names_of: Callable[[Sequence[Tensor]], Sequence[str]],
    precomputed: Mapping[int, Tensor] | None = None,
) -> GradientReading:
    """Read the gradients that an optimiser is about to step with, without waiting for a device.

    `precomputed` has the norms of sharded parameters, by `id` of the parameter.
    """
    trained, idle = parameters_of(optimizer), list[Tensor]()
    gradients = [*map(_gradient_of, trained)]
    if NoneType in map(type, gradients):
        idle = [tensor for tensor in trained if tensor.grad is None]
        trained = [tensor for tensor in trained if tensor.grad is not None]
        gradients = [*map(_gradient_of, trained)]
    norms: list[float] | Tensor
    if precomputed is None:
        norms = norms_without_waiting(gradients)
    else:
        trained = [tensor for tensor in trained if id(tensor) in precomputed]
        norms = stacked([precomputed[id(tensor)] for tensor in trained])
    return GradientReading(
        parameters=trained,
        names=names_of(trained),
        norms=norms,
        without=names_of([tensor for tensor in idle if tensor.requires_grad]) if idle else (),
        frozen=names_of([tensor for tensor in idle if not tensor.requires_grad]) if idle else (),
        rates=[number_of(group["lr"]) for group in optimizer.param_groups if "lr" in group],
        scale=_scalar(getattr(optimizer, "grad_scale", None)),
        found_inf=_scalar(getattr(optimizer, "found_inf", None)),
    )


def norms_without_waiting(gradients: Sequence[Tensor]) -> list[float] | Tensor:
    """Return the L2 norm of each gradient: numbers if they are known at once, else a tensor on the device."""
    norms = _norms_in_compiled_code(gradients)
    return _norms_in_torch(gradients) if norms is None else norms


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    return [*chain.from_iterable([group["params"] for group in optimizer.param_groups])]


def can_be_measured(parameter: Tensor) -> bool:
    """Tell whether a parameter holds dense floating-point numbers, real or complex."""
    is_dense = parameter.layout is torch.strided and not parameter.is_meta
    return is_dense and (parameter.is_floating_point() or parameter.is_complex())


def some_values(tensor: Tensor, most: int) -> Tensor:
    """Return a copy of about `most` values, spread over a tensor."""
    flat = tensor.detach().reshape(-1)
    return without_float8(flat[:: max(1, flat.numel() // most)].clone())


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimiser inside wrappers such as those of accelerate and Lightning."""
    inner = getattr(optimizer, "optimizer", None)
    return inner_optimizer(inner) if isinstance(inner, Optimizer) and inner is not optimizer else optimizer


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each tensor as a vector (P,) on the device of the first; empty for no tensors.

    Squares are added up in float64, in which squares of float32 values neither overflow nor vanish; in float32 on MPS,
    which has no float64. Norms of float64 tensors on the CPU are computed anew if their squares overflow or vanish.
    """
    norms = _norms_in_compiled_code(tensors)
    return _norms_in_torch(tensors) if norms is None else torch.tensor(norms, dtype=torch.float64)


def stacked(scalars: Sequence[Tensor]) -> Tensor:
    """Stack scalars into one vector, on the device of the first."""
    if not scalars:
        return torch.empty(0)
    device = scalars[0].device
    is_one = all(scalar.device == device for scalar in scalars)
    return torch.stack([*scalars] if is_one else [moved(scalar, device) for scalar in scalars])


def _norms_in_compiled_code(tensors: Sequence[Tensor]) -> list[float] | None:
    """Return the norms of dense float32 tensors on the CPU; None if any tensor is of another kind."""
    sums = square_sums(tensors) if all(tensor.is_cpu for tensor in tensors) else [None]
    norms = [math.sqrt(summed) for summed in sums if summed is not None]
    return norms if len(norms) == len(tensors) else None


def _norms_in_torch(tensors: Sequence[Tensor]) -> Tensor:
    dense = [tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor for tensor in tensors]
    tensors = [*map(without_float8, dense)]
    kinds = [(tensor.device, tensor.dtype) for tensor in tensors]
    norms: dict[int, Tensor] = {}
    for kind in {*kinds}:
        positions = [position for position, pair in enumerate(kinds) if pair == kind]
        norms.update(zip(positions, _norms_of_a_kind([tensors[position] for position in positions]), strict=True))
    return stacked([norms[position] for position in range(len(tensors))])


def _norms_of_a_kind(tensors: Sequence[Tensor]) -> list[Tensor]:
    first = tensors[0]
    if first.device.type == "mps":
        return [*torch._foreach_norm([*tensors], 2, torch.float32 if first.dtype in HALF else None)]
    dtype = torch.complex128 if first.is_complex() else torch.float64
    if hasattr(first, "device_mesh"):  # torch cannot compute norms of DTensors in another dtype
        return [*torch._foreach_norm([tensor.to(dtype) for tensor in tensors], 2)]
    norms = [*torch._foreach_norm([*tensors], 2, dtype)]
    if not first.is_cpu or first.dtype not in _DOUBLE:
        return norms
    vector = torch.stack(norms)
    if (vector.isfinite() & (vector > 0)).all():
        return norms
    pairs = zip(tensors, norms, strict=True)
    return [norm if norm.isfinite() and norm else _scaled_norm(tensor) for tensor, norm in pairs]


def _scaled_norm(tensor: Tensor) -> Tensor:
    """Return the L2 norm of values whose squares float64 cannot hold; NaN or Inf if a value is not finite."""
    values = tensor.abs()
    greatest = values.max() if values.numel() else values.sum()
    return greatest * torch.linalg.vector_norm(values / greatest) if greatest.isfinite() and greatest else greatest


def _scalar(value: object) -> Tensor | None:
    return value.detach().reshape(()) if isinstance(value, Tensor) else None


class Transfer:
    """Numbers that are read together: those on a device are copied without waiting, with the others.

    If a device has no events that signal the end of a copy, reading waits for the device.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start to copy; tensors are scalars and vectors of any real dtype."""
        device = next((tensor.device for tensor in tensors if not tensor.is_cpu), torch.device("cpu"))
        parts = [moved(tensor.reshape(-1), device) for tensor in tensors]
        self._numbers = torch.cat(parts) if parts else torch.empty(0)
        self._event: torch.Event | None = None
        if not self._numbers.is_cpu and _has_events(device):
            host = torch.empty(self._numbers.shape, dtype=self._numbers.dtype, pin_memory=device.type == "cuda")
            self._numbers = host.copy_(self._numbers, non_blocking=True)
            self._event = _recorded(device)

    @property
    def is_complete(self) -> bool:
        """Whether `read` returns without waiting; False for a device without events."""
        return self._numbers.is_cpu and (self._event is None or self._event.query())

    def read(self) -> list[float]:
        """Return the numbers of all tensors, in order, after waiting for them."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._numbers.cpu().tolist()
        return numbers


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; in float32 on MPS, which has no float64."""
    return tensor.to(device, torch.float32 if device.type == "mps" else tensor.dtype)


def number_of(value: float | Tensor) -> float | Tensor:
    """Return a number, or the only value of a tensor as it is now: a number on the CPU, else a copy on its device."""
    if isinstance(value, Tensor) and not (type(value) is Tensor and value.is_cpu):
        return value.detach().clone().reshape(())
    return float(value)


@cache
def _has_events(device: torch.device) -> bool:
    try:
        event = _recorded(device)
        event.query()
        event.synchronize()
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def _recorded(device: torch.device) -> torch.Event:
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
