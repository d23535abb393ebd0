"""Default targets for detection networks, which cannot run in train mode without targets."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks.attributes import attribute_of
from hookscope.hooks.selection import unwrap
from hookscope.inputs.batches import Batch

# By name, so that torchvision is not imported for other networks.
_DETECTORS = frozenset(
    {
        "torchvision.models.detection.fcos.FCOS",
        "torchvision.models.detection.generalized_rcnn.GeneralizedRCNN",  # with boxes, masks or keypoints
        "torchvision.models.detection.retinanet.RetinaNet",
        "torchvision.models.detection.ssd.SSD",  # SSDlite too
    }
)

_COCO_KEYPOINTS = 17


def default_targets_text(model: nn.Module) -> str:
    """Return what `with_default_targets` gives a network, in words for people; "" for one that takes no targets."""
    network = unwrap(model)
    if not _is_detector(network):
        return ""
    parts = [f"one box over the middle half of the picture, class {_label(network)}"]
    if _has(network, "mask"):
        parts.append("its mask the whole box")
    if _has(network, "keypoint"):
        parts.append(f"its {_keypoint_count(network)} keypoints at the centre")
    return ", ".join(parts)


def with_default_targets(model: nn.Module, batch: Batch) -> Batch:
    """Return the batch with a target for each picture, as torchvision's detection networks need in train mode.

    The target is a single object, whose box has half the height and half the width of the picture, in its
    middle. The records say so. A network of another kind, and a batch that has targets, stay as they are. Targets are
    boxes (1, 4) in pixels x1, y1, x2, y2, labels (1,), and where the network has heads for them masks (1, H, W) and
    keypoints (1, K, 3), each x, y, 1 for visible; pictures (C, H, W) are on their device and in their dtype already.
    """
    network = unwrap(model)
    pictures = batch.args[0] if len(batch.args) == 1 else None
    if not _is_detector(network) or not isinstance(pictures, list) or any(picture.dim() != 3 for picture in pictures):
        return batch
    step = f"target for training: {default_targets_text(network)}"
    records = tuple(replace(record, steps=(*record.steps, step)) for record in batch.records)
    return replace(batch, args=(pictures, [_target(network, picture) for picture in pictures]), records=records)


def _is_detector(network: nn.Module) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" in _DETECTORS for kind in type(network).__mro__)


def _target(network: nn.Module, picture: Tensor) -> dict[str, Tensor]:
    height, width = picture.shape[1:]
    corners = [width / 4, height / 4, width * 3 / 4, height * 3 / 4]
    target = {
        "boxes": torch.tensor([corners], dtype=picture.dtype, device=picture.device),
        "labels": torch.tensor([_label(network)], device=picture.device),
    }
    if _has(network, "mask"):
        mask = torch.zeros(1, height, width, dtype=torch.uint8, device=picture.device)
        # Whole pixels, and at least one.
        mask[:, height // 4 : -(-height * 3 // 4), width // 4 : -(-width * 3 // 4)] = 1
        target["masks"] = mask
    if _has(network, "keypoint"):
        # In float32, which torchvision insists on.
        centre = torch.tensor([width / 2, height / 2, 1.0], dtype=torch.float32, device=picture.device)
        target["keypoints"] = centre.repeat(1, _keypoint_count(network), 1)  # (1, K, 3)
    return target


def _label(network: Any) -> int:
    """Return class 1, 0 being the background for most; 0 for a head with a single class."""
    head = attribute_of(attribute_of(network, "head"), "classification_head")
    return min(1, int(attribute_of(head, "num_classes", 2)) - 1)


def _has(network: Any, head: str) -> bool:
    return attribute_of(attribute_of(network, "roi_heads"), f"{head}_predictor") is not None


def _keypoint_count(network: Any) -> int:
    scores = attribute_of(network.roi_heads.keypoint_predictor, "kps_score_lowres")
    return int(attribute_of(scores, "out_channels", _COCO_KEYPOINTS))
