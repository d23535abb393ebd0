"""TorchScript under hooks: what they see is what they see of the eager network."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import hookscope
from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.hooks.forward_hooks import capture
from hookscope.inspection.forward import ForwardError
from hookscope.models import torchscript
from hookscope.models.construction import LoadedModel
from hookscope.models.exported import load_program
from tests.inspections import inspect
from tests.models.saved import SAVERS, SEVEN, build, load_script, quiet, tensors_of
from tests.models.scripts import BY_HAND
from tests.networks import conv_net


def test_a_layer_traced_twice_has_two_calls(tmp_path: Path) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    module = load_script(nn.Sequential(block, nn.Tanh(), block), tmp_path, (torch.randn(2, 4),)).module
    assert [name for name, _ in module.named_parameters()] == ["0.0.weight", "0.0.bias"]
    assert [(row.layer, row.call) for row in inspect(module, torch.randn(2, 4), ["*"]).rows] == [
        ("0.0", 0), ("0.1", 0), ("0", 0), ("1", 0), ("0.0", 1), ("0.1", 1), ("0", 1), ("", 0),
    ]  # fmt: skip


def test_tied_parameters_stay_tied_and_frozen_ones_frozen(tmp_path: Path) -> None:
    eager = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    eager[1].weight = eager[0].weight
    eager[0].bias.requires_grad_(False)
    module = load_script(eager, tmp_path).module
    assert [name for name, _ in module.named_parameters()] == ["0.weight", "0.bias", "1.bias"]
    assert module.get_submodule("0").weight is module.get_submodule("1").weight
    assert [parameter.requires_grad for parameter in module.parameters()] == [True, False, True]


def test_a_buffer_that_the_script_assigns_is_restored(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.steps = self.steps + 1
            return x * self.steps

    module = load_script(nn.Sequential(Counting()), tmp_path).module
    assert module(torch.ones(1)) == 1
    assert module.get_buffer("0.steps") == 1
    (row,) = inspect(module, torch.ones(1)).rows
    assert row.activation.max == 2
    assert module.get_buffer("0.steps") == 1
    assert module(torch.ones(1)) == 2


@pytest.mark.parametrize("traced", [True, False])
def test_a_failing_layer_is_found_and_the_cause_is_the_operators(tmp_path: Path, traced: bool) -> None:
    eager, args = build(SEVEN["resnet"])
    loaded = load_script(eager, tmp_path, args if traced else None)
    with pytest.raises(ForwardError) as caught:
        inspect(loaded, torch.randn(1, 4, 32, 32))
    failure = caught.value.inspection.failure
    assert failure is not None
    assert (failure.layer, failure.kind) == ("conv1", "Conv2d")
    assert failure.error.startswith("RuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected input")
    assert inspect(loaded, args[0]).failure is None


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
@pytest.mark.sample("error0")
def test_what_a_hook_raises_comes_out_as_it_is_and_leaves_nothing_behind(tmp_path: Path, error: BaseException) -> None:
    eager, args = build(SEVEN["resnet"])
    module = load_script(eager, tmp_path).module

    def explode(*_: object) -> None:
        raise error

    for register in ("register_forward_hook", "register_forward_pre_hook"):
        handle = getattr(module.get_submodule("layer2.0.bn1"), register)(explode)
        with pytest.raises(type(error)) as caught:
            module(*args)
        handle.remove()
        assert caught.value is error
        assert error.__cause__ is None
        assert torch.equal(module(*args), eager(*args))
    with pytest.raises(RuntimeError, match="expected input"):  # and not the former error
        module(torch.randn(1, 4, 32, 32))


def plain(path: Path) -> Any:
    """Load an archive as torch does."""
    with quiet():
        return torch.jit.load(path)  # type: ignore[no-untyped-call]


def copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(argument.clone() if isinstance(argument, Tensor) else argument for argument in args)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", BY_HAND)
def test_conditions_loops_and_random_numbers_are_those_of_the_plain_archive(
    name: str, train: bool, tmp_path: Path
) -> None:
    eager, args = build(BY_HAND[name])
    network = load_script(eager, tmp_path).module.train(train)
    script = plain(tmp_path / "model.pt").train(train)
    modules = dict(network.named_modules())
    results, states = [], []
    for case in (script, network):
        torch.manual_seed(3)
        with torch.no_grad(), capture(network, modules, lambda *_: None) as captured:
            results.append(tensors_of(case(*copies(args))))
        states.append(torch.get_rng_state())
    assert captured.observations
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(*states)
    for key, value in script.state_dict().items():
        assert torch.equal(value, network.state_dict()[key])


def gradients(network: nn.Module, args: tuple[Any, ...]) -> list[Tensor | None]:
    """Differentiate a fixed projection of the outputs; return the gradients of the parameters."""
    network.zero_grad()
    generator = torch.Generator().manual_seed(1)
    outputs = [parameter for parameter in tensors_of(network(*args)) if parameter.requires_grad]
    loss = torch.stack([(output * torch.randn(output.shape, generator=generator)).sum() for output in outputs]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for _, parameter in sorted(network.named_parameters())]


@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_through_writes_in_place_are_those_of_the_plain_archive(name: str, tmp_path: Path) -> None:
    eager, args = build(BY_HAND[name])
    network = load_script(eager, tmp_path).module
    seen: list[str] = []
    arrived: Any = lambda site, _: seen.append(site.layer)  # noqa: E731
    with capture(network, dict(network.named_modules()), lambda *_: None, gradients=arrived):
        ours = gradients(network, copies(args))
    assert seen
    for gradient, expected in zip(ours, gradients(plain(tmp_path / "model.pt"), copies(args)), strict=True):
        assert (gradient is None) == (expected is None)
        assert gradient is None or (expected is not None and torch.equal(gradient, expected))


class Added(nn.Module):
    """A network in Python whose block is a script."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.conv, self.block = nn.Conv2d(3, 3, 1), block

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x)) + self.block(x)


def scripted_residual() -> nn.Module:
    with quiet():
        return torch.jit.script(Added(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())))  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", ["input", "output", "grad"])
def test_a_script_inside_a_network_can_be_edited(place: str) -> None:
    network = nn.Sequential(nn.Conv2d(3, 3, 1), scripted_residual()).eval()
    result = hookscope.grads(network, torch.randn(1, 3, 4, 4), loss="sum", edit=f"name:1:{place}:zero")
    assert next(row for row in result.gradients if row.layer == "0").status == "zero"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


@pytest.mark.parametrize("form", ["scripted", "traced"])
def test_a_note_names_the_scripts_whose_operations_are_not_seen(tmp_path: Path, form: str) -> None:
    x = torch.randn(1, 3, 4, 4)
    unseen = "Operations inside TorchScript are not seen: "
    eager = Added(nn.Identity()).eval()
    loaded = load_script(eager, tmp_path, (x,) if form == "traced" else None)
    run = inspect(loaded, x, ops=True)
    assert [row.label for row in run.rows if row.owner is not None] == []
    assert run.notes[-1] == f"{unseen}(model)."
    assert not any("TorchScript" in note for note in inspect(loaded, x).notes)
    mixed = inspect(Added(scripted_residual()), x, ops=True)
    assert [row.label for row in mixed.rows if row.owner is not None] == ["(model):relu", "(model):add"]
    assert mixed.notes[-1] == f"{unseen}block."
    layers = load_script(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()), tmp_path)
    assert not any("TorchScript" in note for note in inspect(layers, x, ops=True).notes)


def check_limited(loaded: LoadedModel, eager: nn.Module, x: Tensor, reason: str) -> None:
    (warning,) = loaded.warnings
    assert warning == f"model.pt: only the output of the whole network and its parameters{reason}."
    torch.testing.assert_close(loaded.module(x), eager(x))
    rows = inspect(loaded, x, ["*"]).rows
    assert [(row.layer, row.kind) for row in rows] == [("", type(eager).__name__)]


def test_an_embedding_in_a_script_which_has_no_max_norm_runs(tmp_path: Path) -> None:
    embedding, indices = nn.Embedding(9, 4), torch.tensor([[1, 8]])
    loaded = load_script(nn.Sequential(embedding, nn.Linear(4, 2)), tmp_path)
    (embedded, *_) = inspect(loaded.module, indices).rows
    assert embedded.activation.mean == pytest.approx(float(embedding.weight[[1, 8]].detach().mean()))


def test_a_frozen_script_shows_its_output(tmp_path: Path) -> None:
    eager = conv_net().eval()
    with quiet():
        torch.jit.save(torch.jit.freeze(torch.jit.script(eager)), tmp_path / "model.pt")
    loaded = load_program(WeightsFiles.at(tmp_path / "model.pt"))
    check_limited(
        loaded,
        eager,
        torch.randn(2, 3, 8, 8),
        " can be seen: its code does not say where its layers are called",
    )
    assert not loaded.module.train().training


def test_a_torch_with_other_graphs_leaves_output_and_parameter_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reroute(_graph: Any, node: Any, *_: object) -> None:
        node.destroy_in_another_way()

    monkeypatch.setattr(torchscript, "_reroute", reroute)
    eager = conv_net().eval()
    loaded = load_script(eager, tmp_path)
    check_limited(loaded, eager, torch.randn(2, 3, 8, 8), " can be seen: this version of torch does not let hooks in")
    x = torch.randn(2, 3, 8, 8)
    loaded.module(x).square().sum().backward()
    eager(x).square().sum().backward()
    for (name, parameter), (reference, expected) in zip(
        loaded.module.named_parameters(), eager.named_parameters(), strict=True
    ):
        assert name == reference
        torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("form", ["scripted", "traced"])
@pytest.mark.sample("scripted")
def test_a_quantised_script_shows_its_layers(tmp_path: Path, form: str) -> None:
    with quiet():
        eager = torchvision.models.quantization.shufflenet_v2_x0_5(weights=None, quantize=True).eval()
    x = torch.randn(1, 3, 64, 64)
    SAVERS[form](eager, (x,), tmp_path / "model.pt")
    loaded = load_program(WeightsFiles.at(tmp_path / "model.pt"))
    expected = {row.label: row.activation.l2 for row in inspect(eager, x, ["type:ConvReLU2d", "type:Linear"]).rows}
    seen = {row.label: row.activation.l2 for row in inspect(loaded, x, ["type:ConvReLU2d", "type:Linear"]).rows}
    assert len(seen) > 30
    assert seen == pytest.approx(expected)
    float_network = torchvision.models.shufflenet_v2_x0_5()
    convolutions = [layer for layer in float_network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    biases = sum(layer.weight.shape[0] for layer in convolutions)  # of BatchNorm, folded into the convolutions
    assert loaded.info.parameter_count == sum(layer.weight.numel() for layer in convolutions) + biases


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"labels.txt": "cat\ndog\nnewt\n"}, "labels.txt"),
        ({"config.json": '{"lr": 0.1, "id2label": {"0": "cat", "1": "dog", "2": "newt"}}'}, "config.json"),
        ({"labels.txt": "cat\ndog\n", "meta/classes.json": '["cat", "dog", "newt"]'}, "meta/classes.json"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:torch.ao.quantization is deprecated")
def test_names_of_classes_come_from_extra_files(extra: dict[str, str], key: str, tmp_path: Path) -> None:
    with quiet():
        int8 = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)), {nn.Linear})
        for number, network in enumerate((nn.Linear(4, 3), int8)):
            torch.jit.save(torch.jit.script(network), tmp_path / f"{number}.pt", _extra_files=extra)  # type: ignore[no-untyped-call]
    for number in range(2):
        loaded = load_program(WeightsFiles.at(tmp_path / f"{number}.pt"))
        assert loaded.info.categories == ("cat", "dog", "newt")
        assert loaded.notes == (f"{number}.pt: 3 class names taken from its extra file '{key}'.",)
        assert loaded.info.parameter_count == 4 * 3 + 3
