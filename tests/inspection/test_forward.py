"""The pipeline as a library: rows, flags, several batches, grids, failures and what it refuses."""

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

import hookscope
from hookscope.errors import UsageError
from hookscope.inputs.batches import Batch
from hookscope.inspection.forward import ForwardError, list_modules
from hookscope.models.construction import LoadedModel
from hookscope.results.inputs import InputRecord, Preprocessing
from hookscope.results.network import ModelInfo
from hookscope.statistics import native
from tests.inspections import inspect
from tests.networks import Apply, Written


def batches_of(values: Tensor, size: int) -> list[Batch]:
    records = [InputRecord(str(index), None, None, (3, 8, 8), ()) for index in range(len(values))]
    places = [tuple(range(len(values))[begin : begin + size]) for begin in range(0, len(values), size)]
    return [Batch((values[[*part]],), part, tuple(records[index] for index in part)) for part in places]


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(216, 5)
    ).eval()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_statistics_are_over_the_whole_input_however_it_is_batched(size: int) -> None:
    network, values = small_network(), torch.randn(7, 3, 8, 8)
    inspection = inspect(network, batches_of(values, size))
    conv = network[0](values).detach().double().numpy()
    statistics = inspection.rows[0].activation
    assert statistics.element_count == conv.size
    assert statistics.mean == pytest.approx(conv.mean(), rel=1e-5)
    assert statistics.std == pytest.approx(conv.std(), rel=1e-5)
    # Batches of different sizes may take different kernels.
    assert (statistics.min, statistics.max) == pytest.approx((conv.min(), conv.max()), rel=1e-5)
    assert statistics.l2 == pytest.approx(np.sqrt((conv**2).sum()), rel=1e-5)
    relu = network[:3](values).detach().numpy()
    assert inspection.rows[2].activation.zero_fraction == (relu == 0).sum() / relu.size
    assert inspection.rows[2].activation.dead_channel_count == (relu == 0).all(axis=(0, 2, 3)).sum()


def test_flags_say_what_a_reader_should_know() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:  # x: (1, 4, 8, 8)
        net.same(x)
        net.clip(x.clone())
        net.zero(-x.abs())
        net.ones(x)
        net.partly(x * torch.tensor([1.0, 1.0, 0.0, 0.0]).view(4, 1, 1))
        net.bad(x / 0)
        net.mixed(torch.tensor([math.nan, math.inf, 0.0, 0.0]) * x[0, 0, 0, 0])
        net.none(None)
        return x

    parts = {"clip": nn.ReLU(inplace=True), "zero": nn.Hardtanh(0.0, 1.0), "ones": nn.Threshold(300.0, 1.0)}
    model = Written(forward, **parts, **{name: nn.Identity() for name in ("same", "partly", "bad", "mixed", "none")})
    rows = {row.layer: row for row in inspect(model, torch.arange(1.0, 257.0).view(1, 4, 8, 8), ["name:/./"]).rows}
    assert rows["same"].flags == ("pass-through",)
    assert rows["clip"].flags == ("in-place",)
    assert rows["zero"].flags == ("all zero",)
    assert rows["ones"].flags == ("constant",)
    assert rows["partly"].flags == ("dead channels", "pass-through")
    assert rows["bad"].flags == ("non-finite", "pass-through")
    assert rows["mixed"].flags == ("non-finite", "pass-through")
    assert rows["none"].flags == ("not a tensor",)


def test_a_zero_of_one_picture_is_no_dead_channel_of_a_fully_connected_layer() -> None:
    network = nn.Sequential(nn.Linear(8, 64), nn.ReLU())
    torch.nn.init.zeros_(network[0].weight)
    network[0].bias.data = torch.tensor([1.0, -1.0]).repeat(32)
    few, many = (inspect(network, torch.ones(count, 8)).rows[1] for count in (31, 32))
    assert few.activation.dead_channel_count == many.activation.dead_channel_count == 32
    assert (few.flags, many.flags) == ((), ("dead channels",))


@pytest.mark.parametrize("run", [hookscope.activations, hookscope.grads])
def test_arguments_without_inputs_are_refused(run: Any) -> None:
    with pytest.raises(UsageError, match=r"^A tensor of shape 0x2 holds no input: axis 0 counts the inputs\.$"):
        run(nn.Sequential(nn.Linear(2, 3)), (torch.zeros(0, 2),))


def test_grids_are_kept_for_the_first_inputs_only() -> None:
    network, values = small_network(), torch.randn(5, 3, 8, 8)
    inspection = inspect(network, batches_of(values, 2), ["type:conv2d"], grids_for=3, max_channels=4)
    assert [maps.input_index for maps in inspection.feature_maps] == [0, 1, 2]
    expected = network[0](values).detach()[:3, :4].numpy()
    for maps in inspection.feature_maps:
        assert maps.arrangement == "maps"
        assert maps.channel_count == 6
        # A batch of one and a batch of two may take different kernels.
        np.testing.assert_allclose(maps.values, expected[maps.input_index], rtol=1e-4, atol=1e-5)


def test_a_forward_pass_that_raises_gives_the_rows_up_to_there_and_the_place() -> None:
    def breaks(_x: Tensor, **_scale: Tensor) -> Tensor:
        raise ValueError("broken\nin two lines")

    parts = {"layers": nn.Sequential(*(nn.Linear(4, 4) for _ in range(19))), "inner": nn.ModuleList([Apply(breaks)])}
    outer = Written(lambda net, x: net.inner[0](net.layers(x), scale=torch.ones(2)), **parts)
    with pytest.raises(
        ForwardError, match=r"inner\.0 \(Apply\).*\[0\] \(1, 4\), \['scale'\] \(2,\): ValueError: broken$"
    ) as info:
        inspect(outer, torch.zeros(1, 4))
    inspection = info.value.inspection
    assert [row.layer for row in inspection.rows] == [f"layers.{index}" for index in range(19)]
    assert inspection.failure.layer == "inner.0"
    assert [layer.layer for layer in inspection.uncalled] == []
    assert info.value.exit_code == 6


def test_a_model_that_exits_is_a_model_that_raised() -> None:
    exits = Apply(lambda _x: sys.exit(0))
    with pytest.raises(ForwardError, match="SystemExit: 0"):
        inspect(exits, torch.zeros(1))
    assert list_modules(exits, [torch.zeros(1)])[1] is not None


def test_the_model_s_output_is_handed_over_with_a_batch_that_it_has_not_overwritten() -> None:
    inputs = torch.tensor([[1.0], [3.0]])
    seen: list[tuple[list[float], list[float]]] = []

    def keep(batch: Batch, output: object) -> None:
        assert isinstance(output, dict)
        seen.append((batch.args[0].flatten().tolist(), output["out"].flatten().tolist()))

    inspect(Apply(lambda x: {"out": x.mul_(2)}), batches_of(inputs, 1), on_output=keep)
    assert seen == [([1.0], [2.0]), ([3.0], [6.0])]


def test_refuses_lazy_modules_which_could_not_come_out_as_they_were() -> None:
    with pytest.raises(UsageError, match=r"0 \(LazyLinear\) is lazy"):
        inspect(nn.Sequential(nn.LazyLinear(3)), torch.zeros(1, 2))
    with pytest.raises(UsageError, match=r"0 \(LazyLinear\) is lazy"):
        hookscope.activations(nn.Sequential(nn.LazyLinear(3)), torch.zeros(1, 2))
    with pytest.raises(UsageError, match="is lazy"):
        list_modules(nn.LazyBatchNorm2d(), None)


def test_says_why_a_module_was_never_called() -> None:
    parts = {"items": nn.ModuleList([nn.ReLU()]), "spare": nn.Linear(2, 3)}
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    model = Written(lambda net, x: net.items[0](net.attention(x, x, x)[0]), attention=attention, **parts)
    inspection = inspect(model, torch.randn(1, 5, 4), ["*"])
    reasons = {layer.layer: layer.reason for layer in inspection.uncalled}
    assert set(reasons) == {"items", "attention.out_proj", "spare"}
    assert "its items are" in reasons["items"]
    assert "uses its weight directly" in reasons["attention.out_proj"]
    assert "did not call it" in reasons["spare"]
    assert {layer.layer: layer.parameter_count for layer in inspection.uncalled}["spare"] == 9
    model.items[0] = Apply(lambda _: 1 / 0)
    with pytest.raises(ForwardError) as caught:  # after the attention
        inspect(model, torch.randn(1, 5, 4), ["*"])
    before = {layer.layer: layer.reason for layer in caught.value.inspection.uncalled}
    assert before == {**reasons, "spare": "the forward pass raised before it"}


def test_predictions_name_the_best_classes_with_softmax_probabilities() -> None:
    info = ModelInfo(
        "net", "Identity", "given", random=False, sha256=None, parameter_count=0, categories=("a", "b", "c")
    )
    loaded = LoadedModel(nn.Identity(), info, Preprocessing(), ())
    inspection = inspect(loaded, torch.log(torch.tensor([[1.0, 6.0, 3.0]])))
    (prediction,) = inspection.predictions
    assert prediction.class_names == ("b", "c", "a")
    assert prediction.probabilities == pytest.approx((0.6, 0.3, 0.1))
    other = replace(loaded, info=replace(info, categories=("a",)))
    assert inspect(other, torch.ones(1, 3)).warnings == (
        "The output has 3 scores per input, but 1 class name is known, so none is shown.",
    )
    assert inspect(Apply(lambda x: {"logits": x}), torch.ones(1, 0), output_key="logits").predictions == ()


def test_by_default_attention_and_layers_with_parametrised_weights_have_rows() -> None:
    transformer = torchvision.models.VisionTransformer(16, 8, 2, 2, 8, 16, num_classes=3)
    inspection = inspect(transformer, torch.zeros(1, 3, 16, 16))
    attention = [row for row in inspection.rows if row.kind == "MultiheadAttention"]
    assert [row.layer for row in attention] == [f"encoder.layers.encoder_layer_{at}.self_attention" for at in range(2)]
    assert inspection.uncalled == ()
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 2, 3)), nn.ReLU())
    rows = inspect(normed, torch.zeros(1, 3, 5, 5)).rows
    assert [(row.label, row.activation.shape, row.parameter_count) for row in rows] == [
        ("0", (1, 2, 3, 3), 2 * 3 * 9 + 2 + 2),  # directions, lengths, biases
        ("1", (1, 2, 3, 3), 0),
    ]


def test_an_installation_without_the_kernel_says_what_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    network, values = small_network(), torch.randn(1, 3, 8, 8)
    monkeypatch.setattr(native, "load_kernel", lambda: None)
    assert [note for note in inspect(network, values).notes if "compiled kernel" in note]
    nothing = native.Kernel(lambda *_: 1, *[lambda _: 0] * 3)  # measures nothing
    monkeypatch.setattr(native, "load_kernel", lambda: nothing)
    assert inspect(network, values).notes == ()


def test_the_callers_tensor_stays_as_it_is_in_every_batch() -> None:
    inputs = torch.arange(36.0).view(9, 4)
    hookscope.activations(Written(lambda net, x: net.act(x.sub_(1)), act=nn.ReLU()), inputs, batch_size=4, verify=False)
    assert torch.equal(inputs, torch.arange(36.0).view(9, 4))
