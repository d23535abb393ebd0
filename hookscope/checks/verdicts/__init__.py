"""Judge what a backward pass showed: rules that look at a finished `Gradients` and say what they measured.

No rule depends on the scale of the loss: ratios inside one run are compared with limits. What a rule takes, it takes
from the result alone; nothing here knows torch. `judge` is loaded on first use, so that `--help`, which names rules and
limits, does not wait for NumPy.
"""

from typing import TYPE_CHECKING

from hookscope.checks.verdicts.limits import RULES, Limits

if TYPE_CHECKING:
    from hookscope.checks.verdicts.judging import judge

__all__ = ["RULES", "Limits", "judge"]


def __getattr__(name: str) -> object:
    if name != "judge":
        raise AttributeError(f"module 'hookscope.checks.verdicts' has no attribute {name!r}")
    from hookscope.checks.verdicts.judging import judge  # noqa: PLC0415 - see above

    return judge
