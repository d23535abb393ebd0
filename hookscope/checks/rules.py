"""The rules of `hookscope check`: what each means, how grave it is, where it begins to object, and why there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hookscope.checks.explanations import EXPLANATIONS
from hookscope.checks.verdicts.limits import Limits

if TYPE_CHECKING:
    from hookscope.results.check import Level  # it loads NumPy, and `--help` names rules

Needs = Literal["file", "network", "stored", "forward", "outputs", "gradients", "expectations", "baseline"]
"""What of an `Examination` a rule looks at."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Where a rule begins to object.

    Attributes:
        default: In the unit that `meaning` states.
        meaning: What is compared with it, for people.
        source: Where the number comes from; "our choice" and why, if it is ours.
    """

    default: float
    meaning: str
    source: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that a checkpoint must not do.

    Attributes:
        identifier: Stable: "dead-channels".
        meaning: What it objects to, in one sentence.
        level: Unless the user says otherwise.
        needs: What it looks at; it is skipped where that cannot be had.
        limits: By name.
        explanation: What causes it, what it does not mean, and what to do: for `--explain`.
    """

    identifier: str
    meaning: str
    level: "Level"
    needs: Needs
    limits: Mapping[str, Limit] = field(default_factory=dict)
    explanation: str = ""


_ACCEPTED = Limits()
_OURS_AS_GRADS = "our choice, the same as for `hookscope grads`"


def _rule(identifier: str, meaning: str, level: "Level", needs: Needs, **limits: Limit) -> tuple[str, Rule]:
    return identifier, Rule(identifier, meaning, level, needs, limits, EXPLANATIONS[identifier])


RULES: Mapping[str, Rule] = dict(
    [
        _rule("integrity", "The file is complete, of a known kind, and safe to read.", "fail", "file"),
        _rule("architecture", "The names and shapes in the file are those of the network.", "fail", "network"),
        _rule("non-finite-parameter", "A parameter or buffer holds NaN or Inf.", "fail", "stored"),
        _rule("zero-parameter", "A weight matrix or kernel is zero everywhere.", "warn", "stored"),
        _rule(
            "constant-parameter",
            "A weight matrix or kernel has one value everywhere, other than zero.",
            "warn",
            "stored",
        ),
        _rule("duplicate-parameter", "Two weights that are not tied hold the same values.", "warn", "stored"),
        _rule(
            "batchnorm-variance",
            "A running variance of BatchNorm is negative or zero.",
            "fail",
            "stored",
            max_zero_fraction=Limit(
                0.2,
                "share of a layer's channels whose mean and variance may be zero, 0-1; none while all means are zero",
                "our choice; up to 0.125 of the trained EfficientNet-Lite0's channels died so, harmlessly",
            ),
        ),
        _rule(
            "dead-filter",
            "Output channels of a weight are zero everywhere, while others are not.",
            "warn",
            "stored",
            max_fraction=Limit(
                0.05,
                "share of a weight's output channels that may be zero, 0-1",
                "our choice; the trained EfficientNet-Lite0 has up to 0.031",
            ),
        ),
        _rule("forward", "The forward pass raises.", "fail", "forward"),
        _rule("non-finite-activation", "A module makes NaN or Inf out of finite inputs.", "fail", "forward"),
        _rule("output-shape", "The output has another shape or dtype than expected.", "fail", "outputs"),
        _rule(
            "constant-output",
            "The output is the same whatever the input.",
            "fail",
            "outputs",
            min_difference=Limit(
                1e-6,
                "greatest difference between the outputs for different inputs, in units of the greatest output",
                "our choice, eight roundings of float32; seeded networks of torchvision measure 5e-5 to 1.6, GoogLeNet"
                " 0 while its BatchNorm is untrained",
            ),
        ),
        _rule(
            "repeatability",
            "The same input gives another output the second time.",
            "fail",
            "outputs",
            max_difference=Limit(
                1e-5,
                "greatest difference between two passes over the same batch, in units of the greatest output",
                "our choice; seeded networks of torchvision repeat exactly, and sums in another order differ by less."
                " For float16 and bfloat16 at least 16 roundings",
            ),
        ),
        _rule(
            "batch-consistency",
            "An input gives another output in a batch than alone.",
            "fail",
            "outputs",
            max_difference=Limit(
                1e-4,
                "greatest difference between an input in a batch and alone, in units of the greatest output",
                "our choice; seeded networks of torchvision stay below 3e-6, which is rounding. For float16 and"
                " bfloat16 at least 16 roundings",
            ),
        ),
        _rule(
            "dead-channels",
            "Channels behind a ReLU are zero over all inputs.",
            "warn",
            "forward",
            max_fraction=Limit(
                _ACCEPTED.dead_channel_fraction,
                "share of a layer's channels that may be zero over all inputs, 0-1",
                f"{_OURS_AS_GRADS}; seeded networks of torchvision stay at or below 0.5 on noise",
            ),
        ),
        _rule(
            "quiet-channels",
            "Channels behind a smooth activation (GELU, SiLU) are nearly zero over all inputs.",
            "warn",
            "forward",
            below=Limit(
                3e-3,
                "magnitude that a quiet channel stays below; of the layer's greatest, where that is below 1",
                "our choice; |GELU(x)| stays below it for x < -3.1, |SiLU(x)| for x < -7.88, where slopes are below"
                " 1 %",
            ),
            max_fraction=Limit(
                _ACCEPTED.dead_channel_fraction,
                "share of a layer's channels that may be quiet over all inputs, 0-1",
                "our choice, as for dead-channels; seeded networks of torchvision stay below 0.001 on noise",
            ),
        ),
        _rule(
            "saturated-activation",
            "Most outputs of a bounded activation lie where its slope is nearly gone.",
            "warn",
            "forward",
            max_fraction=Limit(
                _ACCEPTED.saturated_fraction,
                "share of a layer's outputs that may lie where the slope is below 1/16 of its greatest, 0-1",
                f"after Glorot and Bengio 2010, section 3; {_OURS_AS_GRADS}",
            ),
        ),
        _rule(
            "fp16-headroom",
            "Values come near the greatest of float16, or vanish in it.",
            "warn",
            "forward",
            max_fraction_of_range=Limit(
                0.5,
                "greatest magnitude of activations and weights, in units of 65504, the greatest of float16",
                "IEEE 754 binary16; the half is our choice: another picture may double a value",
            ),
            max_vanishing_fraction=Limit(
                0.1,
                "share of a weight's non-zero values that may become zero in float16, at most 2**-25 as they are, 0-1",
                "IEEE 754 binary16; the tenth is our choice: seeded networks of torchvision stay below 0.001",
            ),
        ),
        _rule(
            "bf16-headroom",
            "Values come near the greatest of bfloat16.",
            "warn",
            "forward",
            max_fraction_of_range=Limit(
                0.5,
                "greatest magnitude of activations and weights, in units of 3.39e38, the greatest of bfloat16",
                "(2 - 2**-7) * 2**127; the half is our choice, as for fp16-headroom",
            ),
        ),
        _rule("expectation", "A named picture is not classified as expected.", "fail", "expectations"),
        _rule(
            "drift",
            "A layer's statistics differ from the baseline.",
            "fail",
            "baseline",
            max_difference=Limit(
                0.01,
                "how far a layer's mean, std or a quantile may move, in units of its spread: its std, but at least 0.01"
                " of its greatest magnitude (0.5 in float16, 4 in bfloat16)",
                "our choice; on 15 networks other threads, kernels or precision move it by up to 3e-5 (bfloat16 3e-3),"
                " one weight tensor scaled by 1.01 by 0.02 to 0.12, a training step at a rate of 1e-3 by 0.012 or more,"
                " and another picture decoder, one level more or less in every pixel, would by 0.03 to 0.4",
            ),
            max_dead_difference=Limit(
                0.05,
                "how far a layer's share of dead channels may move, 0-1",
                "our choice; on 15 networks other threads or kernels move it by 0 (bfloat16 0.008), one level more or"
                " less in every pixel by up to 0.02, and one batch through BatchNorm by up to 0.5",
            ),
            max_gradient_ratio=Limit(
                1.1,
                "how many times larger or smaller the L2 norm of a layer's gradient may be",
                "our choice; on 15 networks other threads or kernels change it by up to 1.0001 times (bfloat16 1.03),"
                " one level more or less in every pixel by 1.08, a training step at a rate of 1e-3 by 1.001 to 1e10",
            ),
        ),
        _rule("non-finite-loss", "The loss is NaN or Inf.", "off", "gradients"),
        _rule(
            "non-finite-gradient",
            "The backward of a layer makes NaN or Inf out of a finite gradient.",
            "off",
            "gradients",
        ),
        _rule(
            "zero-gradient",
            "Every gradient is zero, or no more than rounding.",
            "off",
            "gradients",
            rounding=Limit(
                _ACCEPTED.rounding,
                "share of the loss, or of ‖g‖·‖x‖ one layer on, below which ‖g‖·‖x‖ is rounding",
                f"ten roundings of float32; {_OURS_AS_GRADS}",
            ),
        ),
        _rule("dead-gradient", "Layers on the path get a gradient of exactly zero.", "off", "gradients"),
        _rule(
            "vanishing-gradient",
            "The first weights learn far slower than the last.",
            "off",
            "gradients",
            min_ratio=Limit(
                _ACCEPTED.vanishing,
                "median ‖g‖/‖w‖ of the first tenth of the weights, in units of the last tenth's",
                f"{_OURS_AS_GRADS}; healthy networks of torchvision measure 0.1 to 1000, thirty sigmoid layers 1e-24",
            ),
        ),
        _rule(
            "exploding-gradient",
            "Gradients grow on the way back to the first layers.",
            "off",
            "gradients",
            max_ratio=Limit(
                _ACCEPTED.exploding,
                "median ‖grad_output‖ of the first tenth of the layers, in units of the greatest of the last tenth",
                f"{_OURS_AS_GRADS}; networks of torchvision in train mode stay below 200",
            ),
        ),
        _rule("unused-parameter", "Trainable parameters never get a gradient.", "off", "gradients"),
        _rule(
            "gradient-imbalance",
            "One learning rate must serve weights with far different relative gradients.",
            "off",
            "gradients",
            max_ratio=Limit(
                _ACCEPTED.imbalance,
                "greatest ‖g‖/‖w‖ of the weights, in units of the smallest",
                f"{_OURS_AS_GRADS}; networks of torchvision in train mode stay below 500000, ConvNeXt apart",
            ),
        ),
    ]
)
"""By identifier, in the order in which they are judged and reported."""
