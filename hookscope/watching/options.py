"""How a script is watched. No torch."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """As for `hookscope.watch`; `folder` is `out` as it was given."""

    every: int
    out: Path | None
    folder: str | None
    layer: tuple[str, ...]
    edits: tuple[str, ...]
    eager_forward: bool
