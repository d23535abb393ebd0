"""A file that names its network is taken for that, if it fits; else what tells the candidates apart is said."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

from hookscope.checkpoints.checkpoint import stored_architectures
from hookscope.errors import UsageError
from hookscope.models.spec import load_model


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"arch": "resnet18"}, ("resnet18",)),
        ({"arch": "ResNet18", "pretrained_cfg": {"architecture": "resnetblur18.tag"}}, ("resnet18", "resnetblur18")),
        ({"hyper_parameters": {"model_name": "timm/vit_small_patch16_224.augreg"}}, ("vit_small_patch16_224",)),
        ({"model": {"conv.weight": torch.ones(1)}, "args": {"model": "timm:resnet18"}}, ("resnet18",)),
        ({"arch": "../x"}, ()),
        ({"arch": "a b"}, ()),
        ({"arch": "x" * 200}, ()),
        ({"arch": 3, "args": [1]}, ()),
        (torch.ones(1), ()),
        (None, ()),
    ],
)
def test_names_of_networks_are_found_where_scripts_write_them(content: object, names: tuple[str, ...]) -> None:
    assert stored_architectures(content) == names


def _torch(path: Path, state: dict[str, Any], name: str) -> Path:
    torch.save({"state_dict": state, "arch": name}, path)
    return path


def _safetensors(path: Path, state: dict[str, Any], name: str) -> Path:
    safetensors.torch.save_file(state, path, {"architecture": name})
    return path


@pytest.mark.parametrize("write", [_torch, _safetensors])
@pytest.mark.exhaustive
def test_the_network_that_the_file_names_is_built_if_it_fits(tmp_path: Path, write: Any) -> None:
    state = timm.create_model("resnetblur18", num_classes=7).state_dict()
    loaded = load_model(str(write(tmp_path / "model.pt", state, "resnetblur18")))
    assert any(type(module).__name__ == "BlurPool2d" for module in loaded.module.modules())
    assert "timm:resnetblur18" in loaded.info.name
    assert "the file names it" in " ".join(loaded.notes)
    other = load_model(str(write(tmp_path / "model.pt", state, "vgg11")))  # which does not fit
    assert "(resnet18)" in other.info.name
    assert "the file names it" not in " ".join(other.notes)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "phrases"),
    [
        ("tf_efficientnet_b1", ("timm:efficientnet_b1 (no Conv2dSame)", "timm:tf_efficientnet_b1 (Conv2dSame)")),
        (
            "vit_small_patch16_224",
            ("deit_small_patch16_224 (224x224 pixels, mean 0.485", "224 (224x224 pixels, mean 0.5"),
        ),
    ],
)
def test_networks_that_fit_alike_are_told_apart(tmp_path: Path, name: str, phrases: tuple[str, ...]) -> None:
    torch.save(timm.create_model(name).state_dict(), tmp_path / "model.pt")
    with pytest.raises(UsageError) as raised:
        load_model(str(tmp_path / "model.pt"))
    assert all(phrase in str(raised.value) for phrase in phrases), raised.value
