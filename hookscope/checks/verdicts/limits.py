"""The rules by name, and where each begins to object."""

from collections.abc import Mapping
from dataclasses import dataclass

RULES: Mapping[str, str] = {
    "non-finite-loss": "fail: the loss is NaN or Inf.",
    "non-finite-activation": "fail: the first output in forward order that holds NaN or Inf; warn: it is the only one,"
    " holds Inf only, and the loss is finite (a mask).",
    "non-finite-gradient": "fail: the layer whose backward is the first to make NaN or Inf of a finite gradient; layers"
    " that pass it on are not named.",
    "zero-gradient": "fail: every gradient is exactly 0; warn: gradients so small that they are rounding, as of a sum"
    " after softmax or LayerNorm. Limit: our choice, ten roundings of float32.",
    "dead-gradient": "fail: layers on the path whose gradient is exactly 0 everywhere, and where it is lost; warn: a"
    " weight that starts at zero blocks it until its first update, stochastic depth does by chance, or the loss gives"
    " an output none, but others some. A module that gets a gradient at another call or output is not dead, nor one"
    " beside which a parallel one gets one, as at a detector's levels without an object.",
    "vanishing-gradient": "fail: ‖g‖/‖w‖ of the first tenth of the weights over that of the last tenth. Limit: our"
    " choice; healthy networks of torchvision measure 0.1 to 1000, thirty sigmoid layers 1e-24.",
    "exploding-gradient": "fail: ‖grad_output‖ of the first tenth of the layers over that of the last tenth; warn: the"
    " same in eval mode with untrained BatchNorm. Limit: our choice; networks of torchvision in train mode stay below"
    " 200.",
    "unused-parameter": "warn: trainable parameters that never get a gradient.",
    "saturated-activation": "warn: sigmoids, tanhs and their like with most outputs where the slope is below 1/16 of"
    " its greatest. After Glorot and Bengio 2010; limit and slope are our choice.",
    "dead-channels": "warn: ReLUs with most channels exactly 0 over at least 32 values each. Limit: our choice.",
    "gradient-imbalance": "warn: greatest over smallest ‖g‖/‖w‖ of the weights; biases, scales and zero weights do not"
    " count, nor do weights before a detector's level without an object. Limit: our choice; networks of torchvision in"
    " train mode stay below 500000, ConvNeXt apart.",
}
"""Rule identifiers, the gravest first, each with its levels, its meaning and the source of its limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Where judging begins. Every limit is our choice; `RULES` says what healthy networks show.

    Attributes:
        vanishing: Smallest ‖g‖/‖w‖ of the first weights, in units of the last weights'.
        exploding: Greatest ‖grad_output‖ of the first layers, in units of the last layers'.
        imbalance: Greatest ‖g‖/‖w‖ of any weight, in units of the smallest.
        saturated_fraction: Share of an activation's outputs that may be saturated, 0-1.
        dead_channel_fraction: Share of a ReLU's channels that may be zero over the whole input, 0-1.
        rounding: Share of the loss, or of ‖g‖·‖x‖ one layer on, below which ‖g‖·‖x‖ of a tensor is rounding error.
    """

    vanishing: float = 1e-4
    exploding: float = 1e4
    imbalance: float = 1e6
    saturated_fraction: float = 0.8
    dead_channel_fraction: float = 0.8
    rounding: float = 1e-6
