"""Every name that MODEL accepts builds and runs, on a real device, on an input made by its own preprocessing."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hookscope.models import LoadedModel, build_on_meta, load_model, model_names
from hookscope.results.inputs import Preprocessing


def inputs_for(preprocessing: Preprocessing, device: str = "cpu") -> list[object]:
    """Return the positional inputs of a network, the smallest that its preprocessing allows."""
    height, width = preprocessing.crop or (128, 160)
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


def tensors(output: object) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    else:
        for value in output.values() if isinstance(output, dict) else output:  # type: ignore[attr-defined]
            yield from tensors(value)


def check_output(loaded: LoadedModel, output: object) -> None:
    found = list(tensors(output))
    assert found
    classes = {"image": 1000, "video": 400}.get(loaded.preprocessing.kind)
    if classes and isinstance(output, torch.Tensor):
        assert output.shape == (1, classes)
    if isinstance(output, dict):  # segmentation: Pascal VOC's 20 classes and background, at the input's size
        assert output["out"].shape == (1, 21, 128, 160)
    if loaded.preprocessing.kind == "flow":
        assert found[-1].shape == (1, 2, 128, 160)
    if loaded.preprocessing.kind == "detection":
        assert {"boxes", "labels", "scores"} <= output[0].keys()  # type: ignore[index]


@pytest.mark.parametrize("name", model_names())
def test_network_builds_and_runs(name: str) -> None:
    loaded = load_model(name, weights="none")
    assert isinstance(loaded.module, nn.Module)
    assert loaded.info.name == name
    assert loaded.info.parameter_count > 500_000
    loaded.module.eval()
    with torch.no_grad():
        output = loaded.module(*inputs_for(loaded.preprocessing))
    check_output(loaded, output)


# Detection counts boxes, which the meta device cannot; int8 networks stay on the CPU.
WITH_META_FORWARD = [name for name in model_names() if not any(w in name for w in ("rcnn", "retina", "ssd", "fcos"))]


@pytest.mark.parametrize("name", WITH_META_FORWARD)
def test_network_runs_on_the_meta_device(name: str) -> None:
    loaded = build_on_meta(name, weights="none")
    loaded.module.eval()
    device = next(iter(loaded.module.state_dict().values())).device
    assert device.type == ("cpu" if name.startswith("quantized_") else "meta")
    with torch.no_grad():
        output = loaded.module(*inputs_for(loaded.preprocessing, device.type))
    check_output(loaded, output)
