"""Compare the weights of two networks, or of two files, tensor by tensor, without running anything."""

import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hookscope.checkpoints.checkpoint import FileOptions
from hookscope.commands.diff.alignment import Call, align, match_names
from hookscope.commands.diff.measures import coarser, comparable, plain, sums_of
from hookscope.commands.diff.tolerances import exceeded, parse_condition
from hookscope.errors import NothingMatchedError
from hookscope.inspection.session import package_versions
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.construction import LoadedModel
from hookscope.models.statedict import named_tensors
from hookscope.parameters import arg
from hookscope.results.differences import Differences, Match, Side, Unmatched, WeightDifference
from hookscope.results.inputs import Provenance
from hookscope.results.network import ModelInfo
from hookscope.statistics.storage import without_float8
from hookscope.text import counted

# Buffers of batch normalisation, which are not counted as parameters.
_BATCH_STATISTICS = ("running_mean", "running_var")

# Elements whose signs are compared at a time: a few MB.
_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters and buffers by name, and the model that they belong to."""

    info: ModelInfo
    tensors: Mapping[str, Tensor]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def weights_of(loaded: LoadedModel) -> Weights:
    """Return the weights of a network."""
    return Weights(loaded.info, dict(named_tensors(loaded.module.state_dict())), loaded.warnings, loaded.notes)


def read_weights(path: Path, options: FileOptions = FileOptions()) -> Weights:  # noqa: B008 - frozen
    """Return the weights in a file, without a network.

    Raises:
        HookscopeError: As `read_checkpoint`.
    """
    read = read_checkpoint(path, options)
    tensors = dict(named_tensors(read.state))
    parameters = [tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in _BATCH_STATISTICS]
    count = sum(parameter.numel() for parameter in parameters if parameter.is_floating_point())
    info = ModelInfo(read.name, "(no network)", read.name, random=False, sha256=read.sha256, parameter_count=count)
    return Weights(info, tensors, read.warnings, read.notes)


def compare_weights(a: Weights, b: Weights, *, maps: Sequence[str] = (), fail_over: Sequence[str] = ()) -> Differences:
    """Compare two sets of weights.

    Tensors are paired by name, also after `maps` or without prefixes of wrappers; the rest by order and shapes.

    Args:
        a: Weights of A.
        b: Weights of B.
        maps: As for `--map`, over names of tensors.
        fail_over: Conditions for `exceeded`, whose patterns are over names of tensors.

    Returns:
        All pairs in `weights`, equal ones too, and tensors without a partner in `unmatched`.

    Raises:
        NothingMatchedError: If no tensor of A has a partner in B.
        UsageError: If a map or a condition is malformed, or the condition needs a run.
        LayerNotFoundError: If a map or a condition matches nothing.
    """
    began = time.perf_counter()
    conditions = [parse_condition(text) for text in fail_over]
    shapes_a, shapes_b = ({name: (tuple(tensor.shape),) for name, tensor in side.tensors.items()} for side in (a, b))
    named = match_names(shapes_a, shapes_b, maps)
    aligned = align(_calls(shapes_a), _calls(shapes_b), named)
    ordered: dict[str, tuple[str, Match]] = {name: (other, "order") for (name, _), (other, _) in aligned.items()}
    partners = {**ordered, **named}
    if not partners:
        raise NothingMatchedError(
            f"No tensor of A ({a.info.name}) has a partner in B ({b.info.name}): pair them with {arg('map')} 'a.*=b.*'."
        )
    rows = [
        _weight_difference(name, *partners[name], tensor, b.tensors[partners[name][0]])
        for name, tensor in a.tensors.items()
        if name in partners
    ]
    alone = [*_unmatched("A", a, partners), *_unmatched("B", b, {partner for partner, _ in partners.values()})]
    incomparable = sum(row.measures is None for row in rows)
    return Differences(
        a=Side(a.info, dtype=_main_dtype(a)),
        b=Side(b.info, dtype=_main_dtype(b)),
        way="weights",
        weights=tuple(rows),
        unmatched=tuple(alone),
        exceeded=exceeded(conditions, rows),
        warnings=(
            *(f"A: {text}" for text in a.warnings),
            *(f"B: {text}" for text in b.warnings),
            *([f"{counted(incomparable, 'pair')} of tensors cannot be compared."] if incomparable else []),
        ),
        notes=tuple(dict.fromkeys((*a.notes, *b.notes))),
        timings={"compare": time.perf_counter() - began},
        provenance=Provenance((), None, versions=package_versions(), threads=torch.get_num_threads()),
    )


def _calls(shapes: Mapping[str, tuple[tuple[int, ...], ...]]) -> list[Call]:
    return [Call((name, 0), name.rpartition(".")[2], shape, ()) for name, shape in shapes.items()]


def _weight_difference(name: str, name_b: str, matched: Match, a: Tensor, b: Tensor) -> WeightDifference:
    forms = (tuple(a.shape), tuple(b.shape), str(a.dtype).removeprefix("torch."), str(b.dtype).removeprefix("torch."))
    first, other = (a, b) if comparable(a, b) else (without_float8(side.detach().cpu()) for side in (a, b))
    sums = sums_of(first, other)
    if sums is None:
        return WeightDifference(name, name_b, matched, *forms, None)
    flips = _sign_flips(*(plain(side, torch.device("cpu")) for side in (first, other))) if sums.unequal else 0.0
    return WeightDifference(name, name_b, matched, *forms, sums.measured(coarser(a.dtype, b.dtype)), flips)


def _sign_flips(a: Tensor, b: Tensor) -> float:
    """Return the share of elements that are above zero on one side and below on the other."""
    if not (a.dtype.is_signed and b.dtype.is_signed):  # torch compares no large unsigned integers
        return 0.0
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    parts = zip(flat_a.split(_CHUNK), flat_b.split(_CHUNK), strict=True)  # type: ignore[no-untyped-call]
    flips = (int((((first > 0) & (other < 0)) | ((first < 0) & (other > 0))).sum()) for first, other in parts)
    return sum(flips) / a.numel()


def _unmatched(side: Literal["A", "B"], weights: Weights, paired: Collection[str]) -> Iterator[Unmatched]:
    reason = f"{'B' if side == 'A' else 'A'} has no such tensor"
    for name, tensor in weights.tensors.items():
        if name not in paired:
            yield Unmatched(side, name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), reason)


def _main_dtype(weights: Weights) -> str:
    counts: Counter[str] = Counter()
    for tensor in weights.tensors.values():
        if tensor.is_floating_point():
            counts[str(tensor.dtype).removeprefix("torch.")] += math.prod(tensor.shape)
    return max(counts, key=counts.__getitem__, default="none")
