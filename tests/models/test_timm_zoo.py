import hashlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import safetensors.torch
import timm
import timm.data
import torch
from PIL import Image
from torch import nn

from hookscope.errors import CheckpointError, ModelNotFoundError, NothingMatchedError, UntrustedFileError, UsageError
from hookscope.inputs.loading import load_input
from hookscope.models import timm_zoo
from hookscope.models.download import cached_file
from hookscope.models.names import model_names
from hookscope.models.spec import build_on_meta, load_model
from tests.models.hostile import Call

from .conftest import Server
from .test_zoo import assert_same

SMALL = "test_resnet"  # one of timm's own test networks, with published weights like any other


@pytest.fixture(autouse=True)
def face_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hugging Face's folder of downloaded files: empty."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def network(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model(SMALL, **options)


def cached(folder: Path, file: str) -> Path:
    """Return the place of a file of `SMALL`'s published weights in Hugging Face's cache."""
    repository = folder / ("models--" + timm.get_pretrained_cfg(SMALL).hf_hub_id.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    path = repository / "snapshots" / ("0" * 40) / file
    path.parent.mkdir(parents=True)
    return path


def test_names_are_listed_only_when_timm_is_asked_for() -> None:
    assert not any(name.startswith("timm:") for name in model_names())
    assert "resnet34" in model_names("resnet34")
    assert model_names("timm:convnext_tin?") == ["timm:convnext_tiny"]
    assert model_names("timm:") == [f"timm:{name}" for name in sorted(timm.list_models())]
    with pytest.raises(NothingMatchedError, match=r"matches 'timm:zzz'\. List all"):  # "timm:" makes no name alike
        model_names("timm:zzz")
    with pytest.raises(NothingMatchedError, match="Nearest: 'timm:resnet"):
        model_names("timm:resnet43b")


@pytest.mark.parametrize("name", ["resnt18", "hf-hub:timm/resnet18", "../x"])
def test_unknown_network_is_an_error_and_nothing_is_looked_up(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="hookscope models timm:"):
        load_model(f"timm:{name}")
    with pytest.raises(ModelNotFoundError, match=r"no network 'zzz'\. List them"):
        load_model("timm:zzz")
    with pytest.raises(ModelNotFoundError, match="Nearest: 'timm:resnet18'"):
        load_model("timm:resnet_18")


@pytest.mark.parametrize("name", [SMALL, "test_vit"])
def test_random_weights_are_those_of_the_users_own_seeded_script(name: str) -> None:
    torch.manual_seed(3)
    expected = timm.create_model(name)
    loaded = load_model(f"timm:{name}", weights="none", seed=3)
    assert_same(loaded.module, expected)
    assert loaded.info.random
    assert loaded.info.name == f"timm:{name}"
    assert loaded.info.categories == ()
    assert loaded.warnings == loaded.notes == ()


def test_auto_without_network_is_random_with_a_loud_reason_and_soon() -> None:
    started = time.process_time()
    loaded = load_model(f"timm:{SMALL}", seed=2)
    assert time.process_time() - started < 15
    assert loaded.info.random
    (warning,) = loaded.warnings
    assert "RANDOM (seed 2)" in warning
    assert "the host name does not resolve" in warning
    assert "give the file with --weights, or to `check` with --arch." in warning  # `check` has no --weights
    assert_same(loaded.module, network(2))


def test_a_network_that_timm_publishes_no_weights_of_says_so() -> None:
    (warning,) = load_model("timm:gmlp_ti16_224").warnings
    assert warning.endswith("timm publishes no weights of gmlp_ti16_224 that hookscope reads.")


def test_arguments_and_channels_make_another_network() -> None:
    loaded = load_model(f"timm:{SMALL}", model_arguments=["num_classes=7", "in_chans=1"])
    assert loaded.info.random
    assert "--model-arg" in loaded.warnings[0]
    assert loaded.module.eval()(torch.zeros(1, 1, 64, 64)).shape == (1, 7)
    assert (loaded.preprocessing.channels, len(loaded.preprocessing.mean)) == (1, 1)


@pytest.mark.parametrize("argument", ["bogus=1", "global_pool=nothing", "pretrained=True", "checkpoint_path=x.pt"])
def test_arguments_that_timm_does_not_take_are_usage_errors(argument: str) -> None:
    with pytest.raises(UsageError, match=argument.partition("=")[0]):
        load_model(f"timm:{SMALL}", weights="none", model_arguments=[argument])


def test_cached_weights_are_loaded(face_cache: Path) -> None:
    original = network(9)
    path = cached(face_cache, "model.safetensors")
    safetensors.torch.save_file(original.state_dict(), path)
    loaded = load_model(f"timm:{SMALL}", weights="auto")
    assert_same(loaded.module, original)
    assert loaded.info.weights == f"timm {SMALL}.r160_in1k"
    assert loaded.info.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert not loaded.info.random
    assert loaded.warnings == ()
    assert len(loaded.info.categories) == 1000
    assert "Egyptian cat" in loaded.info.categories[285]
    assert "state_dict" not in loaded.module.pretrained_cfg  # it would hold the weights a second time


def test_cached_pickle_is_read_safely(face_cache: Path, tmp_path: Path) -> None:
    path = cached(face_cache, "pytorch_model.bin")
    torch.save(network(9).state_dict(), path)
    assert_same(load_model(f"timm:{SMALL}").module, network(9))
    torch.save({"x": Call(Path.touch, tmp_path / "canary")}, path)
    with pytest.raises(UntrustedFileError):
        load_model(f"timm:{SMALL}")
    assert not (tmp_path / "canary").exists()


def test_weights_of_an_address_are_downloaded_and_cached(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cached_file(f"{server.url}/weights.pth")
    path.parent.mkdir(parents=True)
    torch.save(network(9).state_dict(), path)
    server.bodies["/weights.pth"] = path.read_bytes()
    path.unlink()
    config = replace(timm.get_pretrained_cfg(SMALL), hf_hub_id=None, url=f"{server.url}/weights.pth")
    monkeypatch.setattr(timm_zoo, "published", lambda _name: config)
    assert_same(load_model(f"timm:{SMALL}").module, network(9))
    assert_same(load_model(f"timm:{SMALL}").module, network(9))
    assert server.requests == ["/weights.pth"]


def test_weights_asked_for_by_name_are_had_or_an_error(face_cache: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be downloaded"):
        load_model(f"timm:{SMALL}", weights="r160_in1k")
    with pytest.raises(UsageError, match="it has r160_in1k"):
        load_model(f"timm:{SMALL}", weights="a1_in1k")
    with pytest.raises(ModelNotFoundError, match="it has r160_in1k"):
        load_model(f"timm:{SMALL}.a1_in1k")
    safetensors.torch.save_file(network().state_dict(), cached(face_cache, "model.safetensors"))
    with pytest.raises(UsageError, match="1000 classes"):
        load_model(f"timm:{SMALL}", weights="r160_in1k", model_arguments=["num_classes=7"])


def test_file_with_other_counts_is_recognised_and_loaded(tmp_path: Path) -> None:
    original = network(9, num_classes=7, in_chans=4)
    torch.save(original.state_dict(), tmp_path / "mine.pt")
    loaded = load_model(str(tmp_path / "mine.pt"), arch=f"timm:{SMALL}")
    assert_same(loaded.module, original)
    assert loaded.info.arguments == {"num_classes": 7}
    assert loaded.preprocessing.channels == 4
    assert loaded.info.categories == ()
    picture = torch.rand(1, 4, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded.module.eval()(picture), original.eval()(picture))


@pytest.mark.parametrize(
    "name",
    [
        "test_resnet",  # 160 pixels, scaled to more
        "test_vit",
        "vit_base_patch16_siglip_224",  # squashed
    ],
)
@pytest.mark.sample("test_resnet", "test_vit")
def test_preprocessing_is_timms_own(name: str, pytestconfig: pytest.Config) -> None:
    loaded = build_on_meta(f"timm:{name}", weights="none")
    picture = pytestconfig.rootpath / "sample_images" / "cat.jpg"
    ours, _ = load_input(picture, loaded.preprocessing)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(loaded.module), is_training=False)
    with Image.open(picture) as image:
        theirs = transform(image.convert("RGB"))
    # One step of eight bits, at the smallest std there is: a difference in rounding.
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1 / 255 / 0.22 + 1e-6
    assert (ours - theirs).abs().mean() < 1e-3
    assert name in loaded.preprocessing.source


def test_border_padding_that_hookscope_does_not_do_is_said() -> None:
    padded = network()
    padded.pretrained_cfg["crop_mode"] = "border"
    *_, warnings = timm_zoo._describe(SMALL, False, padded)
    assert "pads pictures" in warnings[0]
    assert timm_zoo._describe(SMALL, False, network())[2] == ()
