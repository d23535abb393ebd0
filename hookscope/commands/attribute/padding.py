"""The area that a map covers where its network adds to its input, below and at the right."""

from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks.attributes import attribute_of
from hookscope.inputs import Batch
from hookscope.inputs.batches import copied
from hookscope.results.concentration import Extent

# Gives pictures of a batch one size: zeros are added below and at the right.
_DETECTORS_TRANSFORM = "torchvision.models.detection.transform.GeneralizedRCNNTransform"
# Swin's name for the layer that halves a grid; to one of odd size it adds a row below or a column at the right.
_MERGING = "PatchMerging"
_PICTURE_AXES = 4  # (N, C, H, W)


def padded_extents(network: nn.Module, batch: Batch, grid: tuple[int, ...]) -> list[Extent]:
    """Return for each input the area that a map covers if it is stretched over it and what the network adds to it.

    Args:
        network: Its transform may be called, if it is one of torchvision's detectors.
        batch: The inputs.
        grid: Of the map: (l,), (h, w) or (d, h, w).
    """
    transform: Any = attribute_of(network, "transform")
    kind = type(transform)
    pictures = batch.args[0] if batch.args else None
    is_map = len(grid) == _PICTURE_AXES - 2  # and no words
    if isinstance(pictures, list) and is_map and f"{kind.__module__}.{kind.__qualname__}" == _DETECTORS_TRANSFORM:
        with torch.no_grad():
            made, _ = transform(copied(pictures))
        height, width = made.tensors.shape[-2:]
        return [(0.0, 0.0, height / rows, width / columns) for rows, columns in made.image_sizes]
    covered = (1.0,) * len(grid)
    if isinstance(pictures, Tensor) and pictures.dim() == _PICTURE_AXES and is_map and _merges(network):
        patch = next((module.stride for module in network.modules() if isinstance(module, nn.Conv2d)), (1, 1))
        rows, columns = (_covered(*sizes) for sizes in zip(pictures.shape[2:], grid, patch, strict=True))
        covered = rows, columns
    return [(*((0.0,) * len(grid)), *covered)] * len(batch.indices)


def _merges(network: nn.Module) -> bool:
    return any(_MERGING in type(module).__name__ for module in network.modules())


def _covered(size: int, cells: int, patch: int) -> float:
    """Return how much of a side is covered, in shares of it; the patches of the first layer may not cover all of it."""
    covered, wanted = patch * cells, size - size % patch
    while covered < wanted:
        covered *= 2
    return max(covered / size, 1.0)
