"""Losses: values and gradients from closed forms, targets, which output counts, and what is refused."""

import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hookscope
from hookscope.errors import ModelError, UsageError
from hookscope.hooks.pytree import tensors_in
from hookscope.inspection.losses import targets
from hookscope.inspection.losses.choosing import choose_loss
from hookscope.inspection.losses.formulas import LOSSES, OVER_ALL, LossValue
from hookscope.parameters import called_from_python
from tests.networks import normal

PETS = ("tabby", "tiger cat", "Persian cat", "Egyptian cat")


def batch(*args: Any, indices: tuple[int, ...] = (0,)) -> Any:
    return SimpleNamespace(args=args, kwargs={}, indices=indices)


def loss_of(
    output: object, loss: Any, *, indices: tuple[int, ...] | None = None, args: Any = (), **options: Any
) -> LossValue:
    """Compute a loss; the batch is as long as the first output's axis 0 unless said otherwise."""
    if indices is None:
        first = next((tensor for _, tensor in tensors_in(output)), torch.zeros(1))
        indices = tuple(range(first.shape[0] if first.dim() else 1))
    return choose_loss(loss, **options)(output, batch(*args, indices=indices))


def gradient(value: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(value, of, retain_graph=True)[0]


def leaf(*rows: Any) -> Tensor:
    return torch.tensor(rows, requires_grad=True)


# --- Cross-entropy ---


def test_ce_is_minus_the_log_of_the_softmax_and_its_gradient_is_softmax_minus_one_hot() -> None:
    x = leaf([0.0, math.log(2), math.log(5)])  # softmax 1/8, 2/8, 5/8
    loss = loss_of(x, "ce", target=1)
    assert loss.value.item() == pytest.approx(math.log(4), rel=1e-6)
    assert gradient(loss.value, x).tolist()[0] == pytest.approx([1 / 8, 2 / 8 - 1, 5 / 8])
    assert (loss.name, loss.target, loss.outputs, loss.warnings) == ("ce", "class 1", ("(model)",), ())
    assert loss.value.shape == ()


def test_ce_without_a_target_takes_each_inputs_own_argmax_and_names_it() -> None:
    x = leaf([0.0, 1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0])
    loss = loss_of(x, "ce", categories=PETS)
    assert loss.target == "argmax: classes 1 (tiger cat), 3 (Egyptian cat)"
    expected = -(x.detach().log_softmax(1)[0, 1] + x.detach().log_softmax(1)[1, 3]) / 2
    assert loss.value.item() == pytest.approx(expected.item())
    assert loss_of(x[1:], "ce", categories=PETS).target == "argmax: class 3, Egyptian cat"
    for other in (PETS[:2], (*PETS, "lion")):  # not the names of these classes
        assert loss_of(x[1:], "ce", categories=other).target == "argmax: class 3"
    assert loss_of(torch.eye(7), "ce").target == "argmax: classes 0, 1, 2, 3, 4 and 2 more"


@pytest.mark.parametrize(("share", "warned"), [(0.89, False), (0.91, True)])
@pytest.mark.parametrize("loss", ["ce", "nll"])
def test_a_confident_argmax_is_warned_about_and_a_given_target_is_not(share: float, warned: bool, loss: str) -> None:
    x = torch.tensor([[math.log(share), math.log(1 - share)]])
    warnings = loss_of(x, loss).warnings
    assert len(warnings) == warned
    assert not warned or warnings[0].startswith(f"The network is more than 90% sure of the class that {loss}")
    assert not warned or loss_of(x.expand(2, 2), loss).warnings[0].startswith("For 2 of 2 inputs of a batch, the")
    assert loss_of(x, loss, target=0).warnings == ()


def test_confidence_counts_inputs_and_for_dense_outputs_their_mean_over_positions() -> None:
    sure, unsure = [math.log(99.0), 0.0], [0.0, 0.0]
    rows = torch.tensor([sure, unsure, sure])
    assert "For 2 of 3 inputs" in loss_of(rows, "ce").warnings[0]
    assert "For 2 of 3 rows of the output" in loss_of(rows, "ce", indices=(0,)).warnings[0]
    dense = torch.tensor([sure, unsure]).t().reshape(1, 2, 1, 2)  # mean share (0.99 + 0.5) / 2
    assert loss_of(dense, "ce").warnings == ()


@pytest.mark.parametrize("loss", ["ce", "nll", "logit"])
def test_of_a_softmax_the_logarithm_is_taken_and_that_is_said(loss: str) -> None:
    x = leaf([0.0, math.log(2), math.log(5)])
    actual = loss_of(x.softmax(1), loss, target=1)
    sign = 1 if loss == "logit" else -1
    assert actual.value.item() == pytest.approx(sign * math.log(1 / 4), rel=1e-5)
    assert gradient(actual.value, x).tolist()[0] == pytest.approx([-sign / 8, sign * 3 / 4, -sign * 5 / 8], abs=1e-6)
    assert actual.warnings == (f"(model) already is a softmax (rows sum to 1), so {loss} takes its logarithm.",)


def test_a_probability_of_0_gives_a_finite_loss() -> None:
    loss = loss_of(torch.tensor([[1.0, 0.0]]), "ce", target=1)
    assert loss.value.item() == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))


def test_nll_of_logits_is_the_negative_logit_with_a_warning() -> None:
    x = leaf([3.0, 1.0])
    loss = loss_of(x, "nll")
    assert loss.value.item() == -3
    assert gradient(loss.value, x).tolist() == [[-1.0, 0.0]]
    assert len(loss.warnings) == 1
    assert "For logits, use ce." in loss.warnings[0]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)],
)
def test_losses_are_computed_in_float32_or_float64(dtype: torch.dtype, tolerance: float) -> None:
    x = normal(4, 10).to(dtype).requires_grad_()
    loss = loss_of(x, "ce", target=3)
    expected = F.cross_entropy(x.detach().double(), torch.tensor([3] * 4))
    assert loss.value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.value.item() == pytest.approx(expected.item(), rel=tolerance)
    assert gradient(loss.value, x).dtype == dtype


def test_autocast_does_not_reach_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(outputs: Sequence[Any], _task: Any) -> LossValue:
        return LossValue(outputs[0].tensor.new_tensor(float(torch.is_autocast_enabled("cpu"))))

    monkeypatch.setitem(OVER_ALL, "sum", probe)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss_of(normal(2, 3), "sum").value.item() == 0
        assert torch.is_autocast_enabled("cpu")


# --- Where the classes are ---

EACH, DENSE, TOKENS, LAST, FLAT = normal(2, 4), normal(2, 4, 3, 3), normal(2, 6, 4), normal(2, 3, 3, 4), normal(7)
LABELS = (torch.arange(18) % 4).reshape(2, 3, 3)
SHARES = normal(2, 4, seed=1).softmax(1)


def one_hot_bce(x: Tensor, axis: int, index: int = 3) -> Tensor:
    labels = torch.zeros(x.shape)
    labels.select(axis, index).fill_(1.0)
    return F.binary_cross_entropy_with_logits(x, labels)


@pytest.mark.parametrize(
    ("output", "loss", "options", "expected"),
    [
        (EACH, "ce", {"target": 0}, lambda x: F.cross_entropy(x, torch.tensor([0, 0]))),
        (EACH, "ce", {"target": SHARES}, lambda x: F.cross_entropy(x, SHARES)),
        (EACH.log_softmax(1), "nll", {"target": 2}, lambda x: -x[:, 2].mean()),
        (DENSE, "ce", {}, lambda x: F.cross_entropy(x, x.argmax(1))),
        (DENSE, "ce", {"target": "3,0"}, lambda x: -(x.log_softmax(1)[0, 3] + x.log_softmax(1)[1, 0]).mean() / 2),
        (DENSE, "ce", {"target": LABELS}, lambda x: F.cross_entropy(x, LABELS)),
        (DENSE, "ce", {"target": LABELS[0]}, lambda x: F.cross_entropy(x, LABELS[:1].expand(2, 3, 3))),
        # Of three axes the last has the classes, unless their number says otherwise.
        (TOKENS, "ce", {"target": 3}, lambda x: -x.log_softmax(2)[:, :, 3].mean()),
        (TOKENS, "ce", {"target": 3, "categories": ["a"] * 6}, lambda x: -x.log_softmax(1)[:, 3].mean()),
        (LAST, "ce", {"target": 3, "categories": PETS}, lambda x: -x.log_softmax(3)[..., 3].mean()),
        (FLAT, "ce", {"target": 2, "indices": (0,)}, lambda x: -x.log_softmax(0)[2]),
        (DENSE, "logit", {"target": 3}, lambda x: x[:, 3].mean((1, 2)).sum()),
        (EACH, "logit", {"target": torch.tensor([2], dtype=torch.uint8)}, lambda x: x[:, 2].sum()),
        (EACH[:, 0], "logit", {}, torch.sum),
        (torch.ones(2, 1), "logit", {}, torch.sum),  # a single class is no softmax
        (TOKENS, "bce", {"target": 3}, lambda x: one_hot_bce(x, 2)),
        (FLAT, "bce", {"target": 3, "indices": (0,)}, lambda x: one_hot_bce(x, 0)),
        (EACH[:, :1], "bce", {"target": "1,0"}, lambda x: (F.softplus(-x[0]) + F.softplus(x[1])).sum() / 2),
        (EACH[:, 0], "bce", {"target": "1,0"}, lambda x: (F.softplus(-x[0]) + F.softplus(x[1])) / 2),
        (EACH.to_sparse(), "mse", {"target": "zeros"}, lambda x: x.to_dense().square().mean()),
    ],
)
def test_values_and_gradients_are_those_of_torch_wherever_the_classes_are(
    output: Tensor, loss: str, options: Any, expected: Callable[[Tensor], Tensor]
) -> None:
    x = output.clone().requires_grad_()
    actual, wanted = loss_of(x, loss, **options).value, expected(x)
    assert actual.item() == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(gradient(actual, x).to_dense(), gradient(wanted, x).to_dense())


@pytest.mark.parametrize("shape", [(3, 1), (3,)])
@pytest.mark.parametrize("loss", ["ce", "nll"])
def test_a_single_value_per_input_is_nothing_for_class_losses(shape: tuple[int, ...], loss: str) -> None:
    with pytest.raises(UsageError, match=r"needs two classes or more, but \(model\) of shape 3.* take --loss bce"):
        loss_of(normal(*shape), loss)


# --- logit ---


def test_logit_is_the_sum_of_the_targets_values_with_a_gradient_of_1() -> None:
    x = leaf([1.0, 5.0, 2.0], [4.0, 0.0, 3.0])
    loss = loss_of(x, "logit")
    assert loss.value.item() == 9
    assert gradient(loss.value, x).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert loss.target == "argmax: classes 1, 0"


# --- bce ---


def test_bce_without_a_target_compares_with_one_half() -> None:
    x = leaf([0.0, math.log(3)])  # sigmoid 1/2, 3/4
    loss = loss_of(x, "bce")
    assert loss.value.item() == pytest.approx((math.log(2) - 0.5 * math.log(3 / 16)) / 2, rel=1e-6)
    assert gradient(loss.value, x).tolist()[0] == pytest.approx([0, (3 / 4 - 1 / 2) / 2])
    assert loss.target == "0.5 everywhere"


@pytest.mark.parametrize(
    "move", [lambda t: t, lambda t: t.flatten(1), lambda t: t.unsqueeze(1).transpose(1, 2).clone()]
)
def test_bce_of_a_sigmoid_takes_its_logarithm(move: Callable[[Tensor], Tensor]) -> None:
    x = leaf([0.0, math.log(3)])
    loss = loss_of(move(x.sigmoid()), "bce", target="zeros")
    assert loss.value.item() == pytest.approx((math.log(2) + math.log(4)) / 2, rel=1e-6)
    assert gradient(loss.value, x).tolist()[0] == pytest.approx([1 / 4, 3 / 8])
    assert loss.warnings == ("(model) already is a probability, so bce takes its logarithm.",)


def test_bce_of_logits_that_happen_to_lie_between_0_and_1_says_what_they_are_taken_for() -> None:
    x = leaf([0.25, 0.75])
    loss = loss_of(x * 1, "bce")
    assert loss.value.item() == pytest.approx(F.binary_cross_entropy_with_logits(x, torch.full((1, 2), 0.5)).item())
    assert loss.warnings == ("bce reads (model) as logits, although all values lie between 0 and 1.",)


@pytest.mark.parametrize("wrong", [-0.01, 1.01, math.nan])
def test_bce_refuses_labels_outside_0_to_1(wrong: float) -> None:
    with pytest.raises(
        UsageError, match=r"bce compares with numbers from 0 to 1, but its target \(t\.npy\) has others"
    ):
        loss_of(normal(1, 2), "bce", target=torch.tensor([[0.5, wrong]]), target_name="t.npy")


# --- mse, l1, huber ---


@pytest.mark.parametrize(
    ("loss", "value", "slopes"),
    [
        ("mse", (0.25 + 4 + 0) / 3, [2 * 0.5 / 3, 2 * -2 / 3, 0]),
        ("l1", (0.5 + 2 + 0) / 3, [1 / 3, -1 / 3, 0]),
        ("huber", (0.125 + 1.5 + 0) / 3, [0.5 / 3, -1 / 3, 0]),
    ],
)
def test_elementwise_losses_are_means_over_all_elements(loss: str, value: float, slopes: list[float]) -> None:
    x = leaf([1.5, -1.0, 3.0])
    actual = loss_of(x, loss, target=torch.tensor([[1.0, 1.0, 3.0]]), target_name="wanted.pt")
    assert actual.value.item() == pytest.approx(value)
    assert gradient(actual.value, x).tolist()[0] == pytest.approx(slopes)
    assert actual.target == "wanted.pt"


@pytest.mark.parametrize("loss", ["mse", "l1", "huber"])
@pytest.mark.parametrize("target", [None, "noise"])
def test_elementwise_losses_without_a_target_take_seeded_noise(loss: str, target: str | None) -> None:
    x = normal(1, 50, seed=9).requires_grad_()
    actual = loss_of(x, loss, target=target, seed=5)
    noise = torch.randn(50, generator=torch.Generator().manual_seed(5))
    reference = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}[loss](x, noise.unsqueeze(0))
    assert actual.value.item() == reference.item()
    assert actual.target == "noise (seed 5)"
    if loss == "mse":
        torch.testing.assert_close(gradient(actual.value, x), (2 * (x.detach() - noise) / 50))


def test_zeros_and_self_are_what_they_say() -> None:
    x, image = torch.tensor([[3.0, -4.0]]), torch.tensor([[1.0, 1.0]])
    assert loss_of(x, "mse", target="zeros").value.item() == 12.5
    loss = loss_of(x, "l1", target="self", args=(torch.tensor([1, 2, 3]), image))
    assert (loss.value.item(), loss.target) == (3.5, "the input itself")


def test_the_gradient_of_self_does_not_go_through_the_input() -> None:
    image = leaf([1.0, 2.0])
    loss = loss_of(image * 3, "mse", target="self", args=(image,))
    # d/dx mean((3x - t)^2) at t = x held fixed: 2 * (3x - x) * 3 / 2
    assert gradient(loss.value, image).tolist() == [[6.0, 12.0]]


def test_self_has_to_fit_the_output() -> None:
    with pytest.raises(UsageError, match=r"\(model\) of shape 1x2 with the input itself, 1x3x8x8"):
        loss_of(normal(1, 2), "mse", target="self", args=(normal(1, 3, 8, 8),))
    with pytest.raises(UsageError, match="with the input itself, no floating-point tensor"):
        loss_of(normal(1, 2), "mse", target="self", args=(torch.tensor([1]),))


# --- Random numbers ---


def test_the_projection_is_the_dot_product_with_seeded_noise_over_all_floating_outputs() -> None:
    first, second = normal(1, 3, seed=1).requires_grad_(), normal(1, 2, 2, seed=2).requires_grad_()
    output = {"a": first, "count": torch.tensor([3]), "b": [second, None]}
    loss = loss_of(output, "projection", seed=7)
    source = torch.Generator().manual_seed(7)
    r, s = torch.randn(3, generator=source), torch.randn(2, 2, generator=source)
    assert loss.value.item() == pytest.approx(((first * r).sum() + (second * s).sum()).item(), rel=1e-6)
    assert torch.equal(gradient(loss.value, first)[0], r)
    assert torch.equal(gradient(loss.value, second)[0], s)
    assert loss.outputs == ("(model)['a']", "(model)['b'][0]")
    assert (loss.target, loss.warnings) == ("standard normal weights (seed 7)", ())


@pytest.mark.parametrize("loss", ["projection", "mse"])
def test_an_inputs_random_numbers_do_not_depend_on_its_batch(loss: str) -> None:
    x = normal(3, 20).requires_grad_()
    whole = gradient(loss_of(x, loss, input_count=3).value, x)
    scale = {"projection": 1, "mse": 3}[loss]  # mse is a mean over the batch
    for index in range(3):
        one = x.detach()[index : index + 1].requires_grad_()
        alone = gradient(loss_of(one, loss, indices=(index,), input_count=3).value, one)
        torch.testing.assert_close(alone[0], scale * whole[index])
    assert len({row.sum().item() for row in whole + x.detach()}) == 3


def test_outputs_whose_first_axis_is_not_the_batch_are_projected_too() -> None:
    x = normal(5, 2, 3).requires_grad_()
    loss = loss_of(x, "projection", indices=(0, 1), seed=4)
    assert torch.equal(gradient(loss.value, x), torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(4)))


def test_a_complex_output_counts_as_its_two_parts() -> None:
    x = torch.tensor([[1 + 2j, 3 - 1j]])
    assert loss_of(x, "sum").value.item() == 5
    assert loss_of(x, "mse", target="zeros").value.item() == (1 + 4 + 9 + 1) / 4
    assert loss_of(x, "mse", target=x).value.item() == 0


@pytest.mark.parametrize("loss", ["ce", "nll", "logit", "bce"])
def test_the_parts_of_complex_numbers_are_no_classes(loss: str) -> None:
    with pytest.raises(UsageError, match=rf"{loss} cannot compare \(model\), complex numbers: take .* projection"):
        loss_of(torch.tensor([[1 + 2j, 3 - 1j]]), loss)


# --- Targets from the user ---


@pytest.mark.parametrize(("text", "index"), [("3", 3), (" 2 ", 2), ("tabby", 0), ("TIGER cat", 1), ("Egyptian Cat", 3)])
def test_classes_are_given_by_index_or_name(text: str, index: int) -> None:
    loss = loss_of(normal(1, 4), "logit", target=text, categories=PETS)
    assert loss.target == f"class {index}, {PETS[index]}"
    assert loss.value.item() == normal(1, 4)[0, index].item()


def test_names_with_commas_are_one_class_each() -> None:
    names = ("tabby, tabby cat", "tiger cat", "lynx, catamount")
    loss = loss_of(normal(3, 3), "logit", target="lynx, catamount,tiger cat, tabby, tabby cat", categories=names)
    assert loss.value.item() == pytest.approx(float(normal(3, 3)[[0, 1, 2], [2, 1, 0]].sum()))


def test_a_class_for_each_of_many_inputs_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(targets, "class_index", lambda text, _: asked.append(text) or int(text) % 2)
    choose_loss("ce", target=",".join(["1"] * 500), categories=("cat", "dog"), input_count=500)
    assert asked == ["1"] * 500


def test_each_input_takes_its_own_class_in_whatever_batch_it_comes() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    compute = choose_loss("logit", target="3,0,1", input_count=3)
    assert compute(x[:2], batch(indices=(0, 1))).value.item() == 3 + 4
    last = compute(x[2:], batch(indices=(2,)))
    assert (last.value.item(), last.target) == (9, "class 1")


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("4", {}, r"Target class 4 is out of range for ce: \(model\) of shape 2x4 has classes 0 to 3"),
        ("cat", {}, "'cat' is not an index from 0, and the model has no class names"),
        ("tabbi", {"categories": PETS}, "knows no class 'tabbi'. Nearest: 'tabby'"),
        ("1,2", {"indices": (0, 1, 2)}, "2 target classes are given for 3 inputs"),
        ("1,2,3,0", {"indices": (0, 1, 2, 3)}, "The output has 2 rows for 4 inputs"),
        (
            "crane",
            {"categories": ("crane", "cat", "dog", "Crane")},
            "Several classes are named 'crane': give one of 0, 3",
        ),
        ("zeros", {}, "ce does not take 'zeros' as its target. Give a class index or name or a tensor file"),
        (np.array([1, 2]), {}, r"Target class '\[1 2\]' is not an index from 0"),
        (torch.tensor([0, 9]), {"target_name": "t.pt"}, "Target class 9 is out of range"),
        (torch.zeros(3, dtype=torch.long), {}, "with 3 rows for 2 inputs"),
        (torch.zeros(2, 3, dtype=torch.long), {"target_name": "t.pt"}, "shape 2 for .* of shape 2x4, but t.pt is 2x3"),
        (torch.tensor([0.0, 1.0]), {}, "needs a target of shape 2x4 .* is 2"),
        (torch.tensor([[0.5, 0.5, 0.5, 0.0]]), {}, "not probabilities"),
    ],
)
def test_a_class_target_that_does_not_fit_is_refused(target: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        loss_of(normal(2, 4), "ce", target=target, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(1, 5), (5,)])
def test_logit_does_not_round_values_to_classes(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"logit takes class indices, but tensor .*5 holds torch.float32"):
        loss_of(normal(1, 5), "logit", target=torch.ones(shape))


@given(st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_a_value_target_goes_with_its_inputs(count: int, extra: int, one_for_all: bool) -> None:
    total = count + extra
    target = normal(1 if one_for_all else total, 6, seed=1)
    compute = choose_loss("mse", target=target, input_count=total)
    x = normal(count, 6, seed=2)
    indices = tuple(range(extra, total))
    rows = target.expand(total, 6)[extra:]
    assert compute(x, batch(indices=indices)).value.item() == pytest.approx((x - rows).square().mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5,), r"mse needs a target of shape 2x6 for \(model\) of shape 2x6, but tensor 5 is 5"),
        ((3, 6), "of shape 3x6, with 3 rows for 2 inputs: give 1 row, or as many"),
        ((2, 6, 1), "shape 2x6 .* is 2x6x1"),
        ((), "shape 2x6 .* is scalar"),
    ],
)
def test_a_value_target_of_another_shape_is_refused_with_both_shapes(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loss_of(normal(2, 6), "mse", target=torch.zeros(shape))


def test_a_target_without_a_batch_axis_fits_an_output_without_one() -> None:
    x = normal(5, 3)
    assert loss_of(x, "mse", target=x, indices=(0, 1)).value.item() == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_says_which_targets_it_takes(loss: str) -> None:
    all_kinds = {"class": "1", "zeros": "zeros", "noise": "noise", "self": "self", "tensor": torch.zeros(1, 2)}
    for kind, target in all_kinds.items():
        if kind in LOSSES[loss]:
            choose_loss(loss, target=target)
        else:
            with pytest.raises(
                UsageError, match=f"^{loss} does not take .* as its target|^The loss {loss} takes no target"
            ):
                choose_loss(loss, target=target)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("hubert", "huber"),
        ("crossentropy", "ce"),
        ("cross_entropy", "ce"),
        ("CrossEntropyLoss", "ce"),
        ("BCEWithLogitsLoss", "bce"),
        ("MSELoss", "mse"),
        ("l2", "mse"),
        ("mae", "l1"),
        ("smooth_l1", "huber"),
        ("NLLLoss", "nll"),
    ],
)
def test_a_loss_that_does_not_exist_is_refused_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"^There is no loss '{name}'\. Nearest: '{meant}'\. Give ce, bce, mse"):
        choose_loss(name)


# --- Several outputs ---

Inception = namedtuple("Inception", ["logits", "aux_logits"])  # noqa: PYI024 - what torchvision returns


MAIN, OTHER = normal(1, 4, seed=1), normal(1, 4, seed=2)


@pytest.mark.parametrize(
    ("output", "label"),
    [
        (Inception(MAIN, OTHER), "(model).logits"),
        (OrderedDict(aux=OTHER, out=MAIN), "(model)['out']"),
        ({"output": OTHER, "logits": MAIN}, "(model)['logits']"),
        ([MAIN, OTHER], "(model)[0]"),
        ((torch.tensor(3.0), MAIN, OTHER), "(model)[1]"),
    ],
)
def test_of_several_outputs_the_main_one_counts_and_the_others_are_named(output: Any, label: str) -> None:
    loss = loss_of(output, "logit", indices=(0,))
    assert (loss.value.item(), loss.outputs) == (MAIN.max().item(), (label,))
    assert loss.warnings[0].startswith(f"logit is computed from {label} alone, not from (model)")


@pytest.mark.parametrize("key", ["aux", "['aux']", "(model)['aux']"])
@pytest.mark.parametrize("loss", ["logit", "sum"])
def test_a_key_chooses_the_output(key: str, loss: str) -> None:
    actual = loss_of(OrderedDict(out=MAIN, aux=OTHER), loss, output_key=key)
    with pytest.raises(UsageError, match=r"no floating-point output 'aus'. It has \['out'\], \['aux'\]"):
        loss_of(OrderedDict(out=MAIN, aux=OTHER, n=torch.tensor(1)), loss, output_key="aus")
    with pytest.raises(UsageError, match=r"no floating-point output 'out'. It has a single one"):
        loss_of(MAIN, loss, output_key="out")
    assert actual.value.item() == {"logit": OTHER.max().item(), "sum": OTHER.sum().item()}[loss]
    assert (actual.outputs, actual.warnings) == (("(model)['aux']",), ())


@pytest.mark.parametrize(
    ("output", "key"),
    [
        (Inception(OTHER, MAIN), "aux_logits"),
        ([OTHER, MAIN], "[1]"),
        ([OTHER, {"a": MAIN}], "[1]['a']"),
        ({0: OTHER, 1: MAIN}, "1"),
    ],
)
def test_keys_are_attributes_indices_and_paths(output: Any, key: str) -> None:
    assert loss_of(output, "logit", output_key=key, indices=(0,)).value.item() == MAIN.max().item()


@pytest.mark.parametrize("output", [None, "text", torch.tensor([1, 2]), {"n": torch.tensor([True])}, []])
def test_a_model_without_floating_outputs_has_no_loss(output: Any) -> None:
    with pytest.raises(
        UsageError, match="projection needs an output of floating-point numbers, but the model returned"
    ):
        loss_of(output, "projection")


@pytest.mark.parametrize("loss", ["projection", "sum"])
def test_a_dictionary_of_losses_is_summed(loss: str) -> None:
    a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    actual = loss_of({"classifier": a, "boxes": b * 2}, loss)
    assert (actual.value.item(), actual.name, actual.target) == (8, "loss dict sum", "")
    assert (gradient(actual.value, a).item(), gradient(actual.value, b).item()) == (1, 2)
    assert actual.outputs == ("(model)['classifier']", "(model)['boxes']")
    assert loss_of({"classifier": a, "boxes": b * 2}, loss, output_key="boxes").value.item() == 6


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"projection", "sum"}))
def test_a_dictionary_of_losses_is_nothing_to_compare(loss: str) -> None:
    with pytest.raises(UsageError, match=f"{loss} needs an output, but the model returned its own losses"):
        loss_of({"classifier": torch.tensor(1.0)}, loss)


def test_outputs_without_elements_are_said_to_have_no_gradient() -> None:
    empty = [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}]
    loss = loss_of(empty, "projection", indices=(0,))
    assert loss.value.item() == 0
    assert loss.warnings == ("(model)[0]['boxes'] has no elements, so projection has no gradient.",)


# --- Losses without gradient ---

UNIT = nn.LayerNorm(64, elementwise_affine=False)


@pytest.mark.parametrize(
    ("loss", "target", "normalise", "reason"),
    [
        ("sum", None, lambda x: x.softmax(1), "softmax whose rows sum to 1"),
        ("sum", None, UNIT, "normalised to mean 0"),
        ("sum", None, lambda x: F.layer_norm(x.reshape(8, 4, 4, 4).movedim(1, -1), (4,)).movedim(-1, 1), "to mean 0"),
        ("sum", None, lambda x: F.layer_norm(x.reshape(8, 4, 4, 4), (4, 4, 4)), "normalised to mean 0"),
        ("sum", None, lambda x: UNIT(x).bfloat16(), "normalised to mean 0"),
        ("mse", "zeros", F.normalize, "normalised to length 1"),
        ("mse", "zeros", UNIT, "normalised to mean square 1"),
        ("mse", "zeros", lambda x: F.batch_norm(x, None, None, training=True), "normalised to mean square 1"),
        ("mse", "zeros", lambda x: F.rms_norm(x, (64,)), "normalised to mean square 1"),
        ("l1", "zeros", lambda x: x.softmax(1), "softmax whose rows sum to 1"),
    ],
)
def test_a_loss_that_has_no_gradient_by_construction_is_warned_about(
    loss: str, target: str | None, normalise: Callable[[Tensor], Tensor], reason: str
) -> None:
    x = normal(8, 64).requires_grad_()
    actual = loss_of(normalise(x), loss, target=target)
    lost = gradient(actual.value, x).norm()
    kept = gradient(loss_of(normalise(x), "projection").value, x).norm()
    assert lost < 2e-3 * kept  # it is as the warning says
    assert len(actual.warnings) == 1
    assert reason in actual.warnings[0]
    assert "Take --loss projection" in actual.warnings[0]


@pytest.mark.parametrize(
    ("loss", "target", "output"),
    [
        ("sum", None, normal(1, 1000)),
        ("sum", None, normal(2, 4) - normal(2, 4).mean(1, keepdim=True)),  # four values: may be chance
        ("sum", None, (UNIT(normal(1, 64)) + 0.05 / 8).bfloat16()),  # a mean 0.05 of what chance gives
        ("sum", None, UNIT(normal(1, 64)) + 0.005 / 8),
        ("mse", "zeros", (UNIT(normal(1, 64)) * 1.03).bfloat16()),
        ("mse", "zeros", UNIT(normal(1, 64)) * 1.003),
        ("sum", None, normal(8, 64).sigmoid()),
        ("sum", None, torch.zeros(8, 64)),
        ("sum", None, torch.full((8, 64), math.nan)),
        ("mse", "zeros", normal(8, 64)),
        ("mse", None, F.normalize(normal(8, 64))),
        ("projection", None, normal(8, 64).softmax(1)),
    ],
)
def test_a_loss_with_a_gradient_is_not_warned_about(loss: str, target: str | None, output: Tensor) -> None:
    assert loss_of(output, loss, target=target).warnings == ()


def test_sum_adds_up_every_floating_output() -> None:
    x, y = leaf([1.0, 2.0]), leaf([4.0])
    loss = loss_of({"a": x, "b": y, "n": torch.tensor([9])}, "sum")
    assert loss.value.item() == 7
    assert gradient(loss.value, x).tolist() == [[1, 1]]
    assert (loss.target, loss.outputs) == ("", ("(model)['a']", "(model)['b']"))


# --- NaN and Inf ---


@pytest.mark.parametrize("loss", [name for name in LOSSES if name not in ("logit", "nll")])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_loss_of_broken_values_is_a_value(loss: str, broken: float) -> None:
    x = torch.tensor([[1.0, broken, 2.0]], requires_grad=True)
    value = loss_of(x, loss, target=0 if loss == "ce" else None).value
    assert not math.isfinite(value.item())
    gradient(value, x)


# --- A user's own function ---


def squared(output: Tensor) -> Tensor:
    return output.square().sum()


def compared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().sum()


def of_logits(output: Any) -> Tensor:
    return output["logits"].sum()


def test_a_users_function_is_called_with_the_output() -> None:
    x = leaf([1.0, -2.0])
    loss = loss_of(x, squared)
    assert loss.value.item() == 5
    assert gradient(loss.value, x).tolist() == [[2, -4]]
    assert (loss.name, loss.target, loss.outputs, loss.warnings) == ("test_losses.py:squared", "", ("(model)",), ())


def test_a_users_function_gets_the_whole_output_or_the_chosen_one() -> None:
    output = {"logits": MAIN, "aux": OTHER}
    assert loss_of(output, of_logits).value.item() == MAIN.sum().item()
    assert loss_of(output, squared, output_key="aux").value.item() == OTHER.square().sum().item()


def test_a_users_function_gets_the_target() -> None:
    x = normal(2, 3)
    classes = loss_of(x, F.cross_entropy, target="2,0", categories=("a", "b", "c"))
    assert classes.value.item() == F.cross_entropy(x, torch.tensor([2, 0])).item()
    assert classes.target == "classes 2 (c), 0 (a)"
    zeros = loss_of(x, compared, target="zeros")
    assert (zeros.value.item(), zeros.target) == (x.abs().sum().item(), "zeros")
    noise = loss_of(x, compared, target="noise", seed=3)
    assert noise.value.item() == pytest.approx((2 * 3) * loss_of(x, "l1", target="noise", seed=3).value.item())
    image = normal(2, 3, seed=8)
    assert loss_of(x, compared, target="self", args=(image,)).value.item() == compared(x, image).item()
    rows = normal(4, 3, seed=5)
    part = loss_of(x, compared, target=rows, indices=(2, 3), input_count=4)
    assert part.value.item() == compared(x, rows[2:]).item()
    assert loss_of(x, compared, target=rows[0], input_count=2).value.item() == compared(x, rows[0]).item()


def test_a_loss_module_is_a_function_too() -> None:
    loss = loss_of(normal(2, 3), nn.CrossEntropyLoss(reduction="sum"), target=1)
    expected = F.cross_entropy(normal(2, 3), torch.tensor([1, 1]), reduction="sum")
    assert (loss.value.item(), loss.name) == (expected.item(), "CrossEntropyLoss")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.sum().item(), "returned float, but a loss has to be a single floating-point number"),
        (lambda x: x, "returned 1x2 of torch.float32, but a loss has to be"),
        (lambda x: x.argmax(), "returned scalar of torch.int64, but a loss has to be"),
        (lambda x: (x * 1j).sum(), "returned scalar of torch.complex64, but a loss has to be"),
        (lambda x: x.detach().sum(), "returned a tensor without a gradient: leave out .detach"),
    ],
)
def test_what_is_no_loss_is_refused(function: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        loss_of(leaf([1.0, 2.0]), function)
    assert str(caught.value).startswith("test_losses.py:<lambda> ")
    assert "\n" not in str(caught.value)


def test_a_frozen_model_or_no_grad_is_not_the_functions_fault() -> None:
    assert loss_of(torch.ones(1, 2), squared).value.item() == 2
    with torch.no_grad():
        assert loss_of(leaf([1.0, 1.0]), squared).value.item() == 2


def exits(_output: Tensor) -> Tensor:
    raise SystemExit(3)


def fails(output: Tensor) -> Tensor:
    return output.no_such_thing


def fails_inside_torch(output: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.tensor([99]))


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (exits, "SystemExit: 3"),
        (fails, "AttributeError: 'Tensor' object"),
        (fails_inside_torch, "IndexError: Target 99 is out"),
    ],
)
def test_a_function_that_raises_is_named_with_its_place(function: Callable[[Tensor], Tensor], error: str) -> None:
    line = function.__code__.co_firstlineno + 1
    with pytest.raises(ModelError) as caught:
        loss_of(normal(1, 2), function)
    assert str(caught.value).startswith(
        f"test_losses.py:{function.__qualname__} raised at test_losses.py:{line}: {error}"
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99999999999999 bytes."),
    ],
)
def test_running_out_of_memory_stays_what_it_is(error: Exception) -> None:
    def hungry(_output: Tensor) -> Tensor:
        raise error

    with pytest.raises(type(error)) as caught:
        loss_of(normal(1, 2), hungry)
    assert caught.value is error


def test_a_function_that_takes_something_else_is_refused_before_anything_runs() -> None:
    with pytest.raises(
        UsageError, match=r"<lambda>\(output, first, second\) cannot be called with the output alone .*'first'"
    ):
        choose_loss(lambda output, first, second: output.sum())  # noqa: ARG005
    with pytest.raises(UsageError, match="cannot be called with the output and the target"):
        choose_loss(squared, target="zeros")


@pytest.mark.parametrize("loss", [compared, torch.nn.CrossEntropyLoss()])
def test_a_function_without_its_target_asks_for_one(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(UsageError, match=r"(compared|CrossEntropyLoss) needs a target: give --target\.$"):
        choose_loss(loss)
    with pytest.raises(UsageError, match=r"needs a target: give `target`\.$"):
        called_from_python(choose_loss)(loss)


@pytest.mark.parametrize("target", ["self", "noise", "zeros"])
def test_a_target_that_cannot_be_made_is_refused(target: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be given {target}: there is no floating-point tensor"):
        loss_of(None, compared, target=target)


# --- Hostile text ---


def test_names_from_elsewhere_are_shown_safely() -> None:
    name = "\x1b[31mcat\n::error::"
    loss = loss_of(normal(1, 2), "ce", target=1, categories=("a", name))
    assert loss.target == "class 1, \\x1b[31mcat\\n::error::"
    for call in (
        lambda: loss_of(normal(1, 2), "ce", target="\ncat", categories=("a", name)),
        lambda: loss_of({"\n::error::": MAIN, "b": OTHER}, "ce", output_key="\x1b"),
        lambda: choose_loss("\nce"),
        lambda: choose_loss("mse", target="\nce"),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("shapes", [[(2, 3)], [(2, 3), (2, 2, 2)]])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_output_is_never_written_to(loss: str, shapes: Sequence[tuple[int, ...]]) -> None:
    outputs = [normal(*shape) for shape in shapes]
    versions = [output._version for output in outputs]
    loss_of(outputs, loss, indices=(0, 1))
    assert [output._version for output in outputs] == versions
    assert all(torch.equal(output, normal(*shape)) for output, shape in zip(outputs, shapes, strict=True))


def test_one_input_of_several_axes_and_several_classes_names_the_batch_axis() -> None:
    said = "3 target classes are given for 1 input: give 1 or as many, or `batch_axis` 0 if"
    with pytest.raises(UsageError, match=said):
        hookscope.grads(torch.nn.Conv1d(1, 4, 9), [], input_shape=(1, 1, 30), loss="ce", target="0,1,2")
