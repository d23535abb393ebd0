"""What `activations` does, for the command line and for Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookscope import options
from hookscope.commands.opening import open_inputs
from hookscope.hooks.interrupts import interrupts_between_blocks

if TYPE_CHECKING:
    from hookscope.commands.opening import Model
    from hookscope.inspection.given_inputs import Images
    from hookscope.inspection.session import OnError, OnProgress
    from hookscope.results.activations import Activations


@interrupts_between_blocks()
def activations(
    model: Model,
    images: Images = (),
    *,
    option: options.Activations,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
) -> Activations:
    """Run a model over inputs once, in eval mode, and measure its layers' outputs.

        >>> import hookscope
        >>> run = hookscope.activations("demo", "sample_images/cat.jpg", layer="conv")
        >>> run["_conv_stem"].shape
        (1, 32, 112, 112)

    A module keeps its state and its device.

    Args:
        model: A module, the result of `load_model`, or MODEL: "resnet34", "timm:NAME", "net.py:build", a weights file.
        images: Files, folders and globs, PIL pictures, or one tensor (N, ...) with the inputs on axis 0; a tuple of
            tensors for several arguments by position, a mapping for arguments by name.
        on_progress: Called after each batch with the number of inputs finished and their total.
        on_error: Called with the error of each input that cannot be used; the input is then skipped. Without it, the
            error is raised.

    Returns:
        The run, with its verdicts. Printing it shows the command's table, `run["layer1.0.conv1"]` is a row, and
        `run.save("runs/a")` writes the command's run directory.

    Raises:
        HookscopeError: One of its subclasses: `ModelNotFoundError`, `CheckpointError`, `UntrustedFileError`,
            `ImageError`, `LayerNotFoundError`, `UsageError`, and `ForwardError` if the model raised; it carries the
            rows measured before that.
    """
    from hookscope.inspection.session import run_forward
    from hookscope.rules.judging import judge_activations

    session = open_inputs(model, images, option)
    return run_forward(session, option, judge_activations, on_progress, on_error)
