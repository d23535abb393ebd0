"""Differentiate each input alone: does every picture pull on the network alike?"""

import math
from collections.abc import Callable, Iterable

from hookscope.inputs import Batch
from hookscope.inspection.backward import PassError
from hookscope.results.gradients import Gradients, InputGradients
from hookscope.results.inputs import InputRecord


def gradients_by_input(
    differentiate: Callable[[Iterable[Batch]], Gradients],
    batches: Iterable[Batch],
    on_error: Callable[[InputRecord, PassError], None] | None = None,
) -> tuple[InputGradients, ...]:
    """Run each batch by itself and keep the norms of its gradients.

    Args:
        differentiate: `inspect_gradients` with everything but the inputs given.
        batches: Of one input each.
        on_error: Called for an input that the model raised on, which is then left out; without it the error is raised.

    Returns:
        Norms, one set an input, in order.
    """
    results = []
    for batch in batches:
        try:
            inspection = differentiate([batch])
        except PassError as error:
            if on_error is None:
                raise
            on_error(batch.records[0], error)
            continue
        norms = [row.gradient.l2 for row in inspection.parameters if row.gradient.l2 is not None]
        results.append(
            InputGradients(
                name=inspection.inputs[0].name,
                loss=math.nan if inspection.loss is None else inspection.loss.value,
                parameters_l2=math.hypot(*norms) if norms else None,
                rows_l2={row.label: row.gradient.l2 for row in inspection.gradients if row.role == "output"},
            )
        )
    return tuple(results)
