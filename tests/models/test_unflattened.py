"""Exported programs under hooks: what they see is what they see of the eager network."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.errors import CheckpointError
from hookscope.inspection.forward import ForwardError
from hookscope.models import unflattened
from hookscope.models.construction import LoadedModel
from hookscope.models.exported import load_program
from tests.inspections import inspect
from tests.models.saved import quiet, save_exported, witness
from tests.networks import conv_net


def load(network: nn.Module, folder: Path, *args: Any) -> LoadedModel:
    save_exported(network.eval(), args, folder / "model.pt2")
    return load_program(WeightsFiles.at(folder / "model.pt2"))


class Rows(nn.Module):
    """Computes with a size that the exported graph holds as a number, so that two calls have two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.shift = torch.full((4,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] * 2, 2).reshape(x.shape[0], -1) * self.scale + self.bias - self.shift


class Repeating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Rows(), nn.ReLU()))
        self.items = nn.ModuleList([Rows()])
        self.unused = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.block(x)
        second = self.block(torch.cat([first, x]))
        third = self.block(self.items[0](second)[:3])
        return {"out": self.items[0](third)}


def test_further_calls_of_a_layer_are_calls_of_one_module_at_every_depth(tmp_path: Path) -> None:
    eager = Repeating().eval()
    args = (torch.randn(2, 4),)
    loaded = load(eager, tmp_path, *args)
    expected, outputs = witness(eager, args)
    seen, again = witness(loaded.module, args)
    assert dict(loaded.module.named_modules()).keys() == dict(eager.named_modules()).keys()
    assert list(seen.activations) == list(expected.activations)
    assert ("block.1.0", 2, 0) in seen.activations
    for key, tensor in expected.activations.items():
        torch.testing.assert_close(seen.activations[key], tensor)
    assert seen.gradients.keys() == expected.gradients.keys()
    for key, tensor in expected.gradients.items():
        torch.testing.assert_close(seen.gradients[key], tensor)
    assert torch.equal(again[0], outputs[0])
    assert loaded.warnings[0] == "model.pt2: absent from the exported graph: 1 layer (unused)."
    assert [(row.layer, row.call) for row in inspect(loaded, args[0], ["*"]).rows] == [
        (row.layer, row.call) for row in inspect(eager, args[0], ["*"]).rows
    ]


def test_a_container_is_no_layer_of_the_class_that_it_holds(tmp_path: Path) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    modules = dict(load(Listed(), tmp_path, torch.ones(2, 4)).module.named_modules())
    assert {name: type(module).__name__ for name, module in modules.items() if name} == {
        "layers": "Module",
        "layers.0": "Linear",
    }


def test_a_size_that_may_vary_is_that_of_the_export_and_no_reason_to_warn(tmp_path: Path) -> None:
    eager = conv_net().eval()
    sizes = {"input": {0: torch.export.Dim("batch", min=2, max=64), 2: torch.export.Dim("height", min=8, max=64)}}
    with quiet(), (tmp_path / "model.pt2").open("wb") as file:
        torch.export.save(torch.export.export(eager, (torch.randn(2, 3, 8, 10),), dynamic_shapes=sizes), file)
    loaded = load_program(WeightsFiles.at(tmp_path / "model.pt2"))
    assert loaded.warnings == ()
    assert loaded.example_shape == (1, 3, 8, 10)
    assert loaded.preprocessing.crop == loaded.preprocessing.resize == (8, 10)  # 224 pixels are more than 64
    x = torch.randn(5, 3, 12, 10)
    torch.testing.assert_close(loaded.module(x), eager(x))


def test_a_program_that_is_given_gets_the_input_that_it_was_exported_for() -> None:
    with quiet():
        program: Any = torch.export.export(conv_net().eval(), (torch.randn(2, 3, 8, 10),))
    gradients = hookscope.grads(program)
    assert [record.shape for record in gradients.inputs] == [(3, 8, 10)] * 2
    assert gradients.warnings[0].endswith("of shape (2, 3, 8, 10), so it takes batches of exactly 2.")


@pytest.mark.parametrize(
    ("shape", "channels", "crop", "resize", "kind", "mean"),
    [
        ((1, 3, 40, 40), 3, (40, 40), 40, "image", (0.485, 0.456, 0.406)),
        ((1, 3, 24, 40), 3, (24, 40), (24, 40), "image", (0.485, 0.456, 0.406)),
        ((1, 1, 40, 40), 1, (40, 40), 40, "image", (0.449,)),
        ((1, 3, 4, 24, 24), 3, (24, 24), 24, "video", (0.485, 0.456, 0.406)),
        ((1, 7, 40, 40), 3, (224, 224), 224, "image", (0.485, 0.456, 0.406)),
        ((1, 5), 3, (224, 224), 224, "image", (0.485, 0.456, 0.406)),
    ],
)
def test_preprocessing_follows_the_exported_shape(
    tmp_path: Path, shape: tuple[int, ...], channels: int, crop: Any, resize: Any, kind: str, mean: Any
) -> None:
    preprocessing = load(nn.Sequential(nn.ReLU(), nn.Tanh()), tmp_path, torch.randn(shape)).preprocessing
    assert (preprocessing.channels, preprocessing.crop, preprocessing.resize) == (channels, crop, resize)
    assert preprocessing.kind == kind
    assert preprocessing.mean == pytest.approx(mean)
    if len(shape) == 5:
        assert preprocessing.frames == 4


@pytest.mark.parametrize(("shape", "example"), [((), None), ((0, 3), (0, 3)), ((2, 3), (2, 3))])
def test_a_number_and_an_empty_batch_are_inputs_too(
    tmp_path: Path, shape: tuple[int, ...], example: tuple[int, ...] | None
) -> None:
    torch.export.save(torch.export.export(nn.Sequential(nn.ReLU()), (torch.ones(shape),)), tmp_path / "net.pt2")
    loaded = load_program(WeightsFiles.at(tmp_path / "net.pt2"))
    assert loaded.example_shape == example
    assert torch.equal(loaded.module(-torch.ones(shape)), torch.zeros(shape))


class TakesDict(nn.Module):
    def forward(self, batch: dict[str, torch.Tensor], *, scale: torch.Tensor) -> torch.Tensor:
        return batch["image"] * scale


def test_an_input_in_a_dict_or_by_name_is_no_plain_tensor(tmp_path: Path) -> None:
    x = torch.ones(1, 3, 8, 8)
    program = torch.export.export(TakesDict(), ({"image": x},), {"scale": 2 * x})
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = load_program(WeightsFiles.at(tmp_path / "net.pt2"))
    assert loaded.example_shape is None
    assert torch.equal(loaded.module({"image": 3 * x}, scale=x), 3 * x)
    with pytest.raises(
        TypeError, match=r"exported for the arguments and keywords \(\({'image': '…'},\), {'scale': '…'}\)"
    ):
        loaded.module(x)


def test_another_batch_size_is_the_models_error_and_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load(conv_net(), tmp_path, torch.randn(2, 3, 8, 8))
    with pytest.raises(ForwardError, match=r"shape\[0\] to be equal to 2, but got 3"):
        inspect(loaded, torch.randn(3, 3, 8, 8))
    with pytest.raises(TypeError):
        loaded.module(torch.randn(2, 3, 8, 8), torch.randn(1))
    assert capsys.readouterr() == ("", "")


def test_a_program_exported_in_training_mode_is_said_to_stay_in_it(tmp_path: Path) -> None:
    save_exported(conv_net().train(), (torch.randn(2, 3, 8, 8),), tmp_path / "model.pt2")
    loaded = load_program(WeightsFiles.at(tmp_path / "model.pt2"))
    assert any("3 batch normalisation or dropout operators stay in training mode" in text for text in loaded.warnings)
    buffers = {name: buffer.clone() for name, buffer in conv_net().named_buffers()}
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in loaded.module.named_buffers())


def test_layers_that_would_compute_something_else_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = Repeating().eval()
    x = torch.randn(2, 4)
    # As torch 2.15 lays them out: it runs the graph of one call for all that look alike from outside.
    monkeypatch.setattr(unflattened, "_repeats_kept", quiet)
    loaded = load(eager, tmp_path, x)
    assert loaded.warnings[0] == (
        "model.pt2: only the output of the whole network and its parameters can be seen: torch cannot lay its layers "
        "out such that they compute the same."
    )
    assert torch.equal(loaded.module(x)["out"], eager(x)["out"])
    assert [name for name, _ in loaded.module.named_parameters()] == [name for name, _ in eager.named_parameters()]
    assert [row.layer for row in inspect(loaded, x, ["*"]).rows][-1] == ""
    loaded.module(x)["out"].sum().backward()
    eager(x)["out"].sum().backward()
    torch.testing.assert_close(loaded.module.get_parameter("block.0.weight").grad, eager.block[0].weight.grad)


def test_a_program_that_cannot_be_read_is_one_line_with_the_cause(tmp_path: Path) -> None:
    save_exported(nn.Linear(2, 2), (torch.ones(1, 2),), tmp_path / "model.pt2")
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "model.pt2", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content.replace(b'"operators"', b'"0perators"').replace(b"linear", b"lineaR"))
    with pytest.raises(CheckpointError, match=r"model.pt2 cannot be loaded as an exported program: \w+: ") as caught:
        load_program(WeightsFiles.at(tmp_path / "model.pt2"))
    assert str(caught.value).isprintable()
    assert "warnings above" not in str(caught.value)


def test_a_program_given_from_python_has_its_layers_and_their_cost() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 5, 3, bias=False)).eval()
    inputs = torch.randn(2, 3, 11, 13)
    program: Any = torch.export.export(network, (inputs,))
    table = hookscope.layers(program, input_shape=(2, 3, 11, 13), cost=True)
    assert [(row.layer, row.kind) for row in table.rows] == [
        ("", "Sequential"),
        ("0", "Conv2d"),
        ("1", "ReLU"),
        ("2", "Conv2d"),
    ]
    cost = table.cost
    assert cost is not None
    # Maps of 5x6 and 3x4, kernels of 3x3x3 and 4x3x3, 2 inputs.
    assert [cost[name].total.multiply_adds for name in ("0", "2")] == [2 * 4 * 30 * 27, 2 * 5 * 12 * 36]
    fields = [module.receptive_field for module in cost.modules if module.layer in ("0", "2")]
    assert [(field.size, field.stride) for field in fields if field] == [((3, 3), (2, 2)), ((7, 7), (2, 2))]
    differences = hookscope.diff(network, program, inputs, batch_axis=0)
    assert [row.layer for row in differences.rows] == ["0", "1", "2"]
    assert differences.first_differences == ()
    assert hookscope.check(program, input_shape=(2, 3, 11, 13)).model.kind == "Sequential"


def test_the_flat_graph_of_a_program_is_said_to_call_no_layer() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval()
    program: Any = torch.export.export(network, (torch.randn(2, 3),))
    run = hookscope.activations(program.module(), torch.randn(2, 3), batch_axis=0)
    assert "its graph calls operations and none of its layers, so rows are those of operations." in run.warnings[0]
    traced = hookscope.activations(torch.fx.symbolic_trace(network), torch.randn(2, 3), batch_axis=0)
    assert (traced.warnings, [row.layer for row in traced]) == ((), ["0", "1"])
