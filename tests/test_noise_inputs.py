"""Noise for several arguments of a network, by position and by name, with dtypes and bounds, in every command."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.errors import UsageError

SOURCE = """
import torch
from torch import nn

class Words(nn.Module):
    '''Takes words and facts about them, which it computes with in float64; words are indices into both embeddings.'''
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words, self.marks, self.facts = nn.Embedding(50, 6), nn.Embedding(7, 6), nn.Linear(5, 6)
            self.head = nn.Linear(12, 3)

    def forward(self, words, facts):
        assert facts.dtype is torch.float64, facts.dtype
        read = (self.words(words) + self.marks(words)).mean(1)
        return self.head(torch.cat([read, self.facts((facts * 2).float())], 1))

class Pictured(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv, self.facts = nn.Conv2d(3, 4, 3), nn.Linear(5, 4)

    def forward(self, picture, facts):
        return self.conv(picture).mean((2, 3)) + self.facts(facts)
"""

FORMS: dict[str, Any] = {
    "by position, typed": ["4,9:int64", "4,5:float64"],
    "by name": {"words": "4,9:int64", "facts": "4,5:float64"},
    "both": ["4,9<7", "facts=4,5:float64"],
}


def network(name: str = "Words") -> nn.Module:
    names: dict[str, Any] = {}
    exec(SOURCE, names)
    model: nn.Module = names[name]()
    return model.eval()


def recording(model: nn.Module) -> list[dict[str, Tensor]]:
    """The arguments of each call of a network, by name."""
    inputs: list[dict[str, Tensor]] = []

    def record(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        named = dict(zip(("words", "facts"), args, strict=False)) | kwargs
        inputs.append({name: tensor.detach().clone() for name, tensor in named.items()})

    model.register_forward_pre_hook(record, with_kwargs=True)
    return inputs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sample("both")
def test_functions_give_the_network_what_is_asked_for(form: str) -> None:
    model, shapes = network(), FORMS[form]
    inputs = recording(model)
    run = hookscope.activations(model, input_shape=shapes, layer="*", verify=False)
    words, facts = inputs[0]["words"], inputs[0]["facts"]
    assert (words.shape, words.dtype, facts.shape, facts.dtype) == ((4, 9), torch.int64, (4, 5), torch.float64)
    assert 0 <= words.min() <= words.max() < 7  # the smaller embedding
    assert len(words.unique()) > 2
    assert facts.std() > 0.5
    output = network()(words, facts)
    assert len(run.inputs) == 4
    assert run["(model)"].l2 == pytest.approx(output.norm().item(), rel=1e-6)
    output.sum().backward()
    expected = network()
    expected(words, facts).sum().backward()
    norms = {
        name: parameter.grad.norm().item()
        for name, parameter in expected.named_parameters()
        if parameter.grad is not None
    }
    gradients = hookscope.grads(model, input_shape=shapes, loss="sum")
    assert {row.name: row.gradient.l2 for row in gradients.parameters} == pytest.approx(norms, rel=1e-5)
    assert hookscope.layers(model, input_shape=shapes)["facts"].input_shapes == ((4, 5),)
    report = hookscope.check(model, input_shape=shapes)
    assert (report.error, report.findings, len(report.inputs)) == ("", (), 4)
    compared = hookscope.diff(model, network(), input_shape=shapes)
    assert [row.label for row in compared.rows] == ["words", "marks", "facts", "head"]


def test_an_argument_of_another_length_belongs_to_all_inputs() -> None:
    class Shared(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return x @ table

    model = Shared()
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[1].shape)))
    run = hookscope.activations(model, input_shape=[(6, 2), (2, 3)], batch_size=2, verify=False)
    assert {*shapes} == {(2, 3)}
    assert len(run.inputs) == 6


def test_noise_by_name_goes_with_a_tensor_by_position() -> None:
    model, pictures = network("Pictured"), torch.ones(3, 3, 8, 8)
    plain = model(pictures, torch.zeros(3, 5))
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, _args, kwargs: seen.append(kwargs["facts"].clone()), with_kwargs=True)
    run = hookscope.activations(model, pictures, input_shape={"facts": (3, 5)}, layer="*", verify=False)
    expected = plain - network("Pictured").facts(torch.zeros(3, 5)) + network("Pictured").facts(seen[0])
    assert run["(model)"].l2 == pytest.approx(expected.norm().item(), rel=1e-5)
    with pytest.raises(UsageError, match="Give pictures or `input_shape`, not both"):
        hookscope.activations(model, pictures, input_shape=[(3, 5)])


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown name": ({"wrds": (4, 9)}, "`input_shape` wrds: forward of Words takes words, facts. Nearest: 'words'"),
    "too many": ([(4, 9)] * 3, "`input_shape` is given 3 times by position, but forward of Words takes words, facts"),
    "twice": (["4,9", "words=4,9"], "words is given by position already; forward of Words takes words, facts"),
    "by name alone": ({"words": (4, 9), "facts": (4, 5), "more": (1,)}, "more: forward of Words takes words, facts"),
    "no dtype": (["4,9:long"], "there is no dtype 'long'"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_wrong_shape_is_refused(mistake: str) -> None:
    inputs, words = REFUSED[mistake]
    with pytest.raises(UsageError) as raised:
        hookscope.activations(network(), input_shape=inputs)
    assert words in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_an_argument_is_given_once() -> None:
    with pytest.raises(UsageError, match="facts is given twice: with `input`, and with `input_shape`"):
        hookscope.activations(network(), input={"facts": torch.ones(4, 5)}, input_shape=["4,9", "facts=4,5"])


def test_whole_numbers_without_an_embedding_are_valid_indices_anywhere() -> None:
    class Looks(nn.Module):
        def forward(self, table: Tensor, places: Tensor, pixels: Tensor, on: Tensor) -> Tensor:
            return table.gather(1, places) + pixels.amax(1, keepdim=True) + on.sum(1, keepdim=True)

    model = Looks()
    seen: list[tuple[Tensor, ...]] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args))
    shapes = ["4,2", "4,1:int64", "4,500:uint8", "4,9:bool"]
    hookscope.activations(model, input_shape=shapes, layer="*", verify=False)
    assert [tensor.dtype for tensor in seen[0]] == [torch.float32, torch.int64, torch.uint8, torch.bool]
    assert seen[0][2].max() > 200


@pytest.mark.parametrize("by_name", [False, True])
def test_each_input_has_its_own_target_in_batches_too(by_name: bool) -> None:
    linear = nn.Linear(4, 3)
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"input": {"input": values}} if by_name else {"input_shape": (3, 4), "seed": 0}
    result = hookscope.grads(linear, **inputs, loss="ce", target=[0, 2, 1], batch_size=2)
    losses = nn.functional.cross_entropy(linear(values), torch.tensor([0, 2, 1]), reduction="none")
    assert result.loss is not None
    assert result.loss.value == pytest.approx((losses[:2].mean() + losses[2]).item(), rel=1e-5)  # a mean for each batch
