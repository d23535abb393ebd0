"""Which weights go into a network that has a name, and what the record says of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torchvision.models import WeightsEnum

from hookscope.models.checkpoint import Checkpoint, read_checkpoint
from hookscope.models.construction import FileOptions, parameter_count
from hookscope.results.network import ModelInfo
from hookscope.text import printable

ALTERED = "trained ones are not tried together with --model-arg or other input channels."


@dataclass(frozen=True, slots=True)
class ChosenWeights:
    """What goes into a network that has a name.

    Attributes:
        origin: For people and the record: "ResNet34_Weights.IMAGENET1K_V1", "random, seed 0", "model.pt".
        enum: torchvision's trained weights, which also decide how their builder configures the network.
        checkpoint: The state dict; None for random weights, and when nothing is loaded.
        random: Whether the network keeps the random values it is built with.
        warnings: Sentences a reader must see.
        notes: Sentences that are no cause for alarm.
    """

    origin: str
    enum: WeightsEnum | None = None
    checkpoint: Checkpoint | None = None
    random: bool = False
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def model_info(
    name: str, module: nn.Module, chosen: ChosenWeights, categories: tuple[str, ...], arguments: Mapping[str, Any]
) -> ModelInfo:
    """Return what the record says of a named network."""
    return ModelInfo(
        name=name,
        kind=type(module).__name__,
        weights=chosen.origin,
        random=chosen.random,
        sha256=chosen.checkpoint.sha256 if chosen.checkpoint else None,
        parameter_count=parameter_count(module),
        categories=categories,
        arguments=dict(arguments),
    )


def no_weights(name: str, seed: int, *, on_meta: bool, reason: str | None = None) -> ChosenWeights:
    """Return random weights; on the meta device there are no values at all.

    Args:
        name: The network's.
        seed: Of the weights.
        on_meta: Whether the network has no values.
        reason: Why they are random though trained ones were wanted; None if random ones were asked for.
    """
    if on_meta:
        return ChosenWeights("not loaded")
    loud = f"{name}: weights are RANDOM (seed {seed}), so activations show no learnt features: {reason}"
    return ChosenWeights(f"random, seed {seed}", random=True, warnings=(loud,) if reason else ())


def file_weights(weights: str | Checkpoint, options: FileOptions) -> ChosenWeights:
    """Return the weights of a file, reading it unless that has been done.

    Raises:
        CheckpointError: If it cannot be read.
        UntrustedFileError: If reading it could run code.
    """
    checkpoint = weights if isinstance(weights, Checkpoint) else read_checkpoint(Path(weights), options)
    return ChosenWeights(checkpoint.name, checkpoint=checkpoint, warnings=checkpoint.warnings, notes=checkpoint.notes)


def shown(arguments: Mapping[str, Any]) -> str:
    """Return a builder's arguments as a person would write them."""
    return printable(", ".join(f"{key}={value!r}" for key, value in arguments.items()))
