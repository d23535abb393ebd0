"""Follow attention through all blocks, and refuse where that means nothing.

Source:
    Abnar and Zuidema, Quantifying Attention Flow in Transformers, ACL 2020, section 3: half of each row goes to the
    token itself, for the residual connection, and rows are averaged over heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hookscope.commands.attention.places import Places
from hookscope.errors import UsageError
from hookscope.parameters import arg


@dataclass(slots=True)
class Rollout:
    """The product of the blocks so far, of one batch.

    Attributes:
        weights: (N, queries, tokens of the network's input).
        places: Where tokens lie.
    """

    weights: Tensor | None = None
    places: Places | None = None

    def add(self, weights: Tensor, places: Places | None) -> None:
        """Go through one more block, whose weights (N, T, T) are averaged over heads."""
        count = weights.size(-1)
        step = (weights + torch.eye(count)) / 2
        step = step / step.sum(-1, keepdim=True)
        self.weights = step if self.weights is None else step @ self.weights
        self.places = places


def refuse_rollout(
    label: str, queries: int, keys: int, windows: int, tokens: int | None, *, are_others: bool = False
) -> None:
    """Refuse a block that attention cannot be followed through.

    `tokens` counts the keys of the block before it, None for the first. `are_others` tells that queries and keys are
    different tokens, or keys are not the tokens of the block before it, although there are as many.

    Raises:
        UsageError: If it attends within windows, pools, or looks at other tokens than the block before it.
    """
    reason = ""
    if windows > 1:
        reason = "attends within windows"
    elif queries != keys:
        pools = "pools" if queries == 1 else "has queries and keys of different tokens"
        count = "1 query" if queries == 1 else f"{queries} queries"
        reason = f"{pools} ({count}, {keys} keys)"
    elif tokens is not None and keys != tokens:
        reason = f"has {keys} tokens, the blocks before it have {tokens}"
    elif are_others:
        reason = "looks at other tokens than the blocks before it"
    if reason:
        raise UsageError(
            f"{arg('rollout')} is undefined here: {label} {reason}. Leave it out, and look at single blocks."
        )
