"""Measure the parameters and buffers of a network: NaN and Inf, zeros, constants, duplicates, structure."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from hookscope.commands.check.measuring.weight_structure import (
    SUBNORMAL_BELOW,
    float8_values,
    longest_run,
    outlier_ratio,
    repeated_filters,
    spread_beyond_chance,
)
from hookscope.hooks.attributes import attribute_of
from hookscope.inspection.device import cpu_threads
from hookscope.results.check import StoredValues
from hookscope.rules.stored import is_weight
from hookscope.statistics.storage import stored_values
from hookscope.text import one_line

# Half of the smallest magnitude rounds to zero. 464 rounds to 448, the greatest of float8_e4m3fn: it is halfway
# to the next number on this grid (IEEE 754; OCP 8-bit Floating Point Specification, 2023).
_FP16_VANISHES = 2.0**-25
_FLOAT8_VANISHES = 2.0**-10
_FLOAT8_OVERFLOWS = 464.0

_PIECE_ELEMENTS = 2**16  # they stay in a processor's own cache while they are read several times
_UNMEASURED_BY_TORCH = (torch.bool, torch.uint16, torch.uint32, torch.uint64)  # no least and greatest value
_GREATEST_INTEGER = 2**15  # weights are quantised to 16 bits at most; beyond 2**23 all of float32's numbers are whole
_EPS = 1e-5  # default of torch's BatchNorm; programs and state dicts do not store it

Role = Literal["parameter", "buffer"]


@dataclass(frozen=True, slots=True)
class _NamedTensor:
    name: str
    module: nn.Module
    role: Role
    tensor: Tensor
    aliases: list[str] = field(default_factory=list)


def stored_tensors(network: nn.Module) -> tuple[tuple[StoredValues, ...], tuple[str, ...]]:
    """Measure the parameters and buffers of the state dict in its order, tied ones once.

    Also returns a sentence for each tensor whose values cannot be read. Packed weights of int8 modules are measured
    after unpacking. Output channels are counted along axis 0 of weights of Conv*d, Linear, RNNs and
    MultiheadAttention, along axis 1 and the groups of ConvTranspose*d, and not for other modules, such as Embedding.
    """
    measured: list[StoredValues] = []
    remarks: list[str] = []
    seen: dict[object, list[_NamedTensor]] = {}
    with cpu_threads(1):  # on pieces this small, threads mostly wait for each other
        for entry in _tensors(network):
            try:
                values = _measure(entry)
            except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
                remarks.append(f"The values of '{entry.name}' cannot be read: {one_line(error).removesuffix('.')}.")
                continue
            measured.append(replace(values, twin_of=_twin_of(entry, values, seen)))
    return tuple(measured), tuple(remarks)


def _tensors(network: nn.Module) -> Iterator[_NamedTensor]:
    by_id: dict[int, _NamedTensor] = {}
    for prefix, module in network.named_modules(remove_duplicate=False):
        for role, name, tensor in _stored_by(module):
            path = f"{prefix}.{name}" if prefix else name
            if id(tensor) in by_id:
                by_id[id(tensor)].aliases.append(path)
            else:
                by_id[id(tensor)] = _NamedTensor(path, module, role, tensor)
    yield from by_id.values()  # only now: the dict keeps unpacked weights alive, so that no two have the same id


def _stored_by(module: nn.Module) -> Iterator[tuple[Role, str, Tensor]]:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield "parameter", name, parameter
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield "buffer", name, buffer
    if attribute_of(module, "_packed_params") is not None:  # eager int8 modules, whose weight and bias are methods
        for name in ("weight", "bias"):
            unpack = attribute_of(module, name)
            unpacked = unpack() if callable(unpack) else None
            if isinstance(unpacked, Tensor):
                yield "parameter", name, unpacked


def _measure(entry: _NamedTensor) -> StoredValues:
    tensor = entry.tensor.detach()
    if tensor.is_meta:
        raise ValueError("it is on the meta device, which holds no data.")
    values, shape, implicit_zeros = stored_values(tensor, tuple(tensor.shape))
    count = values.numel() + implicit_zeros
    totals = _Totals(zero_count=implicit_zeros)
    if implicit_zeros:
        totals.min = totals.max = totals.max_abs = 0.0
    for piece in _pieces(values):
        totals.add(piece)
    filters = _filters(entry, values, shape)
    is_real = values.is_floating_point() and not totals.inf_count and not totals.nan_count
    if values.is_complex() or values.dtype == torch.bool:  # neither has an order
        totals.min = totals.max = None
    measured = StoredValues(
        *(entry.name, type(entry.module).__name__, entry.role, shape, str(tensor.dtype).removeprefix("torch."), count),
        **asdict(totals),
        zero_filters=_zero_filters(entry, filters, totals.zero_count),
        filter_count=None if filters is None else len(filters),
        aliases=tuple(entry.aliases),
        outlier_ratio=outlier_ratio(values) if is_real and (totals.max_abs or 0) > 1 else None,
        means_without_variance=_means_without_variance(entry, totals),
    )
    if is_weight(measured) and totals.min != totals.max:
        measured = replace(measured, float8=float8_values(values))
    if not is_real or totals.min == totals.max:
        return measured
    plain = values.float() if values.itemsize < 2 else values
    if filters is not None or (is_weight(measured) and entry.name.endswith("weight")):
        may_be_whole = 1 < (totals.max_abs or 0) <= _GREATEST_INTEGER and not tensor.is_quantized
        is_whole = may_be_whole and all(torch.equal(piece, piece.round()) for piece in _pieces(plain))
        measured = replace(measured, is_whole=is_whole)
    if filters is None or entry.name.endswith("_orig"):
        return measured
    rounded = tensor.is_quantized or filters.itemsize < 2
    filters = filters.float() if filters.itemsize < 2 else filters
    return replace(
        measured,
        repeated_filters=repeated_filters(filters, rounded=rounded),
        constant_run=longest_run(plain),
        spread_beyond_chance=spread_beyond_chance(filters),
    )


def _means_without_variance(entry: _NamedTensor, totals: "_Totals") -> tuple[int, ...]:
    """Return the channels of a BatchNorm with no variance, but a squared mean above a hundredth of eps."""
    if totals.min is None or totals.min >= SUBNORMAL_BELOW:
        return ()
    mean, eps = attribute_of(entry.module, "running_mean"), attribute_of(entry.module, "eps", _EPS)
    if not entry.name.endswith("running_var") or not isinstance(mean, Tensor) or mean.shape != entry.tensor.shape:
        return ()
    stuck = (entry.tensor.to_dense().abs() < SUBNORMAL_BELOW) & (mean.to_dense().square() > eps / 100)
    return tuple(stuck.nonzero().flatten().tolist())


def _pieces(values: Tensor) -> Iterator[Tensor]:
    """Yield the elements in pieces, in memory order if the tensor is dense."""
    if not values.is_contiguous():
        values = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True))
    flat = values.reshape(-1)
    if flat.numel():
        yield from torch.split(flat, _PIECE_ELEMENTS) if flat.is_cpu else [flat]


@dataclass(slots=True)
class _Totals:
    nan_count: int = 0
    inf_count: int = 0
    zero_count: int = 0
    fp16_zero_count: int = 0
    float8_zero_count: int = 0
    float8_overflow_count: int = 0
    min: float | None = None
    max: float | None = None
    max_abs: float | None = None

    def add(self, piece: Tensor) -> None:
        if piece.is_complex():
            self.nan_count += int(piece.isnan().sum())
            self.inf_count += int((piece.isinf() & ~piece.isnan()).sum())
            piece = piece[piece.isfinite()].to(torch.complex128).abs()  # the modulus may be larger than both parts
        elif piece.dtype in _UNMEASURED_BY_TORCH:
            piece = piece.double()
        elif piece.is_floating_point() and piece.itemsize < 2:  # float8 has no arithmetic
            piece = piece.float()
        if not piece.numel():
            return
        low, high = map(float, torch.aminmax(piece))
        if not (math.isfinite(low) and math.isfinite(high)):
            nan_count = int(piece.isnan().sum())
            finite = piece[piece.isfinite()]
            self.nan_count += nan_count
            self.inf_count += piece.numel() - finite.numel() - nan_count
            if not finite.numel():
                return
            piece = finite
            low, high = map(float, torch.aminmax(piece))
        nonzero = int(torch.count_nonzero(piece))
        self.zero_count += piece.numel() - nonzero
        if piece.is_floating_point():
            magnitudes = piece.abs()
            self.fp16_zero_count += nonzero - int(torch.count_nonzero(magnitudes > _FP16_VANISHES))
            self.float8_zero_count += nonzero - int(torch.count_nonzero(magnitudes > _FLOAT8_VANISHES))
            if max(abs(low), abs(high)) > _FLOAT8_OVERFLOWS:
                self.float8_overflow_count += int(torch.count_nonzero(magnitudes > _FLOAT8_OVERFLOWS))
        self.min = low if self.min is None else min(low, self.min)
        self.max = high if self.max is None else max(high, self.max)
        self.max_abs = max(abs(low), abs(high), self.max_abs or 0.0)


def _filters(entry: _NamedTensor, values: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return a weight as (output channels, inputs, places); None if it has no known output channels."""
    module, name = entry.module, entry.name.rpartition(".")[2].removesuffix("_orig")
    packed = attribute_of(module, "_packed_params") is not None
    is_kernel = name == "weight" and (packed or isinstance(module, _ConvNd | nn.Linear))
    is_attention = isinstance(module, nn.MultiheadAttention) and name.endswith("proj_weight")
    is_recurrent = isinstance(module, nn.RNNBase | nn.RNNCellBase) and name.startswith("weight_")
    if not (is_kernel or is_attention or is_recurrent) or len(shape) < 2 or values.dim() != len(shape):
        return None
    count, places = shape[0], math.prod(shape[2:])
    if isinstance(module, _ConvTransposeNd) or (packed and type(module).__name__.startswith("ConvTranspose")):
        groups = int(attribute_of(module, "groups", 1))
        count = shape[1] * groups
        if values.numel():  # (groups * inputs, outputs, ...)
            values = values.reshape(groups, -1, shape[1], places).transpose(1, 2)
    return values.reshape(count, -1, places) if values.numel() else values.reshape(count, 0, 0)


def _zero_filters(entry: _NamedTensor, filters: Tensor | None, zero_count: int) -> tuple[int, ...]:
    """Return the filters that are zero everywhere, as they are or under a mask of torch.nn.utils.prune."""
    name, _, suffix = entry.name.rpartition(".")[2].rpartition("_")
    mask: Any = attribute_of(entry.module, f"{name}_mask") if suffix == "orig" else None
    masks = _filters(entry, mask, mask.shape) if getattr(mask, "shape", None) == entry.tensor.shape else None
    if filters is not None and masks is not None:
        filters, zero_count = filters * masks, filters.numel()
    if filters is None or zero_count < max(1, math.prod(filters.shape[1:])):
        return ()
    return tuple((filters == 0).flatten(1).all(1).nonzero().flatten().tolist())


def _twin_of(entry: _NamedTensor, values: StoredValues, seen: dict[object, list[_NamedTensor]]) -> str:
    """Return the first weight in `seen` that has equal values in separate memory; "" for none."""
    if not is_weight(values) or values.min == values.max:
        return ""
    key = (values.dtype, values.shape, values.min, values.max, values.zero_count, entry.tensor.device)
    alike = seen.setdefault(key, [])
    twin = next((other.name for other in alike if _is_copy(other.tensor, entry.tensor)), "")
    alike.append(entry)
    return twin


def _is_copy(first: Tensor, second: Tensor) -> bool:
    """Tell whether equal values are in separate memory; a table of equal rows, as Mamba's A_log, starts so anywhere."""
    try:
        shared = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        return not shared and torch.equal(first, second) and not (len(first) > 1 and torch.equal(first[1:], first[:-1]))
    except (RuntimeError, NotImplementedError):  # sparse, or a dtype that torch cannot compare
        return False
