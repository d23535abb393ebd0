"""The findings of rules."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NoReturn

from hookscope.text import safe_text

Level = Literal["fail", "warn", "off"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a rule found.

    Attributes:
        level: "fail" if it breaks training or results, "warn" if it deserves a look.
        where: Label of a layer's output, or name of a parameter or an input; "" for the whole network.
        message: One sentence with the measured value and the limit, complete without `where`; a second one counts
            `followed_by`.
        followed_by: Further places with the same problem and cause, named as in `where`, in order.
    """

    rule: str
    level: Literal["fail", "warn"]
    where: str
    message: str
    followed_by: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """`where`, then `followed_by`."""
        return (self.where, *self.followed_by)


def raise_failures(lines: Iterable[str]) -> NoReturn:
    """Raise AssertionError for a test, with one line for each failure; empty ones are left out."""
    __tracebackhide__ = True  # pytest then shows the test's own line
    raise AssertionError("\n".join(map(safe_text, filter(None, lines))))
