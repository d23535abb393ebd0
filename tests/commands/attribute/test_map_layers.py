"""`hookscope.attribute` on one picture: which layer is looked at, and what is refused."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.ao.nn.quantized import FloatFunctional
from torchvision.models import detection

import hookscope
from hookscope.errors import HookscopeError, LayerNotFoundError, UsageError
from tests import networks as small
from tests.commands.attribute.small_network import Small
from tests.networks import Written, batch_of

CAT = Path(__file__).parents[3] / "sample_images" / "cat.jpg"

attribute = partial(hookscope.attribute, sanity="none")


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3)


# --- What the demo network sees ---


def test_the_map_of_egyptian_cat_lies_on_the_cat() -> None:
    """The cat fills the picture but for the right edge, which shows a wall: one column of seven."""
    looks = attribute("demo", CAT, target="Egyptian cat")
    (only,) = looks.maps
    assert only.target.label == "Egyptian cat"
    assert only.target.index == 285
    assert only.values[:, :6].sum() / only.values.sum() > 0.95
    assert only.values.shape == looks.layers[0].grid == (7, 7)


@pytest.mark.parametrize(("method", "corner"), [("grad-cam", (0, 0)), ("layer-cam", (112, 112))])
def test_the_map_finds_the_cat_in_the_corner_it_is_pasted_into(corner: tuple[int, int], method: Any) -> None:
    picture = Image.new("RGB", (224, 224), (124, 116, 104))
    picture.paste(Image.open(CAT).convert("RGB").resize((112, 112)), corner)
    (only,) = attribute("demo", picture, target="Egyptian cat", method=method, resize="none", crop="none").maps
    left, top = (place * 7 // 224 for place in corner)
    # The corner's four of seven rows and columns are a third of the map.
    assert only.values[top : top + 4, left : left + 4].sum() / only.values.sum() > 0.85


# --- Which layer ---


def test_the_layer_is_the_last_that_says_where(network: nn.Module, pictures: Tensor) -> None:
    (layer,) = attribute(network, pictures).layers
    assert (layer.label, layer.kind, layer.shape, layer.grid) == ("second", "Conv2d", (3, 8, 8, 8), (8, 8))
    assert layer.reason == "last spatial output that reaches the target"


def test_containers_count_under_their_own_name_and_copies_do_not() -> None:
    resnet = attribute(torchvision.models.resnet18(weights=None), torch.randn(1, 3, 64, 64))
    assert [layer.label for layer in resnet.layers] == ["layer4"]
    # VGG's adaptive pooling to the size that there is copies what `features` returned.
    vgg = attribute(small.vgg_with_a_small_head(), torch.randn(1, 3, 224, 224))
    assert [layer.label for layer in vgg.layers] == ["features"]


def test_a_network_s_own_score_map_is_not_its_layer() -> None:
    torch.manual_seed(0)
    squeezenet = attribute(torchvision.models.squeezenet1_1(weights=None), torch.randn(1, 3, 64, 64))
    assert squeezenet.layers[0].label == "features"
    assert squeezenet.layers[0].reason.endswith("classifier.2 holds the scores themselves")
    segmentation = attribute(small.small_fcn(), torch.randn(2, 3, 65, 65), target="0,1-2")
    assert segmentation.layers[0].label == "classifier.2"
    assert segmentation.maps[1].target.label.startswith("class 1 - class 2")


def test_behind_the_last_block_of_a_vit_only_the_class_token_reaches_the_target(vit: nn.Module) -> None:
    (layer,) = attribute(vit, torch.randn(2, 3, 64, 64)).layers
    assert (layer.label, layer.grid) == ("blocks.2.norm1", (4, 4))
    assert layer.reason == "last spatial output that reaches the target; after it only the class token does"


@pytest.mark.parametrize("layer", ["blocks.2", "norm"])
def test_a_layer_whose_gradient_is_zero_is_refused_with_the_nearest_that_works(vit: nn.Module, layer: str) -> None:
    with pytest.raises(UsageError) as info:
        attribute(vit, torch.randn(1, 3, 64, 64), target=7, layer=layer)
    assert str(info.value) == (
        f"The gradient of 'class 7' is zero everywhere at {layer}: after it only the class token reaches the target. "
        "Nearest layer that works: blocks.2.norm1."
    )


def test_a_layer_without_extent_is_refused_with_the_nearest_that_works(network: nn.Module, pictures: Tensor) -> None:
    with pytest.raises(UsageError) as info:
        attribute(network, pictures, layer="fc")
    assert str(info.value) == (
        "fc returns 3x4, which has no spatial extent: maps need a grid of more than one place. Nearest layer that "
        "works: second."
    )


@pytest.mark.parametrize(("spectrum", "dtype"), [(torch.fft.fft2, "complex64"), (torch.isfinite, "bool")])
def test_a_layer_without_floating_point_is_refused_with_its_dtype(
    pictures: Tensor, spectrum: Callable[[Tensor], Tensor], dtype: str
) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return spectrum(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.spectrum, self.fc = nn.Conv2d(3, 2, 3), Spectrum(), nn.Linear(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            self.spectrum(x)
            output: Tensor = self.fc(x.mean((2, 3)))
            return output

    with pytest.raises(UsageError, match=f"which holds {dtype} values, not floating point. Nearest layer .* conv"):
        attribute(Net(), pictures, layer="spectrum")


@pytest.mark.parametrize("batch_size", [1, 2])
def test_calls_are_counted_anew_after_an_input_that_raised(batch_size: int) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        features = net.conv(x)
        if (x < 0).any():
            raise ValueError("negative")
        return net.head(features.mean((2, 3)))

    inputs = torch.rand(4, 3, 8, 8)
    inputs[1] -= 9
    network = Written(forward, conv=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 5))
    settings: dict[str, Any] = {"target": "1", "layer": "conv", "sanity": "none", "batch_size": batch_size}
    maps = hookscope.attribute(network, inputs, **settings, on_error=lambda _: None).maps
    assert [heat_map.layer for heat_map in maps] == ["conv"] * 3


def test_each_half_of_a_split_output_is_a_layer_of_its_own() -> None:
    class Split(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x.chunk(2, 1)

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(net.split(net.conv(x))[1].mean((2, 3)))

    network = Written(forward, conv=nn.Conv2d(3, 8, 3), split=Split(), head=nn.Linear(4, 5))
    assert hookscope.attribute(network, torch.rand(1, 3, 8, 8), target="1", sanity="none").maps[0].layer == "split[1]"


def test_a_view_that_is_modified_later_has_the_gradient_of_each_of_several_targets() -> None:
    class View(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(2, 3)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.view = nn.Conv2d(3, 4, 3), View()

        def forward(self, x: Tensor) -> Tensor:
            view = self.view(self.conv(x))
            before = view[:, :, 0].sum((1, 2))
            view.mul_(torch.linspace(0, 1, 6))
            after = view[:, 0].sum((1, 2))
            return torch.stack([before, after, before + after, before - after, 2 * before], 1)

    network, pictures = Net(), torch.randn(1, 3, 8, 8)
    run = attribute(network, pictures, layer=["conv", "view"], target="0,1,2,3,4", method="hires-cam")
    activation = network.conv(pictures).detach().transpose(2, 3)
    before, after = torch.zeros(1, 4, 6, 6), torch.zeros(1, 4, 6, 6)
    before[:, :, 0], after[:, 0] = 1, torch.linspace(0, 1, 6)
    for place, gradient in enumerate([before, after, before + after, before - after, 2 * before]):
        expected = (activation * gradient).sum(1)[0]
        (heat_map,) = [part for part in run.maps if (part.layer, part.target.index) == ("view", place)]
        torch.testing.assert_close(torch.from_numpy(heat_map.values), expected)


def test_layers_are_given_by_name_by_pattern_and_as_operations(network: nn.Module, pictures: Tensor) -> None:
    several = attribute(network, pictures[:2], layer=["first", "op:relu#1"], target="0,1")
    assert [(layer.label, layer.kind, layer.reason) for layer in several.layers] == [
        ("first", "Conv2d", "given"),
        ("(model):relu#1", "relu", "given"),
    ]
    assert [(heat_map.input_index, heat_map.target.label, heat_map.layer) for heat_map in several.maps] == [
        (at, label, layer) for at in (0, 1) for label in ("class 0", "class 1") for layer in ("first", "(model):relu#1")
    ]
    by_type = attribute(network, pictures, layer=["type:Conv2d", "type:Linear"])
    assert [layer.label for layer in by_type.layers] == ["first", "second"]
    assert by_type.notes == (
        "`layer` type:Conv2d, type:Linear: layers with no place for the picture are left out: fc.",
    )
    # The ReLU follows `second` directly: where the gradient is, both have the same.
    assert not np.array_equal(several.maps[1].values, by_type.maps[1].values)


def test_one_call_of_a_layer_can_be_meant() -> None:
    resnet = torchvision.models.resnet18(weights=None)
    both = attribute(resnet, torch.randn(1, 3, 64, 64), layer="layer4.0.relu")
    assert [layer.label for layer in both.layers] == ["layer4.0.relu", "layer4.0.relu#1"]
    one = attribute(resnet, torch.randn(1, 3, 64, 64), layer="layer4.0.relu#1")
    assert [layer.label for layer in one.layers] == ["layer4.0.relu#1"]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"layer": "nothing"}, LayerNotFoundError, "No layer matches 'nothing'"),
        ({"layer": "op:tanh"}, LayerNotFoundError, "No operation matches 'op:tanh'"),
        ({"layer": "pool"}, UsageError, "Nearest layer that works: second."),
        ({"layer": "first", "method": "gradient"}, UsageError, "looks at the input itself: leave out `layer`"),
        ({"method": "gradcam"}, UsageError, "There is no method 'gradcam'. Nearest: 'grad-cam'"),
        ({"method": None}, UsageError, "There is no method 'None'. There are: grad-cam,"),
        ({"sanity": "quik"}, UsageError, "`sanity` takes none or quick or full, not 'quik'."),
        ({"target": "cat"}, UsageError, "is not an index from 0"),
        ({"target": 4}, UsageError, "has 4 classes, counted from 0"),
        ({"target": 1, "top": 2}, UsageError, "either targets or how many of the best"),
        ({"top": 0}, UsageError, "`top` 0 is not possible"),
        ({"tokens": "14x14"}, UsageError, "not of the form"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    network: nn.Module, pictures: Tensor, options: dict[str, Any], kind: type[HookscopeError], message: str
) -> None:
    with pytest.raises(kind) as info:
        attribute(network, pictures, **options)
    assert message in str(info.value)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("layers", [["op:*"], ["0", "op:*"]])
def test_operations_of_a_network_that_calls_none_are_refused(layers: list[str]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))
    with pytest.raises(LayerNotFoundError, match="own code called no operation that `layer` op:"):
        attribute(network, torch.rand(2, 3, 8, 8), layer=layers)


def test_another_picture_through_the_same_layers_is_not_taken_for_the_one_under_the_map() -> None:
    torch.manual_seed(0)

    class Siamese(Small):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            first, second = self.first(x).relu(), self.first(other).relu()
            return self.fc((first - second).mean((2, 3)))

    network, (x, other) = Siamese(), torch.randn(2, 1, 3, 16, 16)
    (heat_map,) = attribute(network, x, input={"other": other}, target=1, method="hires-cam").maps
    with torch.no_grad():  # the score is linear in the means over 8 x 8 places
        expected = (network.first(x)[0].relu() * network.fc.weight[1][:, None, None] / 64).sum(0)
    assert heat_map.layer == "first"
    np.testing.assert_allclose(heat_map.values, expected.numpy(), atol=1e-7)
    both = attribute(network, x, input={"other": other}, target=1, layer="/^first$/")
    assert [layer.label for layer in both.layers] == ["first", "first#1"]
    assert both.notes[0].startswith("first#1: no gradient leads from it to the input that maps are drawn over.")


class Sealed(Small):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 3)),
            "returns a map of the picture with more than one place: choose an operation with `layer` op:NAME",
        ),
        (Sealed, "No gradient leads from the score of Sealed to its input"),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            "are the scores themselves: give `layer` 0 to look at them",
        ),
        (lambda: small.Written(lambda net, x: net.fc(x.flatten(1)) * 0, fc=nn.Linear(768, 3)), "returns a map"),
        (
            lambda: small.Written(lambda net, x: net.conv(x).mean((2, 3)) * 0, conv=nn.Conv2d(3, 4, 3)),
            "is zero at every layer",
        ),
    ],
)
def test_networks_with_nothing_to_look_at_say_so(
    pictures: Tensor, build: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(UsageError) as info:
        attribute(build(), pictures)
    assert message in str(info.value)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_a_quantised_network_is_refused_with_the_reason() -> None:
    quantised = small.TORCHVISION["quantized resnet18"].build()
    with pytest.raises(UsageError, match=r"is quantised: conv1 \(ConvReLU2d\) computes in whole numbers"):
        attribute(quantised, torch.randn(1, 3, 64, 64))


def test_a_network_that_can_be_quantised_and_is_not_is_explained() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head, self.skip_add = nn.Conv2d(3, 4, 3), nn.Linear(4, 2), FloatFunctional()

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            output: Tensor = self.head(self.skip_add.add(x, x.square()).mean((2, 3)))
            return output

    assert attribute(Adds(), torch.randn(1, 3, 8, 8), sanity="none").maps


def test_tokens_whose_grid_is_not_known_need_a_word() -> None:
    torch.manual_seed(0)

    class Patches(nn.Module):
        """Cuts its patches with unfold: no convolution shows their grid, and they are no squares."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.fc = nn.Linear(24, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            patches = F.unfold(x, (2, 4), stride=(2, 4)).transpose(1, 2)
            return self.fc(torch.relu(self.mix(self.embed(patches))).mean(1))

    picture = torch.randn(1, 3, 8, 16)
    with pytest.raises(UsageError, match="one has 16 tokens whose grid is not known; for patches give `tokens`"):
        attribute(Patches(), picture)
    (layer,) = attribute(Patches(), picture, tokens="grid=4x4").layers
    assert (layer.label, layer.grid) == ("mix", (4, 4))


def test_tokens_that_lie_by_windows_are_no_map() -> None:
    hiera = timm.create_model("hiera_tiny_224", stages=(1, 1, 1, 1))
    nn.init.normal_(hiera.head.fc.weight)
    picture = torch.randn(1, 3, 224, 224)
    with pytest.raises(UsageError, match="which has tokens in the order of windows, not of the picture's rows"):
        attribute(hiera, picture, layer="blocks.1")
    (layer,) = attribute(hiera, picture).layers
    assert (layer.label, layer.grid) == ("blocks.3", (7, 7))


# --- Exported programs ---


@pytest.mark.exhaustive
def test_an_exported_vit_has_the_map_of_its_original(vit: nn.Module, tmp_path: Path) -> None:
    picture = torch.randn(1, 3, 64, 64)
    path = tmp_path / "vit.pt2"
    torch.export.save(torch.export.export(copy.deepcopy(vit).eval(), (picture,)), path)
    ours = attribute(vit, picture, target=3, layer="blocks.1")
    torch.save(picture, tmp_path / "picture.pt")
    exported = attribute(str(path), tmp_path / "picture.pt", target=3, layer="blocks.1", trust=True)
    assert exported.layers[0].grid == (4, 4)
    np.testing.assert_allclose(exported.maps[0].values, ours.maps[0].values, rtol=1e-3, atol=1e-7)
    assert attribute(str(path), tmp_path / "picture.pt", trust=True).layers[0].label == "blocks.2.norm1"


def test_a_layer_that_one_input_does_not_reach_is_said_to_have_no_map_of_it() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        is_dark = (x.amax((1, 2, 3)) < 5)[:, None, None, None]
        return net.head(net.near(x).amax((2, 3)) + (net.far(x) * is_dark).amax((2, 3)))

    layers = {"near": nn.Conv2d(3, 4, 3), "far": nn.Conv2d(3, 4, 3), "head": nn.Linear(4, 3)}
    pictures = torch.rand(3, 3, 8, 8)
    pictures[1] += 10
    for batch_size in (1, 3):
        looks = attribute(small.Written(forward, **layers), pictures, layer=["near", "far"], batch_size=batch_size)
        places = [(heat_map.input_index, heat_map.layer) for heat_map in looks.maps]
        assert places == [(0, "near"), (0, "far"), (1, "near"), (2, "near"), (2, "far")]
        assert "far: inputs for which the gradient of a target is zero everywhere have no map." in looks.notes


def test_only_the_target_that_a_layer_does_not_reach_is_named() -> None:
    layers = {name: nn.Conv2d(3, 4, 3) for name in ("one", "two")}
    network = small.Written(
        lambda net, x: torch.stack([net.one(x).sum((1, 2, 3)), net.two(x).sum((1, 2, 3))], 1), **layers
    )
    with pytest.raises(UsageError, match=r"^The gradient of 'class 1' is zero everywhere at one: .* No layer works"):
        attribute(network, torch.rand(1, 3, 8, 8), layer="one", target=[0, 1])
    with pytest.raises(HookscopeError, match="the gradient of 'class 0' is zero everywhere at two"):
        attribute(network, torch.rand(1, 3, 8, 8), target=[0, 1])


# --- Detectors ---


def test_a_box_is_looked_for_in_the_level_of_the_backbone_that_it_comes_from() -> None:
    torch.manual_seed(0)
    detector = detection.RetinaNet(small.pyramid(), 3, detections_per_img=5, score_thresh=0.0, **small.SMALL)
    pictures = [torch.rand(3, 64, 90)]
    looks = attribute(detector, batch_of(pictures), top=2)
    assert looks.layers[0].label.startswith("backbone[")
    assert "of the backbone" in looks.layers[0].reason
    assert [heat_map.target.label.endswith(f"in box {at}") for at, heat_map in enumerate(looks.maps[:2])] == [
        True,
        True,
    ]
    # 64 x 90 stays as it is and is padded to 64 x 96.
    assert looks.maps[0].extent == pytest.approx((0, 0, 1, 96 / 90))
    as_tensor = attribute(detector, torch.stack(pictures), top=1)
    by_name = attribute(detector, (), input={"images": torch.stack(pictures)}, top=1)
    assert as_tensor.maps[0].extent == by_name.maps[0].extent == looks.maps[0].extent
    assert all(np.abs(heat_map.values).max() > 0 for heat_map in looks.maps[:1])


def test_layers_over_a_second_picture_of_another_size_are_stretched_over_the_input() -> None:
    """The 4 x 4 cells over 32 x 32 pixels are cells of the second picture, not of the first with its 16 x 16."""
    net = {"near": nn.Conv2d(3, 4, 4, 4), "far": nn.Conv2d(1, 4, 8, 8), "head": nn.Linear(4, 3)}
    network = small.Written(lambda net, x, depth: net.head((net.near(x) * net.far(depth)).mean((2, 3))), **net)
    depth = torch.rand(1, 1, 32, 32)
    looks = attribute(network, torch.rand(1, 3, 16, 16), input={"depth": depth}, layer=["near", "far"], target=0)
    assert [heat_map.extent for heat_map in looks.maps] == [(0, 0, 1, 1)] * 2
    assert sum("stretched evenly" in note for note in looks.notes) == 2


@pytest.mark.parametrize("layer", [(), "conv"])
def test_a_network_that_takes_its_inputs_one_by_one_says_so(layer: Any) -> None:
    layers = {"conv": nn.Conv2d(3, 4, 3), "head": nn.Linear(4, 3)}
    network = small.Written(
        lambda net, x: torch.cat([net.head(net.conv(picture[None]).mean((2, 3))) for picture in x]), **layers
    )
    pictures = torch.rand(2, 3, 8, 8)
    with pytest.raises(UsageError, match="runs layers on one input at a time: give `batch_size` 1"):
        attribute(network, pictures, layer=layer)
    assert len(attribute(network, pictures, layer=layer, batch_size=1).maps) == 2


class PictureAndWords(nn.Module):
    """Classes from patches and words; 16 words are as many as half of the grid's rows and columns have places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.words = nn.Conv2d(3, 8, 8, 8), nn.Embedding(50, 8)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        patches = self.patches(pixels).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.mix(patches), torch.tanh(self.words(ids))], 1)
        scores: Tensor = self.head(torch.tanh(tokens * torch.linspace(0.5, 2, tokens.shape[1])[:, None]).mean(1))
        return scores


@pytest.mark.parametrize("count", [16, 65])
def test_steps_of_an_embedding_beside_a_picture_are_words(count: int, tmp_path: Path) -> None:
    network = PictureAndWords().eval()
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(2, 3, 64, 64, generator=generator)
    ids = torch.randint(0, 50, (2, count), generator=generator)
    options = {"pixels": pixels, "ids": ids}
    result = hookscope.attribute(network, input=options, layer="words", target="1")
    kept: list[Tensor] = []
    with network.words.register_forward_hook(lambda *call: kept.append(call[2])):
        score = network(pixels, ids)[:, 1].sum()
    (gradient,) = torch.autograd.grad(score, kept)
    expected = (kept[0] * gradient.mean(1, keepdim=True)).sum(2).clamp(min=0).detach()
    assert [heat_map.size for heat_map in result.maps] == [(count,)] * 2
    for heat_map, row in zip(result.maps, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(heat_map.values), row, rtol=1e-3, atol=1e-7)
    assert not any(check.name == "deletion" for check in result.sanity)
    result.save(tmp_path / "run")
    assert hookscope.attribute(network, input=options, target="1").layers[0].label != "words"
