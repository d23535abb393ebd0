"""Every function and command takes inputs by name in the same words: containers of tensors, alone and in files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.errors import ImageError

SOURCE = """
import torch
from torch import nn

class Views(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, views, scale=1.0):
        views = list(views.values()) if isinstance(views, dict) else views
        return self.head(sum(self.conv(view).mean((2, 3)) for view in views)) * scale
"""


def views() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 3, size, size, generator=generator) for size in (8, 10)]


def network() -> nn.Module:
    names: dict[str, Any] = {}
    exec(SOURCE, names)
    model: nn.Module = names["Views"]()
    return model.eval()


CONTAINERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda several: dict(zip(("x", "y"), several, strict=True)),
}


@pytest.mark.parametrize(("container", "stored"), [("dict", False), ("tuple", False), ("list", True)])
def test_functions(container: str, stored: bool, tmp_path: Path) -> None:
    model, inputs = network(), CONTAINERS[container](views())
    torch.save(inputs, tmp_path / "views.pt")
    named = {"views": tmp_path / "views.pt" if stored else inputs, "scale": 2.0}
    output = model(views(), 2.0)
    output.sum().backward()
    gradients = {name: parameter.grad.double().norm().item() for name, parameter in model.named_parameters()}
    for batch_size in (8, 2):
        run = hookscope.activations(model, input=named, batch_size=batch_size, layer="*")
        assert len(run.inputs) == 3
        assert run["(model)"].l2 == pytest.approx(output.double().norm().item(), rel=1e-5)
        differentiated = hookscope.grads(model, input=named, batch_size=batch_size, loss="sum")
        assert {row.name: row.gradient.l2 for row in differentiated.parameters} == pytest.approx(gradients, rel=1e-4)
    report = hookscope.check(model, input=named)
    assert (report.error, report.findings) == ("", ())
    assert hookscope.layers(model, input=named)["conv"].input_shapes == ((3, 3, 8, 8),)
    compared = hookscope.diff(model, network(), input=named)
    assert [row.label for row in compared.rows] == ["conv", "conv#1", "head"]
    assert len(compared.inputs) == 3
    looks = hookscope.attribute(model, input=named, layer="conv", target=1, sanity="none")
    scores = {heat_map.input_index: heat_map.target.score for heat_map in looks.maps}
    assert [scores[index] for index in range(3)] == pytest.approx(output[:, 1].tolist(), rel=1e-4)


def test_a_file_of_several_tensors_without_a_name_says_how_to_give_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(views(), "views.pt")
    with pytest.raises(ImageError, match=r"holds a list.*an input of several tensors goes by name: `input`"):
        hookscope.activations(network(), "views.pt")


NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Encoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@NESTED
@pytest.mark.parametrize(("by_name", "layout"), [(False, torch.strided), (True, torch.jagged)], ids=str)
@pytest.mark.sample("False-torch.strided")
def test_a_nested_tensor_is_an_input_with_the_numbers_of_its_parts(layout: torch.layout, by_name: bool) -> None:
    model, generator = Encoded().eval(), torch.Generator().manual_seed(2)
    parts = [torch.randn(length, 4, generator=generator) for length in (2, 5, 1)]
    inputs = torch.nested.nested_tensor(parts, layout=layout)
    args, kwargs = ((), {"input": {"x": inputs}}) if by_name else ((inputs,), {})
    outputs = [model(part) for part in parts]
    torch.cat(outputs).sum().backward()
    gradients = {name: parameter.grad.double().norm().item() for name, parameter in model.named_parameters()}
    for batch_size in (8, 2):
        run = hookscope.activations(model, *args, **kwargs, batch_size=batch_size, layer="*", ops=True)
        assert len(run.inputs) == 3
        row = run["(model)"]
        assert row.activation.element_count == 8 * 3
        assert row.l2 == pytest.approx(torch.cat(outputs).double().norm().item(), rel=1e-5)
        actual = hookscope.grads(model, *args, **kwargs, batch_size=batch_size, loss="sum")
        assert {row.name: row.gradient.l2 for row in actual.parameters} == pytest.approx(gradients, rel=1e-4)
    together = hookscope.grads(model, *args, **kwargs).loss.value
    alone = hookscope.grads(model, *args, **kwargs, batch_size=1).loss.value
    assert together == pytest.approx(alone, rel=1e-5)  # the projection of an input is the same in whatever batch
    assert hookscope.check(model, **({"input": {"x": inputs}} if by_name else {"images": inputs})).error == ""
    assert hookscope.diff(model, Encoded().eval(), *args, **kwargs).rows
    with pytest.raises(hookscope.UsageError, match=r"ce cannot compare .*, a nested tensor: take `loss` projection"):
        hookscope.grads(model, *args, **kwargs, loss="ce", target=0)
