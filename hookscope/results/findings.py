"""What rules find in a network."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["fail", "warn", "off"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a rule found.

    Attributes:
        level: "fail" for what breaks training or results, "warn" for what deserves a look.
        where: Label of a layer's output, or name of a parameter or an input; "" for the whole network.
        message: One sentence with the measured value and the limit that stands without `where`; another one counts
            what follows.
        followed_by: Further places with the same problem and cause, as `where` names them, in order.
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
