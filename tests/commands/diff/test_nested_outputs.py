"""`diff` compares every tensor in what networks return, in containers of any kind and in nested tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.commands.diff.measures import comparable, sums_of

NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@dataclass
class Answer:
    scores: Tensor
    hidden: tuple[Tensor, ...]


def ragged(rows: Tensor, layout: torch.layout = torch.strided) -> Tensor:
    parts = [row[: 1 + index % 3] for index, row in enumerate(rows)]
    return torch.nested.as_nested_tensor(parts, layout=layout)


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda hidden, scores: {"scores": scores, "deep": {"hidden": [hidden, (hidden.sum(1), None)]}},
    "dataclass": lambda hidden, scores: Answer(scores, (hidden,)),
    "nested": lambda _hidden, scores: ragged(scores),
    "jagged in a dict": lambda hidden, scores: {"ragged": ragged(scores, torch.jagged), "hidden": hidden},
}


class Returning(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor], Any], factor: float = 1.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.form = form
        with torch.no_grad():
            self.last.weight.mul_(factor)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        return self.form(hidden, self.last(hidden))


def leaves(value: Any) -> list[Tensor]:
    """The tensors in a value, the parts of nested tensors together, by the walk of this test."""
    if isinstance(value, Tensor):
        return [torch.cat([part.flatten() for part in value.unbind()])] if value.is_nested else [value]
    if isinstance(value, Answer):
        value = [value.scores, value.hidden]
    several = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for each in several for tensor in leaves(each)]


@NESTED
@pytest.mark.parametrize("batch_size", [3, 10])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sample("dict-3", "nested-3")
def test_every_leaf_is_compared(form: str, batch_size: int) -> None:
    a, b = Returning(FORMS[form]), Returning(FORMS[form], 1.25)
    inputs = torch.randn(10, 5, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        batches = inputs.split(batch_size)
        pairs = [list(zip(leaves(a(batch)), leaves(b(batch)), strict=True)) for batch in batches]
    wanted = []
    for leaf in zip(*pairs, strict=True):
        one, other = (torch.cat([pair[side].flatten() for pair in leaf]).double() for side in (0, 1))
        wanted.append(float((one - other).norm() / one.norm()))
    assert max(wanted) > 0.01
    compared = hookscope.diff(a, b, inputs, batch_size=batch_size)
    actual = [output.measures.relative_l2 if output.measures else None for output in compared.outputs]
    assert actual == pytest.approx(wanted, rel=1e-6)


@NESTED
@pytest.mark.parametrize(("layout", "batch_size"), [(torch.strided, 8), (torch.jagged, 2)], ids=str)
@pytest.mark.sample("torch.jagged-2")
def test_rows_of_nested_tensors_have_the_numbers_of_their_parts(batch_size: int, layout: torch.layout) -> None:
    torch.manual_seed(0)
    a, b = nn.Sequential(nn.Linear(5, 3), nn.GELU()), nn.Sequential(nn.Linear(5, 3), nn.GELU())
    parts = [torch.randn(length, 5) for length in (2, 3, 4, 1, 2)]
    one, other = (model(torch.cat(parts)).detach().double() for model in (a, b))
    inputs = torch.nested.nested_tensor(parts, layout=layout)
    compared = hookscope.diff(a, b, inputs, batch_size=batch_size, reference="float64", grads=True, loss="sum")
    wanted = float((one - other).norm() / one.norm())
    actual = next(row for row in compared.rows if row.label == "1")
    assert actual.measures is not None
    assert actual.measures.relative_l2 == pytest.approx(wanted, rel=1e-5)
    assert (actual.shape, compared.outputs[0].shape) == ((5, -1), (5, -1))


@NESTED
def test_parts_of_nested_tensors_are_compared_where_their_shapes_are_the_same() -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    one, other = ragged(rows), ragged(rows)
    other.unbind()[2][1] += 2
    assert comparable(one, other) == ""
    sums = sums_of(one, other, first_input=10)
    assert sums is not None
    assert (sums.max_at, sums.max_abs, sums.unequal, sums.count) == ((12, 1), 2.0, 1, 7)
    turned = torch.nested.as_nested_tensor([*reversed(one.unbind())])
    assert comparable(one, torch.nested.as_nested_tensor([turned[0], *one.unbind()[1:]])) == ""
    assert comparable(one, torch.nested.as_nested_tensor([rows[0], *one.unbind()[1:]])) == "shapes differ"
    assert comparable(one, rows) == "A is no dense tensor"
    assert comparable(rows, one) == "B is no dense tensor"


class Ordered(nn.Module):
    """Its parts return and take the same tensors by name, in an order of their own."""

    class Head(nn.Module):
        def __init__(self, names: Sequence[str]) -> None:
            super().__init__()
            self.names, self.logits, self.aux = names, nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            by_name = {"logits": self.logits(x), "aux": self.aux(x)}
            return {name: by_name[name.removesuffix("_b")] for name in self.names}

    class Sum(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor, shift: Tensor) -> Tensor:
            return x * scale + shift

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.sum = self.Head(names), self.Sum()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        returned = self.head(x)
        keywords = {"scale": x[:, :3], "shift": x[:, 2:]}
        if self.head.names[0] != "logits":
            keywords = dict(reversed(keywords.items()))
        return {**returned, "sum": self.sum(returned["logits"], **keywords)}


@pytest.mark.parametrize("names", [("aux", "logits"), ("aux_b", "logits")])
def test_tensors_of_the_same_name_are_compared_whatever_their_order(names: Sequence[str]) -> None:
    x = torch.randn(4, 5)
    result = hookscope.diff(Ordered("logits", "aux"), Ordered(*names), x, layer=["*"], grads=True, loss=_of_logits)
    assert {row.relative_l2 for row in (*result.rows, *result.gradients, *result.outputs)} == {0.0}
    assert {row.input_relative_l2 for row in result.rows} == {0.0}
    assert {(row.label, row.label_b) for row in result.rows if row.layer == "head"} == {
        ("head['logits']", "head['logits']"),
        ("head['aux']", f"head['{names[0]}']"),
    }
    assert result.unmatched == ()


def test_a_layer_that_returns_one_of_several_tensors_is_compared_by_its_name() -> None:
    result = hookscope.diff(Ordered("aux", "logits").head, Ordered("logits").head, torch.randn(4, 5), layer=["*"])
    assert {row.label: row.relative_l2 for row in result.rows if not row.layer} == {"(model)['logits']": 0.0}
    assert [(row.label, row.reason) for row in result.unmatched if not row.label.startswith("aux")] == [
        ("(model)['aux']", "B returns fewer tensors there")
    ]


def _of_logits(output: dict[str, Tensor]) -> Tensor:
    return output["logits"].square().sum() + output["sum"].sum()
