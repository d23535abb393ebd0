"""Detection networks in train mode get targets whose numbers are known, and their own losses add up."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.ssd import SSD

from hookscope.inputs.batches import Batch
from hookscope.inputs.noise import noise_batch
from hookscope.inspection.detection import default_targets_text, with_default_targets
from hookscope.results.inputs import InputRecord
from tests.inspections import inspect_gradients
from tests.networks import pyramid, small_resnet

SMALL = {"min_size": 64, "max_size": 64}
FEW_BOXES = {**SMALL, "box_batch_size_per_image": 8, "rpn_post_nms_top_n_train": 20}


def mask_rcnn() -> nn.Module:
    return detection.MaskRCNN(pyramid(), 3, **FEW_BOXES)


def keypoint_rcnn() -> nn.Module:
    head, predictor = KeypointRCNNHeads(32, (16,)), KeypointRCNNPredictor(16, 5)
    return detection.KeypointRCNN(pyramid(), 2, keypoint_head=head, keypoint_predictor=predictor, **FEW_BOXES)


def ssd() -> nn.Module:
    layers = IntermediateLayerGetter(small_resnet(), {"layer3": "0", "layer4": "1"})
    return SSD(layers, DefaultBoxGenerator([[2], [2]]), (64, 64), 3)


# Families, with the losses that torchvision's reference training prints for it.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "Faster R-CNN": (
        lambda: detection.FasterRCNN(pyramid(), 3, **FEW_BOXES),
        {"loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"},
    ),
    "Keypoint R-CNN": (
        keypoint_rcnn,
        {"loss_classifier", "loss_box_reg", "loss_keypoint", "loss_objectness", "loss_rpn_box_reg"},
    ),
    "SSD": (ssd, {"bbox_regression", "classification"}),
}


def pictures(*sizes: tuple[int, int]) -> Batch:
    records = tuple(InputRecord("a.png", None, None, (3, *size), ("resized",)) for size in sizes)
    return Batch(([torch.rand(3, *size) for size in sizes],), tuple(range(len(sizes))), records)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sample("Faster R-CNN", "SSD")
def test_loss_and_gradients_in_train_mode_are_those_of_the_networks_own_losses(name: str) -> None:
    build, expected_losses = NETWORKS[name]
    torch.manual_seed(1)
    network = build()
    batch = with_default_targets(network, noise_batch((2, 3, 64, 64), 0, "detection"))
    alone = copy.deepcopy(network).train()
    torch.manual_seed(7)  # boxes are sampled
    losses = alone(*copy.deepcopy(batch.args))
    assert losses.keys() == expected_losses
    total = torch.stack(list(losses.values())).sum()
    total.backward()
    seen: dict[str, Tensor] = {}
    inspection = inspect_gradients(
        network, batch, mode="train", seed=7, on_tensor=lambda label, tensor, _: seen.update({label: tensor.clone()})
    )
    assert inspection.loss.name == "loss dict sum"
    assert set(inspection.loss.outputs) == {f"(model)[{loss!r}]" for loss in expected_losses}
    assert total.isfinite()
    assert all(loss.item() > 0 for loss in losses.values()), "every head has something to learn from the target"
    assert inspection.loss.value == total.item()
    expected = {f"{parameter} grad": p.grad for parameter, p in alone.named_parameters() if p.grad is not None}
    assert expected
    assert expected.keys() == {label for label in seen if label.endswith(" grad")}
    for label, gradient in expected.items():
        torch.testing.assert_close(seen[label], gradient, rtol=1e-3, atol=1e-6 * float(gradient.abs().max()))


def test_gradients_of_inputs_arrive_beside_targets() -> None:
    network = NETWORKS["SSD"][0]()
    batch = with_default_targets(network, noise_batch((2, 3, 64, 64), 0, "detection"))
    plain = inspect_gradients(network, batch, mode="train")
    inspection = inspect_gradients(network, batch, mode="train", include_inputs=True)
    assert inspection.loss == plain.loss
    assert any(row.role == "input" for row in inspection.gradients)
    assert not batch.args[1][0]["boxes"].requires_grad


def test_the_box_covers_the_middle_half_of_each_picture() -> None:
    network = ssd()
    batch = with_default_targets(network, pictures((40, 60), (3, 1)))
    first, second = batch.args[1]
    assert first.keys() == second.keys() == {"boxes", "labels"}
    assert first["boxes"].tolist() == [[15, 10, 45, 30]]
    assert second["boxes"].tolist() == [[0.25, 0.75, 0.75, 2.25]]
    assert first["labels"].tolist() == [1]
    assert first["labels"].dtype == torch.int64


def test_masks_are_the_whole_box_in_whole_pixels() -> None:
    network = mask_rcnn()
    batch = with_default_targets(network, pictures((40, 60), (5, 7), (1, 1)))
    first, second, third = (target["masks"] for target in batch.args[1])
    assert first.shape == (1, 40, 60)
    assert first.dtype == torch.uint8
    assert int(first.sum()) == int(first[0, 10:30, 15:45].sum()) == 20 * 30
    assert second.nonzero()[:, 1:].unique(dim=0).tolist() == [[y, x] for y in (1, 2, 3) for x in (1, 2, 3, 4, 5)]
    assert third.tolist() == [[[1]]]


def test_keypoints_lie_visible_at_the_centre_as_many_as_the_head_has() -> None:
    network = keypoint_rcnn()
    for dtype in (torch.float32, torch.float64):
        batch = pictures((40, 60))
        batch.args[0][0] = batch.args[0][0].to(dtype)
        (target,) = with_default_targets(network, batch).args[1]
        assert target["boxes"].dtype == dtype
        assert target["keypoints"].dtype == torch.float32, "torchvision takes no other"
        assert target["keypoints"].tolist() == [[[30, 20, 1]] * 5]


def test_the_only_class_of_a_head_is_the_one_of_the_box() -> None:
    backbone = BackboneWithFPN(small_resnet(), {"layer4": "0"}, [512], 32)
    network = detection.FCOS(backbone, num_classes=1, min_size=64, max_size=64)
    assert default_targets_text(network) == "one box over the middle half of the picture, class 0"
    (target,) = with_default_targets(network, pictures((40, 60))).args[1]
    assert target["labels"].tolist() == [0]


def test_what_is_given_is_said() -> None:
    network = keypoint_rcnn()
    words = "one box over the middle half of the picture, class 1, its 5 keypoints at the centre"
    assert default_targets_text(network) == words
    batch = pictures((40, 60))
    with_targets = with_default_targets(network, batch)
    assert with_targets.records[0].steps == ("resized", f"target for training: {words}")
    assert len(batch.args) == 1, "the batch given stays as it is"
    assert with_targets.args[0] is batch.args[0]


class Own(detection.RetinaNet):
    """A user's own kind of a network of torchvision."""


def test_a_users_own_kind_of_a_detector_and_a_wrapped_one_get_targets_too() -> None:
    backbone = BackboneWithFPN(small_resnet(), {"layer4": "0"}, [512], 16)
    anchors = detection.anchor_utils.AnchorGenerator(((32,),), ((1.0,),))
    network = nn.DataParallel(Own(backbone, num_classes=2, anchor_generator=anchors, min_size=64, max_size=64))
    assert len(with_default_targets(network, pictures((40, 60))).args) == 2


def test_other_networks_and_batches_that_have_targets_stay_as_they_are() -> None:
    batch = pictures((40, 60))
    assert with_default_targets(nn.Identity(), batch) is batch
    assert default_targets_text(nn.Identity()) == ""
    network = ssd()
    own = Batch((batch.args[0], [{"boxes": torch.ones(1, 4)}]), batch.indices, batch.records)
    assert with_default_targets(network, own) is own
    flat = Batch(([torch.ones(10)],), (0,), batch.records)
    assert with_default_targets(network, flat) is flat
