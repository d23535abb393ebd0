"""Run forward and backward for the rules about gradients."""

from pathlib import Path

from hookscope.checks.measuring.preparing import Prepared
from hookscope.checks.settings import CheckSettings
from hookscope.errors import UsageError
from hookscope.inputs import TENSOR_SUFFIXES, read_tensor
from hookscope.inspection.backward import PassError, inspect_gradients
from hookscope.inspection.detection import default_targets_text, with_default_targets
from hookscope.losses import choose_loss
from hookscope.losses.choosing import Loss
from hookscope.models import load_function
from hookscope.results.gradients import Gradients

# Losses that fit every output and need no target: where they do not, the network has nothing to differentiate.
_FIT_ALL = ("projection", "sum")


def differentiate(prepared: Prepared, settings: CheckSettings) -> tuple[Gradients | None, str]:
    """Run the network forward and backward over all inputs, with the loss that the settings name.

    Detectors in train mode are given targets, as `detection.with_default_targets` makes them.

    Returns:
        What was seen, and in a sentence why it is not everything; "" if it is.

    Raises:
        HookscopeError: If there is no such loss, or its target does not fit the output.
    """
    module = prepared.loaded.module
    needs_targets = settings.mode == "train" and default_targets_text(module) != ""
    batches = prepared.batches()
    if needs_targets:
        batches = (with_default_targets(module, batch) for batch in batches)
    loss = _loss(prepared, settings)
    try:
        inspection = inspect_gradients(
            prepared.loaded, batches, loss, mode=settings.mode, seed=settings.seed, output_key=settings.output_key
        )
    except PassError as error:
        return error.inspection, str(error)
    except UsageError as error:
        if settings.loss in _FIT_ALL and settings.output_key is None:
            return None, str(error)
        raise
    return inspection, ""


def _loss(prepared: Prepared, settings: CheckSettings) -> Loss:
    """Return the loss that the settings name: by name, or as FILE.py:FUNCTION; a target may be a tensor file."""
    source, _, name = settings.loss.rpartition(":")
    target = settings.target
    file = Path(target) if target is not None and target.lower().endswith(tuple(TENSOR_SUFFIXES)) else None
    return choose_loss(
        load_function(Path(source), name) if source.endswith(".py") else settings.loss,
        target=target if file is None else read_tensor(file),
        target_name="" if file is None else file.name,
        seed=settings.seed,
        categories=prepared.loaded.info.categories,
        output_key=settings.output_key,
        input_count=prepared.input_count,
    )
