"""Put every rule to an inspection: which apply, which silence others, which come first."""

from hookscope.checks.verdicts.activations import dead_channels, saturated_activation
from hookscope.checks.verdicts.dead import dead_gradient
from hookscope.checks.verdicts.depth import exploding_gradient, gradient_imbalance, vanishing_gradient
from hookscope.checks.verdicts.finite import non_finite_activation, non_finite_gradient, non_finite_loss
from hookscope.checks.verdicts.limits import RULES, Limits
from hookscope.checks.verdicts.zeros import unused_parameter, zero_gradient
from hookscope.results.gradients import Gradients, Verdict
from hookscope.results.repeats import fold_repeats


def judge(inspection: Gradients, limits: Limits = Limits()) -> tuple[Verdict, ...]:  # noqa: B008 - frozen
    """Judge one forward and backward pass by every rule of `RULES`.

    A cause silences its consequences: with non-finite or all-zero gradients nothing is said about depth, and a
    vanishing gradient is not called imbalance as well. Of a pass that broke off, only the activations are judged. Rows
    that repeat another are not judged a second time.

    Args:
        inspection: What to judge; its own `verdicts` are not looked at.
        limits: What is still accepted.

    Returns:
        Verdicts, failures first, then in the order of `RULES`. None means that nothing broke a limit.
    """
    inspection = fold_repeats(inspection)
    found = [*non_finite_loss(inspection), *non_finite_activation(inspection)]
    found += [*saturated_activation(inspection, limits), *dead_channels(inspection, limits)]
    if inspection.loss is not None and inspection.failure is None:
        causes = [*non_finite_gradient(inspection)] or [*zero_gradient(inspection, limits)]
        found += [*unused_parameter(inspection), *causes]
        if not causes:
            vanishing = [*vanishing_gradient(inspection, limits)]
            found += [*dead_gradient(inspection), *vanishing, *exploding_gradient(inspection, limits)]
            found += [] if vanishing else gradient_imbalance(inspection, limits)
    order = [*RULES]
    return tuple(sorted(found, key=lambda verdict: (verdict.level != "fail", order.index(verdict.rule))))
