"""Weights that are frozen in two files, though their values differ, and what may have moved them."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hookscope.commands.history.changes import FROZEN
from hookscope.commands.history.drift import cosine
from hookscope.commands.history.measure_file import Weights
from hookscope.results.findings import Finding
from hookscope.results.history import HistoryFinding
from hookscope.text import in_words, printable

# A copy that follows a weight, as momentum encoders and target networks do, is nearer to it than this. Unrelated
# weights have a cosine near 0.
_COSINE_OF_COPY = 0.5

_WRITTEN = "such as an average (EMA) or a merged adapter"


def moved_though_frozen(
    before: Weights, now: Weights, drift: Mapping[str, float | None], labels: Sequence[str], learnt: Sequence[str]
) -> Iterator[Finding]:
    """Yield the parameters that are frozen in two files and differ between them by more than rounding.

    Files without a trainable parameter are averaged copies, or saved for use: nothing is said of those. What shares its
    memory with a trainable parameter, or follows one as a copy, moves with it. `learnt` has a tied parameter once.
    """
    flags, others = now.requires_grad, before.requires_grad
    if not (any(flags.values()) and any(others.values())):
        return
    dense = {name: tensor for name, tensor in now.tensors.items() if tensor.layout is torch.strided}
    trained = {name: dense[name] for name, flag in flags.items() if flag and name in dense}
    addresses = {tensor.data_ptr() for tensor in trained.values()}
    moved = {
        name: dense[name]
        for name in learnt
        if flags.get(name) is others.get(name) is False
        and name in dense
        and dense[name].dtype == before.tensors[name].dtype
        and (drift.get(name) or 0) > _rounding(dense[name])
        and dense[name].data_ptr() not in addresses
    }
    copies = set(_copies(moved, trained))
    for name in moved:
        if not any(name.startswith(prefix) and origin + name[len(prefix) :] in trained for prefix, origin in copies):
            where = f"is frozen in {labels[0]} and {labels[1]}, yet moved between them"
            yield Finding(FROZEN, "warn", name, f"'{printable(name, 80)}' {where}: {_cause(name, now.moves_by)}.")


def frozen_verdicts(by_file: Mapping[int, Sequence[Finding]]) -> Iterator[HistoryFinding]:
    """Yield since when frozen parameters move, of files in order; those that began together make one verdict.

    Momentum fades, so some of them rest sooner than others.
    """
    order = [*by_file]
    begun: dict[int, list[Finding]] = {}
    seen: set[str] = set()
    for at, findings in by_file.items():
        if new := [finding for finding in findings if finding.where not in seen]:
            begun[at] = new
            seen |= {finding.where for finding in new}
    for first, new in begun.items():
        where, *others = places = [finding.where for finding in new]
        later = order[order.index(first) :]
        files = tuple(at for at in later if any(finding.where in places for finding in by_file[at]))
        before, lasts = order[order.index(first) - 1], [*files] == later
        message, rest = new[0].message, tuple(others)
        yield HistoryFinding(FROZEN, "warn", where, message, rest, first=first, before=before, files=files, lasts=lasts)


def _rounding(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0


def _copies(moved: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield what the names of copies begin with, and those of the trainable weights that they follow."""
    for name, tensor in moved.items():
        for origin, other in trained.items():
            ending = _common_ending(name, origin)
            alike = ending and tensor.shape == other.shape and sum(size > 1 for size in tensor.shape) >= 2
            if alike and cosine(tensor, other) > _COSINE_OF_COPY:
                yield name.removesuffix(ending), origin.removesuffix(ending)


def _common_ending(first: str, second: str) -> str:
    """Return the last parts that two dotted names have in common; "" for none, or all of the shorter name."""
    parts, others = first.split("."), second.split(".")
    same = 0
    while same < min(len(parts), len(others)) and parts[-1 - same] == others[-1 - same]:
        same += 1
    return ".".join(parts[len(parts) - same :])


def _cause(name: str, moves_by: Mapping[str, Sequence[str]] | None) -> str:
    if moves_by is None:
        optimiser = "an optimizer with momentum or weight decay still moves it"
        return f"either its .grad is 0, not None, so that {optimiser}, or something else wrote to it, {_WRITTEN}"
    if name not in moves_by:
        return f"the optimizer in the file does not have it, so something else wrote to it, {_WRITTEN}"
    if by := moves_by[name]:
        remedy = "set .grad to None, or take it out of the optimizer"
        return f"its .grad is probably 0, not None, so the optimizer still moves it, by {in_words(by)}; {remedy}"
    stale = "either its .grad still holds the gradient of an earlier step, with which the optimizer still moves it"
    return f"{stale}, or something else wrote to it, {_WRITTEN}"
