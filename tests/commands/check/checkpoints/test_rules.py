"""For every rule a checkpoint that breaks exactly it, and a near miss that passes all rules, of one seeded network."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from hookscope.commands.check.checkpoint import check_checkpoint
from hookscope.results.check import CheckMeasurements, CheckReport
from hookscope.rules import RULES
from hookscope.rules.baseline import Baseline, baseline_of
from hookscope.rules.judging import wanted_rules
from hookscope.rules.settings import CheckSettings, Expectation, LayerSettings, RuleSettings
from tests.commands.check.checkpoints import networks

NETWORKS = Path(networks.__file__)
PICTURE = "half.png"

State = dict[str, Tensor]
Change = Callable[[State], object]


def put(name: str, value: Any, at: Any = ...) -> Change:
    """Set values of a tensor."""

    def change(state: State) -> None:
        state[name][at] = torch.as_tensor(value, dtype=state[name].dtype)

    return change


def puts(name: str, *values: Any, at: Any = ...) -> tuple[Change, ...]:
    """Set a tensor to either of two values."""
    return tuple(put(name, value, at) for value in values)


def spots(name: str, value: Any, *places: Any) -> tuple[Change, ...]:
    """Set a tensor to a value at either of two places."""
    return tuple(put(name, value, at) for at in places)


def scale(name: str, factor: float) -> Change:
    return lambda state: state[name].mul_(factor)


def copy(name: str, onto: str) -> Change:
    return lambda state: state[onto].copy_(state[name])


def add(name: str) -> Change:
    return lambda state: state.update({name: torch.ones(3)})


def behind_a_prefix(state: State) -> None:
    """Name everything as nn.DataParallel does."""
    for name in list(state):
        state[f"module.{name}"] = state.pop(name)


def both(*changes: Change) -> Change:
    return lambda state: [change(state) for change in changes]


def after(first: Change, sides: tuple[Change, ...]) -> tuple[Change, ...]:
    """Make a change before either side's own."""
    return tuple(both(first, side) for side in sides)


def in_float8(name: str, factor: float) -> Change:
    """Scale a weight, and round it to float8_e4m3fn."""

    def change(state: State) -> None:
        state[name] = (state[name] * factor).to(torch.float8_e4m3fn).float()

    return change


def nothing(_: State) -> None:
    """Leave the network as it was initialised."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two checkpoints of one network, on either side of a rule's limit.

    Attributes:
        case: "RULE of NETWORK at WHERE": a function of `networks.py`, and what the finding has to name: a layer's
            label, or a tensor of the checkpoint.
        sides: What to do to the state dict to break the rule, and nothing else; and so that all rules just pass.
        named: A text in the message, where `where` does not say which layer it was.
        settings: As for `CheckSettings`.
        expects: What the network has to say about a picture, as for `Expectation`.
        label: The class of twelve labelled pictures.
        limits: Of the rule.
        consequences: Other rules that are broken by necessity.
        missed: Those that the near miss breaks too.
        bytes_lost: How many are missing at the end of the broken file.
    """

    case: str
    sides: tuple[Change, ...]
    named: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    expects: Mapping[str, Any] = field(default_factory=dict)
    label: int | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    consequences: frozenset[str] = frozenset()
    missed: frozenset[str] = frozenset()
    bytes_lost: int = 0

    @property
    def rule(self) -> str:
        return self.case.partition(" of ")[0]

    @property
    def network(self) -> str:
        return self.case.partition(" of ")[2].partition(" at ")[0]

    @property
    def where(self) -> str:
        return self.case.partition(" at ")[2]


def trained(*names: str) -> Change:
    """Make the rows of weights differ, as training does: one in size, one in sign."""
    return both(
        *(lambda state, name=name: state[name].mul_(torch.linspace(0.5, 2, 16).view(16, 1, 1, 1)) for name in names)
    )


def moved(*norms: str) -> Change:
    """Give BatchNorms other statistics than they start with."""
    return both(
        *(put(f"{norm}.running_mean", torch.linspace(-0.1, 0.1, 10)) for norm in norms),
        *(put(f"{norm}.running_var", torch.linspace(0.9, 1.1, 10)) for norm in norms),
    )


def saved_with(**others: Any) -> Change:
    """Put the weights below "model", beside other things; functions are given the weights."""

    def change(state: State) -> None:
        weights = {name: state.pop(name) for name in list(state)}
        whole: dict[str, Any] = state  # type: ignore[assignment]
        whole["model"] = weights
        whole.update({name: other(weights) if callable(other) else other for name, other in others.items()})

    return change


def adam(steps: Any, *moments: float, **settings: Any) -> dict[str, Any]:
    """Return the state of Adam for as many parameters as there are first moments; the second are 0 and 1."""
    state = {
        at: {"step": steps, "exp_avg": torch.tensor([0.0, moment]), "exp_avg_sq": torch.tensor([0.0, 1.0])}
        for at, moment in enumerate(moments)
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(state), **settings}]}


BETAS = {"betas": (0.0, 0.75), "amsgrad": False}


def schedule(rate: float) -> dict[str, Any]:
    """Return what a learning-rate scheduler saves of the rate that it has set."""
    optimiser = torch.optim.SGD([torch.zeros(1)], rate)
    return dict(torch.optim.lr_scheduler.ConstantLR(optimiser, 1.0).state_dict())


def scaler(scale: float, tracker: int = 0) -> dict[str, Any]:
    """Return what a GradScaler saves; on a machine without an accelerator it can be given nothing to do."""
    return {**torch.amp.GradScaler("cpu").state_dict(), "scale": scale, "_growth_tracker": tracker}


def averaged(**replaced: Tensor) -> Callable[[State], State]:
    """Return a copy of weights as AveragedModel names them, some replaced."""
    return lambda weights: {
        f"module.{name}": replaced.get(name.replace(".", "_"), weight) for name, weight in weights.items()
    }


def scaled_copy(factor: float) -> Callable[[State], State]:
    """Return an averaged copy whose floating tensors are scaled."""
    return lambda weights: {
        f"module.{name}": weight * factor if weight.is_floating_point() else weight for name, weight in weights.items()
    }


def replaced_in_copy(name: str, change: Callable[[Tensor], object]) -> Callable[[State], State]:
    """Return an averaged copy of which one tensor is changed."""

    def copied(weights: State) -> State:
        copy = {f"module.{weight}": tensor.clone() for weight, tensor in weights.items()}
        change(copy[f"module.{name}"])
        return copy

    return copied


def with_other_signs(share: float) -> Callable[[State], State]:
    """Average a weight of equal magnitudes, a share of which has changed its sign."""

    def copied(weights: State) -> State:
        weights["middle.1.weight"].sign_().mul_(0.1)
        return replaced_in_copy("middle.1.weight", lambda each: each.view(-1)[: int(share * each.numel())].neg_())(
            weights
        )

    return copied


def with_batches(count: int) -> Callable[[State], State]:
    return replaced_in_copy("middle.2.num_batches_tracked", lambda each: each.fill_(count))


def as_new(weights: State) -> State:
    copy = replaced_in_copy("middle.2.running_mean", Tensor.zero_)(weights)
    copy["module.middle.2.running_var"].fill_(1)
    return copy


ALL_MOVED = moved(*(f"middle.{at}" for at in range(5)))
NINE_OF_TEN, EIGHT_OF_TEN, SEVEN_OF_TEN = slice(9), slice(8), slice(7)
ALL = slice(None)
BIAS, VARIANCE, MEAN = "first.bias", "middle.running_var", "middle.running_mean"
NEGATIVE = spots(BIAS, -100, NINE_OF_TEN, EIGHT_OF_TEN)
FP16 = frozenset({"fp16-headroom"})
UNSQUARED = frozenset({"overflowing-activation", "outlier-weight"})
GUESSING = frozenset({"accuracy"})  # a warning where no picture is right
UNCHANGED = 0  # what the network says of the picture
NAN_LOSS = frozenset({"non-finite-loss"})

# Lets layers drift by their values, so that what else may drift shows.
WHATEVER_THE_VALUES = {"layers": (LayerSettings("*", {"drift": RuleSettings(limits={"max_difference": 1e9})}),)}

SAMPLES = {"images": (Path(__file__).parents[4] / "sample_images",), "resize": "64", "crop": "64"}

PAIRS = [
    Pair("integrity of plain", (nothing, nothing), "model.pt", bytes_lost=1),
    Pair("architecture of plain", (lambda state: state.pop("head.weight"), behind_a_prefix), "head.weight"),
    Pair(
        "architecture of plain",
        (add("extra.bias"), add("extra.count")),
        "extra.bias",
        {"allow_unexpected": ("*.count",)},
    ),
    # The near miss is a mask.
    Pair(
        "non-finite-parameter of calibrated at middle.value",
        (put("middle.value", math.nan, at=2), put("middle.value", [0, -math.inf, -math.inf, 0])),
    ),
    # One weight is left in each filter.
    Pair(
        "zero-parameter of residual at middle.branch.weight",
        after(put("middle.branch.weight", 0), puts("middle.branch.weight", 0, 0.1, at=(ALL, 3, 1, 1))),
    ),
    # One weight is the next number of float32; filters without it are equal.
    Pair(
        "constant-parameter of plain at first.weight",
        after(put("first.weight", 0.1), puts("first.weight", 0.1, 0.1 + 2**-27, at=(4, 1, 2, 0))),
        missed=frozenset({"duplicate-filter"}),
    ),
    Pair(
        "duplicate-parameter of twins at middle.1.weight",
        after(copy("middle.0.weight", onto="middle.1.weight"), (nothing, put("middle.1.weight", 0.01, (7, 2, 0, 1)))),
        "middle.0.weight",
    ),
    # Smaller than BatchNorm's epsilon of 1e-5, so that nothing becomes NaN.
    Pair("batchnorm-variance of normalised at middle.running_var", puts(VARIANCE, -1e-6, 1e-6, at=3), "down to -1e-6"),
    # Of a channel that dies in training, the mean goes the same way.
    Pair(
        "batchnorm-variance of normalised at middle.running_var",
        after(both(put(MEAN, 0.1), put(VARIANCE, 0, at=3)), puts(MEAN, 0.1, 0, at=3)),
        "whose running mean is not: 3",
    ),
    Pair(
        "batchnorm-variance of normalised at middle.running_var",
        tuple(both(put(MEAN, 0.1, slice(dead, 10)), put(VARIANCE, 0, slice(dead))) for dead in (6, 5)),
        "6 of 10 channels, 60.0% (limit 50%)",
    ),
    Pair(
        "batchnorm-variance of normalised at middle.num_batches_tracked",
        puts("middle.num_batches_tracked", -1, 0),
        "counts -1 batches (limit 0)",
    ),
    # Just 25%.
    Pair("dead-filter of wide at first.weight", spots("first.weight", 0, slice(6), slice(5))),
    # A quarter is allowed, but not at the end: by chance that has a probability of (1 / 17)^5.
    Pair(
        "dead-filter of wide at first.weight",
        spots("first.weight", 0, slice(15, 20), slice(14, 19)),
        "the last 5 of 20 output channels are all 0, which by chance has a probability of 7e-7",
    ),
    # The greatest other value of the 270 is about 0.19, a ten-thousandth.
    Pair("outlier-weight of plain at first.weight", puts("first.weight", 3000, 15, at=(4, 1, 2, 0))),
    Pair(
        "duplicate-filter of plain at first.weight",
        after(
            lambda state: state["first.weight"][7].copy_(state["first.weight"][2]),
            (nothing, put("first.weight", 0.01, (7, 2, 0, 1))),
        ),
        "1 of 10 output channels equal one before them: 7",
    ),
    # All alike, with 16 inputs each, are no blur; the near miss has as many values of its own in each.
    Pair(
        "duplicate-filter of deep at middle.1.weight",
        (
            lambda state: state["middle.1.weight"].copy_(state["middle.1.weight"][:1].expand(16, -1, -1, -1)),
            lambda state: state["middle.1.weight"].add_(torch.arange(16)[:, None, None, None] * 1e-3),
        ),
        "15 of 16 output channels equal one before them: 1, 2",
    ),
    # A filter has 90 values.
    Pair(
        "constant-block of twins at middle.0.weight",
        tuple(lambda state, end=end: state["middle.0.weight"][3].view(-1)[5:end].zero_() for end in (75, 65)),
        "70 values in a row are 0, where chance explains 1",
    ),
    # One value is between two whole numbers.
    Pair(
        "integer-weight of deep at middle.1.weight",
        after(
            lambda state: state["middle.1.weight"].mul_(7 / state["middle.1.weight"].abs().max()).round_(),
            (nothing, put("middle.1.weight", 0.5, (7, 2, 0, 1))),
        ),
        "whole numbers, up to 7 in magnitude (limit 4)",
    ),
    Pair(
        "unsigned-weight of deep at middle.1.weight",
        after(lambda state: state["middle.1.weight"].abs_(), (nothing, put("middle.1.weight", -0.01, (7, 2, 0, 1)))),
        "1 of 4 weights has values of one sign only",
    ),
    # What comes last may be a new head.
    Pair(
        "untrained-weight of deep at middle.2.weight",
        (
            trained("middle.0.weight", "middle.1.weight", "middle.3.weight"),
            trained("middle.0.weight", "middle.1.weight", "middle.2.weight"),
        ),
    ),
    # Likewise, but that it counts batches.
    Pair(
        "untrained-norm of often_normalised at middle.4.running_mean",
        after(moved(*(f"middle.{at}" for at in range(4))), puts("middle.4.num_batches_tracked", 7, 0)),
        "after 7 batches",
    ),
    # Steps of 2**-9 next to zero round by 2**-9 / sqrt(12), a tenth of an RMS of 0.0056: 0.051 times the weight's.
    Pair(
        "float8-weight of plain at first.weight",
        (in_float8("first.weight", 0.046), in_float8("first.weight", 0.056)),
        "steps of float8_e4m3fn next to zero, 0.00195, round it by about ",
    ),
    # 6 of 27 values in each filter, or 4; 2**-10 is 9.8e-4.
    Pair(
        "float8-range of plain at first.weight",
        spots("first.weight", 9.7e-4, (ALL, 0, slice(2)), (ALL, 0, slice(2), slice(2))),
        "of its values other than 0 become 0 in float8_e4m3fn (limit 20%)",
    ),
    # The near miss is a state that was never stepped.
    Pair(
        "optimizer-state of plain at optimizer",
        (saved_with(optimizer=adam(3, 0.1, math.nan)), saved_with(optimizer=adam(0, 0.1, 0.2))),
        "1 of 4 tensors: 'state.1.exp_avg'",
    ),
    # The root of v / (1 - 0.75) is 2, and the limit twice that.
    Pair(
        "optimizer-state of plain at optimizer",
        tuple(saved_with(optimizer=adam(3, 4 * gradient, **BETAS)) for gradient in (1.01, 0.99)),
        "up to 2.02 times as great as their means of squares allow (limit 2): 'state.0.exp_avg'",
    ),
    # Another setting may be infinite: Prodigy's growth_rate is.
    Pair(
        "optimizer-state of plain at optimizer",
        tuple(saved_with(optimizer=adam(3, 0.1, **{name: math.inf})) for name in ("lr", "growth_rate")),
        "param_groups.0.lr is Inf",
    ),
    Pair(
        "optimizer-state of plain at optimizer",
        tuple(saved_with(optimizer=adam(3, 0.1), scheduler=schedule(rate)) for rate in (0.2, 0.1)),
        "param_groups.0.lr is 0.1, and 0.2 by the schedule",
    ),
    Pair(
        "scaler-state of plain at scaler",
        (saved_with(scaler=scaler(0.0)), saved_with(scaler=scaler(1.0))),
        "a scale of 0 (limit: above 0, and finite)",
    ),
    Pair(
        "scaler-state of plain at scaler",
        (saved_with(scaler=scaler(0.5)), saved_with(scaler=scaler(1.0))),
        "a scale of 0.5 (limit 1): steps were skipped",
    ),
    Pair(
        "scaler-state of plain at scaler",
        tuple(saved_with(scaler=scaler(2.0**16, tracker=steps)) for steps in (2000, 1999)),
        "counts 2000 steps since its last change (limit 2000)",
    ),
    # 16 * 16 * 9 values, of which the first share is of the other sign: the cosine is 1 - 2 * share.
    Pair(
        "averaged-weights of deep at ema",
        (saved_with(ema=with_other_signs(0.46)), saved_with(ema=with_other_signs(0.44))),
        "in 1 of 4 tensors (cosine 0.08, limit 0.1): 'module.middle.1.weight'",
        {"key": "model"},
    ),
    Pair(
        "averaged-weights of often_normalised at ema",
        after(ALL_MOVED, (saved_with(ema=with_batches(1)), saved_with(ema=averaged()))),
        "is newer than the weights: it counts 1 batch, and they count 0: 'module.middle.2.num_batches_tracked'",
        {"key": "model"},
    ),
    Pair(
        "averaged-weights of often_normalised at ema",
        after(ALL_MOVED, (saved_with(ema=as_new), saved_with(ema=averaged()))),
        "is stale: statistics of 1 BatchNorm at their initial values, while those of the weights are not: "
        "'module.middle.2'",
        {"key": "model"},
    ),
    # Allocated and never filled; the near miss was updated once, from zero.
    Pair(
        "averaged-weights of deep at ema",
        (saved_with(ema=scaled_copy(0)), saved_with(ema=scaled_copy(1e-3))),
        "is constant in 6 of 6 tensors, and the weights vary there: 'module.first.weight'",
        {"key": "model"},
    ),
    # The near miss has another number, but its own counter.
    Pair(
        "averaged-weights of plain at ema",
        (
            saved_with(ema=averaged(head_bias=torch.full((5,), math.nan))),
            saved_with(ema=averaged(head_bias=torch.zeros(5))),
        ),
        "1 of 4 tensors: 'module.head.bias'",
        {"key": "model"},
    ),
    Pair("forward of reordered at middle", puts("middle.value", 10, 9, at=0)),
    # A loss of NaN is NaN.
    Pair("non-finite-activation of root_of_square at middle", puts("middle.value", -1, 0), consequences=NAN_LOSS),
    Pair("output-shape of some_classes at (model)", (put("1.value", 4), nothing), "(2, 4)", {"output_shape": ("N", 5)}),
    Pair(
        "output-shape of widened at (model)",
        (put("1.value", 1), nothing),
        "is float64, not float32",
        {"output_dtype": "float32"},
    ),
    Pair("constant-output of gain at (model)", puts("middle.1.value", 2e-6, 1e-5), "for every input"),
    Pair("repeatability of jittering at (model)", puts("middle.value", 1e-4, 2e-5), "two identical passes"),
    Pair("batch-consistency of mixing at (model)", puts("middle.value", 0.01, 0.002), "and the same input alone"),
    # Over the sample images the first convolution has means of -0.37 to 0.27, and half of its variances are above 0.21.
    Pair(
        "batchnorm-statistics of normalised at middle",
        after(put(VARIANCE, 0.1), puts(MEAN, 0.4, 0.2)),
        "'first' feeds",
        SAMPLES,
    ),
    Pair("batchnorm-statistics of normalised at middle", puts(VARIANCE, 0.08, 0.1), "the first BatchNorm", SAMPLES),
    Pair("dead-channels of rectified at middle", NEGATIVE),
    Pair(
        "dead-layer of rectified_beside at middle.relu",
        spots("middle.shift", -100, ..., SEVEN_OF_TEN),
        "all 3,920 outputs of its 10 channels are 0 over all 2 inputs",
        consequences=frozenset({"constant-activation"}),
    ),
    Pair(
        "constant-activation of rectified_beside at middle.relu",
        spots("middle.shift", -100, ..., SEVEN_OF_TEN),
        "all 3,920 outputs are 0 over all 2 inputs",
        consequences=frozenset({"dead-layer"}),
    ),
    # The median magnitude of the other values is about 0.4.
    Pair(
        "massive-activation of tokens at middle",
        puts("middle.value", 1000, 99, at=(31, 4)),
        "channel 4 of token 31 (row 2",
    ),
    Pair("quiet-channels of smooth at middle", NEGATIVE),
    # GELU(-3.2) is -0.0022, GELU(-3) is -0.0040, and the inputs hardly vary.
    Pair(
        "quiet-channels of smooth at middle",
        after(scale("first.weight", 0.001), puts(BIAS, [-3.2] * 9 + [2], [-3] * 9 + [2])),
        "below 0.003",
    ),
    Pair(
        "saturated-activation of gated at middle",
        after(scale("first.weight", 0.1), spots(BIAS, 6, NINE_OF_TEN, SEVEN_OF_TEN)),
    ),
    # Half of 65504 is 32752.
    Pair("fp16-headroom of pooled at first", puts(BIAS, 33000, 32700, at=0)),
    # 3 of 27 values in each filter.
    Pair(
        "fp16-headroom of plain at first.weight",
        spots("first.weight", 1e-9, (ALL, 0, 0), (ALL, 0, 0, slice(2))),
        "11.1% of its values other than 0 become 0 in float16 (limit 10%)",
    ),
    # The root of float32's greatest number is 1.84e19; what is too large to be squared is too large for float16.
    Pair(
        "overflowing-activation of pooled at first",
        puts(BIAS, 2e19, 1.7e19, at=0),
        consequences=FP16 | {"outlier-weight"},
        missed=FP16,
    ),
    Pair(
        "bf16-headroom of pooled at first",
        puts(BIAS, 1.8e38, 1.6e38, at=0),
        consequences=FP16 | UNSQUARED,
        missed=FP16 | UNSQUARED,
    ),
    Pair("expectation of plain at half.png", spots("head.bias", 9, 2, 3), "class 2 with", expects={"top1": 3}),
    Pair(
        "expectation of plain at half.png",
        spots("head.bias", 9, slice(2), slice(2, 4)),
        "class 3 among its first 2 classes",
        expects={"contains": (3,), "k": 2},
    ),
    Pair(
        "expectation of plain at half.png",
        puts("head.bias", 1, 9, at=3),
        "at least 0.9",
        expects={"min_probability": 0.9},
    ),
    # It shows in middle.1, head and (model). Gradients of the layers before it change by as much, which is allowed.
    Pair(
        "drift of twins at middle.1",
        (scale("middle.1.weight", 1.01), scale("middle.1.weight", 1.003)),
        "2 more layers follow: 'head', '(model)'",
    ),
    Pair(
        "drift of wide_rectified at middle",
        spots(BIAS, -15, slice(2), slice(1)),
        "its share of dead channels went from 0 to 0.1",
        WHATEVER_THE_VALUES,
    ),
    # The gradient is passed back through these weights, to what they are given.
    Pair(
        "drift of twins at middle.0",
        (scale("middle.1.weight", 1.15), scale("middle.1.weight", 1.05)),
        "the L2 norm of its gradient",
        WHATEVER_THE_VALUES,
    ),
    Pair("accuracy of plain", spots("head.bias", 9, 2, 3), "0 of 12", label=3, limits={"min_fraction": 1}),
    Pair(
        "class-accuracy of plain",
        spots("head.bias", 9, 2, 3),
        "1 of 1 label is",
        label=3,
        limits={"min_fraction": 1},
        consequences=GUESSING,
    ),
    Pair(
        "accuracy-drop of plain",
        (put("head.bias", 9, 3), nothing),
        "12 lost and 0 gained",
        label=UNCHANGED,
        consequences=GUESSING | {"drift"},
    ),
    # The derivative of log(x) is 1/x, which is finite.
    Pair("non-finite-loss of plain", puts("head.bias", -9, 9), "log_of_sum", {"loss": f"{NETWORKS}:log_of_sum"}),
    # The slope of the square root at 0 is Inf; what comes is above -3.
    Pair("non-finite-gradient of root_of_positive at middle", puts("middle.value", 0, 3)),
    # Probabilities add up to 1 whatever is learnt, and so they do nearly with these weights.
    Pair(
        "zero-gradient of weighed", puts("worth.value", 1.000005, 1.001, at=4), "a sum after softmax", {"loss": "sum"}
    ),
    Pair(
        "dead-gradient of clipped at middle.branch.0",
        spots("middle.branch.0.bias", 9, ..., NINE_OF_TEN),
        "middle.branch.1",
        consequences=frozenset({"constant-activation"}),
    ),
    # What is remembered of a row shrinks with each row after it.
    Pair(
        "gradient-over-time of remembering at memory",
        (scale("memory.weight_hh_l0", 0.05), scale("memory.weight_hh_l0", 0.4)),
        "vanishes over time",
    ),
    Pair("vanishing-gradient of entered at first.weight", puts("scale", 2e-4, 1e-3)),
    Pair(
        "exploding-gradient of amplified at convolutions.0",
        tuple(both(put("enter.value", small), put("gain.value", small)) for small in (1e-6, 3e-6)),
        "'gain'",
    ),
    Pair("unused-parameter of with_auxiliary at auxiliary", puts("share", 0, 0.01)),
    Pair("gradient-imbalance of residual at middle.branch.weight", puts("middle.scale", 4e-7, 2e-6)),
]


@pytest.fixture(autouse=True)
def picture(tmp_path: Path) -> Path:
    """Half red, half blue."""
    path = tmp_path / PICTURE
    image = Image.new("RGB", (16, 16), "red")
    image.paste("blue", (8, 0, 16, 16))
    image.save(path)
    return path


def settings_of(pair: Pair, folder: Path) -> CheckSettings:
    """Return settings under which every rule is on, and fails."""
    settings: dict[str, Any] = {"input_shape": (2, 3, 16, 16)}
    if pair.expects:
        settings = {"expectations": (Expectation(folder / PICTURE, **pair.expects),), "resize": "none", "crop": "none"}
    if pair.label is not None:
        listed = folder / "labels.csv"
        for number in range(12):
            with Image.open(folder / PICTURE) as image:
                image.putpixel((number, 0), (250, 0, 0))  # each a little different
                image.save(folder / f"{number}.png")
        listed.write_text("".join(f"{number}.png,{pair.label}\n" for number in range(12)), encoding="utf-8")
        settings |= {"data": listed, "resize": "none", "crop": "none"}
    asked = [name for name in RULES if name in {pair.rule} | RULES.keys() - {"float8-range"}]  # that is for few
    rules = {name: RuleSettings("fail", pair.limits if name == pair.rule else {}) for name in asked}
    return CheckSettings(arch=f"{NETWORKS}:{pair.network}", rules=rules, **settings, **pair.settings)


def write(pair: Pair, change: Change, path: Path, *, lost: int = 0) -> None:
    """Write a checkpoint of the pair's network, seeded, and then changed; leave out the last bytes of the file."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = dict(getattr(networks, pair.network)().state_dict())
    change(state)
    torch.save(state, path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - lost])


def baseline_for(pair: Pair, folder: Path, settings: CheckSettings) -> Baseline | None:
    """Return what the unchanged network gives, if the rule compares with it."""
    if pair.rule not in ("drift", "accuracy-drop"):
        return None
    write(pair, nothing, folder / "before.pt")
    seen: list[CheckMeasurements] = []
    check_checkpoint(str(folder / "before.pt"), settings, wanted_rules(settings), on_measured=seen.append)
    return baseline_of(seen[0])


def checked(pair: Pair, change: Change, folder: Path, *, lost: int = 0) -> CheckReport:
    """Write a checkpoint and check it, with every rule on."""
    settings = settings_of(pair, folder)
    baseline = baseline_for(pair, folder, settings)
    path = folder / "model.pt"
    write(pair, change, path, lost=lost)
    return check_checkpoint(str(path), settings, wanted_rules(settings), baseline=baseline)


def test_every_rule_has_a_pair() -> None:
    assert list(dict.fromkeys(pair.rule for pair in PAIRS)) == [*RULES]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.case)
def test_a_checkpoint_that_breaks_one_rule_fails_that_rule_and_names_the_place(pair: Pair, tmp_path: Path) -> None:
    report = checked(pair, pair.sides[0], tmp_path, lost=pair.bytes_lost)
    assert {finding.rule for finding in report.findings} == {pair.rule} | pair.consequences
    finding, *more = (finding for finding in report.findings if finding.rule == pair.rule)
    assert finding.where.rpartition("/")[2].partition(":")[0] == pair.where  # or an operation that it calls
    assert (pair.named or pair.where) in finding.message
    assert not more


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.case)
@pytest.mark.sample(
    "architecture of plain0",
    "dead-filter of wide at first.weight",
    "batchnorm-variance of normalised at middle.running_var0",
    "optimizer-state of plain at optimizer0",
    "averaged-weights of deep at ema",
    "batch-consistency of mixing at (model)",
    "dead-channels of rectified at middle",
    "drift of twins at middle.1",
    "accuracy of plain",
    "vanishing-gradient of entered at first.weight",
)
def test_a_near_miss_passes_every_rule(pair: Pair, tmp_path: Path) -> None:
    report = checked(pair, pair.sides[1], tmp_path)
    assert {finding.rule for finding in report.findings} == pair.missed
    assert report.exit_code == bool(pair.missed)
    status = next(outcome.status for outcome in report.outcomes if outcome.rule == pair.rule)
    assert status == "pass"
