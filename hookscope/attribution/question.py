"""What is asked of a network: for one batch, one number per input."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from hookscope.inputs import Batch


@dataclass(frozen=True, slots=True)
class Question:
    """One number for each input of a batch, to be explained.

    Attributes:
        network: In eval mode.
        batch: N inputs, on the network's device.
        score: Takes what the network returned for the batch and returns the numbers, (N,), still attached to autograd's
            graph. Each depends on its own input alone.
    """

    network: nn.Module
    batch: Batch
    score: Callable[[object], Tensor]
