"""Compare what a network returned, in two passes or for two inputs, and read class scores off it."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookscope.hooks.pytree import tensors_given, tensors_in
from hookscope.inputs import Batch
from hookscope.inputs.batches import joined, part_of, with_changed
from hookscope.inspection.losses import Output, output_at
from hookscope.inspection.rows import top_classes
from hookscope.results.comparison import Prediction
from hookscope.statistics.storage import stored_values

Returned = Mapping[str, Tensor]
"""The tensors of one forward pass's result, by the path to each: "", "['logits']", "[0]['boxes']"."""


def returned_tensors(output: object) -> Returned:
    """Return copies of the tensors that a network returned."""
    return {path: tensor.detach().clone() for path, tensor in tensors_in(output)}


def difference(first: Tensor, second: Tensor) -> float | None:
    """Return the greatest absolute difference over the greatest finite magnitude in either.

    It is 0 for equal tensors, NaN in the same places included; NaN where NaN meets a number; Inf where shapes differ,
    or Inf meets anything else; None for tensors that cannot be read.
    """
    # The ragged axis of a nested tensor has a symbol for its size, another one in each pass.
    ragged = first.is_nested and second.is_nested
    if first.dtype != second.dtype or (not ragged and first.shape != second.shape):
        return math.inf
    try:
        left, right = double_numbers(first), double_numbers(second)
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    if left.shape != right.shape:  # ragged and sparse tensors of one shape may hold more or less
        return math.inf
    return _between(left, right) if left.numel() else 0.0


def _between(left: Tensor, right: Tensor) -> float:
    differing = (left != right) & ~(left.isnan() & right.isnan())
    if not differing.any():
        return 0.0
    if (left.isnan() | right.isnan())[differing].any():
        return math.nan
    if (left.isinf() | right.isinf())[differing].any():
        return math.inf
    magnitude = max(float(tensor[tensor.isfinite()].abs().max()) for tensor in (left, right))
    return float((left[differing] - right[differing]).abs().max()) / magnitude


def double_numbers(tensor: Tensor) -> Tensor:
    """Return the values that a tensor stores, in double precision, on the CPU."""
    values, _, _ = stored_values(tensor.detach().cpu(), () if tensor.is_nested else tuple(tensor.shape))
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def greatest(first: float | None, second: float | None) -> float | None:
    """Return the greater of two differences; NaN is greater than any, None is none."""
    gaps = [gap for gap in (first, second) if gap is not None]
    return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps, default=None)


def by_input(returned: Returned, batch: Batch) -> list[dict[str, Tensor]]:
    """Return for each input of a batch, by path, what of the result is its own.

    A detector returns a list with a result for each input; other networks slices along axis 0, if it is as long.
    """
    count = len(batch.indices)
    if is_listed(returned, batch):
        return [
            {path.removeprefix(f"[{index}]"): tensor for path, tensor in returned.items() if _item(path) == index}
            for index in range(count)
        ]
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for path, tensor in returned.items():
        if not tensor.is_nested and tensor.layout == torch.strided and tensor.dim() and tensor.shape[0] == count:
            for index, part in enumerate(parts):
                part[path] = tensor[index : index + 1]
    return parts


def varying(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the paths that two inputs have in common, without empty tensors, which cannot vary."""
    return [path for path, tensor in first.items() if path in other and tensor.numel() + other[path].numel()]


def is_listed(returned: Returned, batch: Batch) -> bool:
    """Tell whether the network took a list of inputs and returned a list of results, one for each."""
    count = len(batch.indices)
    inputs = batch.args[0] if batch.args else None
    items = {_item(path) for path in returned}
    return isinstance(inputs, list) and len(inputs) == count and None not in items and max(items, default=0) < count  # type: ignore[type-var, operator]


def _item(path: str) -> int | None:
    match = re.match(r"\[(\d+)\]", path)
    return int(match[1]) if match else None


def with_a_mirrored_copy(batch: Batch) -> Batch | None:
    """Return the first input of a batch with a mirrored negative of it; None if that equals the input.

    A mirrored input alone looks the same pixel by pixel, a scaled one the same once it is normalised. Whole numbers are
    only mirrored: they may be indices.
    """
    alone = part_of(batch, 0)
    joined_args = tuple(_with_its_mirror(argument) for argument in alone.args)
    by_name = {name: _doubled_by_name(alone, name, mirrors=not alone.args) for name in alone.kwargs}
    index, record = alone.indices[0], alone.records[0]
    pair = replace(alone, args=joined_args, indices=(index, index + 1), records=(record, record), kwargs=by_name)
    return None if same_input(part_of(pair, 0), part_of(pair, 1)) else pair


def _doubled_by_name(alone: Batch, name: str, *, mirrors: bool) -> Any:
    value = alone.kwargs[name]
    if name in alone.listed:
        return _with_its_mirror(value) if mirrors else [*value, *value]

    def doubled(path: str, tensor: Tensor) -> Tensor:
        if not tensor.dim() or name + path in alone.shared:
            return tensor
        return joined([tensor, _mirrored(tensor) if mirrors else tensor])

    return with_changed(value, doubled)


def _with_its_mirror(value: Any) -> Any:
    """Return an input with its mirrored negative: a list of one with a list of the other, a tensor in one with it."""
    if isinstance(value, list):
        return [*value, *with_changed(value, lambda _, tensor: _mirrored(tensor))]
    return with_changed(value, lambda _, tensor: joined([tensor, _mirrored(tensor)]) if tensor.dim() else tensor)


def _mirrored(tensor: Tensor) -> Tensor:
    if tensor.is_nested:
        return torch.nested.as_nested_tensor([*map(_mirrored, tensor.unbind())], layout=tensor.layout)
    flipped = tensor.flip(-1) if tensor.dim() else tensor
    return -flipped if tensor.is_floating_point() or tensor.is_complex() else flipped


def same_input(first: Batch, second: Batch) -> bool:
    """Tell whether two batches of one input each hold the same values."""
    inputs = [tensors_given(batch.args, batch.kwargs) for batch in (first, second)]
    pairs = zip(*inputs, strict=True)
    return all(_same_tensor(left, right) for (_, left), (_, right) in pairs)


def _same_tensor(left: Tensor, right: Tensor) -> bool:
    if left.is_nested:
        parts = [*left.unbind()], [*right.unbind()]
        return len(parts[0]) == len(parts[1]) and all(map(_same_tensor, *parts))
    return left.shape == right.shape and torch.equal(left, right)


def best_classes(
    returned: Returned,
    indices: Sequence[int],
    count: int,
    categories: Sequence[str],
    output_key: str | None,
    *,
    multi_label: bool = False,
) -> list[Prediction] | str:
    """Return the `count` best classes for each input, with probabilities, or why there are none, in a sentence.

    Without names of classes there are indices alone. Which output counts is as in `class_scores`.
    """
    scores = class_scores(returned, len(indices), output_key)
    if isinstance(scores, str):
        return scores
    names = categories if len(categories) == scores.shape[1] else ()
    return top_classes(scores, names, indices, count, multi_label=multi_label)


def class_scores(returned: Returned, count: int, output_key: str | None) -> Tensor | str:
    """Return the rows of class scores for `count` inputs, (N, K), or why there are none, in a sentence.

    Without an `output_key`, the only output of that shape counts; UsageError if there is no output of that key.
    """
    floating = [Output(path, tensor) for path, tensor in returned.items() if tensor.is_floating_point()]
    if output_key is None:
        rows = [output.tensor for output in floating if _is_scores(output.tensor, count)]
        if len(rows) != 1:
            many = "several outputs" if rows else "no output"
            return f"The network returned {many} of one row of class scores per input: name the one with output_key."
        return rows[0]
    scores = output_at(floating, output_key).tensor
    if not _is_scores(scores, count):
        return f"The output '{output_key}' has shape {tuple(scores.shape)}: no row of class scores per input."
    return scores


def _is_scores(tensor: Tensor, count: int) -> bool:
    return tensor.dim() == 2 and tensor.shape[0] == count and tensor.shape[1] > 0
