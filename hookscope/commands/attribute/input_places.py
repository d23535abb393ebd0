"""Which axes of a network's input count positions and channels, and which part of it a map covers.

Networks pad their input at the bottom and at the right, and maps cover the padding, too; or their patches leave out a
margin there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.hooks.attributes import attribute_of
from hookscope.hooks.pytree import tensors_in
from hookscope.inputs.batches import Batch, copied
from hookscope.models.input_spec import first_layer_with_input
from hookscope.parameters import arg
from hookscope.results.attributions import input_word
from hookscope.results.concentration import Extent
from hookscope.results.inputs import PICTURE_AXES
from hookscope.statistics.layouts import Layout
from hookscope.text import printable, shape_text

# (N, L) has no axis for channels; (N, C, L), (N, C, H, W) and (N, C, D, H, W) have one.
_FEWEST_AXES, _MOST_AXES = 2, 5
# Gives pictures of a batch one size: zeros are added below and at the right.
_DETECTORS_TRANSFORM = "torchvision.models.detection.transform.GeneralizedRCNNTransform"
# Swin's name for the layer that halves a grid. A grid of odd size gets a row below or a column at the right.
_MERGING = "PatchMerging"


@dataclass(frozen=True, slots=True)
class InputPlaces:
    """How the axes of an input (N, ...) are to be read.

    Attributes:
        size: How many positions there are along each axis of place: (L,), (H, W) or (D, H, W).
        channel_axis: 1 for channels first; the last one for (N, T, D) of recurrent layers, and (N, H, W, C); None for
            (N, L).
    """

    size: tuple[int, ...]
    channel_axis: int | None

    def by_channel(self, values: Tensor) -> Tensor:
        """Return an input as (N, C, *size), a view."""
        return values.unsqueeze(1) if self.channel_axis is None else values.movedim(self.channel_axis, 1)

    def as_given(self, values: Tensor) -> Tensor:
        """Return what `by_channel` made in the order of axes that the network takes."""
        return values.squeeze(1) if self.channel_axis is None else values.movedim(1, self.channel_axis)


def main_input(batch: Batch) -> Tensor | None:
    """Return the argument whose axes count places: the one with the most axes, of floating-point numbers if one is.

    Arguments by name are considered if none is given by position. Returns None for a list of pictures, and if no
    argument has two to five axes.
    """
    values = batch.args or tuple(batch.kwargs.values())
    tensors = [value for value in values if isinstance(value, Tensor) and _FEWEST_AXES <= value.dim() <= _MOST_AXES]
    tensors = [tensor for tensor in tensors if tensor.is_floating_point()] or tensors
    return max(tensors, key=Tensor.dim, default=None)


def with_argument(batch: Batch, old: object, new: object) -> Batch:
    """Return a batch with another value wherever an argument is the object `old`."""
    args, kwargs = (new if value is old else value for value in batch.args), batch.kwargs.items()
    return replace(batch, args=(*args,), kwargs={name: new if value is old else value for name, value in kwargs})


def alike_inputs(batch: Batch) -> list[Tensor]:
    """Return the tensors among the arguments that have as many axes as the main input, which is one of them."""
    main = main_input(batch)
    arguments = (*batch.args, *batch.kwargs.values())
    return [item for item in arguments if main is not None and isinstance(item, Tensor) and item.dim() == main.dim()]


def place_axes(batch: Batch) -> int:
    """Return how many axes of place the input of a batch has: 1, 2 or 3; 2 for lists."""
    tensor = main_input(batch)
    return 2 if tensor is None else max(tensor.dim() - 2, 1)


def check_token_axes(tokens: Layout | None, axes: int) -> None:
    """Raise UsageError if the grid of `--tokens` has more or fewer axes than the input has axes of place."""
    if tokens is not None and len(tokens.grid) != axes:
        grid, form = "x".join(map(str, tokens.grid)), {1: "LENGTH", 3: "DEPTHxHEIGHTxWIDTH"}.get(axes, "HEIGHTxWIDTH")
        raise UsageError(f"{arg('tokens')} grid={grid} does not fit a {input_word(axes)}: give grid={form}.")


def word_counts(batch: Batch) -> set[int]:
    """Return the lengths of the inputs of whole numbers, (N, T)."""
    tensors = [tensor for _, tensor in tensors_in((*batch.args, *batch.kwargs.values()))]
    return {tensor.shape[1] for tensor in tensors if tensor.dim() == _FEWEST_AXES and not tensor.is_floating_point()}


def places_of(network: nn.Module, tensor: Tensor) -> InputPlaces:
    """Return where the places of an input lie, (N, ...) with two to five axes."""
    shape = tuple(tensor.shape)
    if len(shape) == _FEWEST_AXES:
        return InputPlaces(shape[1:], None)
    axis = _channel_axis(network, shape)
    return InputPlaces(tuple(size for place, size in enumerate(shape) if place not in (0, axis)), axis)


def input_size(network: nn.Module, batch: Batch) -> tuple[int, ...]:
    """Return the sizes of a batch's axes of place; () for lists."""
    tensor = main_input(batch)
    return () if tensor is None else places_of(network, tensor).size


def _channel_axis(network: nn.Module, shape: Sequence[int]) -> int:
    """Return the channel axis, 1 or the last: the one that fits the first layer; its usual one if both fit, or neither.

    A linear layer that fits neither takes the flattened signal. Pictures and volumes have fewer channels than places.
    """
    last = len(shape) - 1
    match first_layer_with_input(network):
        case nn.Conv1d(in_channels=count) | nn.ConvTranspose1d(in_channels=count):
            usual = 1
        case nn.Conv2d(in_channels=count) | nn.Conv3d(in_channels=count) if count < shape[1]:
            usual = 1
        case nn.RNNBase(input_size=count) | nn.MultiheadAttention(embed_dim=count) if last == 2:
            usual = 2
        case nn.Linear(in_features=count) if last == 2:
            usual = 2 if count in shape[1:] else 1
        case _:
            return 1
    fits = [axis for axis in (1, last) if shape[axis] == count]
    return fits[0] if len(fits) == 1 else usual


def require_floating_point(network: nn.Module, tensor: Tensor | None) -> None:
    """Raise a UsageError for an input of whole or complex numbers."""
    if tensor is None or tensor.is_floating_point():
        return
    numbers = "complex numbers, {}, for which no map is made"
    if not tensor.is_complex():
        numbers = "whole numbers, {}, which have no gradient"
    kinds = nn.Embedding | nn.EmbeddingBag
    embeddings = (printable(name) for name, module in network.named_modules() if name and isinstance(module, kinds))
    name = next(embeddings, "")
    raise UsageError(
        f"The network is given {numbers.format(shape_text(tensor.shape))}: look at what "
        f"{'its embedding' if name else 'a layer'} returns, {arg('method')} grad-cam {arg('layer')} {name or 'NAME'}."
    )


def padded_extents(network: nn.Module, batch: Batch, grid: tuple[int, ...]) -> list[Extent]:
    """Return the area of each input that a map covers: the input with the network's padding, or without a margin.

    The transform of torchvision's detectors is called. `grid` is (l,), (h, w) or (d, h, w).
    """
    transform: Any = attribute_of(network, "transform")
    kind = type(transform)
    pictures = next(iter((*batch.args, *batch.kwargs.values())), None)
    is_map = len(grid) == PICTURE_AXES and isinstance(pictures, list | Tensor)  # and no words
    if is_map and f"{kind.__module__}.{kind.__qualname__}" == _DETECTORS_TRANSFORM:
        with torch.no_grad():
            made, _ = transform(copied(pictures))
        height, width = made.tensors.shape[-2:]
        return [(0.0, 0.0, height / rows, width / columns) for rows, columns in made.image_sizes]
    covered = (1.0,) * len(grid)
    if isinstance(pictures, Tensor) and pictures.dim() == 2 + PICTURE_AXES and is_map:
        merges = any(_MERGING in type(module).__name__ for module in network.modules())
        first = next((module for module in network.modules() if isinstance(module, nn.Conv2d)), None)
        stride = attribute_of(first, "stride")  # layers of exported programs have none
        if stride is not None and (merges or attribute_of(first, "kernel_size") == stride):
            sides = zip(pictures.shape[2:], grid, stride, strict=True)
            covered = tuple(_covered(*side, merges=merges) for side in sides)
    return [(*((0.0,) * len(grid)), *covered)] * len(batch.indices)


def _covered(size: int, cells: int, patch: int, *, merges: bool) -> float:
    """Return the length that a map covers as a share of the side, which need not be a whole number of patches.

    Above 1 where the network pads, below 1 where its patches leave out a margin. Merged patches cover twice as much.
    """
    covered, wanted = patch * cells, size - size % patch
    while merges and covered < wanted:
        covered *= 2
    return covered / size if merges or wanted <= covered < size + patch else 1.0
