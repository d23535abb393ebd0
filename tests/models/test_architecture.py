import functools
import inspect
from typing import Any

import pytest
import timm
import torch
import torchvision.models
from torch import nn

from hookscope.models import architecture
from hookscope.models.architecture import Candidate, adapt, nearest_network, recognise
from hookscope.models.construction import silenced_known_warnings, skipped_initialisation
from hookscope.models.input_spec import set_input_channels
from hookscope.models.network_table import Library, NetworkTable, network_table, state_shapes

Shapes = dict[str, tuple[int, ...]]

NAMES = torchvision.models.list_models()
INT8 = [name for name in NAMES if name.startswith("quantized_")]
FLOAT = [name for name in NAMES if name not in INT8]


def default_classes(name: str) -> int | None:
    categories = torchvision.models.get_model_weights(name).DEFAULT.meta.get("categories")
    return len(categories) if categories else None


# One of each way to name the layers that take the picture and give the classes.
FIRST = [
    *("alexnet", "convnext_base", "densenet121", "fcn_resnet101", "googlenet", "keypointrcnn_resnet50_fpn"),
    *("mobilenet_v2", "mvit_v1_b", "raft_large", "resnet101", "squeezenet1_0", "swin_b", "vit_b_16"),
]


@functools.cache
def shapes_of(name: str, channels: int | None = None, **options: Any) -> Shapes:
    """Return what torchvision's own network of that name has in its state dict."""
    if "weights_backbone" in inspect.signature(torchvision.models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None
    if name in INT8:
        options["quantize"] = True
    engine = torch.backends.quantized.engine
    device = "cpu" if name in INT8 or name.startswith("regnet") else "meta"  # those do not build there
    try:
        with silenced_known_warnings(), skipped_initialisation(), torch.device(device):
            network = torchvision.models.get_model(name, **options)
    finally:
        torch.backends.quantized.engine = engine
    if channels is not None:
        set_input_channels(network, channels)
    return state_shapes(network.state_dict())


def timm_shapes(name: str, **options: Any) -> Shapes:
    with skipped_initialisation(), torch.device("meta"):
        return state_shapes(timm.create_model(name, **options).state_dict())


def models(candidates: tuple[Candidate, ...]) -> list[str]:
    return [candidate.model for candidate in candidates]


class ShapesByName(dict[str, Shapes]):
    def __missing__(self, name: str) -> Shapes:
        self[name] = shapes_of(name)
        return self[name]


@pytest.fixture(scope="module")
def all_shapes() -> dict[str, Shapes]:
    return ShapesByName()


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.exhaustive
def test_network_with_ten_classes_is_recognised_as_itself_or_as_a_true_tie(
    name: str, all_shapes: dict[str, Shapes]
) -> None:
    ties = [other for other in FLOAT if all_shapes[other] == all_shapes[name]]
    options = {"num_classes": 10} if default_classes(name) else {}
    candidates = recognise(shapes_of(name, **options))
    assert models(candidates) == ties
    for candidate in candidates:
        assert candidate.arguments == options
        assert candidate.input_channels is None


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.sample("resnet101", "squeezenet1_0", "swin_b")
def test_named_network_takes_the_counts_of_the_file(name: str, all_shapes: dict[str, Shapes]) -> None:
    own = adapt(name, all_shapes[name])
    assert own == Candidate(name, {}, None, ())
    options = {"num_classes": 10} if default_classes(name) else {}
    for channels in (1, 4):
        adapted = adapt(f"torchvision:{name}", shapes_of(name, channels, **options))
        assert adapted is not None
        assert (adapted.model, adapted.arguments, adapted.input_channels) == (name, options, channels)


@pytest.mark.parametrize(("name", "classes"), [("quantized_mobilenet_v2", 10), ("quantized_shufflenet_v2_x0_5", 1000)])
@pytest.mark.sample("quantized_mobilenet_v2-10")
def test_int8_network_is_recognised_by_what_its_layers_pack(name: str, classes: int) -> None:
    (candidate,) = recognise(shapes_of(name, num_classes=classes))
    assert candidate.model == name
    assert candidate.arguments == ({"num_classes": 10} if classes == 10 else {})
    assert "int8" in candidate.remarks[0]


def test_the_known_tie_differs_only_in_the_size_of_its_pictures(all_shapes: dict[str, Shapes]) -> None:
    pair = ["fasterrcnn_mobilenet_v3_large_320_fpn", "fasterrcnn_mobilenet_v3_large_fpn"]
    assert all_shapes[pair[0]] == all_shapes[pair[1]]
    candidates = recognise(all_shapes[pair[0]])
    assert models(candidates) == pair
    assert "so do those of fasterrcnn_mobilenet_v3_large_fpn" in candidates[0].remarks[0]


def test_demo_is_recognised() -> None:
    from efficientnet_lite_pytorch import EfficientNet

    assert models(recognise(state_shapes(EfficientNet.from_name("efficientnet-lite0").state_dict()))) == ["demo"]
    grey = EfficientNet.from_name("efficientnet-lite0", in_channels=1, num_classes=3)
    (candidate,) = recognise(state_shapes(grey.state_dict()))
    assert (candidate.model, candidate.arguments, candidate.input_channels) == ("demo", {"num_classes": 3}, 1)


def test_the_nearest_network_is_named_with_what_differs(all_shapes: dict[str, Shapes]) -> None:
    whole = all_shapes["resnet18"]
    cut = {name: shape for name, shape in whole.items() if name != "fc.bias"}
    assert recognise(cut) == ()
    assert nearest_network(cut) == f"resnet18: {len(whole) - 1} of {len(whole)} names and shapes; missing 'fc.bias'"
    wrapped = {f"module.{name}": shape for name, shape in cut.items()}
    assert nearest_network(wrapped) == nearest_network(cut)
    reshaped = cut | {"fc.bias": (7,), "more": (2,)}
    assert nearest_network(reshaped) == (
        f"resnet18: {len(whole) - 1} of {len(whole)} names and shapes; of another shape 'fc.bias'; unknown to it 'more'"
    )
    without_counters = {name: shape for name, shape in cut.items() if not name.endswith("num_batches_tracked")}
    assert nearest_network(without_counters).startswith("resnet18: 101 of 102 names")
    some = {name: shape for name, shape in whole.items() if name.startswith("layer1")}
    assert nearest_network(some) == ""  # of 122 it has 24


@pytest.mark.parametrize(
    ("name", "options", "arguments"),
    [
        ("googlenet", {"aux_logits": False}, {"aux_logits": False}),
        ("inception_v3", {"aux_logits": False, "num_classes": 4}, {"aux_logits": False, "num_classes": 4}),
        ("fcn_resnet50", {"aux_loss": True}, {"aux_loss": True}),
        ("deeplabv3_mobilenet_v3_large", {"aux_loss": True, "num_classes": 2}, {"aux_loss": True, "num_classes": 2}),
        ("vit_b_32", {"image_size": 64, "num_classes": 3}, {"image_size": 64, "num_classes": 3}),
        ("vit_h_14", {"image_size": 518}, {"image_size": 518}),  # its published weights
    ],
)
def test_other_heads_and_picture_sizes_are_told(name: str, options: dict[str, Any], arguments: dict[str, Any]) -> None:
    (candidate,) = recognise(shapes_of(name, **options))
    assert (candidate.model, dict(candidate.arguments)) == (name, arguments)
    for argument, remark in {
        "aux_logits": "without auxiliary heads",
        "aux_loss": "with auxiliary heads",
        "image_size": f"pictures of {options.get('image_size')} pixels",
        "num_classes": f"{options.get('num_classes')} classes instead of",
    }.items():
        assert any(remark in inputs for inputs in candidate.remarks) == (argument in arguments)


def test_files_without_batch_counters_fit_and_say_so(all_shapes: dict[str, Shapes]) -> None:
    old = {key: shape for key, shape in all_shapes["resnet18"].items() if not key.endswith("num_batches_tracked")}
    (candidate,) = recognise(old)
    assert candidate.model == "resnet18"
    assert any("20 num_batches_tracked are missing" in remark for remark in candidate.remarks)  # one per BatchNorm
    (candidate,) = recognise(
        {key: shape for key, shape in all_shapes["resnet18"].items() if key in old or key[0] != "b"}
    )
    assert any("1 num_batches_tracked is missing" in remark for remark in candidate.remarks)


def bert() -> Shapes:
    layer = nn.TransformerEncoderLayer(32, 4, 64)
    shapes = {f"encoder.layer.{i}.{k}": tuple(v.shape) for i in range(4) for k, v in layer.state_dict().items()}
    return {"embeddings.word_embeddings.weight": (30522, 32), "pooler.dense.weight": (32, 32)} | shapes


def changed_resnet(change: str) -> Shapes:
    shapes = shapes_of("resnet34")
    if change == "block missing":
        return {key: shape for key, shape in shapes.items() if not key.startswith("layer3.5.")}
    if change == "block more":
        return shapes | {key.replace("layer3.5.", "layer3.6."): shape for key, shape in shapes.items()}
    return shapes | CHANGES[change]


CHANGES: dict[str, Shapes] = {
    "another kernel": {"layer2.1.conv1.weight": (128, 128, 5, 5)},
    "another width": {"layer2.1.bn1.bias": (96,)},
    "one axis more": {"conv1.weight": (64, 3, 7, 7, 1)},
    "a bias of another class count": {"fc.bias": (999,)},
    "one layer more": {"layer2.1.conv3.weight": (128, 128, 3, 3)},
}


UNRELATED = {
    "nothing": dict,
    "one number": lambda: {"x": ()},
    "BERT": bert,
    "int8 MLP": lambda: {"0.weight": (3, 3, 3, 3), "0.zero_point": (), "0.scale": ()},
}


@pytest.mark.parametrize("kind", UNRELATED)
def test_unrelated_checkpoint_is_recognised_as_nothing(kind: str) -> None:
    assert recognise(UNRELATED[kind]()) == ()


@pytest.mark.parametrize("change", ["block missing", "block more", *CHANGES])
def test_changed_network_is_recognised_as_nothing(change: str) -> None:
    assert recognise(changed_resnet(change)) == ()
    assert adapt("resnet34", changed_resnet(change)) is None


@pytest.mark.parametrize(
    ("name", "options", "arguments", "channels"),
    [
        ("convnext_tiny", {}, {}, None),
        ("test_efficientnet", {"in_chans": 4}, {}, 4),
        ("tresnet_m", {"in_chans": 1}, {}, 1),  # folds 4 x 4 pixels into channels
        ("vit_small_patch14_dinov2", {"num_classes": 10}, {"num_classes": 10}, None),  # has no classifier by default
        ("deit_tiny_distilled_patch16_224", {"num_classes": 10}, {"num_classes": 10}, None),  # has two
        ("mobilevit_xxs", {"num_classes": 3}, {"num_classes": 3}, None),
        ("vit_tiny_patch16_224", {"img_size": 96}, {"img_size": 96}, None),
    ],
)
def test_named_timm_network_takes_the_counts_of_the_file(
    name: str, options: dict[str, Any], arguments: dict[str, Any], channels: int | None
) -> None:
    adapted = adapt(f"timm:{name}", timm_shapes(name, **options))
    assert adapted is not None
    assert (adapted.model, adapted.arguments, adapted.input_channels) == (f"timm:{name}", arguments, channels)


@pytest.mark.parametrize(
    ("name", "options", "arguments", "channels"),
    [
        ("convnext_tiny", {"num_classes": 10, "in_chans": 1}, {"num_classes": 10}, 1),
        ("test_vit", {"num_classes": 0}, {"num_classes": 0}, None),
    ],
)
@pytest.mark.sample("convnext_tiny-options0-arguments0-1")
def test_timm_network_is_recognised_where_torchvision_has_none(
    name: str, options: dict[str, Any], arguments: dict[str, Any], channels: int | None
) -> None:
    shapes = timm_shapes(name, **options)
    candidates = recognise(shapes)
    assert f"timm:{name}" in models(candidates)
    for candidate in candidates:  # each is a true tie
        assert (candidate.arguments, candidate.input_channels) == (arguments, channels)
        assert timm_shapes(candidate.model.removeprefix("timm:"), **options) == shapes
    assert adapt(f"timm:{name}", shapes) == Candidate(f"timm:{name}", arguments, channels, candidates[0].remarks[1:])


def test_without_timm_an_unknown_checkpoint_is_recognised_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = architecture.find_spec
    monkeypatch.setattr(architecture, "find_spec", lambda name: None if name == "timm" else find_spec(name))
    assert recognise(timm_shapes("test_vit")) == ()


def without(library: Library, *names: str) -> NetworkTable:
    table = network_table(library)
    return NetworkTable("0.0.1", {name: network for name, network in table.networks.items() if name not in names})


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tables of earlier versions, which lack networks."""
    tables = {"torchvision": without("torchvision", "alexnet"), "timm": without("timm", "timm:test_vit")}
    monkeypatch.setattr(architecture, "network_table", tables.__getitem__)


@pytest.mark.usefixtures("older")
def test_a_network_that_the_table_does_not_hold_is_built() -> None:
    assert models(recognise(shapes_of("alexnet"))) == ["alexnet"]
    assert models(recognise(shapes_of("resnet18"))) == ["resnet18"]
    assert nearest_network(shapes_of("alexnet", num_classes=3)).startswith("alexnet: 14 of 16 names and shapes")
    assert adapt("timm:test_vit", timm_shapes("test_vit")) == Candidate("timm:test_vit", {}, None, ())


def test_the_tag_of_weights_decides_on_the_classes() -> None:
    name = "convnext_tiny.in12k"
    assert adapt(f"timm:{name}", timm_shapes(name)) == Candidate(f"timm:{name}", {}, None, ())
    adapted = adapt(f"timm:{name}", timm_shapes("convnext_tiny"))
    assert adapted is not None
    assert (adapted.model, adapted.arguments) == (f"timm:{name}", {"num_classes": 1000})


def test_a_network_that_the_installed_version_has_not_is_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "installed_version", lambda _name: "0.0.1")
    monkeypatch.setattr(architecture, "torchvision_names", lambda: ["alexnet", "vgg11"])
    assert models(recognise(shapes_of("alexnet"))) == ["alexnet"]
    assert adapt("resnet18", shapes_of("resnet18")) is None
