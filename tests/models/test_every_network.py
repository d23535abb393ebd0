"""The networks with names build and run, on the meta device or on a real one, on inputs of their own preprocessing."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hookscope.models.construction import LoadedModel, skipped_initialisation
from hookscope.models.spec import load_model
from hookscope.results.inputs import Preprocessing
from tests.models.saved import tensors_of

pytestmark = pytest.mark.exhaustive

# One for each kind of input: the tables of names and shapes are compared for all.
# Detection counts boxes, which the meta device cannot.
DETECTION = ["keypointrcnn_resnet50_fpn", "retinanet_resnet50_fpn"]
INT8 = ["quantized_resnet18"]
ON_META = ["vit_b_16", "maxvit_t", "regnet_y_400mf", "fcn_resnet101", "mc3_18", "raft_small"]
REAL = [*DETECTION, *INT8, *ON_META, "demo"]

# Networks that take pictures of any size; their own is for the meta device, where it costs nothing.
ANY_SIZE = ("convnext", "efficientnet", "r2plus1d", "r3d", "regnet", "resne", "swin", "vgg", "wide_resnet")


def inputs_for(preprocessing: Preprocessing, device: str = "cpu", size: tuple[int, int] | None = None) -> list[object]:
    """Return the positional inputs of a network, of a size or else the smallest that its preprocessing allows."""
    height, width = size or preprocessing.crop or (128, 160)
    assert height % preprocessing.multiple == width % preprocessing.multiple == 0
    image = torch.rand(preprocessing.channels, height, width, device=device)
    match preprocessing.kind:
        case "detection":
            return [[image]]
        case "video":
            return [image[None, :, None].repeat(1, 1, preprocessing.frames, 1, 1)]
        case "flow":
            return [image[None], image[None]]
        case "image":
            return [image[None]]


def check_output(loaded: LoadedModel, output: object) -> None:
    actual = tensors_of(output)
    assert actual
    classes = {"image": 1000, "video": 400}.get(loaded.preprocessing.kind)
    if classes and isinstance(output, torch.Tensor):
        assert output.shape == (1, classes)
    if isinstance(output, dict):  # segmentation: Pascal VOC's 20 classes and background, at the input's size
        assert output["out"].shape == (1, 21, 128, 160)
    if loaded.preprocessing.kind == "flow":
        assert actual[-1].shape == (1, 2, 128, 160)
    if loaded.preprocessing.kind == "detection":
        assert {"boxes", "labels", "scores"} <= output[0].keys()  # type: ignore[index]


@pytest.mark.parametrize("name", REAL)
def test_network_builds_and_runs(name: str) -> None:
    # The values of weights, up to 645 million of them, matter where boxes are chosen and where they become int8.
    with nullcontext() if name in DETECTION or name in INT8 else skipped_initialisation():
        loaded = load_model(name, weights="none")
    assert isinstance(loaded.module, nn.Module)
    assert loaded.info.name == name
    assert loaded.info.parameter_count > 500_000
    loaded.module.eval()
    if hasattr(getattr(loaded.module, "transform", None), "min_size") and "ssd" not in name:
        loaded.module.transform.min_size = (128,)  # instead of 800: the picture stays as it is
    if hasattr(loaded.module, "rpn"):
        loaded.module.rpn._post_nms_top_n["testing"] = 20  # instead of 1000 proposals
    with torch.no_grad():
        output = loaded.module(*inputs_for(loaded.preprocessing, size=(64, 64) if name.startswith(ANY_SIZE) else None))
    check_output(loaded, output)
