"""Read the best classes off a network's output, for expectations: as many as they ask about, named or not."""

from collections.abc import Sequence

from torch import Tensor

from hookscope.checks.examination.outputs import Returned
from hookscope.inspection.rows import top_classes
from hookscope.losses import Output, output_at
from hookscope.results.activations import Prediction


def best_classes(
    returned: Returned, indices: Sequence[int], count: int, categories: Sequence[str], output_key: str | None
) -> list[Prediction] | str:
    """Return the best classes for each input of a batch, with their softmax probabilities.

    Unlike `rows.predictions` it needs no names of classes: where they are unknown, or too few, there are indices
    alone.

    Args:
        returned: The tensors of the network's result, by path.
        indices: Of the inputs.
        count: How many classes to return.
        categories: Class names by index, if known.
        output_key: Which of several outputs holds the class scores; None for the only one of shape (N, classes).

    Returns:
        The classes, or why there are none, in a sentence.

    Raises:
        UsageError: If there is no such output.
    """
    floating = [Output(path, tensor) for path, tensor in returned.items() if tensor.is_floating_point()]
    if output_key is None:
        rows = [each.tensor for each in floating if _is_scores(each.tensor, len(indices))]
        if len(rows) != 1:
            many = "several outputs" if rows else "no output"
            return f"The network returned {many} of one row of class scores per input: name the one with output_key."
        scores = rows[0]
    else:
        scores = output_at(floating, output_key).tensor
        if not _is_scores(scores, len(indices)):
            return f"The output '{output_key}' has shape {tuple(scores.shape)}: no row of class scores per input."
    names = categories if len(categories) == scores.shape[1] else ()
    return top_classes(scores, names, indices, count)


def _is_scores(tensor: Tensor, count: int) -> bool:
    return tensor.dim() == 2 and tensor.shape[0] == count and tensor.shape[1] > 0
