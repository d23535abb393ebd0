"""What modules cost: closed forms, bytes by hand, torch's own counter, and torchinfo's figures."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

import hookscope
from hookscope.errors import LayerNotFoundError, ModelError
from hookscope.inspection.cost import Call, network_cost
from hookscope.models.construction import silenced_known_warnings
from hookscope.results.cost import CostSums, NetworkCost
from hookscope.results.runs.reading import read_run
from tests.inspection.test_networks import INSPECTED, assert_unchanged, snapshot
from tests.networks import NETWORKS, Apply, Written
from tests.reporting.stored import report_html

FLOAT = 4  # bytes


def with_weight(compute: Callable[[Tensor, Tensor], Tensor], *shape: int) -> nn.Module:
    """Return a network that computes with its input and a weight of ones."""
    return Written(lambda net, inputs: compute(inputs, net.weight), weight=nn.Parameter(torch.ones(shape)))


def cost_of(network: nn.Module, *args: Any, **kwargs: Any) -> NetworkCost:
    return network_cost(Call(network.eval(), args, kwargs))


def multiply_adds_of(network: nn.Module | Callable[..., Any], *args: Any) -> int:
    network = network if isinstance(network, nn.Module) else Apply(network)
    return cost_of(network, *args).whole.total.multiply_adds


# torch's counter leaves vectors out.
WITH_VECTORS = {
    torch.ops.aten.mv: lambda matrix, _vector, **_: 2 * prod(matrix),
    torch.ops.aten.dot: lambda vector, _other, **_: 2 * prod(vector),
    torch.ops.aten.vdot: lambda vector, _other, **_: 2 * prod(vector),
}


def flops_of(network: nn.Module, *args: Any) -> int:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False, custom_mapping=WITH_VECTORS) as counter, torch.no_grad():
            network.eval()(*args)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    return counter.get_total_flops()


# --- Multiply-adds ---

X = torch.zeros


@pytest.mark.parametrize(
    ("network", "args", "expected"),
    [
        # Each output value of a convolution is a sum over the kernel and the input channels of its group.
        (nn.Conv2d(6, 9, (3, 5), stride=2, padding=1), [X(2, 6, 17, 20)], 2 * 9 * 9 * 9 * 6 * 15),
        (nn.Conv2d(8, 8, 3, groups=8, padding=1, bias=False), [X(1, 8, 7, 7)], 8 * 49 * 9),
        (nn.Conv3d(2, 3, 2), [X(1, 2, 4, 5, 6)], 3 * 3 * 4 * 5 * 2 * 8),
        (
            lambda x, w: torch.ops.aten.mkldnn_convolution(x, w, None, [0, 0], [2, 2], [1, 1], 1),
            [X(1, 3, 33, 33), X(8, 3, 3, 3)],
            8 * 16 * 16 * 27,
        ),
        # A transposed one takes every input value once for each weight of its channel.
        (nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1, groups=2), [X(2, 6, 5, 7)], 2 * 6 * 35 * 2 * 9),
        (nn.Linear(10, 7), [X(3, 10)], 3 * 7 * 10),
        (lambda a, b: a @ b, [X(2, 3, 4, 5), X(5, 6)], 2 * 3 * 4 * 5 * 6),
        (lambda a, b: a @ b, [X(3, 4), X(4)], 12),
        (lambda a, b: a @ b, [X(4), X(4)], 4),
        (lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), [X(2, 3, 5, 4), X(2, 3, 6, 4)], 2 * 3 * 5 * 6 * 4),
        (torch.baddbmm, [X(2, 3, 5), X(2, 3, 4), X(2, 4, 5)], 2 * 3 * 4 * 5),
        # Scores and their mean, whatever is masked.
        (F.scaled_dot_product_attention, [X(2, 3, 5, 8), X(2, 3, 7, 8), X(2, 3, 7, 4)], 2 * 3 * 5 * 7 * (8 + 4)),
        (
            lambda *qkv: F.scaled_dot_product_attention(*qkv, enable_gqa=True),
            [X(1, 4, 6, 8), X(1, 2, 6, 8), X(1, 2, 6, 8)],
            4 * 6 * 6 * 16,
        ),
        # Four projections of T tokens, and attention.
        (nn.MultiheadAttention(8, 2, batch_first=True), [X(3, 5, 8)] * 3, 3 * (4 * 5 * 64 + 2 * 25 * 8)),
        # The fused layer is taken apart: attention and an MLP of 16.
        (
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            [X(3, 5, 8)],
            3 * (4 * 5 * 64 + 2 * 25 * 8 + 2 * 5 * 8 * 16),
        ),
        # Four gates, or three, at each step, from the input and the state.
        (nn.LSTM(4, 6), [X(5, 2, 4)], 5 * 2 * 4 * 6 * (4 + 6)),
        (nn.LSTM(4, 6, num_layers=2, bidirectional=True), [X(5, 2, 4)], 10 * 2 * 24 * ((4 + 6) + (12 + 6))),
        # Sums of products are counted, nothing else.
        (nn.Sequential(nn.BatchNorm2d(3), nn.GELU(), nn.AvgPool2d(2), nn.Softmax(1)), [X(1, 3, 4, 4)], 0),
        (lambda a: a.cumsum(0).sort().values + F.interpolate(a[None, None], scale_factor=2).sum(), [X(4, 4)], 0),
    ],
)
def test_multiply_adds_are_those_of_the_closed_form(network: Any, args: list[Tensor], expected: int) -> None:
    cost = cost_of(network if isinstance(network, nn.Module) else Apply(network), *args)
    assert cost.whole.total.multiply_adds == expected
    assert cost.uncounted == ()


def test_inside_inference_mode_operations_are_taken_apart() -> None:
    layer = nn.Linear(10, 7).requires_grad_(False)

    def infers(inputs: Tensor) -> Tensor:
        with torch.inference_mode():
            return layer(inputs * 1)

    assert multiply_adds_of(infers, X(3, 10)) == 210


def test_resnet18_takes_1_81_billion_also_on_the_meta_device() -> None:
    with torch.device("meta"):
        network = torchvision.models.resnet18().eval()
        for side in (224, 64):
            cost = cost_of(network, torch.empty(1, 3, side, side))
            # All but the head falls with the number of pixels.
            assert cost.whole.total.multiply_adds == (1_814_073_344 - 512_000) * side**2 // 224**2 + 512_000
            assert cost.whole.total.multiply_adds == sum(module.own.multiply_adds for module in cost.modules)
            assert cost.whole.seconds is None


def test_operations_without_a_formula_are_listed_and_not_guessed() -> None:
    def transforms(inputs: Tensor) -> Tensor:
        return torch.fft.rfft(torch.fft.rfft(inputs).real).abs() + torch.linalg.inv(inputs)[:, :1].abs()

    cost = cost_of(nn.Sequential(nn.Linear(4, 4), Apply(transforms)), torch.eye(4))
    assert cost.whole.total.multiply_adds == 64
    assert {row.name: (row.call_count, row.layer) for row in cost.uncounted} == {
        "aten._fft_r2c": (2, "1"),
        "aten.linalg_inv_ex": (1, "1"),
    }


def test_a_formula_that_was_registered_with_torch_counts() -> None:
    @torch.library.custom_op("hookscope_test::triple", mutates_args=())
    def triple(inputs: Tensor) -> Tensor:
        return inputs * 3

    triple.register_fake(torch.empty_like)
    frozen = Apply(torch.ops.hookscope_test.triple)
    assert [each.name for each in cost_of(frozen, X(5, 2)).uncounted] == ["hookscope_test.triple"]
    try:
        register_flop_formula(torch.ops.hookscope_test.triple)(lambda shape, **_: 2 * prod(shape))
        cost = cost_of(frozen, X(5, 2))
        assert (cost.whole.total.multiply_adds, cost.uncounted) == (10, ())
    finally:
        flop_registry.pop(torch.ops.hookscope_test.triple)


def test_deformable_convolution_counts_as_convolution() -> None:
    def deformed(inputs: Tensor, weight: Tensor) -> Tensor:
        return torchvision.ops.deform_conv2d(inputs, torch.zeros(2, 18, 6, 6), weight)

    network = with_weight(deformed, 5, 3, 3, 3)
    assert multiply_adds_of(network, torch.rand(2, 3, 8, 8)) == 2 * 5 * 36 * 27


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization:DeprecationWarning", "ignore:Using `torch.compile:UserWarning"
)
@pytest.mark.parametrize("name", INSPECTED)
def test_networks_cost_half_of_torchs_flops_and_leaves_and_the_rest_are_the_whole(name: str) -> None:
    torch.manual_seed(0)
    with silenced_known_warnings():
        network = NETWORKS[name].build().eval()
    args = NETWORKS[name].args()
    before = {key: value.clone() for key, value in network.state_dict().items() if isinstance(value, Tensor)}
    cost = cost_of(network, *args)
    after = network.state_dict()
    assert all(torch.equal(value, after[key]) or value.isnan().any() for key, value in before.items())
    assert all(parameter.grad is None for parameter in network.parameters())
    whole = cost.whole.total
    assert whole == cost.leaves + cost.outside
    assert whole == sum((module.own for module in cost.modules), CostSums())
    assert whole.parameter_count == sum(parameter.numel() for parameter in network.parameters())
    for module in cost.modules:
        assert module.own.multiply_adds <= module.total.multiply_adds <= whole.multiply_adds, module.layer
    if name not in NOT_FOR_TORCHS_COUNTER:
        assert whole.multiply_adds * 2 == flops_of(network, *args)


NOT_FOR_TORCHS_COUNTER = frozenset({"ragged and nothing", "gradients inside"})  # it raises


# --- What a module holds and saves ---


def saved_by(network: nn.Module, *args: Any) -> int:
    return cost_of(network, *args).whole.total.saved_bytes


def test_bytes_saved_for_backward_are_those_by_hand() -> None:
    linear = nn.Linear(10, 7)
    assert saved_by(linear, X(4, 10)) == 4 * 10 * FLOAT, "its input; the weight is there anyway"
    assert saved_by(nn.Linear(10, 7).requires_grad_(False), X(4, 10)) == 0, "nothing to differentiate"
    # The output of a ReLU is the input of what follows: one memory. That of the linear layer before is not kept.
    two = nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 3))
    cost = cost_of(two, X(4, 10))
    assert cost.whole.total.saved_bytes == 4 * (10 + 7) * FLOAT
    assert [module.own.saved_bytes for module in cost.modules] == [0, 160, 112, 0], "where it is saved first"
    assert [module.output_bytes for module in cost.modules] == [4 * 3 * FLOAT, 112, 112, 48]
    # A sigmoid keeps its output, a product both factors, an exponential its output, once.
    square = with_weight(lambda inputs, weight: (inputs * weight).exp() * 2, 5)
    assert saved_by(square, X(3, 5)) == (15 + 15) * FLOAT
    # A view keeps all that it looks into: the first row of the input of 4 x 10.
    assert saved_by(with_weight(lambda inputs, weight: inputs[:1] @ weight, 10, 7), X(4, 10)) == 160
    # A maximum keeps its input and where it was, in 8 bytes each.
    pooled = nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2))
    assert saved_by(pooled, X(1, 3, 4, 4)) == (3 * 16 + 4 * 16) * FLOAT + 4 * 4 * 8
    half = nn.Linear(10, 7).to(torch.bfloat16)
    assert saved_by(half, X(4, 10, dtype=torch.bfloat16)) == 80


def test_checkpointing_shows_in_the_bytes_saved() -> None:
    inner = nn.Sequential(nn.Linear(10, 10), nn.Sigmoid(), nn.Linear(10, 10), nn.Sigmoid())

    recomputes = Apply(lambda inputs: checkpoint(inner, inputs, use_reentrant=False))
    row = 4 * 10 * FLOAT
    # Two inputs and two outputs of the sigmoids; both inputs.
    assert saved_by(nn.Sequential(nn.Linear(10, 10), inner), X(4, 10)) == 4 * row
    assert saved_by(nn.Sequential(nn.Linear(10, 10), recomputes), X(4, 10)) == 2 * row


def test_a_tied_parameter_counts_once_and_belongs_to_the_first() -> None:
    parts = {"encode": nn.Embedding(11, 6), "decode": nn.Linear(6, 11, bias=False)}
    parts["decode"].weight = parts["encode"].weight
    network = nn.Sequential(OrderedDict(parts)).to(torch.float64)
    network.encode.weight.requires_grad_(False)
    cost = cost_of(network, torch.zeros(2, 3, dtype=torch.long))
    assert cost.whole.total == CostSums(6 * 6 * 11, 66, 66 * 8, 0, 0)
    assert (cost["encode"].own.parameter_count, cost["decode"].own.parameter_count) == (66, 0)
    assert (cost["encode"].total.parameter_count, cost["decode"].total.parameter_count) == (66, 66)
    assert cost.whole.total == cost.leaves + cost.outside


def test_shared_modules_lists_and_forward_called_by_name_are_counted_where_they_run() -> None:
    def forward(net: Any, inputs: Tensor) -> Tensor:
        inputs = net.b(net.a(inputs)) @ torch.ones(4, 4)
        for part in net.parts:
            inputs = part(inputs)
        return net.silent.forward(inputs)

    shared, several = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 2), nn.Linear(2, 1)])
    parts = {"a": nn.Sequential(shared, nn.ReLU()), "b": nn.Sequential(shared), "parts": several}
    cost = cost_of(Written(forward, **parts, silent=nn.Sequential(nn.Linear(1, 3))), X(5, 4))
    counted = {module.layer: (module.total.multiply_adds, module.own.multiply_adds) for module in cost.modules}
    assert counted == {
        "": (5 * (16 * 3 + 8 + 2 + 3), 80),
        "a": (80, 0),
        "a.0": (160, 160),  # two calls
        "a.1": (0, 0),
        "b": (80, 0),
        "parts": (50, 0),
        "parts.0": (40, 40),
        "parts.1": (10, 10),
        "silent": (15, 0),
        "silent.0": (15, 15),
    }
    assert cost["parts"].output_bytes is None
    assert cost.whole.total == cost.leaves + cost.outside
    with pytest.raises(LayerNotFoundError, match=r"parts\.0"):
        cost["parts.00"]


def test_networks_that_raise_with_gradients_are_counted_without_and_say_so() -> None:
    def overwrites(net: Any, inputs: Tensor) -> Tensor:
        net.layer.weight.mul_(1)  # torch refuses this where gradients are wanted
        return net.layer(inputs)

    cost = cost_of(Written(overwrites, layer=nn.Linear(4, 4)), X(2, 4))
    assert cost.whole.total.multiply_adds == 32
    assert cost.whole.total.saved_bytes == 0
    assert "Bytes saved for the backward pass are missing" in cost.notes[0]
    with pytest.raises(ModelError, match="no such luck"):
        cost_of(Apply(lambda _: (_ for _ in ()).throw(ValueError("no such luck"))), X(1))


def test_the_cost_is_that_of_the_first_input_that_runs(tmp_path: Path) -> None:
    for name, size in (("a", 5), ("b", 4)):
        torch.save(torch.ones(size), tmp_path / f"{name}.pt")
    run = hookscope.activations(nn.Linear(4, 3), tmp_path, cost=True, on_error=lambda _: None)
    assert run.cost.whole.total.multiply_adds == 12
    with pytest.raises(ModelError, match="the network raises RuntimeError: addmm: mat1 and mat2 shapes cannot be"):
        cost_of(nn.Linear(4, 3), X(2, 5))


def test_a_network_comes_out_as_it_went_in() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()).train()
    inputs = torch.rand(2, 3, 8, 8)
    kept, before = inputs.clone(), snapshot(network)
    network_cost(Call(network, [inputs], {}))
    assert_unchanged(network, before)
    assert torch.equal(inputs, kept)
    assert not inputs.requires_grad


# --- Time ---


def test_times_hold_what_runs_inside_and_are_the_median_of_several_passes() -> None:
    def sleeping(seconds: Callable[[], float]) -> nn.Module:
        return Apply(lambda inputs: (time.sleep(seconds()), inputs)[1])

    passes: list[float] = []

    def now_and_then() -> float:  # one pass in three is slow
        passes.append(0.2 if len(passes) % 3 == 0 else 0.01)
        return passes[-1]

    network = nn.Sequential(nn.Sequential(sleeping(lambda: 0.03)), sleeping(now_and_then), nn.Identity())
    cost = cost_of(network, X(1))
    seconds: Mapping[str, float | None] = {module.layer: module.seconds for module in cost.modules}
    assert 0.03 <= (seconds["0.0"] or 0) <= (seconds["0"] or 0) < 0.1
    assert 0.01 <= (seconds["1"] or 0) < 0.1
    assert (seconds["2"] or 1) < 0.01
    assert cost.pass_count >= 3
    assert cost.device == "cpu"


def test_a_run_has_the_cost_of_its_first_input_and_writes_it(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    run = hookscope.activations(network, torch.rand(3, 3, 8, 8), cost=True)
    assert run.cost.input_shapes == ((1, 3, 8, 8),), "one input, whatever the batch"
    assert run.cost.whole.total.multiply_adds == 4 * 36 * 27 + 4 * 36 * 2
    folder = run.save(tmp_path / "run")
    lines = (folder / "cost.csv").read_text("utf-8").splitlines()
    assert [line.partition(",")[0] for line in lines] == ["layer", "", "0", "1", "2", "3"]
    page = report_html(read_run(folder))
    assert "mult-adds" in page
    assert "of the time in" in page
    assert "mult-adds" not in report_html(
        read_run(hookscope.activations(network, torch.rand(1, 3, 8, 8)).save(tmp_path / "plain"))
    )


def test_a_module_table_converts_with_its_costs() -> None:
    frame = hookscope.layers(nn.Linear(3, 2), input_shape=(1, 3), cost=True).to_pandas()
    assert frame["multiply_adds"].tolist() == [6]
