"""One network on two inputs: `--input-b`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookscope
from hookscope import options
from hookscope.commands.diff import torch_compile
from hookscope.commands.diff.describe import answer
from hookscope.commands.diff.run import diff
from hookscope.errors import HookscopeError, UsageError
from tests.networks import Apply


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.pool, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(self.pool(self.conv(x).relu()).flatten(1))
        return output


def pictures(count: int = 1, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / a.detach().norm())


def test_two_crops_are_compared_layer_by_layer_and_no_layer_is_blamed() -> None:
    network, a, b = Net(), pictures(3), pictures(3, seed=1)
    result = hookscope.diff(network, "same", a, input_b=b, batch_size=2)
    assert result["conv"].measures.relative_l2 == pytest.approx(relative(network.conv(a), network.conv(b)), rel=1e-5)
    assert result["fc"].measures.relative_l2 == pytest.approx(relative(network(a), network(b)), rel=1e-5)
    assert result["conv"].input_relative_l2 == pytest.approx(relative(a, b), rel=1e-5)
    assert result.first_differences == ()
    assert (len(result.inputs), len(result.inputs_b)) == (3, 3)
    assert "A and B get different inputs, so the difference begins there: relative L2" in str(result)


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: F.pad(x, (2, 2, 2, 2)),
        lambda x: x[..., :5, :7],
    ],
)
def test_a_padded_picture_has_rows_where_shapes_agree_and_an_output(changed: Callable[[Tensor], Tensor]) -> None:
    network, a = Net(), pictures()
    b = changed(a)
    result = hookscope.diff(network, "same", a, input_b=b)
    assert result["conv"].measures is None
    assert any(" differs " in line and "shapes differ" in line for line in str(result).splitlines())
    assert result["pool"].measures.relative_l2 == pytest.approx(
        relative(network.pool(network.conv(a).relu()), network.pool(network.conv(b).relu())), rel=1e-4
    )
    assert result.outputs[0].measures.relative_l2 == pytest.approx(relative(network(a), network(b)), rel=1e-4)
    assert result.first_differences == ()
    assert "Of 3 rows 2 have the same shape." in str(result)


def test_rows_that_are_nan_for_other_inputs_are_counted() -> None:
    network = nn.Sequential(nn.Linear(4, 4, bias=False), Apply(torch.log), nn.Linear(4, 3))
    with torch.no_grad():
        network.get_parameter("0.weight").copy_(torch.eye(4))
    a = torch.ones(2, 4)
    result = hookscope.diff(network, "same", a, input_b=a * torch.tensor([1.0, 1.0, 1.0, -1.0]))
    difference = "relative L2 1.00 at layer 0, at most 1.00 at layer 0. 2 rows hold NaN or Inf on one side only."
    assert answer(result)[0] == f"A and B get different inputs, so the difference begins there: {difference}"


def test_the_same_inputs_twice_are_equal_and_a_layer_that_is_given_the_same_is_still_named() -> None:
    class Blind(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clamp(0, 0) + 1)

    assert "A and B get different inputs" not in str(hookscope.diff(Net(), "same", pictures(), input_b=pictures(2)[:1]))
    result = hookscope.diff(Blind(), "same", pictures(), input_b=pictures(seed=1), edit_b="pool:output:scale(2)")
    assert [difference.layer for difference in result.first_differences] == ["pool"]


def test_gradients_are_those_of_each_sides_own_inputs() -> None:
    network, a, b = Net(), pictures(2), pictures(2, seed=1)
    result = hookscope.diff(network, "same", a, input_b=b, grads=True, loss="sum")
    gradients = []
    for inputs in (a, b):
        network.zero_grad()
        network(inputs).sum().backward()
        gradients.append(network.conv.weight.grad.clone())
    network.zero_grad()
    row = next(gradient for gradient in result.gradients if gradient.label == "conv.weight grad")
    assert row.measures.relative_l2 == pytest.approx(relative(*gradients), rel=1e-4)


def test_nothing_that_other_inputs_explain_is_blamed_on_b(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compile, "lower", lambda graph, _inputs: graph.forward)
    compiled = hookscope.diff(Net(), "same", pictures(), input_b=pictures(seed=1), compile_b=True)
    assert compiled.outputs[0].relative_l2 > 1e-3
    assert compiled.warnings == ()
    with pytest.raises(UsageError, match="runs on A's inputs, so B needs the same: leave out `input_b`"):
        hookscope.diff(Net(), "same", pictures(), input_b=pictures(seed=1), reference="float64")


def test_there_is_one_for_each_and_files_are_named(tmp_path: Path) -> None:
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", pictures(seed=ord(name))[0].numpy())
    with pytest.raises(UsageError, match="A is given 1 input, and B 2 by"):
        hookscope.diff(Net(), "same", tmp_path / "a.npy", input_b=[tmp_path / "a.npy", tmp_path / "b.npy"])
    result = hookscope.diff(Net(), "same", tmp_path / "a.npy", input_b=tmp_path / "b.npy")
    assert [Path(case.name).name for case in (*result.inputs, *result.inputs_b)] == ["a.npy", "b.npy"]
    with pytest.raises(UsageError, match="applies to models that run over pictures"):
        hookscope.diff(Net(), "same", input_b=tmp_path / "b.npy")


@pytest.mark.parametrize("broken", ["a1.npy", "b1.npy", "raises"])
def test_an_input_that_cannot_be_used_on_either_side_is_left_out_with_its_pair(tmp_path: Path, broken: str) -> None:
    network, folder, errors = Net(), tmp_path, list[HookscopeError]()
    for name in ("a0", "a1", "a2", "b0", "b1", "b2"):
        fill = torch.nan if broken == "raises" and name == "b1" else 1.0
        np.save(folder / f"{name}.npy", (pictures(seed=ord(name[0]) * int(name[1]))[0] * fill).numpy())
    if broken != "raises":
        (folder / broken).write_bytes(b"no array")

    def refuse_nan(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].isnan().any():
            raise ValueError("NaN")

    network.conv.register_forward_pre_hook(refuse_nan)
    inputs, inputs_b = ([folder / f"{side}{number}.npy" for number in range(3)] for side in "ab")
    result = diff(network, "same", inputs, option=options.Diff(input_b=inputs_b), on_error=errors.append)
    names = [[Path(record.name).stem for record in side] for side in (result.inputs, result.inputs_b)]
    assert names == [["a0", "a2"], ["b0", "b2"]]
    (error,) = errors
    assert str(error).startswith(f"{inputs[1]}, {inputs_b[1]}: ") if broken == "raises" else broken in str(error)
    assert result.provenance is not None
    assert result.provenance.unusable_inputs
    kept = [torch.stack([torch.from_numpy(np.load(side[number])) for number in (0, 2)]) for side in (inputs, inputs_b)]
    assert result["conv"].relative_l2 == pytest.approx(relative(*map(network.conv, kept)), rel=1e-5)
