"""Measurements and inspections made by hand: every number of the latter follows from the chain rule."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hookscope.commands.check.measuring.signatures import OutputSignatures, weights_precision
from hookscope.inspection.network import as_batches, inspected_network
from hookscope.results.accuracy import Accuracy, ClassAccuracy, LabelledResult
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.check import CheckMeasurements, CheckReport, OutputValues, RuleOutcome, StoredValues
from hookscope.results.comparison import Prediction
from hookscope.results.distribution import distribution_of
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, Gradients, GradientStatus, LossRecord, ParameterRow
from hookscope.results.inputs import InputRecord
from hookscope.results.network import ModelInfo
from hookscope.results.statistics import TensorStatistics
from hookscope.rules import RULES
from hookscope.rules.judging import judge, judge_gradients
from hookscope.rules.settings import CheckSettings, Expectation
from tests.inspections import inspect, inspect_gradients

BY_HAND = ModelInfo("net", "Net", "as given", random=False, sha256=None, parameter_count=0)


def tensor(l2: float | None, shape: tuple[int, ...] = (1, 2), **values: object) -> TensorStatistics:
    """Return statistics of a tensor with this L2; None for a tensor that has no values."""
    expected: dict[str, object] = (
        {} if l2 is None else {"l2": l2, "nan_count": 0, "inf_count": 0, "zero_fraction": float(l2 == 0)}
    )
    count = math.prod(shape) if expected else 0
    return TensorStatistics(shape, "float32", count, **{**expected, **values})  # type: ignore[arg-type]


def layer_row(layer: str, activation: TensorStatistics, kind: str = "Linear", call: int = 0) -> LayerRow:
    return LayerRow(0, layer, kind, call, "", 0, activation)


def output_row(
    layer: str, gradient: TensorStatistics, kind: str = "Linear", call: int = 0, status: GradientStatus | None = None
) -> GradientRow:
    """Return the gradient of an output; zero or not is told from its L2."""
    said: GradientStatus = status or ("zero" if gradient.l2 == 0 and not gradient.nan_count else "gradient")
    return GradientRow(0, None, layer, kind, call, "", "output", said, gradient)


def parameter(
    name: str,
    l2: float | None,
    weight_l2: float = 1.0,
    *,
    shape: tuple[int, ...] = (2, 2),
    kind: str = "Linear",
    status: GradientStatus | None = None,
    trainable: bool = True,
    **values: object,
) -> ParameterRow:
    said: GradientStatus = status or ("zero" if l2 == 0 else "gradient")
    ratio = l2 / weight_l2 if l2 is not None and weight_l2 else None
    return ParameterRow(0, name, kind, trainable, said, tensor(l2, shape, **values), weight_l2, ratio)


def inspection(
    rows: Sequence[LayerRow] = (),
    gradients: Sequence[GradientRow] = (),
    parameters: Sequence[ParameterRow] = (),
    *,
    loss: float = 1.0,
    **changes: object,
) -> Gradients:
    """Return an inspection whose rows are numbered, and whose gradients arrived in the order opposite to forward."""
    arrived = [position for position, row in enumerate(gradients) if row.status in ("gradient", "zero")]
    order = {position: backward for backward, position in enumerate(reversed(arrived))}
    return Gradients(
        model=BY_HAND,
        inputs=(),
        loss=LossRecord("sum", "", loss),
        rows=tuple(replace(row, index=index) for index, row in enumerate(rows)),
        gradients=tuple(
            replace(row, index=index, backward_index=order.get(index)) for index, row in enumerate(gradients)
        ),
        parameters=tuple(replace(row, index=index) for index, row in enumerate(parameters)),
        **changes,  # type: ignore[arg-type]
    )


def in_a_row(
    outputs: Sequence[float], gradients: Sequence[float], weights: Sequence[tuple[float, float]], loss: float
) -> Gradients:
    """Return layers in a row, by the norms of outputs and their gradients, and of each weight's gradient and itself."""
    return inspection(
        [layer_row(f"layer{at}", tensor(output)) for at, output in enumerate(outputs)],
        [output_row(f"layer{at}", tensor(gradient)) for at, gradient in enumerate(gradients)],
        [parameter(f"layer{at}.weight", *weight) for at, weight in enumerate(weights)],
        loss=loss,
    )


def chain(factors: Sequence[float], weights: Sequence[float] | None = None, scale: float = 1.0) -> Gradients:
    """Return what a chain of scalar layers y = f·x shows, with the input 1 and the loss y.

    Layer k has the output f_0…f_k and the gradient f_{k+1}…f_n with respect to it; its weight w_k, of which f_k is a
    multiple, has the gradient y_n / w_k.

    Args:
        factors: Of each layer.
        weights: Of each layer; the factors themselves if not given.
        scale: Of the loss.
    """
    weights = weights or factors
    whole = scale * math.prod(factors)
    outputs = [math.prod(factors[: position + 1]) for position in range(len(factors))]
    later = [scale * math.prod(factors[position + 1 :]) for position in range(len(factors))]
    return in_a_row(outputs, later, [(whole / weight, weight) for weight in weights], whole)


def logistic_chain(depth: int, scale: float = 1.0) -> Gradients:
    """Return what logistic layers with the weight 1, the bias -0.5 and the input 0.5 show; `scale` is that of the loss.

    Each is in its middle: its slope there is 0.25, and its output 0.5 again.
    The gradient with respect to the output k layers before the last is 0.25**k; the weight before it has 0.25 times
    0.5 of that.
    """
    gradients = [scale * 0.25 ** (depth - 1 - position) for position in range(depth)]
    weights = [(0.25 * 0.5 * gradient, 1.0) for gradient in gradients]
    return in_a_row([0.5] * depth, gradients, weights, 0.5 * scale)


def found(rule: str, judged: Gradients, limits: Mapping[str, float] | None = None) -> list[Finding]:
    """Return the findings of one rule in `hookscope grads`."""
    return [finding for finding in judge_gradients(judged, limits) if finding.rule == rule]


def rules(judged: Gradients) -> list[str]:
    return [finding.rule for finding in judge_gradients(judged)]


CATEGORIES = ("tabby cat", "tiger cat", "crane", "tram", "crane", "otter")
MODEL = ModelInfo("net", "Net", "net.pt", random=False, sha256=None, parameter_count=100, categories=CATEGORIES)
PICTURE = "cat.jpg"
EVERYTHING = frozenset(RULES)


def stored(name: str, kind: str = "Conv2d", shape: tuple[int, ...] = (4, 3, 2, 2), **changes: Any) -> StoredValues:
    """Return a parameter whose values lie between -1 and 1."""
    expected: dict[str, Any] = {"role": "parameter", "dtype": "float32", "element_count": math.prod(shape)}
    expected |= {"min": -1.0, "max": 1.0, "max_abs": 1.0}
    expected |= dict.fromkeys(("nan_count", "inf_count", "zero_count", "fp16_zero_count"), 0)
    return StoredValues(name, kind, shape=shape, **{**expected, **changes})


def row(layer: str, kind: str, shape: tuple[int, ...] = (2, 4, 4, 4), **changes: Any) -> LayerRow:
    """Return a layer's output of values between -1 and 1: with four channels, of 32 values each over two inputs."""
    expected: dict[str, Any] = {"dtype": "float32", "element_count": math.prod(shape), "min": -1.0, "max": 1.0}
    expected |= {"channel_axis": 1, "channel_count": shape[1]}
    expected |= dict.fromkeys(("nan_count", "inf_count", "dead_channel_count"), 0)
    statistics = TensorStatistics(shape, **{**expected, **changes})
    return LayerRow(0, layer, kind, 0, "", 0, statistics)


STORED = (
    stored("conv.weight", filter_count=4),
    stored("conv.bias", shape=(4,)),
    stored("bn.running_mean", "BatchNorm2d", (4,), role="buffer"),
    stored("bn.running_var", "BatchNorm2d", (4,), role="buffer", min=0.5),
    stored("mask", "Net", (2, 2), role="buffer", min=0.0, max=0.0, max_abs=0.0, zero_count=3, inf_count=1),
    stored("head.weight", "Linear", (6, 4), filter_count=6),
)

ROWS = (
    row("conv", "Conv2d", max=-0.5),  # negative everywhere, as a convolution before a ReLU may be
    row("relu", "ReLU", min=0.0),
    row("gelu", "GELU"),
    row("gate", "Sigmoid", quantiles=(0.5,) * 7, distribution=distribution_of(np.full(10, 0.5))),
    row("", "Net", (2, 6)),
)

OUTPUT = OutputValues(
    "(model)",
    (2, 6),
    "float32",
    batched=True,
    max_abs=1.0,
    repeat_difference=0.0,
    alone_difference=1e-7,
    input_difference=0.5,
    input_count=2,
)

PREDICTION = Prediction(
    0, (0, 1, 3, 2, 5), ("tabby cat", "tiger cat", "tram", "crane", "otter"), (0.6, 0.2, 0.1, 0.05, 0.03)
)

SETTINGS = CheckSettings(
    expectations=(Expectation(PICTURE, "tabby cat", ("tiger cat",), 2, 0.5),),  # type: ignore[arg-type]
    data=Path("val"),
)

INPUTS = tuple(InputRecord(name, None, None, (3, 4, 4), ()) for name in (PICTURE, "dog.jpg"))


def numbered(rows: Sequence[LayerRow]) -> tuple[LayerRow, ...]:
    return tuple(replace(each, index=index) for index, each in enumerate(rows))


def labelled_result(*classes: tuple[str, int, int, int], class_count: int = 6) -> LabelledResult:
    """Return a result by label, index, pictures that are right, and all; their digests are "INDEX-NUMBER"."""
    each = tuple(ClassAccuracy(label, (index,), count, right) for label, index, right, count in classes)
    pictures = {
        (index,): {f"{index}-{number}": number < right for number in range(count)} for _, index, right, count in classes
    }
    return LabelledResult(
        Accuracy(
            "val",
            "labels are names of classes",
            class_count,
            sum(c.count for c in each),
            sum(c.right for c in each),
            each,
        ),
        pictures,
    )


FORWARD = Activations(model=MODEL, inputs=INPUTS, rows=numbered(ROWS), predictions=(PREDICTION,))

LABELLED = labelled_result(("otter", 5, 20, 20), ("tram", 3, 19, 20))

HEALTHY = CheckMeasurements(
    MODEL,
    STORED,
    FORWARD,
    channel_peaks={"gelu": np.array([1.0, 0.5, 0.5, 0.5], np.float32)},
    outputs=(OUTPUT,),
    labelled=LABELLED,
    gradients=chain([0.9] * 6),
)


def inspected(network: Any, inputs: Any, loss: str | None = None) -> CheckMeasurements:
    """Return what `hookscope check` would know of a network, as far as a baseline looks at it."""
    signatures = OutputSignatures()
    on_call, on_tensor = signatures.after(None, lambda *_: None)
    batches = signatures.numbered(as_batches(inputs))
    forward = inspect(network, batches, ["*"], distributions=True, on_call=on_call, on_tensor=on_tensor)
    precision = weights_precision(inspected_network(network).network)
    return CheckMeasurements(
        forward.model,
        (),
        forward,
        gradients=inspect_gradients(network, inputs, loss) if loss is not None else None,
        signatures=signatures.results(),
        weights_precision=precision,
    )


def with_stored(name: str, **changes: Any) -> CheckMeasurements:
    """Return the healthy measurements with another parameter or buffer."""
    assert any(each.name == name for each in STORED)
    values = tuple(replace(each, **changes) if each.name == name else each for each in STORED)
    return replace(HEALTHY, stored=values)


def with_row(layer: str, **changes: Any) -> CheckMeasurements:
    """Return the healthy measurements with other statistics of one output."""
    assert any(each.layer == layer for each in ROWS)
    rows = tuple(
        replace(each, activation=replace(each.activation, **changes)) if each.layer == layer else each
        for each in FORWARD.rows
    )
    return replace(HEALTHY, forward=replace(FORWARD, rows=rows))


def with_output(**changes: Any) -> CheckMeasurements:
    return replace(HEALTHY, outputs=(replace(OUTPUT, **changes),))


def with_peaks(*peaks: float) -> CheckMeasurements:
    return replace(HEALTHY, channel_peaks={"gelu": np.array(peaks, np.float32)})


def with_prediction(**changes: Any) -> CheckMeasurements:
    return replace(HEALTHY, forward=replace(FORWARD, predictions=(replace(PREDICTION, **changes),)))


def with_gradients(gradients: Gradients | None, **changes: Any) -> CheckMeasurements:
    return replace(HEALTHY, gradients=gradients, **changes)


def judged(
    measured: CheckMeasurements, settings: CheckSettings = SETTINGS, wanted: frozenset[str] = EVERYTHING
) -> CheckReport:
    """Judge by all rules, those that are off by default too."""
    return judge("net.pt", measured, settings, wanted)


def outcomes(report: CheckReport) -> Mapping[str, RuleOutcome]:
    return {outcome.rule: outcome for outcome in report.outcomes}


def findings(report: CheckReport) -> list[tuple[str, str, str]]:
    """Return the rule, level and place of every finding."""
    return [(finding.rule, finding.level, finding.where) for finding in report.findings]
