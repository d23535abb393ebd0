"""Which network ran, and the modules in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Which network ran, with which weights.

    Attributes:
        name: Short name for titles and folders: "resnet34", "net.py:build".
        kind: Class name of the root module.
        weights: Origin for people: "ResNet34_Weights.IMAGENET1K_V1", "random, seed 0", "model.pt".
        random: Whether the weights are random instead of trained.
        sha256: Hex digest of the weights file; None when there is none.
        parameter_count: Elements over all parameters; a tied one counts once.
        categories: Class names by index, when the weights come with them.
        arguments: What the factory was called with (`--model-arg`).
    """

    name: str
    kind: str
    weights: str
    random: bool
    sha256: str | None
    parameter_count: int
    categories: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module of a network, for the `layers` command.

    Attributes:
        layer: Dotted name; "" is the whole model.
        kind: Class name.
        parameter_count: Elements in the parameters it owns directly.
        total_parameter_count: Elements in its own and its descendants' parameters; a tied one counts once.
        call_count: Calls in one forward pass.
        input_shapes: Of the first call, nested inputs flattened.
        output_shapes: Of the first call, nested outputs flattened.
        selected: Whether the given patterns select it.
        note: Why there are no shapes, or aliases; "" otherwise.
    """

    layer: str
    kind: str
    parameter_count: int
    total_parameter_count: int
    call_count: int
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    selected: bool
    note: str = ""
