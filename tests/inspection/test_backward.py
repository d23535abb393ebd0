"""The gradient pipeline as a library: statuses, rows, batches, edits, failures, and what it leaves alone."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookscope
from hookscope.errors import ModelError, UsageError
from hookscope.inputs.batches import Batch
from hookscope.inspection.backward import PassError
from hookscope.inspection.losses.formulas import LossValue
from hookscope.results.gradients import Gradients
from tests.inspection.test_networks import assert_unchanged, seeded, snapshot
from tests.inspections import inspect, inspect_gradients
from tests.networks import Apply, Written, batch_of, conv_net


def total(output: Tensor, _batch: Batch) -> Tensor:
    return output.sum()


def chain(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))


def statuses(inspection: Gradients) -> dict[str, str]:
    return {row.label: row.status for row in inspection.gradients}


def with_kept(model: nn.Module, x: Tensor, *args: Any, **options: Any) -> tuple[Gradients, dict[str, Tensor]]:
    """Inspect; return what was seen, and a copy of each gradient by its label."""
    kept: dict[str, Tensor] = {}
    options["on_tensor"] = lambda label, gradient, _: kept.update({label: gradient.clone()})
    return inspect_gradients(model, x, *args or (total,), **options), kept


def remarks(inspection: Gradients) -> dict[str, str]:
    return {row.label: row.remark for row in inspection.gradients}


# --- four statuses ---


def test_a_gradient_is_told_from_zero_from_no_path_and_from_not_reached() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.ignored(x)
        net.index(x.argmax(1))
        return net.used(x) + 0 * net.silenced(x) + net.frozen(x)

    parts = {name: nn.Linear(2, 2) for name in ("used", "silenced", "ignored", "frozen", "spare")}
    parts["frozen"].requires_grad_(False)
    inspection = inspect_gradients(Written(forward, index=nn.Identity(), **parts), torch.ones(3, 2), total)
    assert statuses(inspection) == {
        "ignored": "not reached",
        "index": "no gradient path",
        "used": "gradient",
        "silenced": "zero",
        "frozen": "no gradient path",
    }
    assert remarks(inspection) == {
        "ignored": "unused, or cut off further on",
        "index": "int64 values have no gradient",
        "used": "",
        "silenced": "",
        "frozen": "no parameter before it is trainable",
    }
    parameters = {row.name: (row.status, row.trainable) for row in inspection.parameters}
    assert parameters["used.weight"] == ("gradient", True)
    assert parameters["silenced.bias"] == ("zero", True)
    assert parameters["ignored.weight"] == parameters["spare.bias"] == ("not reached", True)
    assert parameters["frozen.weight"] == ("no gradient path", False)
    assert [layer.layer for layer in inspection.uncalled] == ["spare"]
    without = next(row for row in inspection.gradients if row.layer == "frozen")
    assert (without.gradient.shape, without.gradient.dtype, without.gradient.mean) == ((3, 2), "float32", None)
    assert without.backward_index is None


def test_with_one_trainable_layer_those_before_it_have_no_gradient_path() -> None:
    model = chain(3, 4, 5, 2)
    model.requires_grad_(False)
    model[2].requires_grad_(True)
    assert statuses(inspect_gradients(model, torch.ones(1, 3), total)) == {
        "0": "no gradient path",
        "1": "no gradient path",
        "2": "gradient",
    }
    # Asking for inputs changes nothing about outputs.
    both = inspect_gradients(model, torch.ones(1, 3), total, include_inputs=True)
    assert {(row.label, row.role): row.status for row in both.gradients if row.status == "gradient"} == {
        ("2", "output"): "gradient"
    }


def test_a_frozen_network_is_differentiated_down_to_its_input() -> None:
    model = chain(3, 4, 2).requires_grad_(False)
    inspection = inspect_gradients(model, torch.ones(1, 3), total)
    assert statuses(inspection) == {"0": "gradient", "1": "gradient"}
    assert {row.status for row in inspection.parameters} == {"no gradient path"}
    assert inspection.warnings == (
        "No parameter is trainable: gradients are taken with respect to the network's input.",
    )
    first = inspection.gradients[0].gradient
    expected = model[1].weight.sum(0)
    assert first.l2 == pytest.approx(expected.norm().item(), rel=1e-6)


def test_a_frozen_network_of_integers_is_differentiated_down_to_its_first_floating_tensors() -> None:
    def forward(net: Any, tokens: Tensor) -> Tensor:
        return net.head(net.act(net.words(tokens)) + net.drop(net.places(torch.arange(tokens.shape[1]))))

    torch.manual_seed(0)
    in_place = {"drop": nn.Dropout(0.1, inplace=True), "act": nn.ReLU(inplace=True)}
    parts = {"words": nn.Embedding(9, 4), "places": nn.Embedding(5, 4), **in_place, "head": nn.Linear(4, 2)}
    model = Written(forward, **parts).requires_grad_(False)
    inspection = inspect_gradients(model, torch.tensor([[1, 2, 3]]), total)
    assert statuses(inspection) == dict.fromkeys(["words", "act", "places", "drop", "head"], "gradient")
    assert "gradients are taken with respect to the first floating-point outputs of layers." in inspection.warnings[0]
    model.requires_grad_(True)
    assert statuses(inspect_gradients(model, torch.tensor([[1, 2, 3]]), total))["words"] == "gradient"


@pytest.mark.parametrize(
    ("forward", "remark"),
    [
        (torch.no_grad()(lambda net, x: net.body(x)), "it was computed without gradients (no_grad)"),
        (torch.inference_mode()(lambda net, x: net.body(x)), "it was computed in inference mode"),
        (lambda net, x: net.body(x).detach(), ""),
        (lambda net, x: net.body(x).argmax(1), ""),
    ],
)
def test_a_model_without_any_gradient_path_is_one_sentence(forward: Callable[..., Tensor], remark: str) -> None:
    model = Written(forward, body=chain(2, 3))
    with pytest.raises(PassError, match="The loss of Written has no gradient") as caught:
        inspect_gradients(model, torch.ones(2, 2), lambda output, _: output.float().sum())
    assert caught.value.exit_code == 6
    assert isinstance(caught.value, ModelError)
    assert "\n" not in str(caught.value)
    inspection = caught.value.inspection
    if remark:
        assert remarks(inspection) == {"body.0": remark}
        assert statuses(inspection) == {"body.0": "no gradient path"}
    assert {row.status for row in inspection.parameters} == {"not reached"}
    assert inspection.failure is None


def test_a_part_that_detaches_is_said_to_cut_the_path() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Apply(torch.no_grad()(lambda x: x * 2)), nn.Linear(2, 2))
    inspection = inspect_gradients(model, torch.ones(1, 2), total)
    assert statuses(inspection) == {"0": "not reached", "1": "no gradient path", "2": "gradient"}
    assert remarks(inspection)["1"] == "it was cut off inside the module (no_grad or detach)"


# --- rows ---


def test_the_first_gradient_that_is_not_finite_is_the_earliest_to_arrive() -> None:
    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sqrt()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradients[0] / (2 * x.sqrt())

    bad = Apply(lambda x: Root.apply(x * 0))
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity(), bad, nn.Linear(2, 2))
    inspection = inspect_gradients(model, torch.ones(1, 2), total)
    rows = [row for row in inspection.gradients if row.gradient.nan_count or row.gradient.inf_count]
    first = min(rows, key=lambda row: row.backward_index if row.backward_index is not None else math.inf)
    assert first.layer == "1"  # the gradient of what `bad` was given
    assert [row.layer for row in rows] == ["0", "1"]


def test_tied_parameters_are_one_row_with_aliases_and_the_sum_of_both_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    x = torch.randn(2, 3)
    inspection = inspect_gradients(model, x, total)
    (row,) = inspection.parameters
    assert (row.name, row.aliases) == ("0.weight", ("1.weight",))
    weight = model[0].weight.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad((x @ weight.t() @ weight.t()).sum(), weight)
    assert row.gradient.l2 == pytest.approx(expected.norm().item(), rel=1e-6)
    assert row.weight_l2 == pytest.approx(weight.norm().item(), rel=1e-6)


def test_parameters_that_the_forward_pass_registers_are_measured_and_those_it_drops_are_not() -> None:
    made: list[nn.Parameter] = []

    def forward(net: Any, x: Tensor) -> Tensor:
        del net.dropped
        net.late = nn.Parameter(torch.tensor([6.0, 8.0]))
        made.append(net.late)
        return x * net.early * net.late

    model = Written(forward, early=nn.Parameter(torch.tensor([3.0, 4.0])), dropped=nn.Parameter(torch.ones(2)))
    rows = {row.name: row for row in inspect_gradients(model, torch.tensor([[1.0, 2.0]]), total).parameters}
    assert set(rows) == {"early", "late"}
    assert rows["early"].weight_l2 == pytest.approx(5)
    assert rows["late"].weight_l2 == pytest.approx(10)
    assert rows["early"].gradient.l2 == pytest.approx(math.hypot(6, 16))  # x * late
    assert rows["late"].gradient.l2 == pytest.approx(math.hypot(3, 8))  # x * early
    assert made[-1].grad is None


def test_sparse_gradients_and_odd_dtypes_are_measured() -> None:
    parts = {"words": nn.Embedding(50, 4, sparse=True), "head": nn.Linear(4, 2, dtype=torch.bfloat16)}
    model = Written(lambda net, tokens: net.head(net.words(tokens).bfloat16()), **parts)
    inspection = inspect_gradients(model, torch.tensor([[3, 4]]), total)
    words, head, _ = inspection.parameters
    assert words.gradient.zero_fraction == pytest.approx(48 / 50)
    assert words.gradient.element_count == 200
    assert head.gradient.dtype == "bfloat16"
    assert [row.gradient.dtype for row in inspection.gradients] == ["float32", "bfloat16"]


def test_an_output_whose_operation_got_a_gradient_elsewhere_is_not_reached() -> None:
    def second_half(net: Any, x: Tensor) -> Tensor:
        net.first, second = x.split(2, dim=1)
        return second

    def forward(net: Any, x: Tensor) -> Tensor:
        net.split(net.body(x))
        return net.split.first

    model = Written(forward, body=chain(2, 4), split=Written(second_half))
    assert statuses(inspect_gradients(model, torch.ones(1, 2), total)) == {"body.0": "gradient", "split": "not reached"}


# --- batches ---


def test_batches_are_merged_and_parameters_summed_as_training_does() -> None:
    model, values = chain(3, 4, 2), torch.randn(5, 3)
    inspection = inspect_gradients(
        model, [batch_of(values[:2], count=2), batch_of(values[2:], first=2, count=3)], total
    )
    whole = inspect_gradients(model, values, total)
    assert inspection.loss.value == pytest.approx(whole.loss.value, rel=1e-5)
    assert len(inspection.inputs) == 5
    for merged, together in zip(inspection.gradients, whole.gradients, strict=True):
        assert merged.gradient.element_count == together.gradient.element_count
        assert merged.gradient.mean == pytest.approx(together.gradient.mean, rel=1e-4)
        assert merged.backward_index == together.backward_index
    for merged_row, row in zip(inspection.parameters, whole.parameters, strict=True):
        assert merged_row.gradient.l2 == pytest.approx(row.gradient.l2, rel=1e-5)
    assert any("sums over 2 batches" in note for note in inspection.notes)
    assert not whole.warnings


def test_batches_in_training_draw_new_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    kept: list[Tensor] = []
    x = torch.ones(1, 64)
    inspect_gradients(
        model,
        [batch_of(x), batch_of(x, first=1)],
        total,
        mode="train",
        on_tensor=lambda label, gradient, _: kept.append(gradient.clone()) if label == "0 grad_output" else None,
    )
    assert not torch.equal(*kept)


# --- train mode ---


def test_training_keeps_what_its_owner_froze_if_the_model_is_in_train_mode() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)).train()
    model[0].eval()
    x = torch.tensor([[1.0, 0.0], [3.0, 8.0]])
    assert inspect_gradients(model, x, total, mode="train").rows[0].activation.max == pytest.approx(8, rel=1e-4)


def test_a_repeated_pass_draws_the_same_random_numbers() -> None:
    """A view that is overwritten makes the pass run twice; dropout and buffers must not notice."""

    def forward(net: Any, x: Tensor) -> Tensor:
        net.passes.add_(1)
        return torch.relu_(net.norm(net.drop(x))) * net.passes

    counts = Written(forward, norm=nn.InstanceNorm2d(3), drop=nn.Dropout(0.5), passes=torch.tensor(0))
    model = nn.Sequential(nn.Conv2d(3, 3, 1), counts)
    x = torch.randn(2, 3, 4, 4)
    with seeded(0):
        model.train()
        expected = model(x).sum()
        expected.backward()
    gradient = model[0].weight.grad
    model[1].get_buffer("passes").zero_()
    model.zero_grad()
    inspection, kept = with_kept(model, x, mode="train")
    assert inspection.loss.value == expected.item()
    assert torch.equal(kept["0.weight grad"], gradient)
    assert "1.norm grad_output" in kept
    assert model[1].get_buffer("passes").item() == 0


# --- what is hard to hook ---


def test_a_model_that_counts_on_a_view_sharing_its_memory_is_computed_right_and_says_what_is_not_seen() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x) * 1
        flat = net.same(hidden)
        hidden.mul_(3)  # changes flat as well
        return net.last(flat)

    torch.manual_seed(0)
    model = Written(forward, first=nn.Linear(2, 4), same=nn.Flatten(0), last=nn.Linear(4, 1))
    x = torch.ones(1, 2)
    expected = model(x).item()
    inspection = inspect_gradients(model, x, total)
    assert inspection.loss.value == expected
    assert statuses(inspection) == {"first": "gradient", "same": "no gradient path", "last": "gradient"}
    assert "no copy can take its place" in remarks(inspection)["same"]


def test_a_network_that_overwrites_its_input_leaves_the_users_alone() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 1))
    x = torch.tensor([[-1.0, 2.0]], requires_grad=True)
    inspection = inspect_gradients(model, x, total, include_inputs=True)
    assert x.tolist() == [[-1.0, 2.0]]
    assert x.grad is None
    assert {(row.label, row.role): row.status for row in inspection.gradients} == {
        ("0[0]", "input"): "gradient",
        ("0", "output"): "gradient",
        ("1[0]", "input"): "gradient",
        ("1", "output"): "gradient",
    }
    frozen = inspect_gradients(model.requires_grad_(False), x.detach(), total)
    assert statuses(frozen) == {"0": "gradient", "1": "gradient"}


def shared_part(net: Any, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
    """Call one module twice in a checkpoint."""
    return run(lambda x: net.block[1](net.block[2](net.block[1](x))), x)


def test_reentrant_checkpoints_keep_the_calls_of_a_module_apart() -> None:
    def gradients(run: Callable[..., Tensor]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        model = Written(lambda net, x: shared_part(net, net.stem(x), run), stem=nn.Linear(3, 3), block=block)
        weights = torch.arange(6.0).view(2, 3)
        return with_kept(model, torch.ones(2, 3), lambda output, _: (output * weights).sum(), ["*"])[1]

    expected = gradients(lambda block, x: block(x))
    seen = gradients(lambda block, x: checkpoint(block, x, use_reentrant=True))
    assert not torch.equal(expected["block.1 grad_output"], expected["block.1#1 grad_output"])
    assert seen.keys() == expected.keys()
    for label, gradient in expected.items():
        torch.testing.assert_close(seen[label], gradient)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_layers_under_a_checkpoint_have_the_gradients_that_they_have_without_it(kind: type) -> None:
    torch.manual_seed(0)
    layer, x = kind(3, 3, batch_first=True), torch.randn(2, 5, 3)
    model = Written(lambda net, x: checkpoint(net.layer, x, use_reentrant=False)[0].square(), layer=layer)
    inspection = inspect_gradients(model, x, total, verify=True)
    layer(x)[0].square().sum().backward()
    assert inspection.verification.status == "same"
    norms = {row.name: row.gradient.l2 for row in inspection.parameters}
    assert norms == {
        f"layer.{name}": pytest.approx(float(p.grad.norm()), rel=1e-6) for name, p in layer.named_parameters()
    }
    assert bool(inspection.over_time) != any("over time are missing" in warning for warning in inspection.warnings)


def test_a_frozen_network_of_integers_is_not_blamed_for_its_checkpoint() -> None:
    parts = {"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 2)}
    model = Written(
        lambda net, x: checkpoint(lambda x: net.head(net.embed(x)), x, use_reentrant=False), **parts
    ).requires_grad_(False)
    with pytest.raises(PassError, match=r"No parameter is trainable and no input has a gradient.*checkpointing off"):
        inspect_gradients(model, torch.tensor([[1, 2]]), total)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_pass_that_runs_again_draws_the_same_numbers_as_the_pass_without_hooks() -> None:
    # With gradients of inputs the checkpoint is differentiated, which the network alone does not do.
    block = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    model = Written(lambda net, x: checkpoint(net.block, x, use_reentrant=True) @ net.head, block=block)
    model.head = nn.Parameter(torch.ones(3, 1))
    inspection = inspect_gradients(model, torch.ones(4, 3), total, mode="train", include_inputs=True, verify=True)
    assert inspection.verification.status == "same"
    assert {row.name: row.status for row in inspection.parameters} == {
        "head": "gradient",
        "block.0.weight": "not reached",
        "block.0.bias": "not reached",
    }


def test_what_a_model_or_a_loss_differentiates_on_its_way_is_not_taken_for_the_backward_pass() -> None:
    model = chain(2, 3, 1)
    kept: list[str] = []

    def penalty(output: Tensor, _batch: Batch) -> Tensor:
        parameters = list(model.parameters())
        slopes = torch.autograd.grad(output.sum(), parameters, create_graph=True)
        return torch.stack([slope.square().sum() for slope in slopes]).sum()

    inspection = inspect_gradients(model, torch.ones(1, 2), penalty, on_tensor=lambda label, *_: kept.append(label))
    assert len(kept) == len(set(kept))
    # The penalty depends on the weights of the second layer and on its input, not on what it returned.
    assert statuses(inspection) == {"0": "gradient", "1": "not reached"}


def test_leaves_that_are_no_parameters_of_the_network_keep_their_gradients() -> None:
    hidden = nn.Linear(2, 2)
    with_gradient = torch.ones(2, requires_grad=True)
    with_gradient.grad = torch.full((2,), 5.0)

    model = Written(lambda net, x: net.head(hidden(x)) * with_gradient, head=nn.Linear(2, 2))
    inspect_gradients(model, torch.ones(1, 2), total)
    assert hidden.weight.grad is None
    assert with_gradient.grad.tolist() == [5, 5]


# --- grids and tensors ---


def test_gradient_maps_are_those_of_the_gradients() -> None:
    torch.manual_seed(0)
    model, x = conv_net().eval(), torch.randn(3, 3, 8, 10)
    inspection, kept = with_kept(model, x, total, ["type:conv2d"], grids_for=2, max_channels=2)
    assert [(maps.label, maps.input_index, maps.values.shape) for maps in inspection.gradient_maps] == [
        ("0", 0, (2, 8, 10)),
        ("0", 1, (2, 8, 10)),
        ("3", 0, (2, 3, 4)),
        ("3", 1, (2, 3, 4)),
    ]
    for maps in inspection.gradient_maps:
        assert inspection.gradients[maps.row].label == maps.label
        expected = kept[f"{maps.label} grad_output"][maps.input_index, :2]
        assert torch.equal(torch.from_numpy(maps.values), expected)


# --- edits ---


def test_edits_change_inputs_outputs_and_gradients_of_layers_that_are_not_shown() -> None:
    model = chain(2, 2, 2)
    x = torch.ones(1, 2)
    plain = inspect_gradients(model, x, total, ["/^1$/"])
    doubled = inspect_gradients(model, x, total, ["/^1$/"], edits=["/^0$/:grad:scale(2)"])
    assert doubled.loss == plain.loss
    l2 = [row.gradient.l2 or 0.0 for row in plain.parameters]
    assert [row.gradient.l2 for row in doubled.parameters] == pytest.approx([2 * l2[0], 2 * l2[1], *l2[2:]])
    silent = inspect_gradients(model, x, total, ["/^1$/"], edits=["/^1$/:input:zero"])
    assert silent.loss.value == pytest.approx(model[1].bias.sum().item())
    assert silent.parameters[0].status == "zero"
    nothing = inspect_gradients(model, x, total, ["/^1$/"], edits=["/^1$/:output:zero"])
    assert nothing.loss.value == 0
    assert nothing.rows[0].activation.max == 0


def test_an_edit_of_a_container_comes_before_what_its_last_child_shows() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 1))
    inspection = inspect_gradients(model, torch.ones(1, 2), total, ["*"], edits=["/^0$/:grad:zero"])
    assert statuses(inspection) == {"0.0": "zero", "0.1": "zero", "0": "zero", "1": "gradient", "(model)": "gradient"}


def test_an_edit_that_was_never_applied_is_reported() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    model[1].requires_grad_(True)
    inspection = inspect_gradients(model, torch.ones(1, 2), total, edits=["/^0$/:grad:zero", "/^1$/:grad:scale(2)"])
    reason = "its layer was not called where hooks see it, got no gradient, or has no floating-point numbers."
    assert [text for text in inspection.warnings if "Edit" in text] == [
        f"Edit '/^0$/:grad:zero' was never applied: {reason}"
    ]
    whole = hookscope.activations(Apply(torch.Tensor.long), torch.ones(1, 2), edit="/^$/:output:zero")
    assert f"Edit '/^$/:output:zero' was never applied: {reason}" in whole.warnings


# --- what cannot be ---


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, _: output, r"The loss has shape \(2, 3\) instead of being one number"),
        (lambda output, _: (output * 1j).sum(), "The loss is a complex number"),
        (lambda output, _: output.sum().item(), "The loss returned float instead of a tensor"),
        (lambda output, _: LossValue(output, name="mine"), r"shape \(2, 3\)"),
    ],
)
def test_a_loss_that_is_not_one_real_number_is_refused(loss: Any, message: str) -> None:
    model = chain(2, 3)
    before = snapshot(model)
    with pytest.raises(UsageError, match=message) as caught:
        inspect_gradients(model, torch.ones(2, 2), loss)
    assert caught.value.exit_code == 2
    assert_unchanged(model, before)


def test_a_loss_of_one_element_is_one_number() -> None:
    inspection = inspect_gradients(chain(2, 1), torch.ones(1, 2), lambda output, _: output)
    assert inspection.loss.value == pytest.approx(inspection.rows[0].activation.mean)


def test_a_loss_that_raises_is_one_sentence() -> None:
    def broken(_output: Tensor, _batch: Batch) -> Tensor:
        raise LookupError("no target")

    with pytest.raises(PassError, match="The loss of Sequential raised LookupError: no target"):
        inspect_gradients(chain(2, 2), torch.ones(1, 2), broken)


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, _error: BaseException) -> Tensor:
        _ctx.error = _error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        raise ctx.error


def exploding(error: BaseException) -> nn.Module:
    return Apply(lambda x: Explodes.apply(x, error))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("broken\nin two lines"), "raised in its backward pass at 1 (Apply): ValueError: broken"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            "ran out of memory in its backward pass at 1 (Apply): give fewer inputs at a time",
        ),
        (torch.OutOfMemoryError("CUDA out of memory."), "ran out of memory in its backward pass at 1 (Apply)"),
    ],
)
def test_a_backward_pass_that_raises_says_where_and_keeps_what_was_seen(error: Exception, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), exploding(error), nn.Linear(2, 2))
    before = snapshot(model)
    with pytest.raises(PassError) as caught:
        inspect_gradients(model, torch.ones(1, 2), total)
    assert_unchanged(model, before)
    assert str(caught.value).startswith(f"Sequential {message}")
    assert caught.value.__cause__ is error
    inspection = caught.value.inspection
    assert (inspection.failure.layer, inspection.failure.kind) == ("1", "Apply")
    assert [row.layer for row in inspection.rows] == ["0", "1", "2"]
    assert {row.layer: row.backward_index for row in inspection.gradients} == {"0": None, "1": 1, "2": 0}
    assert inspection.loss is not None


def test_a_layer_that_the_forward_pass_left_out_is_not_explained_by_an_error_of_the_backward_pass() -> None:
    parts = {"used": nn.Linear(2, 2), "spare": nn.Linear(2, 2), "drop": nn.Dropout()}
    model = Written(lambda net, x: net.breaks(net.used(x)), **parts)
    model.breaks = exploding(ValueError("boom"))
    with pytest.raises(PassError, match="raised in its backward pass") as caught:
        inspect_gradients(model, torch.ones(1, 2), total)
    reason = "the forward pass did not call it in eval mode"
    assert {row.layer: row.reason for row in caught.value.inspection.uncalled} == {
        "spare": f"{reason}, or used its weight directly",
        "drop": reason,  # which has no weight
    }


def test_a_forward_pass_that_runs_out_of_memory_says_where_and_what_to_do() -> None:
    def hungry(_x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    model = nn.Sequential(nn.Linear(2, 2), Apply(hungry))
    with pytest.raises(
        PassError,
        match=r"ran out of memory in its forward pass at 1 \(Apply\), given an input of shape \(4, 2\).*smaller batch",
    ) as caught:
        inspect_gradients(model, torch.ones(4, 2), total)
    assert caught.value.inspection.failure is not None
    assert caught.value.inspection.loss is None
    assert [row.layer for row in caught.value.inspection.rows] == ["0"]
    assert "the forward pass raised" in str(caught.value.inspection)
    with pytest.raises(PassError, match="The loss of Linear ran out of memory") as caught:
        hookscope.grads(nn.Linear(2, 2), torch.ones(4, 2), loss=hungry)
    assert str(caught.value.inspection).startswith("No loss and no gradients: the loss raised.")


@pytest.mark.parametrize(("run", "label"), [(inspect, "0"), (inspect_gradients, "0 grad_output")])
def test_an_error_of_the_callers_own_observer_is_not_blamed_on_the_model(run: Callable[..., Any], label: str) -> None:
    def broken(label: str, *_: object) -> None:
        raise LookupError(label)

    model = chain(2, 2)
    before = snapshot(model)
    with pytest.raises(LookupError, match=f"^{label}$"):
        run(model, torch.ones(1, 2), on_tensor=broken)
    assert_unchanged(model, before)


def test_gradients_may_be_asked_for_in_inference_mode() -> None:
    model, x = chain(2, 3, 1), torch.ones(1, 2)
    expected = inspect_gradients(model, x, total)
    with torch.inference_mode():
        seen = inspect_gradients(model, torch.ones(1, 2), total)
    assert seen.gradients == expected.gradients
    with torch.no_grad():
        assert inspect_gradients(model, x, total).parameters == expected.parameters


@pytest.mark.parametrize(
    ("value", "dtype"), [(1e160, torch.float64), (5e-324, torch.float64), (3e307, torch.complex128)]
)
def test_the_norm_of_weights_whose_squares_float64_cannot_hold(value: float, dtype: torch.dtype) -> None:
    model = nn.Linear(4, 1, bias=False, dtype=dtype)
    with torch.no_grad():
        model.weight.fill_(value)
    gradients = inspect_gradients(model, torch.ones(1, 4, dtype=dtype), lambda output, _: output.abs().sum())
    assert gradients.parameters[0].weight_l2 == pytest.approx(2 * value, rel=1e-15)  # the root of 4 squares


def test_a_target_that_differs_from_batch_to_batch_is_that_of_the_first() -> None:
    network = nn.Linear(3, 3, bias=False)
    nn.init.eye_(network.weight)
    run = hookscope.grads(network, torch.eye(3), loss="ce", batch_size=1)
    assert run.loss.target == "argmax: class 0 in the first of 3 batches"
