"""Compare two runs row by row: what did edits change?"""

from collections.abc import Collection, Iterator, Sequence

from hookscope.results.activations import Activations
from hookscope.results.comparison import Change, Comparison
from hookscope.results.gradients import Gradients
from hookscope.results.repeats import Key
from hookscope.results.statistics import TensorStatistics


def compare(
    before: Activations | Gradients,
    after: Activations | Gradients,
    edits: Sequence[str],
    left_out: Collection[Key] = (),
) -> Comparison:
    """Compare a run without edits to the same run with them, but for the outputs left out.

    Rows whose statistics differ are in the order of `after`; those that only `before` has come last.
    """
    old, new = dict(_statistics(before, left_out)), dict(_statistics(after, left_out))
    keys = [*new, *(key for key in old if key not in new)]
    changes = tuple(Change(key[1], key[0], old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key))
    return Comparison(tuple(edits), _losses(before, after), (before.predictions, after.predictions), changes, len(keys))


def _losses(before: Activations | Gradients, after: Activations | Gradients) -> tuple[float, float] | None:
    if not isinstance(before, Gradients) or not isinstance(after, Gradients):
        return None
    return None if before.loss is None or after.loss is None else (before.loss.value, after.loss.value)


def _statistics(
    run: Activations | Gradients, left_out: Collection[Key]
) -> Iterator[tuple[tuple[str, str], TensorStatistics]]:
    """Return ((what, label), statistics) of each row."""
    calls = {key[:2] for key in left_out}
    for row in run.rows:
        if (row.layer, row.call, row.slot) not in left_out:
            yield ("activation", row.label), row.activation
    if isinstance(run, Gradients):
        for gradient in run.gradients:
            key = (gradient.layer, gradient.call, gradient.slot)
            if key[:2] not in calls if gradient.role == "input" else key not in left_out:
                yield (f"grad_{gradient.role}", gradient.label), gradient.gradient
        for parameter in run.parameters:
            yield ("gradient", parameter.name), parameter.gradient
