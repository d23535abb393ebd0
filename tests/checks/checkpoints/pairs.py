"""For every rule a change that breaks exactly it, and one that just does not, to a seeded network of `networks.py`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookscope.checks.settings import LayerSettings, RuleSettings
from tests.checks.checkpoints import networks

NETWORKS = Path(networks.__file__)
PICTURE = "half.png"

State = dict[str, Tensor]
Change = Callable[[State], object]


def put(name: str, value: Any, at: Any = ...) -> Change:
    """Set values of a tensor."""

    def change(state: State) -> None:
        state[name][at] = torch.as_tensor(value, dtype=state[name].dtype)

    return change


def scale(name: str, factor: float) -> Change:
    return lambda state: state[name].mul_(factor)


def copy(name: str, onto: str) -> Change:
    return lambda state: state[onto].copy_(state[name])


def drop(name: str) -> Change:
    return lambda state: state.pop(name)


def add(name: str) -> Change:
    return lambda state: state.update({name: torch.ones(3)})


def behind_a_prefix(state: State) -> None:
    """Name everything as nn.DataParallel does."""
    for name in list(state):
        state[f"module.{name}"] = state.pop(name)


def both(*changes: Change) -> Change:
    return lambda state: [each(state) for each in changes]


def nothing(_: State) -> None:
    """Leave the network as it was initialised."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two checkpoints of one network, on either side of a rule's limit.

    Attributes:
        rule: Its identifier.
        network: A function of `networks.py`.
        where: What the finding has to name: a layer's label, or a tensor of the checkpoint.
        breaks: What to do to the state dict to break the rule, and nothing else.
        near_miss: What to do to it so that all rules just pass.
        settings: As for `CheckSettings`.
        expects: What the network has to say about a picture, as for `Expectation`.
        named: A text in the message, where `where` does not say which layer it was.
        consequences: Other rules that are broken by necessity.
        missed: Those that the near miss breaks too.
        bytes_lost: How many are missing at the end of the broken file.
    """

    rule: str
    network: str
    where: str
    breaks: Change
    near_miss: Change
    settings: Mapping[str, Any] = field(default_factory=dict)
    expects: Mapping[str, Any] = field(default_factory=dict)
    named: str = ""
    consequences: frozenset[str] = frozenset()
    missed: frozenset[str] = frozenset()
    bytes_lost: int = 0


NINE_OF_TEN = slice(9)
EIGHT_OF_TEN = slice(8)
SEVEN_OF_TEN = slice(7)

# Lets layers drift by their values, so that what else may drift shows.
WHATEVER_THE_VALUES = (LayerSettings("*", {"drift": RuleSettings(limits={"max_difference": 1e9})}),)

PAIRS = [
    Pair(
        "integrity",
        "plain",
        "",
        breaks=nothing,
        near_miss=nothing,
        named="model.pt",
        bytes_lost=1,
    ),
    Pair(
        "architecture",
        "plain",
        "",
        breaks=drop("head.weight"),
        near_miss=behind_a_prefix,
        named="head.weight",
    ),
    Pair(
        "architecture",
        "plain",
        "",
        breaks=add("extra.bias"),
        near_miss=add("extra.count"),
        settings={"allow_unexpected": ("*.count",)},
        named="extra.bias",
    ),
    Pair(
        "non-finite-parameter",
        "calibrated",
        "middle.value",
        breaks=put("middle.value", math.nan, at=2),
        near_miss=put("middle.value", [0, -math.inf, -math.inf, 0]),  # a mask
    ),
    Pair(
        "zero-parameter",
        "residual",
        "middle.branch.weight",
        breaks=put("middle.branch.weight", 0),
        # One weight is left in each filter.
        near_miss=both(put("middle.branch.weight", 0), put("middle.branch.weight", 0.1, at=(slice(None), 3, 1, 1))),
    ),
    Pair(
        "constant-parameter",
        "plain",
        "first.weight",
        breaks=put("first.weight", 0.1),
        # One weight is the next number of float32.
        near_miss=both(put("first.weight", 0.1), put("first.weight", 0.1 + 2**-27, at=(4, 1, 2, 0))),
    ),
    Pair(
        "duplicate-parameter",
        "twins",
        "middle.1.weight",
        breaks=copy("middle.0.weight", onto="middle.1.weight"),
        near_miss=both(copy("middle.0.weight", onto="middle.1.weight"), put("middle.1.weight", 0.01, at=(7, 2, 0, 1))),
        named="middle.0.weight",
    ),
    Pair(
        "batchnorm-variance",
        "normalised",
        "middle.running_var",
        # Smaller than BatchNorm's epsilon of 1e-5, so that nothing becomes NaN.
        breaks=put("middle.running_var", -1e-6, at=3),
        near_miss=put("middle.running_var", 1e-6, at=3),
        named="down to -1e-06",
    ),
    Pair(
        "batchnorm-variance",
        "normalised",
        "middle.running_var",
        breaks=both(put("middle.running_mean", 0.1), put("middle.running_var", 0, at=3)),
        # Of a channel that dies in training, the mean goes the same way.
        near_miss=both(
            put("middle.running_mean", 0.1),
            put("middle.running_mean", 0, at=3),
            put("middle.running_var", 0, at=3),
        ),
        named="whose running mean is not: 3",
    ),
    Pair(
        "batchnorm-variance",
        "normalised",
        "middle.running_var",
        breaks=both(put("middle.running_mean", 0.1, at=slice(3, 10)), put("middle.running_var", 0, at=slice(3))),
        near_miss=both(put("middle.running_mean", 0.1, at=slice(2, 10)), put("middle.running_var", 0, at=slice(2))),
        named="3 of 10 channels, 30.0% (limit 20%)",
    ),
    Pair(
        "dead-filter",
        "wide",
        "first.weight",
        breaks=put("first.weight", 0, at=slice(2)),
        near_miss=put("first.weight", 0, at=slice(1)),  # 5 %
    ),
    Pair(
        "forward",
        "reordered",
        "middle",
        breaks=put("middle.value", 10, at=0),
        near_miss=put("middle.value", 9, at=0),
    ),
    Pair(
        "non-finite-activation",
        "root_of_square",
        "middle",
        breaks=put("middle.value", -1),
        near_miss=put("middle.value", 0),
        consequences=frozenset({"non-finite-loss"}),  # a loss of NaN is NaN
    ),
    Pair(
        "output-shape",
        "some_classes",
        "(model)",
        breaks=put("1.value", 4),
        near_miss=nothing,
        settings={"output_shape": ("N", 5)},
        named="(2, 4)",
    ),
    Pair(
        "output-shape",
        "widened",
        "(model)",
        breaks=put("1.value", 1),
        near_miss=nothing,
        settings={"output_dtype": "float32"},
        named="is float64, not float32",
    ),
    Pair(
        "constant-output",
        "gain",
        "(model)",
        breaks=put("middle.1.value", 2e-6),
        near_miss=put("middle.1.value", 1e-5),
        named="whatever the input",
    ),
    Pair(
        "repeatability",
        "jittering",
        "(model)",
        breaks=put("middle.value", 1e-4),
        near_miss=put("middle.value", 2e-5),
        named="two identical passes",
    ),
    Pair(
        "batch-consistency",
        "mixing",
        "(model)",
        breaks=put("middle.value", 0.01),
        near_miss=put("middle.value", 0.002),
        named="and the same input alone",
    ),
    Pair(
        "dead-channels",
        "rectified",
        "middle",
        breaks=put("first.bias", -100, at=NINE_OF_TEN),
        near_miss=put("first.bias", -100, at=EIGHT_OF_TEN),
    ),
    Pair(
        "quiet-channels",
        "smooth",
        "middle",
        breaks=put("first.bias", -100, at=NINE_OF_TEN),
        near_miss=put("first.bias", -100, at=EIGHT_OF_TEN),
    ),
    Pair(
        "quiet-channels",
        "smooth",
        "middle",
        # GELU(-3.2) is -0.0022, GELU(-3) is -0.0040, and the inputs hardly vary.
        breaks=both(scale("first.weight", 0.001), put("first.bias", [-3.2] * 9 + [2])),
        near_miss=both(scale("first.weight", 0.001), put("first.bias", [-3] * 9 + [2])),
        named="below 0.003",
    ),
    Pair(
        "saturated-activation",
        "gated",
        "middle",
        breaks=both(scale("first.weight", 0.1), put("first.bias", 6, at=NINE_OF_TEN)),
        near_miss=both(scale("first.weight", 0.1), put("first.bias", 6, at=SEVEN_OF_TEN)),
    ),
    Pair(
        "fp16-headroom",
        "Pooled",
        "first",
        breaks=put("first.bias", 33000, at=0),
        near_miss=put("first.bias", 32700, at=0),  # half of 65504 is 32752
    ),
    Pair(
        "fp16-headroom",
        "plain",
        "first.weight",
        breaks=put("first.weight", 1e-9, at=(slice(None), 0, 0)),  # 3 of 27 values in each filter
        near_miss=put("first.weight", 1e-9, at=(slice(None), 0, 0, slice(2))),
        named="11.1% of its values other than 0 become 0 in float16 (limit 10%)",
    ),
    Pair(
        "bf16-headroom",
        "Pooled",
        "first",
        breaks=put("first.bias", 1.8e38, at=0),
        near_miss=put("first.bias", 1.6e38, at=0),
        consequences=frozenset({"fp16-headroom"}),  # what is too large for bfloat16 is too large for float16
        missed=frozenset({"fp16-headroom"}),
    ),
    Pair(
        "expectation",
        "plain",
        PICTURE,
        breaks=put("head.bias", 9, at=2),
        near_miss=put("head.bias", 9, at=3),
        expects={"top1": 3},
        named="class 2 with",
    ),
    Pair(
        "expectation",
        "plain",
        PICTURE,
        breaks=put("head.bias", 9, at=slice(2)),
        near_miss=put("head.bias", 9, at=slice(2, 4)),
        expects={"contains": (3,), "k": 2},
        named="class 3 among its first 2 classes",
    ),
    Pair(
        "expectation",
        "plain",
        PICTURE,
        breaks=put("head.bias", 1, at=3),
        near_miss=put("head.bias", 9, at=3),
        expects={"min_probability": 0.9},
        named="at least 0.9",
    ),
    Pair(
        "drift",
        "twins",
        "middle.1",
        # Gradients of the layers before it change by as much, which is allowed.
        breaks=scale("middle.1.weight", 1.01),
        near_miss=scale("middle.1.weight", 1.003),
        named="the first of 3 layers",  # middle.1, head, (model)
    ),
    Pair(
        "drift",
        "wide_rectified",
        "middle",
        breaks=put("first.bias", -100, at=slice(2)),
        near_miss=put("first.bias", -100, at=slice(1)),
        settings={"layers": WHATEVER_THE_VALUES},
        named="its share of dead channels went from 0 to 0.1",
    ),
    Pair(
        "drift",
        "twins",
        "first",
        # The gradient is passed back through these weights.
        breaks=scale("middle.1.weight", 1.15),
        near_miss=scale("middle.1.weight", 1.05),
        settings={"layers": WHATEVER_THE_VALUES},
        named="the L2 norm of its gradient",
    ),
    Pair(
        "non-finite-loss",
        "plain",
        "",
        # The derivative of log(x) is 1/x, which is finite.
        breaks=put("head.bias", -9),
        near_miss=put("head.bias", 9),
        settings={"loss": f"{NETWORKS}:log_of_sum"},
        named="log_of_sum",
    ),
    Pair(
        "non-finite-gradient",
        "root_of_positive",
        "middle",
        # The slope of the square root at 0 is Inf.
        breaks=put("middle.value", 0),
        near_miss=put("middle.value", 3),  # what comes is above -3
    ),
    Pair(
        "zero-gradient",
        "Weighed",
        "",
        # Probabilities add up to 1 whatever is learnt, and so they do nearly with these weights.
        breaks=put("worth.value", [1, 1, 1, 1, 1.000005]),
        near_miss=put("worth.value", [1, 1, 1, 1, 1.001]),
        settings={"loss": "sum"},
        named="a sum after softmax",
    ),
    Pair(
        "dead-gradient",
        "clipped",
        "middle.branch.0",
        breaks=put("middle.branch.0.bias", 9),
        near_miss=put("middle.branch.0.bias", 9, at=NINE_OF_TEN),
        named="middle.branch.1",
    ),
    Pair(
        "vanishing-gradient",
        "Entered",
        "first.weight",
        breaks=put("scale", 2e-4),
        near_miss=put("scale", 1e-3),
    ),
    Pair(
        "exploding-gradient",
        "Amplified",
        "convolutions.0",
        breaks=both(put("enter.value", 1e-6), put("gain.value", 1e-6)),
        near_miss=both(put("enter.value", 3e-6), put("gain.value", 3e-6)),
        named="'gain'",
    ),
    Pair(
        "unused-parameter",
        "WithAuxiliary",
        "auxiliary",
        breaks=put("share", 0),
        near_miss=put("share", 0.01),
    ),
    Pair(
        "gradient-imbalance",
        "residual",
        "middle.branch.weight",
        breaks=put("middle.scale", 4e-7),
        near_miss=put("middle.scale", 2e-6),
    ),
]
