"""What `attention` does, for the command line and for Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookscope import options
from hookscope.commands.opening import open_inputs
from hookscope.hooks.interrupts import interrupts_between_blocks

if TYPE_CHECKING:
    from hookscope.commands.opening import Model
    from hookscope.inspection.given_inputs import Images
    from hookscope.inspection.session import OnError, OnProgress
    from hookscope.results.attention import Attention


@interrupts_between_blocks()
def attention(
    model: Model,
    images: Images = (),
    *,
    option: options.Attention,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
) -> Attention:
    """Show what a transformer's attention looks at: numbers of every block and head, and maps on the photograph.

        >>> import hookscope
        >>> looks = hookscope.attention("vit_b_16", "sample_images/cat.jpg", weights="none")
        >>> looks.census
        '12 of 12 blocks seen'
        >>> looks["class token"].values.shape
        (14, 14)

    A module keeps its state and its device.

    Returns:
        The attention: `looks.census` counts the blocks that were seen, `looks["blocks.11.attn"]` is a map, `looks.rows`
        are the numbers by head, and `looks.save("runs/a")` writes the command's run directory.

    Raises:
        HookscopeError: As for `activations`; `NothingMatchedError` if no attention was seen, `UsageError` if rollout
            is undefined for the network, or no block has the query.
    """
    from hookscope.commands.attention.run_attention import run_attention

    return run_attention(open_inputs(model, images, option), option, on_progress, on_error)
