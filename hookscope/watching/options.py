"""How a script is watched. No torch."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """As for `hookscope.watch`."""

    every: int
    out: Path | None
    layer: tuple[str, ...]
    edits: tuple[str, ...]
    eager_forward: bool
