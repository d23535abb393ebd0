"""Calls in the graphs of TorchScript: what they hand over and return, and which are left alone."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.inspections import inspect
from tests.models.saved import load_script, tensors_of, witness
from tests.networks import conv_net


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Split(nn.Module):
    def forward(self, x: Tensor) -> Pair:
        return Pair(x * 2, x + 1)


class Listed(nn.Module):
    def forward(self, x: Tensor, count: int) -> list[Tensor]:
        return [x * (i + 1) for i in range(count)]


class Keyed(nn.Module):
    def forward(self, parts: list[Tensor]) -> dict[str, Tensor]:
        return {str(i): part for i, part in enumerate(parts)}


class Single(nn.Module):
    def forward(self, parts: dict[str, Tensor], scale: float) -> tuple[Tensor]:
        total = torch.zeros(1)
        for part in parts.values():
            total = total + part * scale
        return (total,)


class Nested(nn.Module):
    def forward(self, x: Tensor, extra: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
        return x - 1, (x if extra is None else x + extra, extra)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> None:
        pass


class Size(nn.Module):
    def forward(self, x: Tensor) -> tuple[int, str, bool]:
        return x.dim(), "text", True


class Structured(nn.Module):
    """Hands every kind of value from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.listed, self.keyed, self.single = Split(), Listed(), Keyed(), Single()
        self.nested, self.nothing, self.size, self.lstm = Nested(), Nothing(), Size(), nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.split(x)
        parts = self.listed(left, 2) + self.listed(right, 0)
        (single,) = self.single(self.keyed(parts), 0.5)
        first, (second, none) = self.nested(single)
        third, (fourth, _) = self.nested(first, second)
        self.nothing(fourth)
        dims, text, flag = self.size(third)
        assert none is None
        assert text == "text"
        assert flag
        out, (hidden, cell) = self.lstm(third.unsqueeze(0))
        return out * dims, hidden + cell


def test_tuples_lists_dictionaries_and_nothing_pass_through_hooked_calls(tmp_path: Path) -> None:
    eager = Structured().eval()
    args = (torch.randn(3, 4),)
    loaded = load_script(eager, tmp_path)
    assert loaded.warnings == ()
    expected, outputs = witness(eager, args)
    seen, again = witness(loaded.module, args)
    assert [layer for layer, _ in inspect_calls(loaded.module, args)] == [
        layer for layer, _ in inspect_calls(eager, args)
    ]
    assert seen.activations.keys() == expected.activations.keys()
    for key, tensor in expected.activations.items():
        torch.testing.assert_close(seen.activations[key], tensor)
    assert seen.gradients.keys() == expected.gradients.keys()
    for key, tensor in expected.gradients.items():
        torch.testing.assert_close(seen.gradients[key], tensor)
    for first, second in zip(again, outputs, strict=True):
        torch.testing.assert_close(first, second)


def inspect_calls(network: nn.Module, args: tuple[Any, ...]) -> list[tuple[str, int]]:
    return [(row.layer, row.call) for row in inspect(network, args[0], ["*"]).rows]


def double(output: Any) -> Any:
    """Double every tensor of an output, whatever holds it."""
    if isinstance(output, Tensor):
        return output * 2
    if isinstance(output, dict):
        return {key: double(value) for key, value in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(double, output))
    return type(output)(map(double, output)) if isinstance(output, list | tuple) else output


@pytest.mark.parametrize("layer", ["split", "keyed", "nested", "lstm", ""])
@pytest.mark.sample("split", "nested", "lstm")
def test_what_hooks_replace_is_what_goes_on(tmp_path: Path, layer: str) -> None:
    eager = Structured().eval()
    module = load_script(eager, tmp_path).module
    x = torch.randn(3, 4)
    before = [tensor.clone() for tensor in tensors_of(module(x))]
    results = []
    for network in (eager, module):
        target = network.get_submodule(layer)
        handles = [
            target.register_forward_pre_hook(lambda _module, args: (args[0], *args[1:])),
            target.register_forward_hook(lambda _module, _args, output: double(output)),
            target.register_forward_hook(lambda _module, _args, _kwargs, _output: None, with_kwargs=True),
        ]
        results.append(tensors_of(network(x)))
        for handle in handles:
            handle.remove()
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)
    assert not torch.allclose(results[1][0], before[0])
    assert torch.equal(tensors_of(module(x))[0], before[0])


class AppendsDeep(nn.Module):
    def forward(self, x: Tensor, groups: dict[str, list[Tensor]]) -> Tensor:
        groups["a"].append(x * 3)
        return x


class GrowingDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.grow, self.last = nn.Linear(2, 2), AppendsDeep(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        groups = {"a": [self.first(x)]}
        y = self.grow(x, groups)
        return self.last(torch.stack(groups["a"]).sum(0) + y)


def test_a_layer_that_changes_the_list_it_is_given_is_left_alone_and_named(tmp_path: Path) -> None:
    eager = GrowingDeep().eval()
    loaded = load_script(eager, tmp_path)
    x = torch.randn(3, 2)
    assert torch.equal(loaded.module(x), eager(x))
    assert loaded.warnings == (
        "model.pt: no hook can reach 1 layer (grow): what they take or return cannot pass through Python.",
    )
    assert [layer for layer, _ in inspect_calls(loaded.module, (x,))] == ["first", "last", ""]


def test_the_network_moves_to_the_meta_device_for_shapes_alone(tmp_path: Path) -> None:
    module = load_script(conv_net(), tmp_path).module.to("meta")
    assert all(tensor.is_meta for tensor in module.state_dict().values())
    assert module(torch.randn(2, 3, 8, 8, device="meta")).shape == (2, 5)
