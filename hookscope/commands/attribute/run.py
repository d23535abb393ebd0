"""What `attribute` does, for the command line and for Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookscope import options
from hookscope.commands.opening import open_inputs
from hookscope.hooks.interrupts import interrupts_between_blocks

if TYPE_CHECKING:
    from hookscope.commands.opening import Model
    from hookscope.inspection.given_inputs import Images
    from hookscope.inspection.session import OnError, OnProgress
    from hookscope.results.attributions import Attributions


@interrupts_between_blocks()
def attribute(
    model: Model,
    images: Images = (),
    *,
    option: options.Attribute,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
) -> Attributions:
    """Map where a model looks: the places of a picture, signal or volume that the score of a class comes from.

        >>> import hookscope
        >>> looks = hookscope.attribute("demo", "sample_images/cat.jpg", target="Egyptian cat", sanity="none")
        >>> looks["Egyptian cat"].values.shape
        (7, 7)

    A module keeps its state and its device.

    Returns:
        The maps: `looks["Egyptian cat"]` is the map of a target, and `looks.save("runs/a")` writes the command's run
        directory.

    Raises:
        HookscopeError: As for `activations`; `UsageError` also if the method cannot explain the layer or the network.
    """
    from hookscope.commands.attribute.run_attribution import run_attribution

    return run_attribution(open_inputs(model, images, option), option, on_progress, on_error)
