"""What `watch` does, for the command line and for Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from hookscope import options
from hookscope.errors import UsageError
from hookscope.parameters import arg

if TYPE_CHECKING:
    from hookscope.commands.watch.networks import Networks, Optimizers
    from hookscope.commands.watch.watch import Watch


def watch(
    model: Networks,
    optimizer: Optimizers,
    *,
    option: options.Watch,
    activations: bool = True,
    edits: options.Texts = (),
    on_line: Callable[[str], None] | None = None,
) -> Watch:
    """Watch a training: every step briefly, every `every`-th step in full, and print a line when a verdict changes.

        watch = hookscope.watch(model, optimizer, every=100, out="runs/a")
        for images, labels in loader:
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
        watch.close()

    The weights are, bit for bit, those of the training without it. For every step it records the loss, the gradient
    norm at the optimiser and before clipping, the largest gradients and the learning rates, all read from the optimiser
    without hooks on modules. For watched steps, and for the step after a jump of loss or norm, it also records every
    parameter with its update, and the activations. Once the training runs, neither an error in hookscope nor a full
    disk ends it: a line reports either. On an accelerator, numbers are not waited for, so a jump is noticed a few steps
    late.

    Args:
        model: The network, or a list or dict of several; names then begin with the class or the key. Activations of
            compiled networks are measured with `eager_forward` only.
        optimizer: The optimiser, or a list of several.
        activations: Measure activations at watched steps, except at the first step.
        edits: Changes to the training, "fc:grad:clip-norm(1)", "param:layer1.*:freeze"; assign to `edits` of the watch
            to change them while it trains. An edit that fails ends the training. Layers of compiled networks cannot be
            edited, but their parameters can.
        on_line: Called with each line instead of printing it on stderr.

    Returns:
        The watch. Call its `step(loss)` after each `optimizer.step()`, and `close()` at the end; or use it as a context
        manager.

    Raises:
        UsageError: If the network cannot be watched (nn.DataParallel, shards), if the optimiser holds none of its
            parameters, or if an edit is malformed or cannot be made.
        LayerNotFoundError: If a pattern or an edit selects nothing.
        OutputError: If `out` holds a different training, is in use, or cannot be written.
    """
    from hookscope.commands.watch.watch import Watch

    if option.resume and option.out is None:
        raise UsageError(f"{arg('resume')} needs {arg('out')}, the folder of the training to continue.")
    return Watch(model, optimizer, replace(option, edit=edits), activations=activations, on_line=on_line)
