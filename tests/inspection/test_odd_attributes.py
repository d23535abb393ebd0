"""Modules whose attributes and operators raise, or answer anything: they are inspected as their plain twins are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.errors import UsageError

X = torch.linspace(-1, 1, 3 * 64).view(1, 3, 8, 8)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class RaisesForWhatItLacks(Plain):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise RuntimeError(name) from None


class AnswersAnything(Plain):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return lambda *_args, **_kwargs: self


def raising(_module: object) -> Any:
    raise ZeroDivisionError


names = (
    "config eps groups head image_size inplace kernel_size num_heads num_prefix_tokens patch_embed shift_size stride"
)
names += " running_mean transform weight bias window_size main_input_name pretrained_cfg device dtype cls_token"
RaisesInProperties = type("RaisesInProperties", (Plain,), {name: property(raising) for name in names.split()})
operators = ("__len__", "__bool__", "__iter__", "__repr__", "__dir__")
RaisesInOperators = type("RaisesInOperators", (Plain,), dict.fromkeys(operators, raising))


class RaisesWhenCompared(Plain):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = nn.Module.__hash__


class Slotted:
    __slots__ = ("empty", "held")

    def __init__(self) -> None:
        self.held = [1]

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class HoldsSlots(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.slotted = Slotted()

    def forward(self, x: Tensor) -> Tensor:
        self.slotted.held = [2]
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.part, self.last = kind(), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(x).relu()).mean((2, 3))


def built(kind: Callable[[], nn.Module], *, is_root: bool) -> nn.Module:
    torch.manual_seed(0)
    return (kind() if is_root else Net(kind)).eval()


ODD = (RaisesForWhatItLacks, AnswersAnything, RaisesInProperties, RaisesInOperators, RaisesWhenCompared, HoldsSlots)


@pytest.mark.parametrize(("kind", "is_root"), [*((kind, False) for kind in ODD), (AnswersAnything, True)])
def test_a_module_that_raises_when_asked_is_inspected_as_its_plain_twin(kind: type[Plain], is_root: bool) -> None:
    model, twin = built(kind, is_root=is_root), built(Plain, is_root=is_root)
    rows = hookscope.activations(model, X.clone(), layer="*").rows
    assert [row.activation for row in rows] == [
        row.activation for row in hookscope.activations(twin, X.clone(), layer="*").rows
    ]
    gradients = hookscope.grads(model, X.clone(), loss="sum", inputs=True)
    expected = torch.autograd.grad(twin(X).sum(), [*twin.parameters()])
    assert [row.gradient.l2 for row in gradients.parameters] == pytest.approx(
        [each.norm().item() for each in expected], rel=1e-5
    )
    assert len(hookscope.layers(model, input_shape=(1, 3, 8, 8)).rows) == len([*twin.modules()])
    surveys = [hookscope.survey(case, X.expand(2, 3, 8, 8), layer="*") for case in (model, twin)]
    assert [row.label for row in surveys[0].rows] == [row.label for row in surveys[1].rows]


def test_a_slot_is_put_back_though_the_object_raises_for_an_empty_one() -> None:
    model: Any = built(HoldsSlots, is_root=True)
    held = model.slotted.held
    hookscope.activations(model, X.clone())
    assert model.slotted.held is held


def test_what_copies_to_itself_cannot_be_compared_with_itself() -> None:
    model = built(AnswersAnything, is_root=False)
    with pytest.raises(UsageError, match=r"Net cannot be copied, .*: its __deepcopy__ returns the module itself\."):
        hookscope.diff(model, "same", X.clone())


def test_a_module_with_an_equality_of_its_own_is_compared() -> None:
    a, b = (built(kind, is_root=True) for kind in (Plain, RaisesWhenCompared))
    [output] = hookscope.diff(a, b, X.clone()).outputs
    assert output.measures.max_abs == 0
