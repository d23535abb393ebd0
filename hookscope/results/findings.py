"""What rules find in a network."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["fail", "warn", "off"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a rule objects to.

    Attributes:
        level: "fail" for what breaks training or results, "warn" for what deserves a look.
        where: Label of a layer's output, or name of a parameter or an input; "" for the whole network.
        message: One sentence that holds the measured value and the limit, and stands without `where`; another one
            counts what follows.
        followed_by: What else the rule objects to for the same cause, as `where` would name it, in the same order.
    """

    rule: str
    level: Literal["fail", "warn"]
    where: str
    message: str
    followed_by: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """All that it is about: `where`, then what follows."""
        return (self.where, *self.followed_by)
