"""`hookscope.attribute` over many pictures: batches, errors, checks, and that nothing is changed."""

import gc
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from torchvision.models import detection, resnet18

import hookscope
from hookscope.errors import HookscopeError, ModelError, UnfitInputError, UsageError
from hookscope.hooks.autograd import graph_nodes
from tests import networks as small
from tests.commands.attribute.small_network import Small
from tests.networks import batch_of

CAT = Path(__file__).parents[3] / "sample_images" / "cat.jpg"

attribute = partial(hookscope.attribute, sanity="none")


# --- Many pictures ---


def test_batches_give_what_each_picture_gives_alone(network: nn.Module, pictures: Tensor) -> None:
    together = attribute(network, pictures, top=2, batch_size=2)
    assert [heat_map.input_index for heat_map in together.maps] == [0, 0, 1, 1, 2, 2]
    for at, picture in enumerate(pictures):
        alone = attribute(network, picture[None], top=2)
        for one, other in zip(together.maps[2 * at : 2 * at + 2], alone.maps, strict=True):
            assert one.target.label == other.target.label
            np.testing.assert_allclose(one.values, other.values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("own_code", [False, True])
def test_the_backward_pass_ends_at_the_layer(monkeypatch: pytest.MonkeyPatch, own_code: bool) -> None:
    network = resnet18(num_classes=4)
    if own_code:
        network.register_forward_hook(lambda *_: None)
    backward = Tensor.backward
    nodes: list[str] = []

    def noted(score: Tensor, **options: Any) -> None:
        nodes.extend(type(node).__name__ for node in graph_nodes(score))
        backward(score, **options)

    monkeypatch.setattr(Tensor, "backward", noted)
    attribute(network, torch.randn(2, 3, 64, 64), layer="/^layer4$/", target="1")
    assert "AddmmBackward0" in nodes  # of the head
    assert "ConvolutionBackward0" not in nodes


@pytest.mark.exhaustive
def test_nothing_but_maps_is_kept_of_many_pictures(network: nn.Module) -> None:
    held: list[int] = []

    def count(_done: int, _all: int) -> None:
        gc.collect()
        held.append(sum(thing.numel() for thing in gc.get_objects() if type(thing) is Tensor))

    attribute(network, torch.randn(24, 3, 16, 16), batch_size=4, on_progress=count)
    assert len(held) == 6
    assert held[-1] <= held[1]


class Bright(Small):
    def forward(self, x: Tensor) -> Tensor:
        if (x > 90).any():
            raise ValueError("too bright")
        return super().forward(x)


def test_a_picture_that_the_network_raises_on_is_left_out(pictures: Tensor) -> None:
    pictures[1] = 100
    with pytest.raises(ModelError, match=r"Bright raised in its forward pass at \(model\) \(Bright\).*too bright"):
        attribute(Bright(), pictures)
    errors: list[HookscopeError] = []
    looks = attribute(Bright(), pictures, on_error=errors.append)
    assert len(looks.inputs) == len(looks.maps) == 2
    assert [type(error) for error in errors] == [UnfitInputError]
    pictures[:] = 100
    with pytest.raises(ModelError, match="too bright"):
        attribute(Bright(), pictures, on_error=errors.append)


def test_a_picture_whose_gradient_is_zero_is_left_out() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        network[0].bias.fill_(-1.0)
    pictures = torch.randn(3, 3, 8, 8)
    pictures[1] = 0  # no ReLU opens
    with pytest.raises(UnfitInputError, match="the gradient of 'class 0' is zero everywhere at layer 0"):
        attribute(network, pictures, target=0, layer="0")
    errors: list[HookscopeError] = []
    looks = attribute(network, pictures, target=0, layer="0", on_error=errors.append)
    assert len(looks.inputs) == 2
    assert len(errors) == 1


def test_an_input_for_which_the_layer_does_not_run_is_left_out() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.other, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.other(self.conv(x)) if x.mean() > 0 else self.conv(x)
            output: Tensor = self.head(x.mean((2, 3)))
            return output

    pictures = torch.stack([torch.rand(3, 8, 8), -torch.rand(3, 8, 8)])
    with pytest.raises(UnfitInputError, match=r"^tensor\[1\]: no layer that `layer` selects returns a map of it\.$"):
        attribute(Branches(), pictures, layer="other", batch_size=1)


def test_a_score_that_is_no_number_is_a_warning(network: nn.Module, pictures: Tensor) -> None:
    with torch.no_grad():
        network.fc.bias[2] = float("inf")  # type: ignore[union-attr, operator]
    looks = attribute(network, pictures[:1])
    assert looks.maps[0].target.score == float("inf")
    assert looks.warnings == ("The score of 'class 2' for tensor is Inf: look at `hookscope activations`.",)


def test_inputs_of_one_name_are_told_apart(network: nn.Module, pictures: Tensor, tmp_path: Path) -> None:
    with torch.no_grad():
        network.fc.bias[2] = float("inf")  # type: ignore[union-attr, operator]
    looks = attribute(network, pictures[:2], target=2)
    assert "\ntensor[1] class 2" in str(looks)
    sentence = "The score of 'class 2' for tensor[{}] is Inf: look at `hookscope activations`."
    assert looks.warnings == (sentence.format(0), sentence.format(1))
    files = [tmp_path / name for name in ("a/1.png", "b/1.png", "b/2.png")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(file)
    shown = str(attribute(network, [*files, files[0]], target=1))
    names = [line.split()[0] for line in shown.splitlines() if " class 1 " in line and "half" not in line]
    assert names == ["a/1.png[0]", "b/1.png", "2.png", "a/1.png[3]"]


# --- Nothing is changed ---


def everything(network: nn.Module) -> dict[str, Any]:
    held: dict[str, Any] = {"modes": [module.training for module in network.modules()]}
    held["hooks"] = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in network.modules()]
    for name, parameter in (*network.named_parameters(), *network.named_buffers()):
        gradient = None if parameter.grad is None else parameter.grad.clone()
        held[name] = (
            id(parameter),
            parameter.requires_grad,
            parameter.is_inference(),
            parameter.detach().clone(),
            gradient,
        )
    return held


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        if isinstance(value, tuple):
            assert value[:3] == after[name][:3]
            assert torch.equal(value[3], after[name][3])
            assert (value[4] is None) == (after[name][4] is None)
            assert value[4] is None or torch.equal(value[4], after[name][4])
        else:
            assert value == after[name]


def resnet_in_use() -> nn.Module:
    """Return a network half frozen, in both modes, with gradients and a hook that its owner counts on."""
    network = small.small_resnet()
    network(torch.randn(2, 3, 64, 64)).sum().backward()
    network.layer1.eval()
    network.conv1.weight.requires_grad_(False)
    network.layer2.register_forward_hook(lambda *_: None)
    return network


def inference_resnet() -> nn.Module:
    with torch.inference_mode():
        return small.small_resnet()


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (resnet_in_use, {"layer": ["layer3", "layer4"], "target": "0,1"}),
        (inference_resnet, {"method": "guided-backprop"}),
        (resnet_in_use, {"layer": "fc"}),
        (inference_resnet, {"target": 5000}),
        (resnet_in_use, {"sanity": "quick", "target": 3}),
    ],
)
@pytest.mark.sample("resnet_in_use-options0", "inference_resnet-options1")
def test_the_network_comes_out_as_it_went_in(build: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    network = build()
    before = everything(network)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[union-attr]
    failed = False
    try:
        hookscope.attribute(
            network, torch.randn(2, 3, 64, 64, generator=torch.Generator()), **{"sanity": "none"} | options
        )
    except UsageError:
        failed = True
    assert failed == (options.get("layer") == "fc" or options.get("target") == 5000)
    assert_same(before, everything(network))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])  # type: ignore[arg-type]


def test_the_network_comes_out_as_it_went_in_when_it_raises(pictures: Tensor) -> None:
    network = Bright()
    before = everything(network)
    with pytest.raises(ModelError):
        attribute(network, pictures + 100, layer="first")
    with pytest.raises(ModelError):
        attribute(network, pictures + 100)
    assert_same(before, everything(network))


@pytest.mark.parametrize(
    ("method", "block"),
    [("grad-cam", torch.inference_mode), ("gradient", torch.no_grad), ("guided-backprop", torch.inference_mode)],
)
def test_it_works_where_gradients_are_off_and_parameters_frozen(
    network: nn.Module, pictures: Tensor, method: str, block: Any
) -> None:
    expected = attribute(network, pictures, method=method).maps[0].values
    network.requires_grad_(False)
    with block():
        np.testing.assert_array_equal(attribute(network, pictures.clone(), method=method).maps[0].values, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_give_maps_in_float32(network: nn.Module, pictures: Tensor, dtype: torch.dtype) -> None:
    expected = attribute(network, pictures, target=1, method="hires-cam").maps[0].values
    looks = attribute(network.to(dtype), pictures, target=1, method="hires-cam")
    assert looks.dtype == str(dtype).removeprefix("torch.")
    assert looks.maps[0].values.dtype == np.float32
    np.testing.assert_allclose(looks.maps[0].values, expected, atol=0.03 * np.abs(expected).max())


def test_a_network_that_overwrites_its_input_leaves_the_pictures_alone(pictures: Tensor) -> None:
    network = small.Written(
        lambda net, x: net.fc(net.conv(x.mul_(2)).mean((2, 3))), conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(4, 2)
    )
    before = pictures.clone()
    attribute(network, pictures)
    assert torch.equal(pictures, before)


# --- Checks ---


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"layer": ["first", "second"]}, {"batch_size": 1}, {"sanity": "full"}, {"method": "guided-backprop"}],
)
def test_activation_checkpointing_changes_no_map(
    pictures: Tensor, options: dict[str, Any], use_reentrant: bool
) -> None:
    class Checkpointed(Small):
        def forward(self, x: Tensor) -> Tensor:
            second = checkpoint(lambda y: self.second(self.first(y).relu()), x, use_reentrant=use_reentrant)
            return self.fc(second.mean((2, 3)))

    class Plain(Small):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.second(self.first(x).relu()).mean((2, 3)))

    torch.manual_seed(3)
    network, plain = Checkpointed(), Plain()
    plain.load_state_dict(network.state_dict())
    actual, expected = (hookscope.attribute(module, pictures, target=1, **options) for module in (network, plain))
    assert len(actual.maps) == len(pictures) * len(options.get("layer", "1"))
    for one, other in zip(actual.maps, expected.maps, strict=True):
        assert np.array_equal(one.values, other.values)
        assert (one.layer, one.extent) == (other.layer, other.extent)
    assert actual.sanity == expected.sanity
    assert "apply" not in vars(CheckpointFunction)


@pytest.mark.exhaustive
def test_checks_come_with_the_maps() -> None:
    looks = hookscope.attribute("demo", CAT, target="Egyptian cat")
    assert [(check.name, check.passed) for check in looks.sanity] == [
        ("weights", True),
        ("class", True),
        ("deletion", None),  # blurring the cat raises its probability
    ]
    assert looks.timings["sanity"] > 0


class FindsFewer(nn.Module):
    """Finds two boxes of class 1 in the first input of a batch, one of class 2 in the second, none in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        features = self.backbone(x).exp().mean((1, 2, 3))
        labels = [torch.tensor(kinds, dtype=torch.long) for kinds in ([1, 1], [2], [])]
        return [
            {"boxes": torch.ones(len(kinds), 4), "labels": kinds, "scores": feature.expand(len(kinds))}
            for kinds, feature in zip(labels, features, strict=True)
        ]


def test_which_boxes_an_input_lacks_is_said_and_fewer_than_the_best_five_are_all() -> None:
    best = hookscope.attribute(FindsFewer(), torch.rand(3, 3, 8, 8), top=5, sanity="none")
    assert [heat_map.input_index for heat_map in best.maps] == [0, 0, 1]
    assert best.warnings == ("The network found no box in tensor[2], so there is no such map.",)
    classes = hookscope.attribute(FindsFewer(), torch.rand(3, 3, 8, 8), target=[1, 2], sanity="none")
    assert [warning.split(",")[0] for warning in classes.warnings] == [
        "The network found no '2' in tensor[0]",
        "The network found no '1' in tensor[1]",
        "The network found no '1' in tensor[2]",
        "The network found no '2' in tensor[2]",
    ]


@pytest.mark.exhaustive
def test_checks_that_a_network_has_nothing_for_are_left_out() -> None:
    torch.manual_seed(0)
    detector = detection.RetinaNet(small.pyramid(), 3, detections_per_img=5, score_thresh=0.0, **small.SMALL)
    looks = hookscope.attribute(detector, batch_of([torch.rand(3, 64, 64)]))
    assert [check.name for check in looks.sanity] == ["weights"]
