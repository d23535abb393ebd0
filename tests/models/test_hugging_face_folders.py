"""A folder that transformers wrote is a network: the one that transformers loads, without running what it brings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from PIL import Image

import hookscope
from hookscope.checkpoints.checkpoint import FileOptions
from hookscope.checkpoints.fileformat import is_weights_folder
from hookscope.checkpoints.find_checkpoints import find_checkpoints
from hookscope.errors import (
    CheckpointError,
    HookscopeError,
    MisfitError,
    ModelError,
    ModelNotFoundError,
    UntrustedFileError,
)
from hookscope.inputs.batches import load_batches
from hookscope.models.input_spec import example_shape
from hookscope.models.names import parse_model
from hookscope.models.spec import load_model
from tests.cli.conftest import CAT

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VIT = {**SMALL, "image_size": 32, "patch_size": 8}

NETWORKS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "ViT": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**VIT, id2label={0: "cat", 1: "dog", 2: "owl"})
    ),
    "ResNet": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    ),
    "DINOv2": lambda: transformers.Dinov2Model(
        transformers.Dinov2Config(**{key: SMALL[key] for key in [*SMALL][:3]}, image_size=28, patch_size=14)
    ),
    "backbone": lambda: transformers.ResNetBackbone(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage1"])
    ),
    "segmentation": lambda: transformers.SegformerForSemanticSegmentation(
        transformers.SegformerConfig(
            hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16
        )
    ),
}


def write(name: str, folder: Path) -> transformers.PreTrainedModel:
    """Save a network with weights that are not those of its initialisation; return it."""
    torch.manual_seed(3)
    network = NETWORKS[name]().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape))
    network.save_pretrained(folder)
    return network


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    write("ViT", tmp_path / "vit")
    return tmp_path / "vit"


def change(folder: Path, name: str = "config.json", /, **settings: Any) -> Path:
    path = folder / name
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(held | settings), encoding="utf-8")
    return folder


def test_weights_of_half_precision_are_said_to_be_converted(vit: Path) -> None:
    state = safetensors.torch.load_file(vit / "model.safetensors")
    half = {name: value.half() for name, value in state.items()}
    safetensors.torch.save_file(half, vit / "model.safetensors", {"format": "pt"})
    (note,) = load_model(str(vit)).notes
    assert note == f"model.safetensors: loading converted {len(state)} tensors from float16 to float32."


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sample("ViT")
def test_the_network_is_the_one_that_transformers_loads(tmp_path: Path, name: str) -> None:
    written = write(name, tmp_path / "network")
    expected = type(written).from_pretrained(tmp_path / "network").eval()
    loaded = load_model(str(tmp_path / "network"))
    assert type(loaded.module) is type(expected)
    assert not loaded.module.training
    assert not loaded.info.random
    assert loaded.info.weights == "model.safetensors"
    actual = loaded.module.state_dict()
    assert list(actual) == list(expected.state_dict())
    assert all(torch.equal(actual[key], tensor) for key, tensor in expected.state_dict().items())
    pictures = torch.rand(1, 3, 64, 64) if name == "segmentation" else torch.rand(1, 3, 32, 32)
    pictures = torch.rand(1, 3, 28, 28) if name == "DINOv2" else pictures
    with torch.no_grad():
        for one, other in zip(loaded.module(pictures).to_tuple(), expected(pictures).to_tuple(), strict=True):
            assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.exhaustive
def test_labels_are_the_classes(vit: Path) -> None:
    assert load_model(str(vit)).info.categories == ("cat", "dog", "owl")


PROCESSORS: dict[str, Callable[[], Any]] = {
    "exact size": lambda: transformers.ViTImageProcessor(size={"height": 24, "width": 40}),
    "shorter side and crop": lambda: transformers.CLIPImageProcessor(
        size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}
    ),
    "scaled more and cropped": lambda: transformers.ConvNextImageProcessor(size={"shortest_edge": 56}),
    "not normalised": lambda: transformers.ViTImageProcessor(size={"height": 32, "width": 32}, do_normalize=False),
    "not resized": lambda: transformers.ViTImageProcessor(do_resize=False),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.sample("shorter side and crop")
def test_pictures_are_prepared_as_by_the_image_processor(vit: Path, name: str) -> None:
    processor = PROCESSORS[name]()
    processor.save_pretrained(vit)
    preprocessing = load_model(str(vit)).preprocessing
    [batch] = load_batches([CAT], preprocessing, 1)
    expected = processor(Image.open(CAT), return_tensors="pt")["pixel_values"]
    (actual,) = batch.args
    assert actual.shape == expected.shape
    # Pillow and torchvision round to whole colours at different moments: a step is 1/255 over a std of at least 0.26.
    difference = (actual - expected).abs()
    assert difference.mean() < 1 / 255 / 0.26
    assert difference.max() < 8 / 255 / 0.26


@pytest.mark.parametrize(
    "settings",
    [
        {"image_processor_type": "ViTImageProcessor"},
        {"feature_extractor_type": "ViTFeatureExtractor"},
        {"image_processor_type": "CLIPImageProcessor", "do_center_crop": True, "crop_size": 32},
        {"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.875},
    ],
    ids=str,
)
def test_one_number_is_a_square_or_the_shorter_side_as_the_image_processor_takes_it(
    vit: Path, settings: dict[str, Any]
) -> None:
    change(vit, "preprocessor_config.json", size=56, resample=3, do_normalize=False, **settings)
    [batch] = load_batches([CAT], load_model(str(vit)).preprocessing, 1)
    processor = getattr(transformers, next(iter(settings.values())).replace("FeatureExtractor", "ImageProcessor"))
    expected = processor.from_pretrained(vit)(Image.open(CAT), return_tensors="pt")["pixel_values"]
    assert batch.args[0].shape == expected.shape
    assert (batch.args[0] - expected).abs().mean() < 1 / 255


@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, (32, 48)), (4, 32)])
def test_without_an_image_processor_pictures_have_the_size_of_the_configuration(
    tmp_path: Path, channels: int, size: int | tuple[int, int]
) -> None:
    config = transformers.ViTConfig(**{**VIT, "image_size": size, "num_channels": channels})
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    loaded = load_model(str(tmp_path / "vit"))
    height, width = (size, size) if isinstance(size, int) else size
    assert example_shape(loaded.module, loaded.preprocessing) == (1, channels, height, width)
    assert loaded.preprocessing.crop == (height, width)


def test_a_configuration_of_pictures_without_end_is_refused(tmp_path: Path) -> None:
    write("ResNet", tmp_path / "network")
    change(tmp_path / "network", image_size=10**9)
    with pytest.raises(CheckpointError, match=r"settings of pictures in its config\.json that are not"):
        load_model(str(tmp_path / "network"))


@pytest.mark.exhaustive
def test_what_the_image_processor_does_and_hookscope_does_not_is_said(vit: Path) -> None:
    size = {"shortest_edge": 64, "longest_edge": 90}
    change(vit, "preprocessor_config.json", size=size, rescale_factor=1 / 127.5, resample=1, do_flip_channel_order=True)
    said = " ".join(load_model(str(vit)).warnings)
    for phrase in ("keeps the longer side within 90 pixels", "does not scale pixels to [0, 1]", "with a filter", "BGR"):
        assert phrase in said
    change(vit, "preprocessor_config.json", size={"longest_edge": 90})
    said = "keeps the longer side within 90 pixels; hookscope does not resize pictures."
    assert said in " ".join(load_model(str(vit)).warnings)


@pytest.mark.exhaustive
def test_weights_that_do_not_fit_are_refused_unless_allowed(vit: Path) -> None:
    state = safetensors.torch.load_file(vit / "model.safetensors")
    del state["classifier.bias"]
    state["extra"], state["classifier.weight"] = torch.ones(1), torch.ones(5, 32)
    safetensors.torch.save_file(state, vit / "model.safetensors", {"format": "pt"})
    with pytest.raises(MisfitError) as raised:
        load_model(str(vit))
    for phrase in (
        "1 missing (classifier.bias)",
        "1 of another shape or type (classifier.weight: file (5, 32), network (3, 32))",
        "1 unknown to the network (e",
    ):
        assert phrase in str(raised.value)
    loaded = load_model(str(vit), options=FileOptions(allow_missing=("classifier.*",), allow_unexpected=("*",)))
    assert "classifier.bias, classifier.weight" in " ".join(loaded.warnings)


def test_a_folder_of_checkpoints_of_a_trainer_counts_each_once(vit: Path, tmp_path: Path) -> None:
    torch.save({}, vit / "optimizer.pt")
    assert is_weights_folder(vit)
    assert find_checkpoints([str(tmp_path)]) == find_checkpoints([str(tmp_path / "v*")]) == [str(vit)]
    assert parse_model(str(vit)).form == "hugging face"


CODE = "import pathlib\npathlib.Path({canary!r}).touch()\n"


def _kernels(folder: Path) -> None:
    change(folder, attn_implementation="kernels-community/evil", _attn_implementation="kernels-community/evil")


HARMLESS: dict[str, Callable[[Path], Any]] = {
    "kernels": _kernels,
    "a name elsewhere": lambda folder: change(folder, _name_or_path="someone/else"),
    "channels of layers": lambda folder: change(folder, layer_list_out_channels=[2048], depthwise_channels=4096),
    "no class": lambda folder: change(folder, architectures=None),
}
REFUSED: dict[str, tuple[Callable[[Path], Any], type[HookscopeError], str]] = {
    "code for the network": (
        lambda folder: change(folder, auto_map={"AutoModel": "modeling.Net"}),
        UntrustedFileError,
        "asks for code that comes with the weights (auto_map), which is never run",
    ),
    "code for pictures": (
        lambda folder: change(folder, "preprocessor_config.json", auto_map={"AutoImageProcessor": "modeling.P"}),
        UntrustedFileError,
        "asks for code that comes with it (auto_map)",
    ),
    "a module of the folder": (lambda folder: change(folder, architectures=["modeling.Net"]), ModelNotFoundError, ""),
    "a class that is no network": (
        lambda folder: change(folder, architectures=["ViTConfig"]),
        ModelNotFoundError,
        "names 'ViTConfig', which is no network of transformers",
    ),
    "an unknown network": (lambda folder: change(folder, model_type="evilnet"), ModelNotFoundError, "'evilnet'"),
    "settings that cannot be": (
        lambda folder: change(folder, hidden_size="x"),
        CheckpointError,
        "TypeError: Field 'hidden_size' expected int, got str (value: 'x')",
    ),
    "layers without end": (
        lambda folder: change(folder, num_hidden_layers=10**9),
        CheckpointError,
        "asks for more than 1000 layers (num_hidden_layers); refused",
    ),
    "a network for text": (
        lambda folder: change(folder, model_type="bert", architectures=["BertModel"]),
        ModelNotFoundError,
        "takes input_ids, not pictures (pixel_values) or recordings (input_values). Give FILE.py:FUNCTION",
    ),
    "quantised weights": (
        lambda folder: change(folder, quantization_config={"quant_method": "bitsandbytes"}),
        ModelNotFoundError,
        "describes quantised weights",
    ),
    "a size without end": (
        lambda folder: change(folder, "preprocessor_config.json", size={"height": 10**12, "width": 1}),
        CheckpointError,
        "settings of an image processor",
    ),
    "a factor that no float holds": (
        lambda folder: change(folder, "preprocessor_config.json", rescale_factor=10**400),
        CheckpointError,
        "settings of an image processor",
    ),
    "a share of the picture that is almost none": (
        lambda folder: change(folder, "preprocessor_config.json", size=224, crop_pct=1e-320),
        CheckpointError,
        "settings of an image processor",
    ),
    "a mean that is not a number": (
        lambda folder: change(folder, "preprocessor_config.json", image_mean=[float("nan")] * 3, image_std=[1.0] * 3),
        CheckpointError,
        "settings of an image processor",
    ),
    "a picture's settings that are no JSON": (
        lambda folder: (folder / "preprocessor_config.json").write_text("["),
        CheckpointError,
        "not the JSON that transformers writes",
    ),
    "a network too large": (
        lambda folder: change(folder, hidden_size=2**24, num_attention_heads=1, intermediate_size=2**30),
        HookscopeError,
        "",
    ),
}


def armed(folder: Path, canary: Path) -> Path:
    """Put Python into a folder wherever transformers looks for it."""
    for name in ("modeling", "modeling_vit", "configuration_vit", "x"):
        (folder / f"{name}.py").write_text(CODE.format(canary=str(canary)), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.sample("code for the network")
def test_what_a_folder_asks_for_beside_a_network_is_refused(vit: Path, tmp_path: Path, name: str) -> None:
    make, kind, phrase = REFUSED[name]
    make(armed(vit, tmp_path / "canary"))
    with pytest.raises(kind) as raised:
        load_model(str(vit), options=FileOptions(trust=True))
    assert phrase in str(raised.value)
    assert str(raised.value).isprintable()
    assert not isinstance(raised.value, ModelError) or "raised while" in str(raised.value)
    assert not (tmp_path / "canary").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_folder_names_beside_its_network_is_not_looked_for(vit: Path, tmp_path: Path, name: str) -> None:
    HARMLESS[name](armed(vit, tmp_path / "canary"))
    loaded = load_model(str(vit), options=FileOptions(allow_unexpected=("classifier.*",), allow_missing=("*pooler*",)))
    assert type(loaded.module).__name__.startswith("ViT")
    assert not (tmp_path / "canary").exists()


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_mutated_configuration_builds_or_ends_in_one_sentence(vit: Path, tmp_path: Path) -> None:
    armed(vit, tmp_path / "canary")
    original = (vit / "config.json").read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(20):
        content = bytearray(original)
        for _ in range(int(generator.integers(1, 3))):
            content[int(generator.integers(len(content)))] ^= 1 << int(generator.integers(5))
        (vit / "config.json").write_bytes(content)
        try:
            load_model(str(vit))
        except HookscopeError as error:
            said = str(error)
            assert said.isprintable(), said
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("arch", [None, "none"])
def test_check_judges_the_weights_of_a_network_for_text(tmp_path: Path, arch: str | None) -> None:
    config = transformers.BertConfig(**SMALL, vocab_size=50)
    network = transformers.BertModel(config)
    with torch.no_grad():
        network.pooler.dense.bias[3] = float("nan")
    network.save_pretrained(tmp_path)
    report = hookscope.check(str(tmp_path), arch=arch)
    finding = next(finding for finding in report.findings if finding.level == "fail")
    assert (finding.rule, finding.where) == ("non-finite-parameter", "pooler.dense.bias")
    assert report.exit_code == (5 if arch is None else 1)
