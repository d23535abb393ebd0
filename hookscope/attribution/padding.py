"""How much of a layer's map lies outside the network's input: what networks add below and at the right."""

from typing import Any

import torch
from torch import Tensor, nn

from hookscope.inputs import Batch
from hookscope.inputs.batches import copied

# Gives pictures of a batch one size: zeros are added below and at the right.
_DETECTORS_TRANSFORM = "torchvision.models.detection.transform.GeneralizedRCNNTransform"
# Swin's name for the layer that halves a grid; to one of odd size it adds a row below or a column at the right.
_MERGING = "PatchMerging"
_PICTURE_AXES = 4  # (N, C, H, W)


def paddings(network: nn.Module, batch: Batch, grid: tuple[int, int]) -> list[tuple[float, float]]:
    """Return for each input which share of a map's height, and of its width, is not the input.

    Args:
        network: Its transform may be called, if it is one of torchvision's detectors.
        batch: The inputs.
        grid: (h, w) of the map.
    """
    transform: Any = getattr(network, "transform", None)
    kind = type(transform)
    pictures = batch.args[0] if batch.args else None
    if isinstance(pictures, list) and f"{kind.__module__}.{kind.__qualname__}" == _DETECTORS_TRANSFORM:
        with torch.no_grad():
            made, _ = transform(copied(pictures))
        height, width = made.tensors.shape[-2:]
        return [(1 - rows / height, 1 - columns / width) for rows, columns in made.image_sizes]
    shares = (0.0, 0.0)
    if isinstance(pictures, Tensor) and pictures.dim() == _PICTURE_AXES and _merges(network):
        patch = next((each.stride for each in network.modules() if isinstance(each, nn.Conv2d)), (1, 1))
        rows, columns = (_share(*sizes) for sizes in zip(pictures.shape[2:], grid, patch, strict=True))
        shares = rows, columns
    return [shares] * len(batch.indices)


def _merges(network: nn.Module) -> bool:
    return any(_MERGING in type(each).__name__ for each in network.modules())


def _share(size: int, cells: int, patch: int) -> float:
    """Return the share of a side that lies outside; the patches of the first layer may not cover all of it."""
    covered, wanted = patch * cells, size - size % patch
    while covered < wanted:
        covered *= 2
    return max(covered - size, 0) / covered
