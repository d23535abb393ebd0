"""`inspect` and `inspect_gradients` with options as keywords, losses by name, and inputs that may be left out."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from hookscope.errors import UnfitInputError
from hookscope.inputs.batches import Batch
from hookscope.inspection import backward, forward
from hookscope.inspection.differentiation import GradientOptions, LossFunction
from hookscope.inspection.forward import ForwardOptions
from hookscope.inspection.losses.choosing import choose_loss
from hookscope.inspection.network import BatchQueue, as_batches
from hookscope.models.construction import LoadedModel
from hookscope.results.activations import Activations
from hookscope.results.gradients import Gradients

Model = nn.Module | LoadedModel
Inputs = Tensor | Batch | Iterable[Batch]
OnError = Callable[[UnfitInputError], None]

_CALLED = ("on_tensor", "on_call", "on_output", "on_batch")


def inspect(
    model: Model, inputs: Inputs, layers: Sequence[str] = (), *, on_error: OnError | None = None, **further: Any
) -> Activations:
    called, options = _apart(further)
    return forward.inspect(model, _queue(inputs, on_error), ForwardOptions(layers=layers, **options), **called)


def inspect_gradients(
    model: Model,
    inputs: Inputs,
    loss: str | LossFunction = "projection",
    layers: Sequence[str] = (),
    *,
    target: str | int | Tensor | None = None,
    on_error: OnError | None = None,
    **further: Any,
) -> Gradients:
    called, written = _apart(further)
    options = GradientOptions(layers=layers, **written)
    if isinstance(loss, str):
        categories = model.info.categories if isinstance(model, LoadedModel) else ()
        loss = choose_loss(loss, target=target, seed=options.seed, categories=categories, output_key=options.output_key)
    return backward.inspect_gradients(model, _queue(inputs, on_error), loss, options, **called)


def _apart(further: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is called during the run, and the options."""
    called = {name: further.pop(name) for name in _CALLED if name in further}
    return called, further


def _queue(inputs: Inputs, on_error: OnError | None) -> BatchQueue:
    return BatchQueue(iter(as_batches(inputs)), on_error)
