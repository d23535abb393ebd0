"""Read results as the rules need them: gradients that arrived, weights in forward order, counts in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hookscope.checks.rules.rule import FindingTarget
from hookscope.text import counted

if TYPE_CHECKING:
    from hookscope.results.activations import LayerRow
    from hookscope.results.check import CheckMeasurements
    from hookscope.results.gradients import GradientRow, Gradients, ParameterRow
    from hookscope.results.statistics import TensorStatistics


def taken_gradients(measured: CheckMeasurements) -> Gradients:
    """Return the gradients of a run that took some; rules that need them are skipped without."""
    assert measured.gradients is not None  # noqa: S101
    return measured.gradients


def arrived_outputs(gradients: Gradients, *, of_operations: bool = False) -> list[GradientRow]:
    """Return the gradients of outputs that received one, zero or not, in forward order; of modules, unless told so."""
    arrived = [row for row in gradients.gradients if row.role == "output" and row.status in ("gradient", "zero")]
    return [row for row in arrived if of_operations or row.owner is None]


def named(row: LayerRow | GradientRow) -> str:
    """Return how a message names a row: "'relu' (ReLU)"; an operation by its line, "'(model):relu' (net.py:14)"."""
    return f"'{row.label}' ({row.source or row.kind})"


def module_of(row: LayerRow | GradientRow) -> str:
    """Return the dotted name of the module that computed a row, itself or by an operation that it calls."""
    return row.layer if row.owner is None else row.owner


def weights(gradients: Gradients) -> list[ParameterRow]:
    """Return the matrices and kernels with a relative gradient that is finite and not zero, in forward order."""
    return [
        each
        for each in in_forward_order(gradients)
        if is_matrix(each) and is_positive(each.ratio) and not non_finite_count(each.gradient)
    ]


def in_forward_order(gradients: Gradients) -> list[ParameterRow]:
    """Sort parameters by when their module ran; one whose module was not seen follows the parameter before it."""
    positions: dict[str, int] = {}
    for row in gradients.rows:
        positions.setdefault(row.layer, row.index)
    keyed: list[tuple[int, ParameterRow]] = []
    position = -1
    for each in gradients.parameters:
        position = positions.get(owner(each), position)
        keyed.append((position, each))
    return [each for _, each in sorted(keyed, key=lambda pair: pair[0])]


def batch_norm_is_idle(gradients: Gradients) -> bool:
    """Tell whether BatchNorm, in eval mode with scales as they start, passes its input on nearly unchanged."""
    scales = [each for each in gradients.parameters if "BatchNorm" in each.kind and each.name.endswith("weight")]
    started = (
        each.weight_l2 is not None
        and (
            each.weight_l2 == 0 or math.isclose(each.weight_l2, math.sqrt(math.prod(each.gradient.shape)), rel_tol=1e-6)
        )
        for each in scales
    )
    return gradients.mode == "eval" and bool(scales) and all(started)


def gates(gradients: Gradients) -> list[ParameterRow]:
    """Return the parameters that are zero and get a gradient: they are about to open. Biases close nothing."""
    return [
        each
        for each in gradients.parameters
        if each.weight_l2 == 0 and each.status == "gradient" and not each.name.endswith("bias")
    ]


def gates_near(gates: Iterable[ParameterRow], dead: str, following: str | None = None) -> list[ParameterRow]:
    """Return the zero weights in the layer that follows a dead one, or in a block around it."""
    return [
        each
        for each in gates
        if (following is not None and is_within(owner(each), following))
        or is_within(dead, owner(each).rpartition(".")[0] or owner(each))
    ]


def is_positive(value: float | None) -> bool:
    """Tell whether a value exists, is finite and greater than zero."""
    return value is not None and 0 < value < math.inf


def is_matrix(parameter: ParameterRow) -> bool:
    """Tell weights from biases and scales: at least two axes are longer than 1, so (C, 1, 1) is a scale."""
    return sum(size > 1 for size in parameter.gradient.shape) >= 2


def owner(parameter: ParameterRow) -> str:
    """Return the dotted name of the module that a parameter belongs to."""
    from hookscope.results.gradients import parameter_owner

    return parameter_owner(parameter.name, parameter.kind)


def parameter_of(parameter: ParameterRow) -> FindingTarget:
    """Return a parameter; patterns match its own name and that of the module it belongs to."""
    return FindingTarget(parameter.name, (parameter.name, owner(parameter)), parameter.kind)


def is_within(layer: str, ancestor: str) -> bool:
    """Tell whether a module is another one or lies inside it, by their dotted names."""
    return layer == ancestor or not ancestor or layer.startswith(f"{ancestor}.")


def l2(statistics: TensorStatistics) -> float:
    """Return the L2 norm of a tensor; 0 if it has none."""
    return statistics.l2 or 0.0


def key(row: LayerRow | GradientRow) -> tuple[str, int, str]:
    """Return what an output's activation and its gradient have in common: layer, call, slot."""
    return row.layer, row.call, row.slot


def non_finite_count(statistics: TensorStatistics) -> int:
    """Return how many elements are NaN or Inf."""
    return (statistics.nan_count or 0) + (statistics.inf_count or 0)


def non_finite_words(statistics: TensorStatistics) -> str:
    """Return the counts of NaN and Inf in words: "3 NaN and 0 Inf in 10 values"."""
    values = counted(statistics.element_count, "value")
    return f"{statistics.nan_count or 0} NaN and {statistics.inf_count or 0} Inf in {values}"


def listed(names: Sequence[str], shown: int = 3) -> str:
    """Return the first few names in quotes and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(f"'{name}'" for name in names[:shown]) + more


def are(count: int) -> str:
    """Return the verb for a number of things."""
    return "is" if count == 1 else "are"
