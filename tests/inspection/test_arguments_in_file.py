"""Files that hold the arguments of a network together, and what is told where an argument is missing or wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import hookscope
from hookscope.errors import HookscopeError, UsageError
from hookscope.inputs.named import read_named
from tests.inputs.written import PLAIN
from tests.networks import Apply


class Two(nn.Module):
    """A picture and five numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.numbers = nn.Linear(5, 4)

    def forward(self, image: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
        return self.conv(image).mean((2, 3)) + self.numbers(meta)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids).mean(1))


@pytest.fixture
def arguments() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"image": torch.randn(2, 3, 8, 8, generator=generator), "meta": torch.randn(2, 5, generator=generator)}


@pytest.mark.parametrize("form", ["tuple", "dict", "safetensors"])
@pytest.mark.sample("dict")
def test_a_file_of_several_tensors_gives_the_arguments(
    arguments: dict[str, torch.Tensor], form: str, tmp_path: Path
) -> None:
    path = tmp_path / ("x.safetensors" if form == "safetensors" else "x.pt")
    if form == "safetensors":
        save_file(arguments, path)
    else:
        torch.save((*arguments.values(),) if form == "tuple" else arguments, path)
    network = Two()
    row = hookscope.activations(network, path, layer="numbers", save_tensors=True)["numbers"]
    expected = network.numbers(arguments["meta"]).detach()
    assert (row.shape, row.mean) == ((2, 4), pytest.approx(float(expected.mean()), abs=1e-6))
    report = hookscope.check(network, images=str(path), select="forward")
    assert (report.passed, len(report.inputs)) == (True, 2)
    assert hookscope.grads(network, [path]).rows[0].shape == (2, 4, 6, 6)


@pytest.mark.parametrize("wrapped", [lambda ids: {"ids": ids}, lambda ids: (ids,)], ids=["dict", "tuple"])
def test_a_file_of_one_tensor_gives_the_only_argument(wrapped: Callable[[torch.Tensor], Any], tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    torch.save(wrapped(ids), tmp_path / "ids.pt")
    network = Tokens()
    run = hookscope.activations(network, tmp_path / "ids.pt", layer="head")
    assert len(run.inputs) == 2
    assert run["head"].mean == pytest.approx(float(network(ids).detach().mean()), abs=1e-6)


def test_an_argument_that_forward_does_not_know_is_told_with_those_it_knows(arguments: dict[str, torch.Tensor]) -> None:
    with pytest.raises(HookscopeError, match="unexpected keyword argument 'extra'; its arguments are image, meta"):
        hookscope.activations(Two(), arguments["image"], input={"extra": arguments["meta"]})
    with pytest.raises(HookscopeError, match=r"A tensor by name needs its batch axis: \(1, 5\), not \(5,\)"):
        hookscope.activations(Cat(), arguments["image"][:1], input={"meta": torch.zeros(5)})


class Cat(Two):
    def forward(self, image: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.conv(image).mean((2, 3)), self.numbers(meta)], 1)


def test_a_row_of_numbers_has_the_dtype_that_is_named() -> None:
    (ids,) = read_named(["ids=4,8,1:int64"], PLAIN)
    assert torch.equal(ids.value, torch.tensor([[4, 8, 1]]))
    row = hookscope.activations(Tokens(), [], input=["ids=4,8,1:int64"], layer="embedding")["embedding"]
    assert row.shape == (1, 3, 4)
    (halves,) = read_named(["x=0.5,1:float16"], PLAIN)
    assert halves.value.dtype is torch.float16


@pytest.mark.parametrize("method", ["grad-cam", "gradient"])
def test_attribute_names_the_embedding_of_tokens(method: str) -> None:
    with pytest.raises(UsageError, match=r"look at what its embedding returns, .*\bembedding\.$"):
        hookscope.attribute(Tokens(), torch.tensor([[1, 2, 3]]), method=method)


def test_a_network_of_functions_is_pointed_to_its_operations() -> None:
    x = torch.randn(1, 3, 8, 8)
    functions = Apply(lambda x: F.relu(x).mean((2, 3)))
    note = "Apply has no modules inside: `ops` shows its operations."
    assert note in hookscope.activations(functions, x).notes
    assert note in hookscope.grads(functions, x).notes
    assert note not in hookscope.activations(functions, x, ops=True).notes
    assert note not in hookscope.activations(nn.ReLU(), x).notes


def test_without_parameters_there_are_no_weights_to_shuffle() -> None:
    result = hookscope.attribute(Apply(lambda x: F.relu(x).mean((2, 3))), torch.randn(1, 3, 8, 8), method="gradient")
    assert "weights" not in {check.name for check in result.sanity}
    assert "Sanity: no weights test, because the network has no parameters to shuffle." in result.notes


class OneDict(Two):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(batch["image"], batch["meta"])


def test_a_network_that_takes_a_whole_dict_is_told_how_to_get_it(
    arguments: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save(arguments, tmp_path / "x.pt")
    with pytest.raises(HookscopeError, match=r"argument is batch\. Give it the dict of a file by `input` batch=FILE"):
        hookscope.activations(OneDict(), tmp_path / "x.pt")
    with pytest.raises(HookscopeError, match=r"argument is batch$"):  # which is given by position here
        hookscope.activations(OneDict(), torch.ones(2, 3), input={"x": 1}, batch_axis=0)
    rows = hookscope.activations(OneDict(), [], input=[f"batch={tmp_path / 'x.pt'}"])
    assert rows["numbers"].shape == (2, 4)


@pytest.mark.parametrize("run", [hookscope.activations, hookscope.grads])
def test_a_name_looked_up_in_a_tensor_is_told_as_such_and_torch_warns_of_nothing(run: Callable[..., Any]) -> None:
    class Entries(Two):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().forward(batch["input_image"], batch["meta"])

    said = "the network looks up 'input_image' in a tensor, as in a dict; its one argument is batch. Give it the dict"
    with pytest.raises(HookscopeError, match=said):
        run(Entries(), torch.ones(2, 4))
