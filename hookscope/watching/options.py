"""The options of `hookscope watch`, without torch."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """The options of `hookscope.watch`; `folder` is `out` as the user wrote it."""

    every: int
    out: Path | None
    folder: str | None
    layer: tuple[str, ...]
    edits: tuple[str, ...]
    eager_forward: bool
