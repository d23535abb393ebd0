"""The tensors that a network returned, and the class scores among them."""

from collections.abc import Mapping

from torch import Tensor

from hookscope.hooks.pytree import tensors_in
from hookscope.inspection.losses.choosing import output_at
from hookscope.inspection.losses.targets import Output
from hookscope.parameters import arg
from hookscope.statistics.storage import is_dense, without_float8

Returned = Mapping[str, Tensor]
"""The tensors that one forward pass returned, by path: "", "['logits']", "[0]['boxes']"."""


def returned_tensors(output: object) -> Returned:
    """Return copies of the tensors that a network returned."""
    return {path: tensor.detach().clone() for path, tensor in tensors_in(output)}


def class_scores(
    returned: Returned, count: int, output_key: str | None = None, *, can_choose: bool = True
) -> Tensor | str:
    """Return the rows of class scores for `count` inputs, (N, K), or why there are none, in a sentence.

    Without an `output_key`, the only output of that shape counts; UsageError if there is no output of that key.
    `can_choose`: the command has the option for it.
    """
    floating = [Output(path, without_float8(tensor)) for path, tensor in returned.items() if tensor.is_floating_point()]
    if output_key is None:
        rows = [output.tensor for output in floating if _is_scores(output.tensor, count)]
        if not rows:
            return "The network returned no row of class scores per input."
        remedy = f": name one with {arg('output_key')}." if can_choose else ", not one."
        return rows[0] if len(rows) == 1 else f"The network returned several rows of class scores per input{remedy}"
    scores = output_at(floating, output_key).tensor
    if not _is_scores(scores, count):
        shape = (scores.size(0), -1) if scores.is_nested else tuple(scores.shape)
        return f"The output '{output_key}' has shape {shape}: no row of class scores per input."
    return scores


def _is_scores(tensor: Tensor, count: int) -> bool:
    return is_dense(tensor) and tensor.dim() == 2 and tensor.shape[0] == count
