import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hookscope.models
from hookscope.errors import CheckpointError, ModelNotFoundError, UsageError
from hookscope.models import ModelSpec, load_model, model_names, parse_model


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("demo", ModelSpec("demo", "demo")),
        ("resnet34", ModelSpec("torchvision", "resnet34")),
        ("torchvision:resnet34", ModelSpec("torchvision", "resnet34")),
        ("ResNet34", ModelSpec("torchvision", "resnet34")),
        ("net.py:build", ModelSpec("file", "net.py", "build")),
        ("/some/where/net.py:Net.small", ModelSpec("file", "/some/where/net.py", "Net.small")),
        (r"C:\some\net.py:build", ModelSpec("file", r"C:\some\net.py", "build")),
        ("package.module:build", ModelSpec("module", "package.module", "build")),
        ("package:build", ModelSpec("module", "package", "build")),
        *[(f"model{s}", ModelSpec("weights", f"model{s}")) for s in (".pt", ".pth", ".ckpt", ".bin", ".safetensors")],
        ("a:b/model.PT", ModelSpec("weights", "a:b/model.PT")),
    ],
)
def test_model_argument_is_read_by_its_form(text: str, spec: ModelSpec) -> None:
    assert parse_model(text) == spec


def test_every_listed_name_is_a_model() -> None:
    for name in model_names():
        assert parse_model(name).source == name


def test_existing_file_without_a_known_suffix_holds_weights(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.touch()
    assert parse_model(str(path)) == ModelSpec("weights", str(path))


def test_registry_name_wins_over_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resnet34").touch()
    monkeypatch.chdir(tmp_path)
    assert parse_model("resnet34").form == "torchvision"
    assert parse_model("./resnet34").form == "weights"


@pytest.mark.parametrize("text", ["resnet43", "torchvision:resnet43", "", ":", "a b:c", "torchvision:demo", "x\0y"])
def test_unknown_model_is_not_found_and_says_where_to_look(text: str) -> None:
    with pytest.raises(ModelNotFoundError, match="`hookscope models`") as caught:
        parse_model(text)
    assert str(caught.value).isprintable()


def test_nearest_names_are_offered() -> None:
    with pytest.raises(ModelNotFoundError, match=r"No model is called 'resnet43'\. Nearest: 'resnet34'"):
        parse_model("resnet43")


def test_python_file_without_a_factory_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"net\.py:NAME"):
        parse_model("net.py")


def test_weights_file_needs_its_network(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "model.pt")
    with pytest.raises(UsageError, match="--arch"):
        load_model(str(tmp_path / "model.pt"))


def test_missing_weights_file_is_reported_as_that() -> None:
    for name in ("absent.pt", "x" * 5000 + ".pt", "a\0.pt"):
        with pytest.raises(CheckpointError, match="does not exist"):
            load_model(name)


@pytest.mark.parametrize(
    "options",
    [{"arch": "other.pt"}, {"arch": "resnet18", "weights": "none"}, {"arch": "resnet18", "weights": "IMAGENET1K_V1"}],
)
def test_contradictory_options_with_a_weights_file_are_usage_errors(tmp_path: Path, options: dict[str, str]) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "model.pt")
    with pytest.raises(UsageError):
        load_model(str(tmp_path / "model.pt"), **options)  # type: ignore[arg-type]


def test_arch_without_a_weights_file_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--arch goes with a weights file"):
        load_model("resnet18", arch="resnet18")


def test_unknown_arch_is_not_found(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "model.pt")
    with pytest.raises(ModelNotFoundError, match="'resnet43'"):
        load_model(str(tmp_path / "model.pt"), arch="resnet43")


def test_all_public_names_exist() -> None:
    assert sorted(hookscope.models.__all__) == hookscope.models.__all__
    assert all(hasattr(hookscope.models, name) for name in hookscope.models.__all__)
    assert not hasattr(hookscope.models, "no_such_name")


def test_users_own_network_loads_without_torchvision() -> None:
    code = """
import sys
from hookscope.models import load_model
load_model("torch.nn:Linear", model_arguments=["in_features=1", "out_features=1"])
sys.exit("torchvision" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
