"""How a run was made, for its record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookscope.results.inputs import InputRecord, Photograph, Preprocessing

SHOWN_INPUTS = 32
"""Inputs whose pictures a run keeps: as many as its report shows. Our choice."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a run was made, besides the facts in the result itself.

    Attributes:
        named_inputs: Inputs by name: the value, or the record of the file it was read from.
        pictures: The first pictures as the network saw them, (H, W, 3) or (H, W) uint8.
        settings: Further options of the command, by name: "edits", "limits", "autocast".
        photographs: Reads again what an input was made of, given the inputs of the run and the position of one.
    """

    patterns: tuple[str, ...]
    preprocessing: Preprocessing
    named_inputs: Mapping[str, Any] = field(default_factory=dict)
    unusable_inputs: tuple[str, ...] = ()
    pictures: Mapping[InputRecord, NDArray[np.uint8]] = field(default_factory=dict, repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    photographs: Callable[[Sequence[InputRecord], int], Photograph] | None = field(default=None, repr=False)
