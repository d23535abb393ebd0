"""Networks that make hooking hard: the same output and loss as without hookscope, no crash, nothing left behind."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.hooks.pytree import tensors_in
from hookscope.inspection.backward import PassError
from hookscope.results.activations import Verification
from hookscope.results.gradients import Gradients
from hookscope.results.runs.reading import read_run
from hookscope.text import figure
from tests.inspection.odd_networks import LOST, ODD, Twice
from tests.inspections import inspect, inspect_gradients
from tests.networks import Apply, Written, batch_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:`?torch.jit"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

X = torch.linspace(-1, 1, 6).view(2, 3)


def total(output: object, _batch: object = None) -> Tensor:
    """Return the sum of squares of all floating outputs."""
    parts = [tensor.as_subclass(Tensor) for _, tensor in tensors_in(output)]
    return sum((part.double().square().sum() for part in parts), torch.zeros((), dtype=torch.float64))


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = ODD[name]()
    return model if "exported" in name else model.eval()


def plain(name: str) -> tuple[float, list[tuple[str, Tensor]]]:
    """Return the loss and the gradients of parameters by name of a fresh network without hooks."""
    model = built(name)
    loss = total(model(X.clone()))
    loss.backward()
    gradients = [
        (weight, parameter.grad) for weight, parameter in model.named_parameters() if parameter.grad is not None
    ]
    return loss.item(), gradients


def hooks_of(model: nn.Module) -> list[Any]:
    return [
        [len(getattr(module, name)) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
        for module in model.modules()
    ]


@pytest.mark.parametrize("name", ODD)
def test_activations_are_seen_and_the_output_is_the_same(name: str) -> None:
    model = built(name)
    before = hooks_of(model)
    inspection = inspect(model, X.clone(), ["*"], verify=True)
    assert inspection.verification.status == "same"
    assert hooks_of(model) == before
    assert all(row.activation.unmeasured is None for row in inspection.rows)
    assert inspection.rows[-1].layer == ""


@pytest.mark.parametrize("include_inputs", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_loss_and_gradients_of_parameters_are_the_same(name: str, include_inputs: bool) -> None:
    loss, expected = plain(name)
    model = built(name)
    before = hooks_of(model)
    seen: dict[str, Tensor] = {}
    inspection = inspect_gradients(
        model,
        X.clone(),
        total,
        ["*"],
        include_inputs=include_inputs,
        on_tensor=lambda label, gradient, _: seen.update({label: gradient.clone()}),
    )
    assert inspection.loss.value == loss
    assert hooks_of(model) == before
    gradients = {label.removesuffix(" grad"): each for label, each in seen.items() if label.endswith(" grad")}
    for (label, gradient), (path, value) in zip(gradients.items(), expected, strict=True):
        torch.testing.assert_close(gradient.to_dense(), value.to_dense())
        assert label == path or "'" in label  # quoted, where two would share a name


# --- numbers ---


def test_an_input_inside_a_transform_has_no_gradient_rather_than_that_of_all_its_uses() -> None:
    model = built("plain input inside vmap")
    run = hookscope.grads(model, X.clone(), loss="sum", layer="*", inputs=True)
    [x] = [row for row in run.gradients if (row.layer, row.role) == ("block", "input")]
    assert (x.status, x.gradient.l2) == ("no gradient path", None)
    hidden = model.get_submodule("linear")(X)
    used = torch.autograd.grad(model(X), [*model.parameters()])
    assert run["linear.bias"].gradient.l2 == pytest.approx(used[1].norm().item(), rel=1e-5)
    assert run["linear"].gradient.element_count == hidden.numel()


def test_modules_named_like_labels_have_rows_and_tensors_of_their_own() -> None:
    model: Any = built("lookalikes")
    seen: dict[str, Tensor] = {}
    names = {
        "r": model.r,
        "'r#1'": model._modules["r#1"],
        "'r[0]'": model._modules["r[0]"],
        "'r:tanh'": model._modules["r:tanh"],
        "'(model):mul'": model._modules["(model):mul"],
        "'(model)'.hidden": model._modules["(model)"].hidden,
    }
    calls: dict[str, int] = {}
    handles = []
    for label, module in names.items():

        def record(_module: Any, _args: Any, output: Tensor, label: str = label) -> None:
            calls[label] = calls.get(label, -1) + 1
            seen[f"{label}#{calls[label]}" if calls[label] else label] = output.detach().clone()

        handles.append(module.register_forward_hook(record))
    output = model(X)
    for handle in handles:
        handle.remove()
    run = hookscope.activations(model, X.clone(), layer="*", ops=True, save_tensors=True, repeats=True)
    labels = [row.label for row in run.rows]
    assert len({*labels}) == len(labels)
    assert {"r:tanh", "(model):mul", "'(model)'().hidden", "'(model)'().rest"} < {*labels}
    assert len(seen) == 7
    for label, tensor in seen.items():
        torch.testing.assert_close(run.tensors[label], tensor, msg=label)
        assert run[label].mean == pytest.approx(tensor.double().mean().item(), rel=1e-5)
    torch.testing.assert_close(run.tensors["(model)"], output)
    torch.testing.assert_close(run.tensors["'(model)'().hidden"], seen["'(model)'.hidden"].tanh())
    assert hookscope.activations(model, X.clone(), layer="r#1")["'r#1'"].call == 0


def test_a_key_with_a_dot_beside_a_nested_twin_is_a_module_of_its_own() -> None:
    model: Any = built("dotted twin first")
    nested, keyed = model.a.b, model._modules["a.b"]
    model(X).sum().backward()
    expected = {"a.b": nested.weight.grad.clone(), r"'a\x2eb'": keyed.weight.grad.clone()}
    run = hookscope.grads(model, X.clone(), loss="sum", layer="*", ops=True)
    for label, gradient in expected.items():
        assert run[f"{label}.weight"].gradient.l2 == pytest.approx(gradient.norm().item(), rel=1e-6)
        assert run[label].gradient.l2 == pytest.approx(6**0.5 * (3 if "x2e" in label else 1), rel=1e-6)
    assert torch.equal(nested.weight.grad, expected["a.b"])
    assert torch.equal(keyed.weight.grad, expected[r"'a\x2eb'"])
    edited = hookscope.activations(model, X.clone(), layer="*", edit=r"a\x2eb:output:zero")
    torch.testing.assert_close(edited["(model)"].l2, nested(X).norm().item())
    assert {row.layer for row in hookscope.layers(model, input_shape=(2, 3)).rows} == {"", "a", "a.b", r"'a\x2eb'"}


@pytest.mark.parametrize("inputs", [False, True])
def test_a_leaf_whose_first_call_raised_is_its_second_call_when_it_returns(inputs: bool) -> None:
    model: Any = built("retried leaf")
    run = hookscope.grads(model, X.clone(), loss="sum", layer="*", inputs=inputs)
    assert [row.label for row in run.rows if row.layer] == ["linear#1"]
    assert run["linear#1"].gradient.l2 == pytest.approx(6**0.5)
    assert hookscope.activations(nn.Sequential(nn.Identity(), nn.Linear(3, 3)), X).uncalled == ()


@pytest.mark.parametrize("name", [name for name in ODD if name.endswith(" written")])
def test_a_view_of_another_dtype_that_is_written_to_has_the_gradient_from_before(name: str) -> None:
    model: Any = built(name)
    plain = model.linear(X)
    if "as_complex" in name:
        base = plain.repeat(1, 2).view(2, 3, 2).detach().requires_grad_()
        total(torch.view_as_real(torch.view_as_complex(base) * 2j)).backward()
    else:
        base = torch.fft.rfft(plain).detach().requires_grad_()
        total(torch.fft.irfft(torch.complex(base.real * 2, base.imag), n=3)).backward()
    expected = model.part(base.grad)
    run = hookscope.grads(model, X.clone(), loss=total, layer="*", save_tensors=True)
    torch.testing.assert_close(run.tensors["part grad_output"], expected.resolve_conj().resolve_neg())
    assert run["part"].gradient.dtype == str(expected.dtype).removeprefix("torch.")
    assert run["part"].gradient.l2 == pytest.approx(expected.norm().item(), rel=1e-5)


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("options", [{}, {"ops": True}, {"inputs": True}], ids=str)
def test_a_view_without_a_history_has_no_gradient_path_and_the_rest_has_its_gradient(
    name: str, options: dict[str, Any]
) -> None:
    run = hookscope.grads(built(name), X.clone(), loss="sum", layer="*", **options)
    assert {run[layer].status for layer in ("writes", "reads")} == {"no gradient path"}
    assert run["linear"].gradient.mean == 3
    assert run["linear.weight"].gradient.l2 == pytest.approx((3 * X.sum(0)).norm().item() * 3**0.5)


def test_an_output_without_a_history_is_the_networks_error() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        first, second = net.linear(x).chunk(2, 1)
        with torch.no_grad():
            first.mul_(2)
        return second

    model = Written(forward, linear=nn.Linear(3, 4))
    with pytest.raises(RuntimeError) as expected:
        model(X).sum()
    with pytest.raises(
        PassError, match="The loss of Written raised RuntimeError: Output 1 of Split is a view"
    ) as raised:
        hookscope.grads(model, X.clone(), loss="sum")
    assert str(expected.value).split(". ")[0] in str(raised.value)


def test_what_a_transform_computes_is_measured_and_has_no_gradient_path() -> None:
    model = built("vmap")
    inspection = inspect_gradients(model, X.clone(), total, ["/^block$/"])
    (row,), (gradient,) = inspection.rows, inspection.gradients
    assert row.activation.mean == pytest.approx(model.get_submodule("block")(X).mean().item())
    assert (gradient.status, gradient.remark) == (
        "no gradient path",
        "it was computed inside a torch.func transform (vmap, grad, jvp)",
    )


def test_rows_inside_vmap_say_so_have_its_axis_in_front_and_the_channels_of_the_module() -> None:
    model: Any = built("vmap over batches")
    with torch.no_grad():
        model.conv.weight[1].zero_()
        model.conv.bias[1] = 0
    expected = model(X).movedim(-1, 0)  # (N, batch, channels, time)
    run = hookscope.activations(model, X.clone(), layer="*", save_tensors=True, batch_axis=0)
    row = run["conv"]
    torch.testing.assert_close(run.tensors["conv"], expected)
    assert (row.shape, row.activation.channel_axis, row.activation.dead_channel_count) == ((2, 5, 2, 3), 2, 1)
    assert ("vmap" in row.flags, "vmap" in run["(model)"].flags) == (True, False)
    listed = {
        row.layer: (row.input_shapes, row.output_shapes) for row in hookscope.layers(model, input_shape=(2, 3)).rows
    }
    assert listed["conv"] == (((2, 5, 1, 3),), ((2, 5, 2, 3),))
    assert hookscope.grads(model, X.clone(), layer="conv", batch_axis=0)["conv"].gradient.shape == (2, 5, 2, 3)


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("name", [name for name in ODD if "nested" in name])
def test_gradients_of_nested_tensors_are_those_of_their_parts(name: str, inputs: bool) -> None:
    model: Any = built(name)
    kept: dict[str, Tensor] = {}

    def keep(key: str, gradient: Tensor) -> None:
        kept[key] = torch.cat([part.flatten() for part in gradient.unbind()])

    def watch(key: str, output: Tensor) -> None:
        output.register_hook(partial(keep, key))

    handles = [
        module.register_forward_hook(lambda _module, _args, output, key=key: watch(key, output))
        for key, module in model.part.named_children()
        if not isinstance(module, nn.Identity)
    ]
    model(X.clone()).square().sum().backward()
    for handle in handles:
        handle.remove()
    run = hookscope.grads(model, X.clone(), loss=total, layer="*", inputs=inputs, repeats=True)
    assert len(kept) > 1
    for key, gradient in kept.items():
        assert run[f"part.{key}"].gradient.l2 == pytest.approx(gradient.double().norm().item(), rel=1e-5)
        assert run[f"part.{key}"].gradient.element_count == gradient.numel()
    for parameter_name, parameter in model.named_parameters():
        assert run[parameter_name].gradient.l2 == pytest.approx(parameter.grad.norm().item(), rel=1e-5)
    x = [row for row in run.gradients if row.role == "input"]
    if inputs and "jagged nested, written" in name:  # torch has no derivative of writing to a view of one
        assert {row.remark for row in x} == {
            "torch cannot differentiate the network if its inputs are replaced by aliases"
        }
    assert bool(x) == inputs


def rows_of(inspection: Gradients) -> dict[str, tuple[str, float | None]]:
    return {row.label: (row.status, row.gradient.l2) for row in inspection.gradients if row.role == "output"}


@pytest.mark.parametrize("include_inputs", [False, True])
def test_a_network_that_asks_whether_two_tensors_are_one_still_shows_gradients(include_inputs: bool) -> None:
    inspection = inspect_gradients(
        built("asks is"), X, lambda output, _: output.sum(), ["name:same"], include_inputs=include_inputs
    )
    assert rows_of(inspection) == {"same": ("gradient", pytest.approx(2 * 6**0.5))}
    inputs = {row.label: row.status for row in inspection.gradients if row.role == "input"}
    assert inputs == ({"same[0]": "no gradient path"} if include_inputs else {})


def test_one_tensor_given_twice_has_no_gradient_at_either_argument_where_no_alias_may_stand_for_it() -> None:
    held: list[Tensor] = []

    class Knows(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return 2 * q + 3 * k if any(q is tensor for tensor in held) else q - k

    def forward(net: Any, x: Tensor) -> Tensor:
        held[:] = [net.linear(x)]
        return net.knows(held[0], held[0]) + 7 * held[0].sum()

    run = hookscope.grads(
        Written(forward, linear=nn.Linear(3, 3), knows=Knows()), X.clone(), loss=total, layer="knows", inputs=True
    )
    assert {row.label: row.status for row in run.gradients} == {
        "knows[0]": "no gradient path",
        "knows[1]": "no gradient path",
        "knows": "gradient",
    }


# --- a backward pass that fails by itself ---


def gated(net: Any, x: Tensor) -> Tensor:
    out = net.gate(net.linear(x))
    return net.relu(out)


def forward_by_name(net: Any, x: Tensor) -> Tensor:
    return net.tail(net.inner.forward(x))


def kept_and_scaled(net: Any, x: Tensor) -> Tensor:
    hidden = net.linear(x)
    squared = hidden**2
    net.tail(hidden)
    return squared


def scaled(_net: Any, x: Tensor) -> Tensor:
    return x.mul_(2)


def place(function: Any, line: int) -> str:
    """Return a line of a function's body, from 1."""
    return f"test_odd_networks.py:{function.__code__.co_firstlineno + line}"


def gate(*, inplace: bool) -> nn.Module:
    return Written(gated, linear=nn.Linear(3, 3), gate=nn.Sigmoid(), relu=nn.ReLU(inplace))


@pytest.mark.parametrize("include_inputs", [False, True])
@pytest.mark.parametrize(
    ("model", "healed", "message"),
    [
        (
            nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Identity(), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Identity(), nn.ReLU()),
            "relu_ in 3 (ReLU) overwrites the tensor that 1 (Tanh) saved for its backward pass (TanhBackward0)",
        ),
        (
            Written(forward_by_name, inner=gate(inplace=True), tail=nn.Linear(3, 3)),
            Written(forward_by_name, inner=gate(inplace=False), tail=nn.Linear(3, 3)),
            (
                f"relu_ in inner.relu (ReLU, {place(gated, 2)}) overwrites the tensor that inner.gate (Sigmoid, "
                f"{place(gated, 1)}) saved"
            ),
        ),
        (
            Written(kept_and_scaled, linear=nn.Linear(3, 3), tail=Written(scaled)),
            Written(kept_and_scaled, linear=nn.Linear(3, 3), tail=Written(lambda _net, x: x * 2)),
            (
                f"mul_ in tail (Written, {place(scaled, 1)}) overwrites the tensor that (model) "
                f"(Written, {place(kept_and_scaled, 2)}) saved for its backward pass (PowBackward0)"
            ),
        ),
    ],
)
def test_a_backward_pass_that_needs_what_was_overwritten_is_reported_with_the_gradients_it_would_have(
    model: nn.Module, healed: nn.Module, message: str, include_inputs: bool
) -> None:
    healed.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total(model(X.clone())).backward()
    model.zero_grad()
    with pytest.raises(PassError) as caught:
        inspect_gradients(model, X, total, ["*"], include_inputs=include_inputs)
    assert message in str(caught.value)
    inspection = caught.value.inspection
    assert "modified by an inplace operation" in inspection.failure.error
    true = inspect_gradients(healed, X, total, ["*"])
    assert rows_of(inspection).keys() == rows_of(true).keys()
    for (_, seen), (_, expected) in zip(rows_of(inspection).values(), rows_of(true).values(), strict=True):
        assert seen == pytest.approx(expected)
    for row, other in zip(inspection.parameters, true.parameters, strict=True):
        assert row.gradient.l2 == pytest.approx(other.gradient.l2)
    assert all(parameter.grad is None for parameter in model.parameters())


def written_by_keyword(net: Any, x: Tensor) -> Tensor:
    hidden = net.linear(x).sigmoid()
    with torch.no_grad():
        torch.mul(hidden, 2, out=hidden)
    return hidden


def beside_an_operator(net: Any, x: Tensor) -> Tensor:
    hidden = net.linear(x).sigmoid()
    either = torch.cond(x.sum() > 0, torch.sin, torch.cos, (hidden,))
    return either * hidden.mul_(2)


def beside_a_sparse_tensor(net: Any, x: Tensor) -> Tensor:
    hidden = net.linear(x).sigmoid()
    mixing = torch.eye(len(x)).to_sparse().mul_(2)
    hidden.mul_(2)
    return torch.sparse.mm(mixing, hidden)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which torch's own tracing reads
@pytest.mark.parametrize(
    ("forward", "operation", "saved_at"),
    [(written_by_keyword, "mul", 1), (beside_an_operator, "mul_", 2), (beside_a_sparse_tensor, "mul_", 1)],
)
def test_a_write_is_named_however_it_is_called_and_whatever_runs_beside_it(
    forward: Any, operation: str, saved_at: int
) -> None:
    with pytest.raises(PassError) as caught:
        inspect_gradients(Written(forward, linear=nn.Linear(3, 3)), X, total, ["*"])
    write, saved = (f"(model) (Written, {place(forward, line)})" for line in (3, saved_at))
    assert f"{operation} in {write} overwrites the tensor that {saved} saved" in str(caught.value)


def test_copies_do_not_mend_a_backward_pass_that_fails_by_itself() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(net.linear(x))
        flat = net.flat(hidden)
        hidden.mul_(3)  # what tanh saved; flat, too
        return flat * 5

    model = Written(forward, linear=nn.Linear(3, 3), flat=nn.Flatten(0))
    with pytest.raises(PassError, match=r"mul_ in \(model\) \(Written, .*\) overwrites the tensor that \(model\)"):
        inspect_gradients(model, X, total, ["*"])


# --- nested tensors ---


def padded(net: Any, parts: Tensor) -> Tensor:
    """Take nested tokens, and give a layer padded ones."""
    return net.mix(torch.nested.to_padded_tensor(parts, 0.0))


def test_tokens_are_measured_inside_a_module_that_is_given_nested_ones() -> None:
    pad = Written(padded, mix=nn.Linear(8, 8))
    model, x = Written(lambda net, x: net.pad(torch.nested.as_nested_tensor([*x])), pad=pad), torch.randn(2, 12, 8)
    row = hookscope.activations(model, x)["pad.mix"]
    assert row.mean == pytest.approx(model.pad.mix(x).mean().item(), abs=1e-6)
    assert row.tokens.max == pytest.approx(model.pad.mix(x).norm(dim=2).max().item(), rel=1e-5)


def test_an_encoder_that_drops_padding_is_listed_drawn_written_and_explained(tmp_path: Path) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:  # in eval mode torch's layers pass on nested tensors
        padding = torch.arange(4) >= torch.tensor([4, 2])[: len(x), None]
        return net.head(net.encoder(net.patches(x).flatten(2).mT, src_key_padding_mask=padding)[:, 0])

    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
    parts = {"patches": nn.Conv2d(3, 8, 4, 4), "encoder": encoder, "head": nn.Linear(8, 2)}
    model, x, kept = Written(forward, **parts).eval(), torch.randn(2, 3, 8, 8), []
    run = hookscope.activations(model, x, layer="encoder.layers.0", grids_for=2)
    with model.encoder.layers[0].register_forward_hook(lambda *call: kept.append(call[-1])), torch.no_grad():
        model(x)
    values = torch.cat([part.flatten() for part in kept[0].unbind()])
    row = run["encoder.layers.0"]
    assert (row.shape, len(values)) == ((2, -1, 8), 6 * 8)
    assert (row.statistics.element_count, row.std) == (6 * 8, pytest.approx(values.std(correction=0).item()))
    assert read_run(run.save(tmp_path / "run")).result["encoder.layers.0"].shape == row.shape
    listed = {row.layer: row.output_shapes for row in hookscope.layers(model, input_shape=(2, 3, 8, 8)).rows}
    assert (listed["encoder.layers.0"], listed["head"]) == (((2, -1),), ((2, 2),))
    looks = hookscope.attribute(model, x, layer="encoder.layers.0", tokens="grid=2x2", sanity="none")
    assert looks.maps[0].values.shape == (2, 2)
    assert torch.backends.mha.get_fastpath_enabled()


# --- verification ---


def test_a_network_that_computes_something_else_while_hooked_is_caught_with_the_first_such_layer() -> None:
    hooked = [Written(lambda net, x: x + len(net._forward_hooks)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(3, 3), Twice(), hooked[0], nn.Linear(3, 1), hooked[1])
    for inspection in (inspect(model, X, verify=True), inspect_gradients(model, X, total, verify=True)):
        verification = inspection.verification
        assert (verification.status, verification.layer) == ("differs", "2")
        assert verification.difference.startswith("the outputs differ by up to ")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_outputs_of_a_dtype_that_torch_does_not_compare_are_compared() -> None:
    model = Written(lambda net, x: (x + len(net._forward_hooks)).to(torch.complex32))
    assert inspect(model, X, verify=True).verification.status == "differs"
    assert inspect(Apply(lambda x: x.to(torch.complex32)), X, verify=True).verification.status == "same"


@pytest.mark.parametrize("cut_off", [True, False])
def test_gradients_that_only_the_hooked_network_has_are_caught(cut_off: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:  # which returns the same, hooked or not
        y = net.first(x)
        if net.first._forward_hooks:
            y = y.detach() if cut_off else y + (y - y.detach())
        return net.second(y)

    model = Written(forward, first=nn.Linear(3, 3), second=nn.Linear(3, 1))
    (truth,) = torch.autograd.grad(total(model(X)), model.first.weight)
    difference = "only one of the two passes gives first.weight a gradient"
    if not cut_off:
        difference = f"the gradients of first.weight differ by up to {figure(truth.abs().max().item())}"
    inspection = inspect_gradients(model, X.clone(), total, ["*"], verify=True)
    assert inspection.verification == Verification("differs", difference, "first")
    [warning] = inspection.warnings
    assert f"Written computes a different result with hooks than without: {difference}" in warning


def unrepeatable() -> nn.Module:
    """Return a network that counts its calls where nobody looks."""
    calls = itertools.count(1)
    return Written(lambda net, x: net.linear(x) * next(calls), linear=nn.Linear(3, 3))


def test_a_network_that_does_not_repeat_itself_is_not_blamed_on_hooks() -> None:
    assert inspect(unrepeatable(), X, verify=True).verification.status == "not repeatable"
    assert inspect_gradients(unrepeatable(), X, total, verify=True).verification.status == "not repeatable"


def test_the_loss_is_that_of_the_first_call() -> None:
    for options in ({}, {"include_inputs": True}, {"verify": True}):
        model = unrepeatable()
        assert inspect_gradients(model, X, total, **options).loss.value == total(model.linear(X)).item()


def test_verifying_costs_one_pass_and_leaves_no_trace_in_what_follows() -> None:
    model, batches = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), [batch_of(X[:1]), batch_of(X[1:], first=1)]
    with_, without = (inspect_gradients(model, batches, total, mode="train", verify=verify) for verify in (True, False))
    assert with_.verification.status == "same"
    assert with_.loss == without.loss
    assert [row.activation for row in with_.rows] == [row.activation for row in without.rows]
    assert [row.gradient for row in with_.parameters] == [row.gradient for row in without.parameters]


def test_reduction_under_the_callers_autocast_is_exact() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.GELU()).eval()
    x = torch.randn(1, 3, 200, 200)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            inspection = inspect(network, x, ["*"])
            gradients = inspect_gradients(network, x, lambda output, _: output.float().sum(), ["*"])
            zeros = (network[:2](x) == 0).double().mean().item()
        for rows in (inspection.rows, gradients.rows):
            assert rows[1].activation.zero_fraction == zeros
        assert all(row.gradient.unmeasured is None for row in (*gradients.gradients, *gradients.parameters))
