"""A weights file without its network: what its names and shapes tell is what the network itself would."""

import math
import re
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn

from hookscope.commands.check.measuring.file_alone import as_named, measure_read, read_alone
from hookscope.commands.check.measuring.stored import stored_tensors
from hookscope.errors import CheckpointError, UsageError
from hookscope.results.check import CheckMeasurements, StoredValues
from hookscope.rules.settings import CheckSettings

# Of a matrix whose rows are not known to be filters.
UNKNOWN = {"filter_count": None, "repeated_filters": (), "constant_run": None, "spread_beyond_chance": None}


def alone(state: dict[str, Tensor]) -> dict[str, StoredValues]:
    return {stored_tensor.name: stored_tensor for stored_tensor in stored_tensors(as_named(state))[0]}


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "swin_t"])
@pytest.mark.sample("resnet18", "mobilenet_v2")
def test_values_of_a_file_are_measured_as_those_of_its_network_are(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = torchvision.models.get_model(name)
    expected = stored_tensors(network)[0]
    actual = alone(network.state_dict())
    assert set(actual) == {each.name for each in expected}
    for each in expected:
        message = actual[each.name]
        assert message == replace(
            each, kind=message.kind, role=message.role, **(UNKNOWN if message.filter_count is None else {})
        )
        assert message.filter_count in (each.filter_count, None)
        assert message.role == each.role or not each.name.endswith(("weight", "bias", "running_mean", "running_var"))


def test_dead_filters_are_counted_along_the_axis_of_the_outputs() -> None:
    up, down, dense = nn.ConvTranspose2d(4, 6, 3), nn.Conv2d(6, 4, 3, bias=False), nn.Linear(4, 3)
    with torch.no_grad():
        up.weight[:, 5] = 0  # (inputs, outputs, H, W): an output channel of a transposed convolution
        up.weight[2] = 0  # an input channel, which is no filter
        down.weight[1] = 0
        dense.weight[2] = 0
    layers = {"up": up, "down": down, "dense": dense, "words": nn.Embedding(5, 4, padding_idx=0)}
    actual = alone(
        {f"{at}.{name}": tensor for at, layer in layers.items() for name, tensor in layer.state_dict().items()}
    )
    assert actual["down.weight"].zero_filters == (1,)
    assert actual["dense.weight"].zero_filters == (2,)
    assert actual["up.weight"].filter_count is None  # only its bias shows that it is transposed
    assert actual["words.weight"].filter_count is None


def test_no_name_hides_another() -> None:
    names = [
        "",
        ".",
        ".weight",
        "weight",
        "a",
        "a.",
        "a.b",
        "a..b",
        "forward",
        "training",
        "_parameters.x",
        "a.forward",
    ]
    state = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    assert {name: each.max for name, each in alone(state).items()} == {name: float(n) for n, name in enumerate(names)}


def test_tied_weights_are_measured_once_and_copies_are_twins() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    actual = alone({"in.weight": weight, "out.weight": weight.view(2, 3), "copy.weight": weight.clone()})
    assert actual.keys() == {"in.weight", "copy.weight"}
    assert actual["in.weight"].aliases == ("out.weight",)
    assert actual["copy.weight"].twin_of == "in.weight"


def test_a_matrix_without_a_bias_is_looked_at_for_whole_numbers() -> None:
    (lone,) = stored_tensors(as_named({"fc.weight": torch.arange(64.0).reshape(8, 8)}))[0]
    assert (lone.filter_count, lone.is_whole) == (None, True)


def test_masks_are_buffers_and_packed_weights_are_looked_into() -> None:
    state = {"mask": torch.full((2, 2), -math.inf).triu(1), "packed": (torch.ones(2), None), "n": torch.tensor(1)}
    actual = alone(state)  # type: ignore[arg-type] - as int8 files have it
    assert (actual["mask"].role, actual["n"].role, actual["packed[0]"].role) == ("buffer", "buffer", "parameter")


def measured_file(path: str, key: str | None = None) -> CheckMeasurements:
    return measure_read(read_alone(path, CheckSettings(key=key)), "there is none", 0.0)


@pytest.mark.exhaustive
def test_the_record_says_that_there_is_no_network(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"model": OrderedDict(w=torch.ones(2, 3)), "net": OrderedDict(w=torch.zeros(5))}, path)
    measured = measured_file(str(path), "net")
    assert (measured.model.name, measured.model.parameter_count) == ("w.pt (no network)", 5)
    assert (measured.forward, measured.no_network) == (None, "there is none")
    with pytest.raises(UsageError, match="--key"):
        measured_file(str(path))
    with pytest.raises(UsageError, match="--arch none needs a weights file"):
        measured_file("resnet18")


def resnet18_state() -> dict[str, Tensor]:
    return torchvision.models.resnet18(num_classes=10).state_dict()


def without_parameters(stub: Tensor) -> dict[str, Tensor]:
    """What ZeRO-3 leaves: buffers are whole on every rank, of parameters there is a stub."""
    names = {name for name, _ in torchvision.models.resnet18(num_classes=10).named_parameters()}
    return {name: stub.clone() if name in names else each for name, each in resnet18_state().items()}


WITHOUT_VALUES = {
    "every tensor is empty": (
        {name: torch.empty(0) for name in resnet18_state()},
        "122 of 122 tensors have no values, such as 'conv1.weight'",
    ),
    "as ZeRO-3 saves it": (
        {"module": without_parameters(torch.empty(0)), "ds_version": "0.14.4", "param_shapes": [{"w": (64, 3, 7, 7)}]},
        "62 of 122 tensors have no values, such as 'conv1.weight'",
    ),
    "as ZeRO-3 saves it, with a value in each": (
        {"module": without_parameters(torch.ones(1)), "ds_version": "0.14.4"},
        "each of its 62 parameters has a single value",
    ),
    "empty with two axes": (
        {name: torch.empty(0, 3) for name in resnet18_state()},
        "122 of 122 tensors have no values, such as 'conv1.weight'",
    ),
    "one weight of many": (
        {**resnet18_state(), "layer1.0.conv1.weight": torch.empty(0)},
        "1 of 122 tensors have no values, such as 'layer1.0.conv1.weight'",
    ),
}


@pytest.mark.parametrize("case", WITHOUT_VALUES)
def test_a_file_of_names_without_values_is_refused(case: str, tmp_path: Path) -> None:
    content, expected = WITHOUT_VALUES[case]
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=re.escape(f"w.pt does not hold its weights: {expected}. ")) as raised:
        measured_file(str(tmp_path / "w.pt"))
    assert "ZeRO-3" in str(raised.value)


@pytest.mark.parametrize(
    "state",
    [
        {"a.weight": torch.ones(2, 3), "observer.min_val": torch.empty(0), "observer.max_val": torch.empty(0)},
        {"0.weight": torch.empty(5, 0), "0.bias": torch.ones(5), **nn.Linear(5, 5).state_dict()},
        {"gain": torch.ones(1), "offset": torch.zeros(1), "temperature": torch.ones(())},
        {**nn.Linear(3, 4).state_dict(), "_extra": torch.empty(0, dtype=torch.uint8)},
    ],
    ids=["observers", "a layer without inputs", "three numbers", "bytes"],
)
def test_tensors_that_are_empty_by_design_are_measured(state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "w.pt")
    measured = measured_file(str(tmp_path / "w.pt"))
    assert {each.name for each in measured.stored} == state.keys()


def two_layers() -> dict[str, Tensor]:
    return {"0.weight": torch.randn(3, 4), "0.bias": torch.randn(3), "1.weight": torch.randn(2, 3)}


def behind(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


def remarks(path: Path, state: dict[str, Tensor], key: str | None = None) -> tuple[str, ...]:
    torch.save(state, path)
    return measured_file(str(path), key).warnings


@pytest.mark.parametrize("prefix", ["module.", "ema.", "module._orig_mod."])
def test_a_network_that_is_there_twice_is_told(tmp_path: Path, prefix: str) -> None:
    path = tmp_path / "model.pt"
    state = two_layers()
    copy = {name: value + 1 for name, value in state.items()}
    (said,) = remarks(path, state | behind(prefix, copy))
    shown = f"('0.weight' and '{prefix}0.weight')"
    choice = f"A network takes one set: --key {prefix.rstrip('.')} chooses the second."
    assert said == f"model.pt has 3 names twice, without and with '{prefix}' {shown}; their values differ. {choice}"
    chosen = remarks(path, state | behind(prefix, copy), prefix.rstrip("."))
    assert not any("twice" in each for each in chosen)
    assert any(f"'{prefix.rstrip('.')}'" in each for each in chosen)
    copy["1.weight"] = state["1.weight"].clone()
    assert "2 of 3 differ." in remarks(path, state | behind(prefix, copy))[0]
    assert "their values are equal." in remarks(path, state | behind(prefix, state))[0]


def test_a_part_that_is_there_compiled_and_not_is_told(tmp_path: Path) -> None:
    state = behind("head.", two_layers()) | {"stem.weight": torch.ones(2, 2)}
    (said,) = remarks(tmp_path / "x.pt", state | behind("head._orig_mod.", two_layers()))
    assert said.startswith("x.pt has 3 names twice, without and with '_orig_mod.' ('head.0.weight' and 'head._orig_mod")
    assert said.endswith("A network takes one set.")


def test_two_copies_in_wrappers_are_told(tmp_path: Path) -> None:
    state = behind("student.", two_layers()) | behind("teacher.", two_layers())
    (said,) = remarks(tmp_path / "x.pt", state)
    assert said.startswith("x.pt has 3 names twice, under 'student.' and 'teacher.' ('student.0.bias' and 'teacher.0.b")


@pytest.mark.parametrize(
    "shapes",
    [
        {"weight": (2, 2), "inner.weight": (2, 2)},  # a layer's own weight, and that of one inside it
        {"weight": (2, 2), "module.weight": (2, 3)},
        {"0.weight": (2, 2), "0.bias": (2,), "1.weight": (2, 2), "1.bias": (2,)},
        {"conv.weight": (2, 2), "encoder.conv.weight": (2, 2), "encoder.norm.weight": (2,), "encoder.fc.bias": (2,)},
        {"backbone.weight": (2, 2), "backbone.bias": (2,), "classifier.weight": (2, 2), "classifier.bias": (2,)},
        {f"module.layers.{at}.{name}": (2, 2) for at in range(4) for name in ("a", "b", "c")},
    ],
)
def test_parts_of_one_network_are_no_copies(tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    assert remarks(tmp_path / "x.pt", {name: torch.randn(shape) for name, shape in shapes.items()}) == ()


@pytest.mark.parametrize(
    ("down", "up"),
    [
        ("q_proj.lora_A.default.weight", "q_proj.lora_B.default.weight"),
        ("layers.0.q_proj.lora.down.weight", "layers.0.q_proj.lora.up.weight"),
    ],
)
def test_adapters_are_told(tmp_path: Path, down: str, up: str) -> None:
    state = {down: torch.ones(2, 8), up: torch.ones(8, 2)}
    (said,) = remarks(tmp_path / "x.pt", state | {"q_proj.alpha": torch.tensor(2.0)})
    assert said == "x.pt: 1 LoRA adapter of rank 2 for q_proj; it needs the network that it was trained on."
    state["q_proj.weight"], state[up] = torch.ones(8, 8), torch.zeros(8, 2)
    (said,) = remarks(tmp_path / "x.pt", state)
    assert said == "x.pt: 1 LoRA adapter of rank 2 for q_proj; every lora_B is 0 (untrained)."


def test_half_an_adapter_beside_its_layer_is_told(tmp_path: Path) -> None:
    state = {"q.lora_A.weight": torch.ones(2, 8), "q.weight": torch.ones(8, 8)}
    (said,) = remarks(tmp_path / "x.pt", state)
    assert said == "x.pt: 1 LoRA tensor without its other half."
    state |= {"q.lora_B.weight": torch.ones(8, 2), "k.lora_B.weight": torch.ones(8, 2)}
    (said,) = remarks(tmp_path / "x.pt", state)
    assert said == "x.pt: 1 LoRA adapter of rank 2 for q; 1 LoRA tensor without its other half."


@pytest.mark.parametrize(
    ("layer", "said"), [("mlp.0", "mlp.0"), ("blocks.1.mlp.0", "mlp.0"), ("0", "layer 0"), ("blocks.1.qkv", "qkv")]
)
def test_an_adapted_layer_is_never_a_bare_number(tmp_path: Path, layer: str, said: str) -> None:
    halves = {f"{layer}.lora_A.weight": torch.ones(2, 8), f"{layer}.lora_B.weight": torch.ones(8, 2)}
    (remark,) = remarks(tmp_path / "x.pt", halves)
    assert remark.startswith(f"x.pt: 1 LoRA adapter of rank 2 for {said}; ")
