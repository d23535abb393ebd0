"""A batch may give the network keyword arguments: they are watched, edited and compared like the others."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.commands.check.measuring.network_passes import measure
from hookscope.commands.check.measuring.preparing import Prepared
from hookscope.inputs.batches import Batch
from hookscope.models.construction import LoadedModel
from hookscope.results.inputs import InputRecord, Preprocessing
from hookscope.results.network import ModelInfo
from hookscope.rules.settings import CheckSettings
from tests.inspections import inspect, inspect_gradients
from tests.networks import Written


def mixed(net: Any, x: Tensor, *, b: Tensor, rate: float = 1.0) -> Tensor:
    """Add what two layers make of two inputs, one of which can only be given by name."""
    return (net.left(x) + net.right(b)) * rate


@pytest.fixture
def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Written(mixed, left=nn.Linear(3, 3), right=nn.Linear(2, 3))


def batch_of(*rows: int) -> Batch:
    generator = torch.Generator().manual_seed(3)
    x, b = torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)
    record = InputRecord("x", None, None, (3,), ())
    chosen = list(rows or range(4))
    return Batch((x[chosen],), tuple(chosen), (record,) * len(chosen), {"b": b[chosen], "rate": 2.0})


@pytest.mark.parametrize("by_name", [False, True])
def test_a_tensor_that_is_two_arguments_stays_one(by_name: bool) -> None:
    network = Written(lambda net, query, key: net.part(query) * (2 if query is key else 1), part=nn.Identity())
    values = torch.tensor([[3.0], [4.0], [12.0]])
    inputs: Any = {"query": values, "key": values} if by_name else (values, values)
    for batch_size in (2, 3):  # the norm of (6, 8, 24) is 26
        run = hookscope.activations(network, inputs, layer="/^$/", batch_size=batch_size)
        assert [row.activation.l2 for row in run.rows] == [26.0]


def test_gradients_of_outputs_and_of_inputs_by_name_are_those_of_autograd(network: nn.Module) -> None:
    batch = batch_of()
    actual = inspect_gradients(network, batch, "sum", ["*"], include_inputs=True)
    x, b = batch.args[0].clone().requires_grad_(), batch.kwargs["b"].clone().requires_grad_()
    output = network(x, b=b, rate=2.0)
    wanted = {"x": x, "b": b, **dict(network.named_parameters())}
    gradients = dict(zip(wanted, torch.autograd.grad(output.sum(), [*wanted.values()]), strict=True))
    for row in actual.parameters:
        assert row.gradient.l2 == pytest.approx(gradients[row.name].norm().item(), rel=1e-5)
    inputs = {row.slot: row.gradient.l2 for row in actual.gradients if row.role == "input" and not row.layer}
    assert inputs == {
        "[0]": pytest.approx(gradients["x"].norm().item(), rel=1e-5),
        "['b']": pytest.approx(gradients["b"].norm().item(), rel=1e-5),
    }


def test_an_edit_of_the_networks_input_reaches_those_by_name(network: nn.Module) -> None:
    edited = inspect(network, batch_of(), ["*"], edits=["name:/^$/:input:zero"])
    zeros = {"b": torch.zeros(4, 2), "rate": 2.0}
    expected = inspect(network, Batch((torch.zeros(4, 3),), (0, 1, 2, 3), batch_of().records, zeros), ["*"])
    assert [row.activation for row in edited.rows] == [row.activation for row in expected.rows]


def test_the_target_self_may_be_an_input_by_name() -> None:
    scale = nn.Parameter(torch.tensor(2.0))
    copies = Written(lambda net, *, ids, values: values[ids] * net.scale, scale=scale)
    values = torch.tensor([1.0, 2.0, 3.0])
    batch = Batch((), (0,), batch_of(0).records, {"ids": torch.tensor([0, 1, 2]), "values": values})
    gradients = inspect_gradients(copies, batch, "mse", target="self")
    assert gradients.loss.value == pytest.approx((values**2).mean().item())  # (2v - v)^2
    assert gradients.loss.target == "the input itself"


def test_inputs_by_name_are_not_overwritten() -> None:
    overwrites = Written(lambda net, *, b: net.linear(b.mul_(3)), linear=nn.Linear(2, 2))
    batch = Batch((), (0,), batch_of(0).records, {"b": torch.ones(1, 2)})
    for pattern in ("@0", "linear"):
        inspect_gradients(overwrites, batch, "sum", [pattern])
    assert batch.kwargs["b"].tolist() == [[1, 1]]


def test_a_check_gives_them_too(network: nn.Module) -> None:
    info = ModelInfo("mixed", "Mixed", "as built", random=False, sha256=None, parameter_count=0)
    loaded = LoadedModel(network.eval(), info, Preprocessing())
    wanted = {"repeatability", "batch-consistency", "constant-output", "non-finite-activation", "dead-gradient"}
    prepared = Prepared(loaded, lambda: iter([batch_of()]), 4)
    measured = measure(prepared, CheckSettings(), wanted)
    assert measured.unmeasured == {}
    [output] = measured.outputs
    assert (output.repeat_difference, output.alone_difference) == (0, pytest.approx(0, abs=1e-6))
    assert output.input_difference > 0
    single = measure(Prepared(loaded, lambda: iter([batch_of(2)]), 1), CheckSettings(), wanted)
    assert single.unmeasured == {}
    broken = batch_of()
    broken.kwargs["b"][2, 0] = torch.nan
    sentences = measure(Prepared(loaded, lambda: iter([broken]), 4), CheckSettings(), wanted).warnings
    assert any("has NaN or Inf itself" in sentence for sentence in sentences)
