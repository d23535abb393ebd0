"""Inspections made by hand, every number of which follows from the chain rule."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hookscope.checks.judging import judge_gradients
from hookscope.results.activations import LayerRow
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, Gradients, GradientStatus, LossRecord, ParameterRow
from hookscope.results.network import ModelInfo
from hookscope.results.statistics import TensorStatistics

MODEL = ModelInfo("net", "Net", "as given", random=False, sha256=None, parameter_count=0)


def tensor(l2: float | None, shape: tuple[int, ...] = (1, 2), **values: object) -> TensorStatistics:
    """Return statistics of a tensor with this L2; None for a tensor that has no values."""
    known: dict[str, object] = (
        {} if l2 is None else {"l2": l2, "nan_count": 0, "inf_count": 0, "zero_fraction": float(l2 == 0)}
    )
    count = math.prod(shape) if known else 0
    return TensorStatistics(shape, "float32", count, **{**known, **values})  # type: ignore[arg-type]


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
        model=MODEL,
        inputs=(),
        loss=LossRecord("sum", "", loss),
        rows=tuple(replace(row, index=index) for index, row in enumerate(rows)),
        gradients=tuple(
            replace(row, index=index, backward_index=order.get(index)) for index, row in enumerate(gradients)
        ),
        parameters=tuple(replace(row, index=index) for index, row in enumerate(parameters)),
        **changes,  # type: ignore[arg-type]
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
    names = [f"layer{position}" for position in range(len(factors))]
    outputs = [math.prod(factors[: position + 1]) for position in range(len(factors))]
    later = [scale * math.prod(factors[position + 1 :]) for position in range(len(factors))]
    return inspection(
        [layer_row(name, tensor(output)) for name, output in zip(names, outputs, strict=True)],
        [output_row(name, tensor(gradient)) for name, gradient in zip(names, later, strict=True)],
        [parameter(f"{name}.weight", whole / weight, weight) for name, weight in zip(names, weights, strict=True)],
        loss=whole,
    )


def logistic_chain(depth: int, scale: float = 1.0) -> Gradients:
    """Return what logistic layers with the weight 1, the bias -0.5 and the input 0.5 show; `scale` is that of the loss.

    Each is in its middle: its slope there is 0.25, and its output 0.5 again.
    The gradient with respect to the output k layers before the last is 0.25**k; the weight before it has 0.25 times
    0.5 of that.
    """
    names = [f"layer{position}" for position in range(depth)]
    gradients = [scale * 0.25 ** (depth - 1 - position) for position in range(depth)]
    return inspection(
        [layer_row(name, tensor(0.5)) for name in names],
        [output_row(name, tensor(gradient)) for name, gradient in zip(names, gradients, strict=True)],
        [parameter(f"{name}.weight", 0.25 * 0.5 * gradient) for name, gradient in zip(names, gradients, strict=True)],
        loss=0.5 * scale,
    )


def found(rule: str, judged: Gradients, limits: Mapping[str, float] | None = None) -> list[Finding]:
    """Return the findings of one rule in `hookscope grads`."""
    return [finding for finding in judge_gradients(judged, limits) if finding.rule == rule]


def rules(judged: Gradients) -> list[str]:
    return [finding.rule for finding in judge_gradients(judged)]
