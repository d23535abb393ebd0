"""Measure a weights file or a state dict without a network."""

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from hookscope.checkpoints.checkpoint import Checkpoint, FileOptions
from hookscope.checkpoints.fileformat import weights_file
from hookscope.checkpoints.locate_state_dict import weights_in
from hookscope.checkpoints.training_entries import training_entries
from hookscope.checkpoints.wrapped_names import twin_names
from hookscope.commands.check.measuring.stored import stored_tensors
from hookscope.commands.check.measuring.training_state import copy_values, optimiser_values, scaler_values
from hookscope.errors import CheckpointError, UsageError
from hookscope.models.adapters import NamedShape, adapter_remark, adapters_in, is_adapter
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.names import parse_model
from hookscope.models.statedict import named_tensors
from hookscope.parameters import arg
from hookscope.results.check import CheckMeasurements, StoredValues
from hookscope.results.network import ModelInfo
from hookscope.rules.settings import CheckSettings
from hookscope.rules.stored import is_zero
from hookscope.text import counted, printable

STATE_DICT = "state dict"
"""The name of a state dict in reports."""

# This many parameters are no network if each has a single value.
_FEWEST_STUBS = 4

# Tensors of observers for quantisation, "min_val" and "max_val", are empty until the observers have seen something.
_RANGES = re.compile(r"(min|max)[^.]*\Z")

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class BatchNorm(_BatchNorm):
    """Stands for a module with a running mean and variance."""


class Convolution(_ConvNd):
    """Stands for a module with a kernel. It has one group, because files do not store groups."""

    groups = 1


def read_alone(model: str | Mapping[str, Any], settings: CheckSettings, *, trust: bool | None = False) -> Checkpoint:
    """Read a weights file, a state dict, or the dict of a training script that holds one, for `measure_read`.

    Raises:
        CheckpointError: If there are no tensors by name.
        UsageError: If `model` is another form of MODEL, or holds several sets of weights and the settings name none.
        HookscopeError: As `read_checkpoint` raises it.
    """
    if isinstance(model, Mapping):
        content = model if isinstance(model, dict) else dict(model)
        weights = weights_in(content, STATE_DICT, settings.key)
        training = training_entries(content, weights, settings.key)
        return Checkpoint(STATE_DICT, weights.state, "", notes=weights.notes, training=training)
    if parse_model(model).form not in ("weights", "hugging face"):
        raise UsageError(f"{arg('arch')} none needs a weights file; MODEL '{printable(model)}' is a network.")
    if not os.path.lexists(model):
        raise CheckpointError(f"{printable(model)} does not exist.")
    return read_checkpoint(
        weights_file(Path(model)), FileOptions(trust, settings.key, allowed_globals=tuple(settings.allow_global))
    )


def measure_read(read: Checkpoint, reason: str, began: float) -> CheckMeasurements:
    """Measure a file that was read since `began`; the `reason` is why rules that need a network are skipped.

    Raises:
        CheckpointError: If it holds names without values, or half of an adapter.
    """
    loaded = time.perf_counter()
    stored, unread = stored_tensors(as_named(read.state))
    if lack := _lack_of_values(stored):
        raise CheckpointError(
            f"{read.name} does not hold its weights: {lack}. Training with sharded parameters (DeepSpeed ZeRO-3, FSDP) "
            "leaves such files: gather the weights before saving, or convert the checkpoint (zero_to_fp32.py)."
        )
    zeros = {alias for values in stored if is_zero(values) for alias in (values.name, *values.aliases)}
    adapters = [NamedShape(key, tuple(tensor.shape), key in zeros) for key, tensor in named_tensors(read.state)]
    alone = adapters_in(adapters) if is_adapter(read.state) else None
    if alone is not None and alone.halves:
        lone = f"'{printable(alone.halves[0], 80)}', a LoRA adapter"
        raise CheckpointError(f"{read.name} lacks the other half of {lone}; save or download it again.")
    parameters = sum(values.element_count for values in stored if values.role == "parameter")
    broken = any(values.nan_count or values.inf_count for values in stored)
    return CheckMeasurements(
        ModelInfo(f"{read.name} (no network)", "(no network)", read.name, False, read.sha256 or None, parameters),
        stored,
        None,
        unmeasured={"non-finite-parameter": " ".join(unread)} if unread and not broken else {},
        no_network=reason,
        optimisers=optimiser_values(read.training),
        scalers=scaler_values(read.training),
        copies=tuple(copy_values(read.training)),
        idle_adapters=() if alone is None else alone.idle,
        warnings=(*read.notes, *read.warnings, *_remarks(read.name, read.state, adapters), *unread),
        seconds={"load": loaded - began, "stored": time.perf_counter() - loaded},
    )


def _remarks(name: str, state: Mapping[str, Any], adapters: Sequence[NamedShape]) -> Iterator[str]:
    """Yield sentences about names: adapters of another network, a network whose weights are there twice."""
    tensors = dict(named_tensors(state))
    if remark := adapter_remark(name, adapters):
        yield remark
    if (twins := twin_names({key: tensor.shape for key, tensor in tensors.items()})) is None:
        return
    first, second = (printable(prefix, 80) for prefix in twins.prefixes)
    places = f"under '{first}' and '{second}'" if first else f"without and with '{second}'"
    shown = " and ".join(f"'{printable(twin, 80)}'" for twin in twins.pairs[0])
    count = len(twins.pairs)
    differ = sum(not _is_same(tensors[twin], tensors[other]) for twin, other in twins.pairs)
    values = f"{differ:,} of {count:,} differ" if 0 < differ < count else "their values differ"
    values = values if differ else "their values are equal"
    is_prefix = all(other.startswith(twins.prefixes[1]) for _, other in twins.pairs)
    choice = f": {arg('key')} {second.rstrip('.')} chooses the second" if is_prefix else ""
    yield f"{name} has {counted(count, 'name')} twice, {places} ({shown}); {values}. A network takes one set{choice}."


def _is_same(first: Tensor, second: Tensor) -> bool:
    try:
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (first, second)]
        return first.dtype == second.dtype and torch.equal(*bits)
    except (RuntimeError, NotImplementedError):  # sparse or quantised
        return False


def _lack_of_values(stored: Sequence[StoredValues]) -> str:
    """Return which tensors lack their values, in words; "" for a file that may hold its weights.

    ZeRO-3 keeps values elsewhere, and leaves parameters of shape (0,) or (1,). A few such parameters may be on purpose,
    but no weight has the shape (0,).
    """
    parameters = [values for values in stored if values.role == "parameter" and not _RANGES.search(values.name)]
    empty = [values for values in stored if not values.element_count]
    lacking = [values for values in empty if values.shape == (0,) and values.name.rpartition(".")[2] == "weight"]
    if lacking or sum(not parameter.element_count for parameter in parameters) > len(parameters) / 2:
        first = printable((lacking or empty)[0].name, 80)
        return f"{len(empty):,} of {counted(len(stored), 'tensor')} have no values, such as '{first}'"
    if len(parameters) >= _FEWEST_STUBS and all(parameter.element_count == 1 for parameter in parameters):
        return f"each of its {len(parameters):,} parameters has a single value"
    return ""


def as_named(state: Mapping[str, Any]) -> nn.Module:
    """Return modules that hold the tensors of a state dict, as far as `stored_tensors` needs them.

    Tensors that are not floating-point, and those named like BatchNorm's statistics or a mask, become buffers.
    """
    owners: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _with_ties(named_tensors(state)):
        prefix, _, leaf = name.rpartition(".")
        owners.setdefault(prefix, {})[leaf if prefix else name] = tensor
    root = nn.Module()
    for prefix, tensors in owners.items():
        module = _empty_module(tensors)
        for leaf, tensor in tensors.items():
            is_buffer = leaf in _STATISTICS or "mask" in leaf.lower()
            is_parameter = not is_buffer and (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)
            kept: dict[str, Any] = module._parameters if is_parameter else module._buffers
            kept[leaf] = tensor
        root._modules[prefix] = module
    return root


def _with_ties(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name; names of the same memory get one object, as tied weights have."""
    seen: dict[object, Tensor] = {}
    for name, tensor in tensors:
        stored = tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel() > 0
        where = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if stored else name
        yield name, seen.setdefault(where, tensor)


def _empty_module(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return an empty module of the class that tensors of these names and shapes suggest."""
    weight, bias = tensors.get("weight", tensors.get("weight_orig")), tensors.get("bias")
    kind: type[nn.Module] = nn.Module
    if {"running_mean", "running_var"} <= tensors.keys():
        kind = BatchNorm
    elif weight is not None and (bias is None or bias.shape == weight.shape[:1]):
        # A transposed kernel, whose outputs are on axis 1, is only known by its bias.
        is_linear = weight.dim() == 2 and bias is not None
        kind = Convolution if weight.dim() > 2 else nn.Linear if is_linear else nn.Module
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module
