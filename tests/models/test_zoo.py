import hashlib
import inspect
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.models
from PIL import Image
from torch import nn
from torchvision.models import get_model, get_model_weights
from torchvision.transforms import InterpolationMode
from torchvision.transforms._presets import ImageClassification

from hookscope.errors import CheckpointError, UntrustedFileError, UsageError
from hookscope.models.construction import replaced, silenced_known_warnings
from hookscope.models.download import cached_file
from hookscope.models.spec import build_on_meta, load_model
from hookscope.models.weight_choice import BuildOptions
from hookscope.models.zoo import load_torchvision
from tests.models.hostile import Call
from tests.models.saved import random_numbers_untouched

from .conftest import Server

SMALL = "squeezenet1_1"

# One of each way a builder treats its weights: plain; renamed keys; heads dropped after loading; frozen BatchNorm; a
# version of its own; buffers that no state dict holds; int8.
FAMILIES = [
    SMALL,
    "densenet121",
    "googlenet",
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "mnasnet0_5",
    "deeplabv3_mobilenet_v3_large",
    "quantized_shufflenet_v2_x0_5",
    "quantized_mobilenet_v3_large",
]


def build(name: str, **options: Any) -> nn.Module:
    """Build an untrained network with torchvision alone."""
    if "weights_backbone" in inspect.signature(torchvision.models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None
    with silenced_known_warnings():
        return get_model(name, **({"quantize": True} if name.startswith("quantized_") else {}), **options)


def trained_state(name: str) -> dict[str, Any]:
    """Return a state dict such as torchvision publishes for `name`, with recognisable values."""
    torch.manual_seed(99)
    options: dict[str, Any] = {"aux_loss": True} if name.startswith("deeplab") else {}
    with ExitStack() as stack:
        if name == "quantized_mobilenet_v3_large":  # published as it was before conversion to int8
            stack.enter_context(replaced(torch.ao.quantization, "convert", lambda *_, **__: None))
        state = build(name, **options).state_dict()
    if name.startswith("fasterrcnn"):  # trained with frozen BatchNorm
        for key in [key for key in state if key.endswith("num_batches_tracked")]:
            del state[key]
    with torch.no_grad():
        for key, value in state.items():
            is_float = isinstance(value, torch.Tensor) and value.dtype == torch.float32
            if is_float and not key.endswith(("min_val", "max_val")):  # an observer's range has to stay one
                value.uniform_(0.01, 0.02)
    return state


def put_in_cache(name: str) -> Path:
    path = cached_file(get_model_weights(name).DEFAULT.url)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(trained_state(name), path)
    return path


def assert_same(first: nn.Module, second: nn.Module) -> None:
    """Check that two networks are the same in every parameter, buffer, mode and int8 weight."""
    for kind in ("named_parameters", "named_buffers", "named_modules"):
        ours, theirs = dict(getattr(first, kind)()), dict(getattr(second, kind)())
        assert list(ours) == list(theirs)
        for key, value in ours.items():
            if kind == "named_modules":
                assert (type(value), value.training) == (type(theirs[key]), theirs[key].training)
            else:
                assert torch.equal(value, theirs[key]), key
                assert value.requires_grad == theirs[key].requires_grad
    packed, expected = first.state_dict(), second.state_dict()
    for key, value in packed.items():
        tensors = zip(*(v if isinstance(v, tuple) else (v,) for v in (value, expected[key])), strict=True)
        assert all(torch.equal(a, b) for a, b in tensors if isinstance(a, torch.Tensor)), key
    for switch in ("transform_input", "aux_logits", "image_size"):
        assert getattr(first, switch, None) == getattr(second, switch, None)


@pytest.mark.parametrize("name", [SMALL, "swin_t", "googlenet", "quantized_shufflenet_v2_x0_5"])
@pytest.mark.sample("squeezenet1_1", "quantized_shufflenet_v2_x0_5")
def test_random_weights_are_those_of_the_users_own_seeded_script(name: str) -> None:
    torch.manual_seed(3)
    expected = build(name)
    assert_same(load_model(name, weights="none", seed=3).module, expected)


def test_building_leaves_random_numbers_and_the_int8_engine_alone() -> None:
    engine = torch.backends.quantized.engine
    with random_numbers_untouched():
        loaded = load_model("quantized_mobilenet_v2", weights="none")
    assert torch.backends.quantized.engine == engine
    with torch.no_grad():  # runs under whichever engine is set
        assert loaded.module(torch.rand(1, 3, 32, 32)).shape == (1, 1000)


def test_auto_without_network_is_random_with_a_loud_reason() -> None:
    loaded = load_model(SMALL, seed=2)
    assert loaded.info.random
    (warning,) = loaded.warnings
    assert "RANDOM (seed 2)" in warning
    assert "squeezenet1_1-b8a52dc0.pth cannot be downloaded" in warning
    assert "the host name does not resolve" in warning
    torch.manual_seed(2)
    assert_same(loaded.module, build(SMALL))


def test_auto_with_arguments_is_random_with_the_reason() -> None:
    put_in_cache(SMALL)
    loaded = load_model(SMALL, model_arguments=["num_classes=7"])
    assert loaded.info.random
    assert "--model-arg" in loaded.warnings[0]
    assert loaded.module.num_classes == 7
    assert loaded.info.arguments == {"num_classes": 7}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sample("squeezenet1_1", "quantized_shufflenet_v2_x0_5")
def test_trained_weights_load_as_torchvision_loads_them(name: str) -> None:
    put_in_cache(name)
    with silenced_known_warnings():
        torch.manual_seed(0)
        options: dict[str, Any] = {"quantize": True} if name.startswith("quantized_") else {}
        expected = get_model(name, weights="DEFAULT", **options)
    loaded = load_model(name)
    assert_same(loaded.module, expected)
    assert not loaded.info.random
    assert loaded.info.weights == str(get_model_weights(name).DEFAULT)
    assert loaded.warnings == ()


def test_trained_classifier_knows_its_categories_and_digest() -> None:
    path = put_in_cache(SMALL)
    info = load_model(SMALL).info
    assert info.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(info.categories) == 1000
    assert info.categories[285] == "Egyptian cat"
    # 1 235 496 is the count torchvision documents for SqueezeNet 1.1.
    assert info.parameter_count == 1_235_496


def test_weights_asked_for_by_name_are_had_or_an_error_that_names_those_there_are() -> None:
    with pytest.raises(CheckpointError, match="cannot be downloaded"):
        load_model(SMALL, weights="IMAGENET1K_V1")
    with pytest.raises(UsageError, match="IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT"):
        load_model("resnet50", weights="IMAGENET22K_V1")
    with pytest.raises(UsageError, match="resnet50 has no weights ''; it has IMAGENET1K_V1"):  # of an unset variable
        load_model("resnet50", weights="")


def test_weights_are_downloaded_and_a_download_that_is_cut_off_leaves_no_file_and_random_weights(
    server: Server, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = get_model_weights(SMALL).DEFAULT
    body = put_in_cache(SMALL).read_bytes()
    cached_file(weights.url).unlink()
    monkeypatch.setattr(weights.value, "url", f"{server.url}/weights.pth")
    server.bodies["/weights.pth"], server.sizes["/weights.pth"] = body[: len(body) // 2], len(body)
    assert load_model(SMALL).info.random
    with pytest.raises(CheckpointError, match="cannot be downloaded"):
        load_model(SMALL, weights="IMAGENET1K_V1")
    assert list(hub_cache.iterdir()) == []
    server.bodies["/weights.pth"] = body
    assert load_model(SMALL).info.weights == "SqueezeNet1_1_Weights.IMAGENET1K_V1"
    assert [p.name for p in hub_cache.iterdir()] == ["weights.pth"]


def test_damaged_cached_file_is_an_error_that_says_what_to_delete() -> None:
    path = put_in_cache(SMALL)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="Delete this file") as caught:
        load_model(SMALL)
    assert str(path) in str(caught.value)
    assert path.exists()


def test_cached_file_of_another_network_is_an_error_and_none_is_unpickled(tmp_path: Path) -> None:
    path = put_in_cache(SMALL)
    torch.save(trained_state("mnasnet0_5"), path)
    with pytest.raises(CheckpointError, match="does not fit"):
        load_model(SMALL)
    torch.save({"w": torch.ones(1), "x": Call(Path.touch, tmp_path / "canary")}, path)
    with pytest.raises(UntrustedFileError):
        load_model(SMALL)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", [SMALL, "quantized_shufflenet_v2_x0_5"])
def test_file_of_trained_weights_fits_its_network(name: str, tmp_path: Path) -> None:
    state = trained_state(name)
    torch.save(state, tmp_path / "mine.pt")
    loaded = load_model(str(tmp_path / "mine.pt"), arch=name)
    assert loaded.info.name == f"mine.pt ({name})"
    assert loaded.info.weights == "mine.pt"
    assert not loaded.info.random
    own = loaded.module.state_dict()
    for key in own.keys() & state.keys():
        if isinstance(own[key], torch.Tensor):
            assert torch.equal(own[key], state[key]), key
    assert own.keys() == state.keys()
    expected = torchvision.models.get_model_weights(name).DEFAULT.meta.get("categories", ())
    assert loaded.info.categories == (tuple(expected) if len(expected) == 1000 else ())


@pytest.mark.parametrize("classes", [91, 3])
@pytest.mark.exhaustive
def test_file_of_a_detector_with_frozen_batchnorm_gives_frozen_batchnorm(tmp_path: Path, classes: int) -> None:
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    state = build(name, num_classes=classes).state_dict()
    path = str(tmp_path / "mine.pt")
    torch.save({key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}, path)
    loaded = load_model(name, weights=path) if classes == 91 else load_model(path, arch=name)
    kinds = {type(m).__name__ for m in loaded.module.modules()}
    assert "FrozenBatchNorm2d" in kinds
    assert "BatchNorm2d" not in kinds
    assert loaded.module.roi_heads.box_predictor.cls_score.out_features == classes


def test_copy_of_a_published_file_is_known_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(trained_state("googlenet"), tmp_path / "mine.pt")
    digest = hashlib.sha256((tmp_path / "mine.pt").read_bytes()).hexdigest()
    weights = get_model_weights("googlenet").DEFAULT
    monkeypatch.setattr(weights.value, "url", f"https://example.org/googlenet-{digest[:8]}.pth")
    loaded = load_model(str(tmp_path / "mine.pt"))
    assert len(loaded.info.categories) == 1000
    assert loaded.info.weights == "mine.pt"
    assert loaded.module.transform_input  # as torchvision builds it for these weights, and only for them
    assert not load_model("googlenet", weights="none").module.transform_input


@pytest.mark.parametrize(
    ("name", "channels"),
    [("mnasnet0_5", 1), ("mc3_18", 4), ("ssdlite320_mobilenet_v3_large", 1), ("raft_small", 4)],
)
@pytest.mark.sample("mnasnet0_5-1")
def test_network_for_other_channels_takes_them_and_keeps_everything_else(name: str, channels: int) -> None:
    ours = load_torchvision(name, BuildOptions("none", input_channels=channels))
    usual = load_torchvision(name, BuildOptions("none"))
    assert ours.preprocessing.channels == channels
    assert len(ours.preprocessing.mean) in (0, channels)
    differing = [
        key for key, value in usual.module.state_dict().items() if ours.module.state_dict()[key].shape != value.shape
    ]
    assert len(differing) == (2 if name == "raft_small" else 1)  # RAFT sees its frames twice
    for key in differing:
        layer = key.removesuffix(".weight")
        before, now = usual.module.get_submodule(layer), ours.module.get_submodule(layer)
        assert str(now) == str(before).replace("(3, ", f"({channels}, ", 1)
    size = (1, channels, 128, 128)
    inputs: tuple[Any, ...] = {
        "mc3_18": (torch.rand(1, channels, 4, 16, 16),),
        "ssdlite320_mobilenet_v3_large": ([torch.rand(channels, 64, 64)],),
        "raft_small": (torch.rand(size), torch.rand(size)),
    }.get(name, (torch.rand(1, channels, 64, 64),))
    with torch.no_grad():
        assert ours.module.eval()(*inputs) is not None


def test_trained_weights_are_not_for_other_channels() -> None:
    put_in_cache(SMALL)
    loaded = load_torchvision(SMALL, BuildOptions(input_channels=1))
    assert loaded.info.random
    assert "input channels" in loaded.warnings[0]
    with pytest.raises(UsageError, match="1 channel;"):
        load_torchvision(SMALL, BuildOptions("IMAGENET1K_V1", input_channels=1))
    with pytest.raises(UsageError, match="no convolution over 3 channels"):
        load_torchvision("quantized_shufflenet_v2_x0_5", BuildOptions("none", input_channels=1))


@pytest.mark.parametrize(
    "argument",
    ["no_such_argument=1", "num_classes=-5", "weights=DEFAULT", "pretrained=True", "weights_backbone=DEFAULT"],
)
def test_arguments_that_the_builder_does_not_take_are_usage_errors(argument: str) -> None:
    with pytest.raises(UsageError, match=argument.partition("=")[0]):
        load_model(SMALL, weights="none", model_arguments=[argument])


def test_arguments_that_contradict_the_weights_are_a_usage_error() -> None:
    put_in_cache(SMALL)
    with pytest.raises(UsageError, match="num_classes"):
        load_model(SMALL, weights="IMAGENET1K_V1", model_arguments=["num_classes=7"])


HALF = (0.5, 0.5, 0.5)
KINETICS = (0.43216, 0.394666, 0.37645)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # As torchvision documents the transforms of the weights.
        ("efficientnet_v2_l", {"kind": "image", "resize": 480, "crop": (480, 480), "mean": HALF, "std": HALF}),
        ("fcn_resnet50", {"kind": "image", "resize": 520, "crop": None, "interpolation": "bilinear"}),
        ("ssd300_vgg16", {"kind": "detection", "resize": None, "crop": None, "mean": (), "std": ()}),
        ("r3d_18", {"kind": "video", "frames": 16, "resize": (128, 171), "crop": (112, 112), "mean": KINETICS}),
        ("mvit_v2_s", {"kind": "video", "frames": 16, "resize": 256, "crop": (224, 224), "mean": (0.45,) * 3}),
        ("s3d", {"kind": "video", "frames": 16, "resize": (256, 256), "crop": (224, 224), "mean": KINETICS}),
        ("raft_large", {"kind": "flow", "multiple": 8, "resize": 384, "crop": None, "mean": HALF, "std": HALF}),
    ],
)
def test_preprocessing_is_that_of_the_weights_transforms(name: str, expected: dict[str, Any]) -> None:
    preprocessing = build_on_meta(name, weights="none").preprocessing
    assert {key: getattr(preprocessing, key) for key in expected} == expected
    assert preprocessing.source.startswith(str(get_model_weights(name).DEFAULT))
    assert (preprocessing.interpolation == "bicubic") == (name == "efficientnet_v2_l")


def test_named_weights_bring_their_own_transforms() -> None:
    on_meta = build_on_meta("vit_b_16", weights="IMAGENET1K_SWAG_E2E_V1")
    assert on_meta.preprocessing.crop == (384, 384)
    assert on_meta.preprocessing.source == "ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1"
    assert on_meta.module(torch.zeros(1, 3, 384, 384, device="meta")).shape == (1, 1000)


def test_vit_gets_the_size_it_was_built_for() -> None:
    untrained = build_on_meta("vit_h_14", weights="none")  # its default weights are for 518 pixels
    assert untrained.preprocessing.crop == (224, 224)
    assert untrained.preprocessing.resize == 224
    small = build_on_meta("vit_b_16", weights="none", model_arguments=["image_size=64"])
    assert small.preprocessing.crop == (64, 64)


@pytest.mark.parametrize(
    ("cached", "name"),
    [
        *((False, SMALL), (False, "deeplabv3_mobilenet_v3_large")),
        *((True, name) for name in FAMILIES if not name.startswith("quantized_")),
    ],
)
@pytest.mark.sample("False-squeezenet1_1", "True-squeezenet1_1", "True-mnasnet0_5")
def test_network_on_meta_is_the_one_that_would_be_loaded(name: str, cached: bool) -> None:
    if cached:
        put_in_cache(name)
    loaded, on_meta = load_model(name), build_on_meta(name)
    assert [(k, v.shape) for k, v in on_meta.module.state_dict().items()] == [
        (k, v.shape) for k, v in loaded.module.state_dict().items()
    ]
    assert [type(m) for m in on_meta.module.modules()] == [type(m) for m in loaded.module.modules()]
    assert all(value.is_meta for value in on_meta.module.state_dict().values())
    assert on_meta.preprocessing == loaded.preprocessing
    assert on_meta.info.parameter_count == loaded.info.parameter_count
    assert on_meta.info.weights == "not loaded"
    assert on_meta.warnings == ()


def test_patches_for_building_are_gone_afterwards() -> None:
    before = nn.Module.load_state_dict, torchvision.models.WeightsEnum.get_state_dict, nn.init.trunc_normal_
    build_on_meta("swin_t")
    load_model(SMALL)
    with pytest.raises(UsageError):
        load_model(SMALL, model_arguments=["no_such_argument=1"])
    assert before == (nn.Module.load_state_dict, torchvision.models.WeightsEnum.get_state_dict, nn.init.trunc_normal_)


def test_demo_sees_the_shipped_cat_with_the_published_probabilities(pytestconfig: pytest.Config) -> None:
    loaded = load_model("demo")
    assert not loaded.info.random
    assert loaded.warnings == ()
    preprocessing = loaded.preprocessing
    # (x - 127) / 128 of 0-255, as EfficientNet-Lite was published: MEAN_RGB and STDDEV_RGB of its builder.
    assert [(255 * mean, 255 * std) for mean, std in zip(preprocessing.mean, preprocessing.std, strict=True)] == [
        (pytest.approx(127), pytest.approx(128))
    ] * 3
    transforms = ImageClassification(  # torchvision's, as the independent implementation
        resize_size=preprocessing.resize,
        crop_size=preprocessing.crop[0],
        interpolation=InterpolationMode(preprocessing.interpolation),
        mean=(127 / 255,) * 3,
        std=(128 / 255,) * 3,
    )
    with Image.open(pytestconfig.rootpath / "sample_images" / "cat.jpg") as picture:
        image = transforms(picture)  # (3, 224, 224)
    with torch.no_grad():
        probabilities = loaded.module.eval()(image[None])[0].softmax(0)
    top = {loaded.info.categories[i]: probabilities[i].item() for i in probabilities.topk(3).indices}
    assert list(top) == ["Egyptian cat", "tiger cat", "tabby"]
    assert list(top.values()) == pytest.approx([0.39, 0.32, 0.17], abs=0.02)  # JPEG moves them a little


def test_demo_takes_a_file_and_nothing_else(tmp_path: Path) -> None:
    torch.save(load_model("demo").module.state_dict(), tmp_path / "mine.pt")
    assert load_model("demo", weights=str(tmp_path / "mine.pt")).info.weights == "mine.pt"
    with pytest.raises(UsageError, match="auto, none or a file"):
        load_model("demo", weights="IMAGENET1K_V1")
    with pytest.raises(UsageError, match="--model-arg width"):
        load_model("demo", model_arguments=["width=3"])
