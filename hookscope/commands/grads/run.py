"""What `grads` does, for the command line and for Python."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hookscope import options
from hookscope.commands.opening import are_given, open_inputs
from hookscope.errors import UsageError
from hookscope.hooks.interrupts import interrupts_between_blocks
from hookscope.parameters import arg

if TYPE_CHECKING:
    from hookscope.commands.opening import Model
    from hookscope.inspection.given_inputs import Images
    from hookscope.inspection.session import OnError, OnProgress
    from hookscope.results.gradients import Gradients


@interrupts_between_blocks()
def grads(
    model: Model,
    images: Images = (),
    *,
    option: options.Grads,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
) -> Gradients:
    """Run a model forward and backward over inputs, measure gradients, and judge them.

        >>> import hookscope
        >>> result = hookscope.grads("demo", "sample_images/cat.jpg", loss="ce", target="tabby", layer="_fc")
        >>> result.verdicts
        ()

    Args:
        model: As for `activations`.
        images: As for `activations`; default: seeded noise.

    Returns:
        The gradients, with their verdicts. Printing them shows the command's tables; `result["layer1.0.conv1"]` is the
        gradient of an output and `result["layer1.0.conv1.weight"]` that of a parameter.

    Raises:
        HookscopeError: As for `activations`; `PassError` if the model raised.
    """
    from hookscope.inspection.session import choose_session_loss, run_backward
    from hookscope.rules import limits_of_grads
    from hookscope.rules.judging import judge_gradients

    limits = limits_of_grads(option.limit)
    if option.per_image and not (are_given(images) or option.input):
        raise UsageError(f"{arg('per_image')} needs inputs: give IMAGE, or {arg('input')}.")
    session = open_inputs(model, images, option, noise=1)
    loss = choose_session_loss(session, option.loss, option.target, option.output_key)
    judge = partial(judge_gradients, limits=limits)
    return run_backward(session, loss, option, judge, {"limits": limits}, on_progress, on_error)
