"""Run the first batch again, and its inputs alone, to see whether the network gives the same."""

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from hookscope.checks.measuring.outputs import (
    FirstPass,
    Returned,
    by_input,
    difference,
    double_numbers,
    greatest,
    is_listed,
    returned_tensors,
    varying,
    with_a_mirrored_copy,
)
from hookscope.hooks.forward_hooks import capture
from hookscope.inputs import Batch, copy_of, part_of
from hookscope.inspection.failures import reraise_internal
from hookscope.inspection.network import InspectedNetwork
from hookscope.inspection.state.preservation import preserved
from hookscope.results.check import OutputValues
from hookscope.text import exception_line

# Inputs of the first batch that are run alone. Our choice: one might be the one that a fault leaves alone.
_ALONE = 2

# From this share of the difference between batch and alone on, the difference between two equal passes explains it. Our
# choice.
_EXPLAINED = 0.1


def compare_passes(subject: InspectedNetwork, first: FirstPass, wanted: AbstractSet[str], seed: int) -> None:
    """Make the passes that the wanted rules need beyond the first.

    `repeatability` takes one over the first batch with other random numbers, which shows what draws any in eval mode;
    where that changes the network, in buffers or attributes, another follows. `batch-consistency` takes one over each
    of two inputs of the first batch alone. Of a single input it takes one over that input together with a mirrored
    negative of it, and so does `constant-output` where no input differs from the first.

    Modules are hooked as in the first pass, though nothing is measured: torch takes other kernels where hooks are.
    """
    batch = first.batch
    if batch is not None and first.returned:
        single = len(batch.indices) == 1
        needs_another = {"batch-consistency": single, "constant-output": not first.distinct}
        if "repeatability" in wanted:
            _repeat(subject, batch, first, seed)
        if "batch-consistency" in wanted and not single:
            _alone(subject, batch, first, seed)
        if paired := [rule for rule, needed in needs_another.items() if needed and rule in wanted]:
            _with_another(subject, batch, first, seed, paired)
    _explain(first, wanted)


def output_values(first: FirstPass) -> tuple[OutputValues, ...]:
    """Return a row for each tensor that the network returned for the first batch."""
    rows = []
    batch = first.batch
    listed = batch is not None and is_listed(first.returned, batch)
    for path, tensor in first.returned.items():
        key = path.partition("]")[2] if listed else path
        batched = not listed and path not in first.unbatched and any(path in part for part in first.parts)
        rows.append(
            OutputValues(
                f"(model){path}",
                tuple(tensor.shape) if not tensor.is_nested else (tensor.size(0), -1),
                str(tensor.dtype).removeprefix("torch."),
                batched,
                _max_abs(tensor),
                first.repeat.get(path),
                first.alone.get(path),
                first.spread.get(key) if listed or batched else None,
                0 if batch is None else len(batch.indices),
            )
        )
    return tuple(rows)


def _max_abs(values: Tensor) -> float | None:
    if values.layout != torch.strided or values.is_nested or values.is_meta:
        return None
    numbers = double_numbers(values)
    finite = numbers[numbers.isfinite()]
    return float(finite.abs().max()) if finite.numel() else None


def _run(subject: InspectedNetwork, batch: Batch) -> Returned:
    given = copy_of(batch)
    with torch.no_grad():
        return returned_tensors(subject.network(*given.args, **given.kwargs))


def _pass(subject: InspectedNetwork, batch: Batch, seed: int) -> Returned | str:
    """Run the network over a batch by itself; return what it returned, or what it raised."""
    with preserved(subject.network, seed), capture(subject.network, subject.modules, lambda *_: None):
        try:
            return _run(subject, batch)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model's code may raise anything
            return exception_line(reraise_internal(error))


def _repeat(subject: InspectedNetwork, batch: Batch, first: FirstPass, seed: int) -> None:
    network = subject.network
    with preserved(network, seed + 1) as state, capture(network, subject.modules, lambda *_: None):
        state.mark_hooks()
        passes = [first.returned]
        try:
            passes.append(_run(subject, batch))
            if state.changed():
                passes.append(_run(subject, batch))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model's code may raise anything
            passes.append({})
            line = exception_line(reraise_internal(error))
            first.warnings.append(f"The network raised in a second pass over the first batch: {line}")
    for again in passes[1:]:
        for path, tensor in first.returned.items():
            found = difference(tensor, again[path]) if path in again else math.inf
            first.repeat[path] = greatest(first.repeat.get(path), found)


def _alone(subject: InspectedNetwork, batch: Batch, first: FirstPass, seed: int) -> None:
    """Run inputs of the batch alone, and compare with what belongs to them in the batch."""
    for index in range(min(_ALONE, len(batch.indices))):
        alone = part_of(batch, index)
        returned = _pass(subject, alone, seed)
        if isinstance(returned, str):
            first.unmeasured["batch-consistency"] = f"The network raised on an input alone: {returned}"
            return
        prefix = f"[{index}]" if is_listed(first.returned, batch) else ""
        _compare_parts(first.parts[index], by_input(returned, alone)[0], prefix, first)


def _with_another(subject: InspectedNetwork, batch: Batch, first: FirstPass, seed: int, rules: list[str]) -> None:
    """Run the first input together with a mirrored negative of it, for the rules given."""
    pair = with_a_mirrored_copy(batch)
    reason = "There is only one input, and no second one can be derived from it: give more pictures."
    returned = _pass(subject, pair, seed) if pair is not None else ""
    if pair is None or isinstance(returned, str):
        if returned:
            reason = f"There is only one input, and with a second one in its batch the network raised {returned}"
        first.unmeasured.update(dict.fromkeys(rules, reason))
        return
    parts = by_input(returned, pair)
    if "batch-consistency" in rules:
        prefix = "[0]" if is_listed(first.returned, batch) else ""
        _compare_parts(first.parts[0], parts[0], prefix, first)
    if "constant-output" in rules:
        for path in varying(parts[0], parts[1]):
            first.spread[path] = difference(parts[0][path], parts[1][path])


def _compare_parts(one: Mapping[str, Tensor], other: Mapping[str, Tensor], item: str, first: FirstPass) -> None:
    """Compare what belongs to one input in two passes; `item` is its place in a list of results, "[0]", or ""."""
    chosen_otherwise = bool(item) and any(
        _differs_in_kind(tensor, other[path]) for path, tensor in one.items() if path in other
    )
    if chosen_otherwise:
        first.warnings.append(
            f"Result {item} differs in number or order in a batch and alone, possibly from rounding: only its scores"
            " are first."
        )
    for path, tensor in one.items():
        if path not in other:
            first.unbatched.add(item + path)
            continue
        pair = _common_scores(tensor, other[path]) if chosen_otherwise else (tensor, other[path])
        found = None if pair is None else difference(*pair)
        first.alone[item + path] = greatest(first.alone.get(item + path), found)


def _differs_in_kind(one: Tensor, other: Tensor) -> bool:
    """Tell whether there are more or fewer values, or other whole numbers: detections lost, gained or reordered."""
    return one.shape != other.shape or (not one.is_floating_point() and not torch.equal(one, other))


def _common_scores(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the highest scores of both, as many as both have; None for what is no list of scores."""
    if one.dim() != 1 or other.dim() != 1 or not one.is_floating_point():
        return None
    count = min(len(one), len(other))
    return one.sort(descending=True).values[:count], other.sort(descending=True).values[:count]


def _explain(first: FirstPass, wanted: AbstractSet[str]) -> None:
    """Say why a wanted rule has nothing to go by."""
    measured = {
        "repeatability": first.repeat.values(),
        "batch-consistency": first.alone.values(),
        "constant-output": first.spread.values(),
    }
    for rule, values in measured.items():
        if rule in wanted and all(value is None for value in values):
            whose = "" if rule == "repeatability" else " that belong to one input"
            first.unmeasured.setdefault(rule, f"No output has values{whose}, so there is nothing to compare.")
    again = [value for value in first.repeat.values() if value]
    alone = [value for value in first.alone.values() if value]
    if again and alone and not max(again) < _EXPLAINED * max(alone):
        first.unmeasured["batch-consistency"] = (
            "The output differs between two identical passes, so a difference alone would prove nothing."
        )
