"""Edits of parameters' values: a network edited so equals one whose state dict was edited, and is left as it was."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import hookscope
from hookscope.errors import LayerNotFoundError, UsageError
from hookscope.inspection.edits import parse_edit
from tests.networks import Apply, Written, failing, normal


def network() -> nn.Sequential:
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 5, 2))
    return nn.Sequential(*parts, Apply(lambda x: x.mean((2, 3))), nn.Linear(5, 2))


X = normal(2, 3, 8, 8, seed=1)


def rounded(values: Tensor) -> Tensor:
    step = values.abs().max() / 127
    return (values / step).round() * step


def channels(values: Tensor, axis: int, kept: int) -> Tensor:
    actual = torch.zeros_like(values)
    actual.select(axis, kept).copy_(values.select(axis, kept))
    return actual


EDITS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "zero(channels=0,2,3)": ("0.weight", lambda values: channels(values, 0, 1)),
    "zero(channels=0,1,2,4)": ("3.weight", lambda values: channels(values, 1, 3)),
    "add(-0.5)": ("1.weight", lambda values: values - 0.5),
    "round(int8)": ("0.weight", rounded),
    "round(dtype=float8_e4m3fn)": ("5.weight", lambda values: values.to(torch.float8_e4m3fn).float()),
}


@pytest.mark.parametrize("operation", EDITS)
def test_the_run_is_that_of_a_network_whose_state_dict_was_edited(operation: str) -> None:
    name, edited = EDITS[operation]
    model, other = network(), network()
    other.load_state_dict({**other.state_dict(), name: edited(other.state_dict()[name])})
    run = hookscope.grads(model, X, loss="sum", layer="*", edit=f"param:{name}:value:{operation}", save_tensors=True)
    expected = hookscope.grads(other, X, loss="sum", layer="*", save_tensors=True)
    assert run.loss == expected.loss
    assert run.parameters == expected.parameters  # with the norms of edited weights
    assert all(torch.equal(values, expected.tensors[label]) for label, values in run.tensors.items())
    plain = hookscope.grads(network(), X, loss="sum", layer="*")
    assert run.comparison.losses == (plain.loss.value, run.loss.value)
    before = network().state_dict()
    assert all(torch.equal(values, before[key]) for key, values in model.state_dict().items())


class Conv1D(nn.Module):
    """As in transformers: a linear layer that keeps its weight as (inputs, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x.movedim(1, -1) @ self.weight + self.bias).movedim(-1, 1)


def parametrised() -> nn.Module:
    return parametrize.register_parametrization(nn.ConvTranspose2d(4, 6, 1), "weight", nn.Identity())


def test_channels_of_a_weight_are_output_channels_or_refused() -> None:
    x, edit = torch.ones(1, 4, 2, 2), "param:weight:value:zero(channels=1)"
    for layer in (nn.Conv2d(4, 6, 1, groups=2), nn.ConvTranspose2d(4, 6, 1), parametrised(), Conv1D()):
        run = hookscope.activations(layer, x, edit=edit, save_tensors=True)
        changed = (run.tensors["(model)"] != layer(x)).any(dim=3).any(dim=2)[0]
        assert changed.tolist() == [False, True, False, False, False, False]
        assert torch.equal(run.tensors["(model)"][0, 1], layer.bias[1].expand(2, 2))
    words = nn.Embedding(5, 3)
    run = hookscope.activations(words, torch.arange(5)[None], edit=edit, save_tensors=True)
    assert torch.equal(run.tensors["(model)"][0], words.weight * torch.tensor([1.0, 0.0, 1.0]))
    # (4, 6 / 2, 1, 1): axis 1 counts the channels of one group, so the weights of channel 1 are also those of 4.
    with pytest.raises(UsageError, match=r"names channel 1, but a tensor of shape 4x3x1x1 has no axis that counts its"):
        hookscope.activations(nn.ConvTranspose2d(4, 6, 1, groups=2), x, edit=edit)


@pytest.mark.parametrize(
    ("layer", "name"), [(parametrised(), "parametrizations.weight.original"), (Conv1D(), "weight")]
)
def test_so_are_those_of_its_gradient(layer: nn.Module, name: str) -> None:
    edit = f"param:{name}:grad:zero(channels=1)"
    gradient = hookscope.grads(layer, torch.ones(1, 4, 2, 2), edit=edit, save_tensors=True).tensors[f"{name} grad"]
    assert [bool(part.any()) for part in gradient.unbind(1)] == [True, False, True, True, True, True]


@pytest.mark.parametrize("place", ["value", "grad"])
def test_a_parameter_behind_a_key_with_a_dot_is_edited_by_the_name_that_tables_show(place: str) -> None:
    model = Written(lambda net, x: getattr(net, "a.b")(x))
    setattr(model, "a.b", nn.Linear(3, 3))
    edit = rf"param:'a\x2eb'.weight:{place}:zero"
    [weight, _] = hookscope.grads(model, normal(1, 3), loss="sum", edit=edit).parameters
    assert weight.name == r"'a\x2eb'.weight"
    assert (weight.weight_l2 if place == "value" else weight.gradient.l2) == 0


@pytest.mark.parametrize("fraction", [0, 0.3, 0.5, 1])
def test_pruning_is_that_of_torch(fraction: float) -> None:
    values = normal(7, 9)
    part = nn.Linear(9, 7)
    part.weight.data.copy_(values)
    prune.l1_unstructured(part, "weight", float(fraction))
    assert torch.equal(parse_edit(f"param:x:value:prune({fraction})").apply(values, 0), part.weight.detach())


def test_rounding_lets_a_gradient_pass() -> None:
    values = normal(4, 4).requires_grad_()
    edited = parse_edit("x:output:round(int8)").apply(values, 1)
    assert torch.equal(edited, rounded(values.detach()))
    edited.backward(torch.ones_like(edited))
    assert torch.equal(values.grad if values.grad is not None else edited, torch.ones(4, 4))
    assert torch.equal(parse_edit("x:output:round(int8)").apply(torch.zeros(3), None), torch.zeros(3))


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "float16", "bfloat16", "float8_e5m2"])
def test_rounding_leaves_what_is_not_finite(dtype: str, differentiated: bool) -> None:
    # Scores of attention that a mask has set to -Inf. Steps of int8 are 254 / 127 = 2, whose halves go to even.
    values = torch.tensor([-math.inf, -254.0, 3.0, math.inf, math.nan], requires_grad=differentiated)
    edited = parse_edit(f"x:output:round({dtype})").apply(values, None)
    least = -256.0 if dtype == "float8_e5m2" else -254.0
    expected = torch.tensor([-math.inf, least, 4.0 if dtype == "int8" else 3.0, math.inf, math.nan])
    torch.testing.assert_close(edited.detach(), expected, rtol=0, atol=0, equal_nan=True)


def test_tied_parameters_are_edited_once_and_views_of_their_memory_follow() -> None:
    one, two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    two.weight = one.weight
    model = Written(lambda net, x: net.two(net.one(x)) + net.view, one=one, two=two)
    model.view = one.weight.detach()[0]
    x, weight = normal(1, 3), model.one.weight.detach().clone()
    run = hookscope.activations(model, x, layer="*", edit="param:*weight:value:scale(2)", save_tensors=True)
    torch.testing.assert_close(run.tensors["(model)"], x @ (2 * weight).T @ (2 * weight).T + 2 * weight[0])
    assert torch.equal(model.one.weight, weight)


def test_several_parameters_are_said_and_what_holds_no_floats_is_a_warning() -> None:
    run = hookscope.activations(network(), X, edit="param:*bias:value:zero")
    assert "Edit 'param:*bias:value:zero' changes 4 parameters: 0.bias, 1.bias, 3.bias and 1 more." in run.notes
    model = network()
    model.register_parameter("counts", nn.Parameter(torch.arange(3), requires_grad=False))
    run = hookscope.activations(model, X, edit="param:counts:value:zero")
    assert any("'param:counts:value:zero' changed nothing" in text for text in run.warnings)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        ("0.weight:value:zero", UsageError, "only a parameter has a value: begin with param:"),
        ("param:0.weight:output:zero", UsageError, "a parameter has no output: give grad or value"),
        ("param:0.weight:value:prune(1.5)", UsageError, "fraction has to be a fraction from 0 to 1"),
        ("param:0.weight:value:round", UsageError, "round needs a dtype"),
        ("param:0.weight:value:round(int4)", UsageError, "there is no dtype 'int4' to round to"),
        ("param:0.weight:value:zero(channels=4)", UsageError, "has 4 on axis 0, counted from 0"),
        ("param:nothing:value:zero", LayerNotFoundError, "matches no parameter"),
    ],
)
def test_what_cannot_be_edited_is_refused_and_nothing_is_changed(
    edit: str, error: type[Exception], message: str
) -> None:
    model = network()
    with pytest.raises(error, match=message):
        hookscope.activations(model, X, edit=["param:*.weight:value:zero", edit])
    before = network().state_dict()
    assert all(torch.equal(values, before[key]) for key, values in model.state_dict().items())


def test_a_parameter_that_is_one_number_for_several_elements_is_refused_before_others_are_changed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.PReLU())
    model[1].weight = nn.Parameter(torch.ones(()).expand(3))
    before = model[0].weight.detach().clone()
    with pytest.raises(UsageError, match=r"cannot change '1\.weight': its elements share memory\."):
        hookscope.activations(model, normal(2, 3), edit="param:weight:value:scale(2)")
    assert torch.equal(model[0].weight, before)


def test_values_come_back_when_the_network_raises() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Apply(failing))
    before = model[0].weight.detach().clone()
    with pytest.raises(hookscope.ForwardError):
        hookscope.activations(model, normal(1, 3), edit="param:0.weight:value:zero")
    assert torch.equal(model[0].weight, before)


def test_a_network_is_compared_with_itself_edited() -> None:
    model, other = network(), network()
    other.load_state_dict({**other.state_dict(), "5.weight": rounded(other.state_dict()["5.weight"])})
    result = hookscope.diff(model, "same", X, edit_b="param:5.weight:value:round(int8)")
    expected = hookscope.diff(model, other, X)
    assert [row.measures for row in result.rows] == [row.measures for row in expected.rows]
    assert result.rows[-1].measures.max_abs
    assert torch.equal(model[5].weight, network()[5].weight)


@pytest.mark.parametrize("label", ["3", "0 grad_output"])
def test_each_input_has_noise_of_its_own_whatever_the_batch_size(label: str) -> None:
    windows, tokens = Apply(lambda x: x.reshape(-1, 3)), Apply(lambda x: x.reshape(-1, 3, 2).transpose(0, 1))
    model = nn.Sequential(nn.Linear(4, 6), windows, tokens, Apply(lambda x: x.mean(0)))  # (N, 6), (2 N, 3), (3, N, 2)
    x = torch.ones(5, 4)

    def values(size: int) -> Tensor:
        options = {"layer": "/^[03]$/", "batch_size": size, "save_tensors": True}
        if label == "3":
            run = hookscope.activations(model, x, edit="/^[012]$/:output:noise(0.5, seed=3)", **options)
        else:
            run = hookscope.grads(model, x, edit="/^[12]$/:grad:noise(1)", loss="sum", **options)
        return run.tensors[label]

    whole = values(5)
    assert len({tuple(row) for row in whole.tolist()}) == 5  # of equal inputs
    assert all(torch.equal(values(size), whole) for size in (1, 2, 5))


@pytest.mark.parametrize("operation", ["prune(0.5)", "round(int8)"])
def test_an_input_is_pruned_and_rounded_by_its_own_values_whatever_the_batch_size(operation: str) -> None:
    model = nn.Sequential(nn.Identity(), Apply(lambda x: x.transpose(0, 1)))  # (N, 4, 3), (4, N, 3)
    x = normal(5, 4, 3) * torch.tensor([1e-3, 1.0, 2.0, 30.0, 500.0])[:, None, None]
    if operation == "prune(0.5)":
        expected = torch.where(x.abs() > x.abs().flatten(1).median(1).values[:, None, None], x, 0)  # the lower of two
    else:
        expected = torch.stack([rounded(values) for values in x])
    for layer, size in (("0", 1), ("0", 5), ("1", 2), ("1", 5)):
        edit = f"{layer}:output:{operation}"
        run = hookscope.activations(model, x, edit=edit, batch_size=size, layer="*", save_tensors=True)
        saved = [run.tensors[label] for label in run.tensors if label.partition("@")[0] == layer]
        assert torch.equal(torch.cat(saved, int(layer)).movedim(int(layer), 0), expected)
