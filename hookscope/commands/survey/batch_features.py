"""Features of layers over any batches, such as those of a DataLoader, streamed to a file."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from hookscope.commands.survey.feature_files import FeatureTarget
from hookscope.commands.survey.features import FeatureSpool
from hookscope.errors import UsageError
from hookscope.inputs import Batch
from hookscope.inputs.batches import to_device
from hookscope.inspection.device import placement
from hookscope.inspection.forward import ForwardOptions, inspect
from hookscope.inspection.network import as_batches
from hookscope.models.construction import LoadedModel
from hookscope.results.inputs import InputRecord
from hookscope.results.survey import FeatureFiles
from hookscope.text import safe_text


def batch_features(
    loaded: LoadedModel, batches: Iterable[Any], target: FeatureTarget, layers: Sequence[str], seed: int
) -> FeatureFiles:
    """Run the network over batches and write what layers put out, in their order.

    Args:
        loaded: The network.
        batches: Tensors (N, ...), or tuples with one first, as a DataLoader yields them; a second entry of N whole
            numbers or texts holds labels.
        target: One file of safetensors.
        layers: Patterns as for `--layer`.
        seed: Of random numbers.

    Raises:
        UsageError: If a batch is something else, or an output has not one row for each input.
        OutputError: If a file cannot be written.
    """
    if not target.is_one_file or target.is_parquet:
        raise UsageError(
            f"Features of batches go into one file: '{safe_text(str(target.path))}' must end in .safetensors."
        )
    target.check()
    spool = FeatureSpool(target.pool, target.dtype)
    labels: list[Any] = []
    place = placement(loaded.module)
    made = (to_device(batch, *place) for batch in _batches(batches, labels))
    run = inspect(
        loaded,
        made,
        ForwardOptions(layers=layers, seed=seed),
        on_tensor=spool.see,
        on_output=lambda batch, _output: spool.keep(len(batch.indices)),
    )
    with target.reported(""):
        target.path.parent.mkdir(parents=True, exist_ok=True)
        shapes = spool.write(target.path, [row.label for row in run.rows])
        return target.write_sidecar(run.model.name, shapes, [target.path], _inputs(labels))


def _batches(batches: Iterable[Any], labels: list[Any]) -> Iterator[Batch]:
    """Yield batches numbered from 0, and note their labels; None for an input without one."""
    begin = 0
    for item in batches:
        values, *others = item if isinstance(item, list | tuple) else (item,)
        if not isinstance(values, Tensor) or not values.dim():
            kind = type(values).__name__
            raise UsageError(f"A batch is {kind}: give tensors (N, ...), or tuples of such a tensor and labels.")
        (batch,) = as_batches(values)
        count = len(batch.indices)
        targets = others[0] if others else None
        listed = targets.tolist() if isinstance(targets, Tensor) and targets.dim() == 1 else targets
        labels += [*listed] if isinstance(listed, list | tuple) and len(listed) == count else [None] * count
        records = tuple(
            InputRecord(f"input {begin + at}", None, None, tuple(values.shape[1:]), ()) for at in range(count)
        )
        yield Batch((values,), tuple(range(begin, begin + count)), records)
        begin += count


def _inputs(labels: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for at, label in enumerate(labels):
        yield {"input": f"input {at}", "sha256": None, "file": 0, **({} if label is None else {"class": str(label)})}
