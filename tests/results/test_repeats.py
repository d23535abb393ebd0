"""Modules that pass their input through: which rows repeat which, and what folding leaves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.hooks.pytree import tensors_in
from hookscope.hooks.selection import module_index, unwrap
from hookscope.inputs.batches import Batch
from hookscope.inspection.backward import PassError
from hookscope.inspection.forward import ForwardError
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.gradients import Gradients
from hookscope.results.network import row_label
from hookscope.results.repeats import reduced
from tests.inspections import inspect, inspect_gradients
from tests.networks import BY_HAND, MECHANISMS, TORCHVISION, Network, Written, batch_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 4)


def repeats(run: Activations | Gradients) -> dict[str, str]:
    return {row.label: row.duplicate_of for row in run.rows if row.duplicate_of}


def gradient_repeats(run: Gradients) -> dict[str, str]:
    return {f"{row.label} {row.role}": row.duplicate_of for row in run.gradients if row.duplicate_of}


def also(run: Activations | Gradients) -> dict[str, tuple[str, ...]]:
    return {row.label: row.duplicates for row in run.rows if row.duplicates}


def labels(rows: Any) -> list[str]:
    return [row.label for row in rows]


# --- which rows repeat which ---


def test_a_row_repeats_the_first_that_showed_the_tensor() -> None:
    network = nn.Sequential(linear(), nn.Dropout(), nn.Identity(), nn.ReLU(), nn.Identity())
    assert repeats(inspect(network, X)) == {"1": "0", "2": "0", "4": "3"}


class AtFirst(nn.Module):
    """Pass the input through at the first call only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls == 1 else x + 1


def batches() -> list[Batch]:
    return [batch_of(X[:1]), batch_of(X[1:], first=1)]


def test_a_row_that_differs_in_one_batch_repeats_nothing() -> None:
    run = inspect(nn.Sequential(linear(), AtFirst()), batches())
    assert repeats(run) == {}
    assert run.rows[1].flags == ()


# --- gradients ---


class Residual(nn.Module):
    """An output that is used twice: through two modules that pass it through, and as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.path, self.last = linear(), nn.Dropout(), nn.Identity(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.last(self.path(self.drop(x)))


@pytest.mark.parametrize("include_inputs", [False, True])
def test_gradients_repeat_the_first_of_the_tensor_with_the_same(include_inputs: bool) -> None:
    network = Residual()
    run = inspect_gradients(network, X, "sum", include_inputs=include_inputs)
    # With the loss summed, the gradient along the branch is the column sums of the last weights; the skip adds ones.
    along = network.last.weight.sum(0).expand(2, 4)
    measured = {row.label: row.gradient.l2 for row in run.gradients if row.role == "output"}
    assert measured["drop"] == measured["path"] == pytest.approx(along.norm().item())
    assert measured["first"] == pytest.approx((along + 1).norm().item())
    assert repeats(run) == {"drop": "first", "path": "first"}
    expected = {"path output": "drop"}
    assert gradient_repeats(run) == (expected | {"path[0] input": "drop"} if include_inputs else expected)
    folded = reduced(run, folds=True)
    assert also(folded) == {"drop": ("path",)}
    assert labels(folded.rows) == ["first", "drop", "last"]
    assert "path[0]" not in labels(folded.gradients)


def test_a_container_of_modules_that_pass_through_passes_through_under_gradients_too() -> None:
    network = nn.Sequential(linear(), nn.Sequential(nn.Identity(), nn.Sequential(nn.Dropout())), nn.Tanh())
    run = inspect_gradients(network, X, layers=["*"], include_inputs=True)
    passing = [row.label for row in run.rows if "pass-through" in row.flags]
    assert passing == ["1.0", "1.1.0", "1.1", "1"]
    assert repeats(run) == dict.fromkeys(passing, "0")


def test_inputs_of_a_call_that_differ_from_its_output_keep_the_call() -> None:
    class Peeks(nn.Module):
        """Pass the input through, and use it for another output as well."""

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, 2 * x

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.peeks = linear(), Peeks()

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.peeks(self.first(x))
            return torch.as_tensor(left + right)

    run = inspect_gradients(Both(), X, "sum", include_inputs=True)
    assert repeats(run) == {"peeks[0]": "first"}
    assert labels(reduced(run, folds=True).rows) == ["first", "peeks[0]", "peeks[1]"]


# --- folding ---


def test_what_a_constant_takes_only_its_shape_of_is_not_its_origin() -> None:
    class Scan(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            state = inputs.new_zeros(inputs.shape[0], 64)
            for at in range(2):
                state = 0.5 * state + inputs[:, at]
            return state

    run = hookscope.activations(Scan(), torch.rand(2, 2, 64) + 1, ops=True)
    assert run["(model):mul"].activation.max == 0
    assert run.verdicts == ()


class Padded(nn.Conv2d):
    """A convolution whose own code pads, with a module that returns its input."""

    def __init__(self) -> None:
        super().__init__(2, 2, 3)
        self.pad = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(self.pad(x), self.weight, self.bias)


def test_a_row_is_computed_from_the_module_whose_own_code_made_its_input() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 1), Padded(), nn.BatchNorm2d(2), nn.ReLU())
    run = hookscope.activations(network, torch.rand(1, 1, 5, 5))
    assert {row.label: row.inputs for row in run.rows} == {
        "0": ("input",),
        "1": ("0",),
        "2": ("1",),
        "3": ("2",),
    }


def test_each_call_of_a_module_is_an_input_of_its_own() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(torch.cat([net.padded(x), net.padded(x)], 1))

    run = hookscope.activations(Written(forward, padded=Padded(), last=nn.Conv2d(4, 1, 1)), torch.rand(1, 2, 5, 5))
    assert run["last"].inputs == ("padded", "padded#1")


def test_what_passes_on_an_operation_inside_its_module_is_not_its_own_input() -> None:
    class Activated(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.drop = nn.Dropout()

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(torch.relu(super().forward(x)))

    run = hookscope.activations(nn.Sequential(Activated(), nn.Tanh()), X, repeats=True)
    assert [(row.label, row.inputs) for row in run.rows if row.label in row.inputs] == []
    assert run["1"].inputs == ("0",)


# --- over many networks ---


def arguments(network: Network) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return network.build().eval(), network.args()


def expected_repeats(model: nn.Module, args: tuple[Any, ...]) -> dict[str, str]:
    """Return which outputs repeat which, seen by plain hooks that keep every tensor, so that none is mistaken."""
    network = unwrap(model)
    modules, _ = module_index(network)
    calls = dict.fromkeys(modules, 0)
    began: list[tuple[nn.Module, list[Tensor], list[int | None]]] = []
    shown: list[tuple[Tensor, int | None, str]] = []
    actual: dict[str, str] = {}

    def version(tensor: Tensor) -> int | None:
        return None if tensor.is_inference() else tensor._version

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [tensor for _, tensor in tensors_in((args, kwargs))]
        began.append((module, inputs, [version(tensor) for tensor in inputs]))

    def after(name: str, module: nn.Module, output: object) -> None:
        while began[-1][0] is not module:
            began.pop()
        _, inputs, versions = began.pop()
        untouched = versions == [version(tensor) for tensor in inputs]
        for slot, tensor in tensors_in(output):
            label = row_label(name, calls[name], slot)
            earlier = [
                shown_label
                for expected, then, shown_label in shown
                if expected is tensor and then == version(tensor) is not None
            ]
            if earlier and untouched and any(value is tensor for value in inputs):
                actual[label] = earlier[0]
            shown.append((tensor, version(tensor), label))
        calls[name] += 1

    handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules.values()]
    handles += [
        layer.register_forward_hook(lambda module, _, output, name=name: after(name, module, output))
        for name, layer in modules.items()
    ]
    with torch.no_grad():
        try:
            model(*args)
        finally:
            for handle in handles:
                handle.remove()
    return actual


CHOSEN = ("vit", "vgg11_bn", "googlenet")
MANY = {**BY_HAND, **{name: TORCHVISION[name] for name in CHOSEN}}


@pytest.mark.parametrize("name", MANY)
@pytest.mark.sample(*MECHANISMS)
def test_rows_repeat_what_plain_hooks_see_to_be_the_same_tensor(name: str) -> None:
    model, args = arguments(MANY[name])
    values: dict[str, Tensor] = {}
    try:
        run = inspect(
            model,
            batch_of(*args),
            ["*"],
            on_tensor=lambda label, tensor, _: values.update({label: tensor.clone()}),
        )
    except ForwardError as error:
        run = error.inspection
    actual = repeats(run)
    for label, other in actual.items():
        assert torch.equal(values[label], values[other])
    if run.failure is None and "compiled" not in name:
        assert actual == expected_repeats(*arguments(MANY[name]))
    folded = reduced(run, folds=True)
    stays = [*labels(folded.rows), *(duplicate for row in folded.rows for duplicate in row.duplicates)]
    assert sorted(stays) == sorted(labels(run.rows))
    assert [row.index for row in reduced(folded, numbers=True).rows] == [*range(len(folded.rows))]


def passing(rows: tuple[LayerRow, ...]) -> list[tuple[str, bool, str]]:
    return [(row.label, "pass-through" in row.flags, row.duplicate_of) for row in rows]


@pytest.mark.parametrize("name", [name for name in MECHANISMS if name in MANY])
@pytest.mark.exhaustive
def test_the_same_rows_pass_through_with_gradients_as_without(name: str) -> None:
    model, args = arguments(MANY[name])
    try:
        plain = inspect(model, batch_of(*args), ["*"])
    except ForwardError as error:
        plain = error.inspection
    for include_inputs in (False, True):
        model, args = arguments(MANY[name])
        try:
            run = inspect_gradients(model, batch_of(*args), layers=["*"], include_inputs=include_inputs)
        except PassError as error:
            run = error.inspection
        assert passing(run.rows) == passing(plain.rows)
