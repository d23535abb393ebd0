import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import hookscope
from hookscope.checkpoints.checkpoint import FileOptions
from hookscope.errors import CheckpointError, InputError, ModelNotFoundError, UsageError
from hookscope.models.construction import seeded
from hookscope.models.names import ModelSpec, parse_model
from hookscope.models.spec import build_on_meta, load_model

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pt2", ".safetensors.index.json", ".bin.index.json")


@pytest.mark.parametrize("text", ["cat.jpg", "photos/Cat.PNG", "./cat.webp", "cat.heic", "cat.jfif"])
def test_a_picture_where_the_network_belongs_is_said_to_be_one(text: str) -> None:
    with pytest.raises(UsageError, match=f"^MODEL '{text}' is a picture. Name the network first, then pictures "):
        parse_model(text)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("demo", ModelSpec("demo", "demo")),
        ("resnet34", ModelSpec("torchvision", "resnet34")),
        ("torchvision:resnet34", ModelSpec("torchvision", "resnet34")),
        ("ResNet34", ModelSpec("torchvision", "resnet34")),
        ("net.py:build", ModelSpec("python", "net.py", "build")),
        ("/some/where/net.py:Net.small", ModelSpec("python", "/some/where/net.py", "Net.small")),
        (r"C:\some\net.py:build", ModelSpec("python", r"C:\some\net.py", "build")),
        ("package.module:build", ModelSpec("python", "package.module", "build")),
        ("package:build", ModelSpec("python", "package", "build")),
        ("timm:convnext_tiny", ModelSpec("timm", "convnext_tiny")),
        ("timm:convnext_tiny.fb_in22k", ModelSpec("timm", "convnext_tiny.fb_in22k")),
        *[(f"model{s}", ModelSpec("weights", f"model{s}")) for s in SUFFIXES],
        ("a:b/model.PT", ModelSpec("weights", "a:b/model.PT")),
    ],
)
def test_model_argument_is_read_by_its_form(text: str, spec: ModelSpec) -> None:
    assert parse_model(text) == spec


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


@pytest.mark.parametrize(
    ("model", "options", "error", "says"),
    [
        ("resnet43", {}, ModelNotFoundError, r"No model is called 'resnet43'\. Nearest: 'resnet34'"),
        ("min.py:build", {}, InputError, r"min\.py does not exist; check the path\. Nearest: 'mine\.py'"),
        ("net.py", {}, UsageError, r"net\.py:NAME"),
        ("mine.py:", {}, UsageError, r"needs the name of a factory: mine\.py:NAME\.$"),
        ("mine.py:build:x", {}, ModelNotFoundError, r"'mine\.py:build:x'\. List them"),
        ("mine", {}, ModelNotFoundError, r"No model is called 'mine'\. mine\.py is here: give mine\.py:NAME\.$"),
        ("mine.build", {}, ModelNotFoundError, r"mine\.py is here: give mine\.py:build\.$"),
        ("model.pt", {}, ModelNotFoundError, r"model\.pt fits no network .*--arch"),
        ("model.pt", {"arch": "resnet43"}, ModelNotFoundError, "'resnet43'"),
        ("model.pt", {"arch": "other.pt"}, UsageError, "name a network"),
        ("model.pt", {"arch": "resnet18", "weights": "none"}, UsageError, "--weights cannot be used"),
        ("model.pt", {"arch": "resnet18", "weights": "IMAGENET1K_V1"}, UsageError, "--weights cannot be used"),
        (".", {"weights": "none"}, CheckpointError, "is a folder"),
        ("/", {"weights": "none"}, CheckpointError, "is a folder"),
        ("resnet18", {"arch": "resnet18"}, UsageError, "--arch needs a weights file"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    options: dict[str, Any],
    error: type[Exception],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(1)}, "model.pt")
    Path("mine.py").touch()
    with pytest.raises(error, match=says):
        load_model(model, **options)


def test_a_module_is_taken_as_it_is_and_without_options() -> None:
    network = nn.Linear(2, 2)
    loaded = load_model(network)
    assert loaded.module is network
    assert load_model(loaded) is loaded
    for option in ({"weights": "none"}, {"arch": "resnet18"}, {"model_arguments": ["a=1"]}):
        with pytest.raises(UsageError, match="A module stays on its device"):
            load_model(network, **option)  # type: ignore[arg-type]


def test_a_path_is_a_model_and_other_objects_are_none(tmp_path: Path) -> None:
    network = nn.Linear(2, 2)
    torch.save(network.state_dict(), tmp_path / "model.pt")
    (tmp_path / "net.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(2, 2)\n", "utf-8")
    loaded = load_model(tmp_path / "model.pt", arch=f"{tmp_path / 'net.py'}:build")
    assert torch.equal(loaded.module.weight, network.weight)
    for other in (3, None, b"model.pt", ["model.pt"]):
        with pytest.raises(
            UsageError, match=rf"^The model is of type {type(other).__name__}\. Give a torch\.nn\.Module"
        ):
            load_model(other)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--seed takes a whole number"):
        load_model("resnet18", seed="x")  # type: ignore[arg-type]


def test_a_path_is_taken_wherever_a_file_is_named(tmp_path: Path) -> None:
    ones = nn.Linear(2, 2)
    nn.init.ones_(ones.weight)
    weights, net = tmp_path / "w.pt", tmp_path / "net.py"
    torch.save(ones.state_dict(), weights)
    net.write_text("from torch import nn\ndef build():\n    return nn.Linear(2, 2)\n", "utf-8")
    build = f"{net}:build"
    for loaded in (load_model(build, weights=weights), load_model(weights, arch=Path(build))):
        assert torch.equal(loaded.module.weight, torch.ones(2, 2))
    sums = torch.tensor([[1.0, 2.0]])  # of ones, 3 and the bias
    (row,) = hookscope.activations(build, sums, weights=weights).rows
    assert row.mean == pytest.approx(3 + ones.bias.detach().mean().item(), abs=1e-6)
    (output,) = hookscope.diff(build, build, sums, weights=weights, weights_b=weights).outputs
    assert output.measures is not None
    assert output.measures.max_abs == 0


SMALL = "squeezenet1_1"


@pytest.fixture(scope="module")
def small() -> nn.Module:
    with seeded(3):
        return torchvision.models.get_model(SMALL, num_classes=7).eval()


@pytest.fixture
def file(tmp_path: Path, small: nn.Module) -> str:
    torch.save(
        {"state_dict": {f"model.{key}": value for key, value in small.state_dict().items()}}, tmp_path / "model.pt"
    )
    return str(tmp_path / "model.pt")


def assert_same(module: nn.Module, expected: nn.Module) -> None:
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(module.eval()(image), expected.eval()(image))


@pytest.mark.parametrize("arch", [None, SMALL, f"torchvision:{SMALL}"])
def test_network_of_a_weights_file_follows_the_file(file: str, small: nn.Module, arch: str | None) -> None:
    loaded = load_model(file, arch=arch)
    assert_same(loaded.module, small)
    assert loaded.info.name == f"model.pt ({SMALL})"
    assert loaded.info.weights == "model.pt"
    assert (loaded.info.arguments, loaded.info.categories) == ({"num_classes": 7}, ())
    assert not loaded.info.random
    assert loaded.warnings == ()
    said = "\n".join(loaded.notes)
    assert ("recognised as squeezenet1_1" if arch is None else "built with num_classes=7") in said
    assert "'state_dict'" in said
    assert "'model.' was removed" in said


def test_file_on_meta_is_read_and_has_to_fit(file: str, tmp_path: Path) -> None:
    on_meta = build_on_meta(file)
    assert all(parameter.is_meta for parameter in on_meta.module.parameters())
    assert on_meta.info.arguments == {"num_classes": 7}
    (tmp_path / "net.py").write_text("from torch import nn\nbuild = lambda: nn.Linear(2, 2)\n")
    with pytest.raises(CheckpointError, match=r"does not fit net\.py:build"):
        build_on_meta(file, arch=f"{tmp_path}/net.py:build")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "linear.pt")
    loaded = build_on_meta(str(tmp_path / "linear.pt"), arch=f"{tmp_path}/net.py:build")
    assert loaded.module.weight.is_meta


@pytest.mark.parametrize(
    "options", [FileOptions(key="a"), FileOptions(allow_missing=("a",)), FileOptions(allow_unexpected=("a",))]
)
def test_file_options_without_a_file_are_usage_errors(options: FileOptions) -> None:
    with pytest.raises(UsageError, match="need a weights file"):
        load_model(SMALL, weights="none", options=options)


@pytest.fixture
def code(tmp_path: Path, small: nn.Module) -> dict[str, str]:
    """The same network in files that run code: kind to path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(small, tmp_path / "module.pt")
        torch.jit.script(small).save(tmp_path / "script.pt")
        image = torch.rand(1, 3, 64, 64)
        torch.export.save(torch.export.export(small, (image,)), tmp_path / "program.pt2")
    return {kind: str(next(tmp_path.glob(f"{kind}.*"))) for kind in ("module", "script", "program")}


@pytest.mark.exhaustive
def test_trust_does_not_make_a_damaged_file_good(code: dict[str, str], small: nn.Module) -> None:
    weight = next(small.parameters()).detach().numpy().tobytes()
    for path in map(Path, code.values()):
        body = bytearray(path.read_bytes())
        body[body.index(weight) + 10] ^= 1
        path.write_bytes(body)
        for arch in (None, SMALL):
            with pytest.raises(CheckpointError, match="not intact"):
                load_model(str(path), arch=arch, options=FileOptions(trust=True))


def test_a_name_of_timms_is_answered_with_its_form() -> None:
    with pytest.raises(ModelNotFoundError, match=r"called .*\. timm has it: give timm:vit_tiny_patch16_224\."):
        parse_model("vit_tiny_patch16_224")
