"""The whole measured: what each pass shows, and what it leaves behind."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import disable_observer, get_default_qat_qconfig, prepare_qat, quantize_dynamic

from hookscope.commands.check.measuring.network_passes import measure, measure_layers
from hookscope.commands.check.measuring.outputs import class_scores
from hookscope.errors import UsageError
from hookscope.results.activations import Activations
from hookscope.rules import RULES
from hookscope.rules.settings import CheckSettings, Expectation
from tests.commands.check.measuring.networks import measure_network, prepared
from tests.inspections import inspect
from tests.networks import NETWORKS, Written, conv_net

EVERYTHING = set(RULES)
OUTPUTS = {"output-shape", "constant-output", "repeatability", "batch-consistency"}
FORWARD = {name for name, rule in RULES.items() if rule.level != "off"}

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]


def pictures(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def small() -> nn.Module:
    torch.manual_seed(0)
    return conv_net()


# --- forward ---


def test_statistics_are_those_of_an_inspection_of_every_module() -> None:
    network, inputs = small(), pictures(3, 3, 8, 8)
    measured = measure_network(network, inputs, wanted=EVERYTHING)
    plain = inspect(network, inputs, ["*"], distributions=True)
    assert [row.label for row in measured.forward.rows] == [row.label for row in plain.rows]
    assert [row.activation for row in measured.forward.rows] == [row.activation for row in plain.rows]
    assert measured.forward.rows[-1].label == "(model)"


@pytest.mark.parametrize(
    ("wanted", "count", "sizes"),
    [
        ({"zero-parameter"}, 3, []),
        ({"dead-channels"}, 3, [3]),
        ({"output-shape", "constant-output"}, 3, [3]),
        ({"repeatability"}, 3, [3, 3]),
        (FORWARD, 3, [3, 3, 1, 1]),
        (FORWARD, 1, [1, 1, 2]),
    ],
)
def test_no_pass_is_made_that_no_rule_wants(wanted: set[str], count: int, sizes: list[int]) -> None:
    network, seen = small(), list[int]()
    network.register_forward_pre_hook(lambda _module, args: seen.append(len(args[0])))
    measured = measure_network(network, pictures(count, 3, 8, 8), wanted=wanted)
    assert seen == sizes
    assert (measured.forward is None) == (sizes == [])


def test_a_forward_pass_that_raises_is_no_error_here() -> None:
    def broken(net: Any, x: Tensor) -> Tensor:
        raise ValueError(f"cannot take {net.first(x).shape[1]} features")

    measured = measure_network(Written(broken, first=nn.Linear(4, 7)), pictures(2, 4), wanted=EVERYTHING)
    assert measured.forward.failure.error == "ValueError: cannot take 7 features"
    assert [row.label for row in measured.forward.rows] == ["first"]
    assert measured.outputs == ()
    assert measured.gradients is None


# --- outputs ---


@pytest.mark.parametrize("name", ["resnext", "vit", "convnext", "retinanet"])
def test_real_networks_repeat_themselves_in_a_batch_and_alone_and_stay_as_they_were(name: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name].build()
    (arguments,) = NETWORKS[name].args()
    batch = [*arguments, torch.rand_like(arguments[0])] if isinstance(arguments, list) else arguments
    state = {key: value.clone() for key, value in network.state_dict().items() if isinstance(value, Tensor)}
    modes = [module.training for module in network.modules()]
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in network.modules()]
    random_state = torch.get_rng_state()
    with torch.random.fork_rng():
        network.eval()
        with torch.no_grad():
            expected = network(copy.deepcopy(batch))
        for module, mode in zip(network.modules(), modes, strict=True):
            module.training = mode

    measured = measure(prepared(network, (batch,)), CheckSettings(), FORWARD)

    assert measured.forward.failure is None
    assert measured.outputs
    for output in measured.outputs:
        assert output.repeat_difference == 0.0
        # Rounding differs with the batch, and networks of many layers amplify it.
        assert output.alone_difference < 1e-3
    if isinstance(expected, Tensor):
        (output,) = measured.outputs
        values = expected.double()
        assert (output.label, output.shape, output.batched) == ("(model)", tuple(expected.shape), True)
        assert output.max_abs == float(values.abs().max())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in network.modules()] == modes
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in network.modules()] == hooks
    after = network.state_dict()
    assert all(torch.equal(after[key], value) for key, value in state.items())


def test_the_difference_between_inputs_is_that_of_the_closed_form() -> None:
    network = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[1.0, 2.0]]))
    first, second = torch.tensor([[1.0, 1.0], [2.0, 1.0]]), torch.tensor([[4.0, 2.0]])
    (output,) = measure_network(network, first, second, wanted=OUTPUTS).outputs
    # Outputs are 3, 4 and 8: at most (8 - 3) / 8 from the first.
    assert output.input_difference == 5 / 8
    assert (output.shape, output.input_count) == ((2, 1), 2)


def test_an_output_that_ignores_its_input_does_not_differ() -> None:
    network = Written(lambda net, x: net.head(x) * 0 + 1, head=nn.Linear(4, 3))
    for inputs in (pictures(3, 4), pictures(1, 4)):
        (output,) = measure_network(network, inputs, wanted=OUTPUTS).outputs
        assert output.input_difference == 0.0


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Sequential(nn.InstanceNorm2d(3), nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
    ],
    ids=["one pixel at a time", "normalises its input"],
)
def test_one_input_is_enough_to_see_that_an_output_varies(network: nn.Module) -> None:
    (output,) = measure_network(network, pictures(1, 3, 8, 8), wanted={"constant-output"}).outputs
    assert output.input_difference > 1e-3


def test_equal_inputs_are_not_called_a_single_one() -> None:
    measured = measure_network(nn.Linear(4, 3), torch.zeros(3, 4), wanted=OUTPUTS)
    reason = "All inputs are the same, and no second one can be derived from it: give more pictures."
    assert measured.unmeasured == {"constant-output": reason}


@pytest.mark.parametrize(("activation", "count"), [("relu", 1), ("gelu", 1), (nn.ReLU(), 0)])
def test_activations_inside_torchs_own_layers_are_named_as_unseen(activation: Any, count: int) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=activation, batch_first=True)
    for wanted in ({"dead-layer"}, {"quiet-channels"}):
        warnings = measure_network(nn.Sequential(layer), pictures(2, 5, 8), wanted=wanted).warnings
        assert sum("torch's own layers are not seen: 0. Build" in warning for warning in warnings) == count


def test_one_input_of_which_no_other_can_be_made_is_said_to_be_too_few() -> None:
    measured = measure_network(nn.Linear(4, 3), torch.zeros(1, 4), wanted=OUTPUTS)
    reason = "There is only one input, and no second one can be derived from it: give more pictures."
    assert measured.unmeasured == {"constant-output": reason, "batch-consistency": reason}


def test_dropout_left_on_is_seen_and_not_blamed_on_the_batch() -> None:
    network = Written(lambda net, x: nn.functional.dropout(net.head(x), 0.5, training=True), head=nn.Linear(4, 50))
    measured = measure_network(network, pictures(2, 4), wanted=OUTPUTS)
    (output,) = measured.outputs
    assert output.repeat_difference > 0.1
    assert "differs between two identical passes" in measured.unmeasured["batch-consistency"]


def test_a_buffer_that_counts_calls_is_seen() -> None:
    def counting(net: Any, x: Tensor) -> Tensor:
        net.calls += 1
        return x * float(net.calls)

    network = Written(counting)
    network.register_buffer("calls", torch.tensor(0.0))
    (output,) = measure_network(network, torch.tensor([[3.0], [1.0]]), wanted={"repeatability"}).outputs
    # The first pass multiplies by 1, the one after it by 2: (6 - 3) / 6.
    assert output.repeat_difference == 1 / 2
    assert float(network.get_buffer("calls")) == 0.0


def test_an_input_that_the_network_overwrites_is_given_anew() -> None:
    network = Written(lambda net, x: net.head(x.mul_(2)), head=nn.Linear(4, 3))
    (output,) = measure_network(network, pictures(2, 4), wanted=OUTPUTS).outputs
    assert output.repeat_difference == 0.0
    assert output.alone_difference < 1e-6


def test_a_network_that_raises_the_second_time_does_not_repeat_itself() -> None:
    def once(net: Any, x: Tensor) -> Tensor:
        net.calls = getattr(net, "calls", 0) + 1
        if net.calls > 1:
            raise RuntimeError("only once")
        return x

    measured = measure_network(Written(once), pictures(2, 4), wanted={"repeatability"})
    assert measured.outputs[0].repeat_difference == math.inf
    assert measured.warnings[-1].endswith("RuntimeError: only once")


def test_an_input_on_which_the_network_raises_alone_is_compared_in_two_batches() -> None:
    norm = nn.BatchNorm1d(32, track_running_stats=False, affine=False)
    inputs = pictures(3, 32)
    measured = measure_network(norm, inputs, wanted={"batch-consistency"})
    (output,), given = measured.outputs, inputs.double()
    batches = (given, torch.stack([given[0], -given[0].flip(-1)]))
    first, other = ((batch - batch.mean(0)) / (batch.var(0, correction=0) + norm.eps).sqrt() for batch in batches)
    expected = (first[0] - other[0]).abs().max() / max(first[0].abs().max(), other[0].abs().max())
    assert output.alone_difference == pytest.approx(float(expected), rel=1e-5)
    assert not measured.unmeasured


def test_what_raises_in_other_batches_too_is_not_compared() -> None:
    measured = measure_network(Written(lambda _, x: x.view(3, 4)), pictures(3, 4), wanted={"batch-consistency"})
    reason = measured.unmeasured["batch-consistency"]
    assert reason.startswith("The network raised on an input alone (RuntimeError: shape '[3, 4]' is invalid")
    assert "), and with a second one in its batch the network raised RuntimeError: shape" in reason


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:.*reduce_range will be deprecated")
@pytest.mark.parametrize("scripted", [False, True])
def test_layers_that_round_by_the_range_of_the_batch_are_not_compared_with_an_input_alone(scripted: bool) -> None:
    # The first input is 100 times the second, so in one batch with it the second is 0 or one step.
    inputs = torch.tensor([[100.0, -100.0], [0.2, 0.3]])
    quantised = quantize_dynamic(nn.Sequential(nn.ReLU(), nn.Linear(2, 3)).eval(), dtype=torch.qint8)
    network = torch.jit.script(quantised) if scripted else quantised
    measured = measure_network(network, inputs, wanted={"batch-consistency"})
    assert measured.unmeasured["batch-consistency"].startswith("'1' is quantised dynamically: it rounds by the range")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:.*reduce_range will be deprecated")
def test_observers_of_quantisation_aware_training_are_told_to_be_switched_off() -> None:
    """They average the ranges of their inputs, those of the second pass with those of the first."""
    network = nn.Sequential(nn.Linear(4, 3)).train()
    network.qconfig = get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    prepare_qat(network, inplace=True)
    network(torch.randn(2, 4))
    inputs = 9 * torch.randn(2, 4)
    rules = {"repeatability", "batch-consistency"}
    unmeasured = measure_network(network.eval(), inputs, wanted=rules).unmeasured
    assert unmeasured.keys() == rules
    assert all("torch.ao.quantization.disable_observer" in reason for reason in unmeasured.values())
    measured = measure_network(network.apply(disable_observer), inputs, wanted=rules)
    assert (measured.unmeasured, measured.outputs[0].repeat_difference) == ({}, 0)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_layers_that_round_to_half_precision_are_compared_with_an_input_alone() -> None:
    quantised = quantize_dynamic(nn.Sequential(nn.Linear(2, 3)).eval(), dtype=torch.float16)
    measured = measure_network(quantised, pictures(2, 2), wanted={"batch-consistency"})
    assert measured.unmeasured == {}


@pytest.mark.parametrize(
    "inputs",
    [
        torch.tensor([[1.0, 3.0]]),  # alone it is 0; beside its mirrored negative (-3, -1) it is (1 + 1, 3 - 1)
        torch.tensor([[1.0], [3.0]]),  # less their mean, 2; alone each is 0
    ],
)
def test_outputs_of_inputs_that_depend_on_each_other_are_measured(inputs: Tensor) -> None:
    (output,) = measure_network(Written(lambda _, x: x - x.mean(0)), inputs, wanted={"batch-consistency"}).outputs
    assert output.alone_difference == 1.0


def test_an_output_for_the_whole_batch_belongs_to_no_input() -> None:
    network = Written(lambda _, x: {"scores": x * 2, "mean": x.mean(), "pair": torch.ones(2, 3)})
    measured = measure_network(network, pictures(2, 4), wanted=OUTPUTS)
    values = {output.label: output for output in measured.outputs}
    assert {label: output.batched for label, output in values.items()} == {
        "(model)['scores']": True,
        "(model)['mean']": False,
        "(model)['pair']": False,  # two rows for one input as well
    }
    assert values["(model)['mean']"].alone_difference is None
    assert values["(model)['mean']"].repeat_difference == 0.0
    assert not measured.unmeasured


def test_rows_that_belong_to_no_input_do_not_pass_as_outputs_that_vary() -> None:
    measured = measure_network(Written(lambda _, x: x.new_ones(2, 3)), pictures(2, 4), wanted=OUTPUTS)
    assert measured.unmeasured.keys() == {"constant-output", "batch-consistency"}


class Detector(nn.Module):
    """Returns as many boxes as its first pixel says, scored by how many pictures came along."""

    def __init__(self, in_batch: Callable[[int], float]) -> None:
        super().__init__()
        self.in_batch = in_batch

    def forward(self, pictures: list[Tensor]) -> list[dict[str, Tensor]]:
        score = self.in_batch(len(pictures))
        results = []
        for picture in pictures:
            count = int(picture.flatten()[0]) + (len(pictures) > 1)
            scores = torch.tensor([score, *[0.01] * (count - 1)])
            results.append({"boxes": torch.full((count, 4), 5.0), "scores": scores})
        return results


def detections(in_batch: Callable[[int], float], *counts: float) -> Any:
    inputs = [torch.full((1, 2, 2), count) for count in counts]
    return measure(prepared(Detector(in_batch), (inputs,)), CheckSettings(), OUTPUTS)


def test_detections_that_rounding_may_add_are_compared_by_their_scores() -> None:
    measured = detections(lambda _: 0.5, 1.0, 2.0)
    by_label = {output.label: output for output in measured.outputs}
    assert by_label["(model)[0]['boxes']"].alone_difference is None
    assert by_label["(model)[0]['scores']"].alone_difference == 0.0
    assert by_label["(model)[1]['boxes']"].shape == (3, 4)
    assert not by_label["(model)[1]['boxes']"].batched
    assert by_label["(model)[1]['boxes']"].input_difference == math.inf  # two boxes for one, three for the other
    remark = "differs in number or order in a batch and alone, possibly from rounding"
    assert f"Result [0] {remark}: only its highest scores are compared." in measured.warnings


def test_detections_with_other_scores_in_a_batch_are_seen() -> None:
    measured = detections(lambda count: 0.5 * count, 1.0, 2.0)
    scores = next(output for output in measured.outputs if output.label == "(model)[0]['scores']")
    assert scores.alone_difference == 0.5  # 1.0 in a batch of two, 0.5 alone


# --- predictions ---


def logits(*rows: list[float]) -> nn.Module:
    """Return a network that gives row n of a table for an input that begins with n."""
    table = torch.tensor(rows)
    return Written(lambda _, x: table[x[:, 0].long()])


def expecting(network: nn.Module, k: int = 5, categories: tuple[str, ...] = (), **settings: Any) -> Any:
    expectation = Expectation(image=__file__, k=k)  # type: ignore[arg-type]
    inputs = torch.tensor([[0.0], [1.0]])
    plan = prepared(network, (inputs[:1],), (inputs[1:],), categories=categories)
    return measure(plan, CheckSettings(expectations=(expectation,), **settings), {"expectation"})


def test_as_many_classes_are_kept_as_an_expectation_asks_about() -> None:
    rows = [[float(index) for index in range(9)], [-float(index) for index in range(9)]]
    actual = expecting(logits(*rows), k=7).forward.predictions
    assert [each.input_index for each in actual] == [0, 1]
    assert [each.class_indices for each in actual] == [(8, 7, 6, 5, 4, 3, 2), (0, 1, 2, 3, 4, 5, 6)]
    total = sum(math.exp(index) for index in range(9))
    np.testing.assert_allclose(actual[0].probabilities, [math.exp(8 - at) / total for at in range(7)], rtol=1e-6)


def test_classes_have_names_where_those_are_as_many() -> None:
    network = logits([0.0, 1.0], [1.0, 0.0])
    assert [
        prediction.class_names for prediction in expecting(network, categories=("cat", "dog")).forward.predictions
    ] == [
        ("dog", "cat"),
        ("cat", "dog"),
    ]
    assert expecting(network, categories=("cat", "dog", "fox")).forward.predictions[0].class_names == ()


def test_of_several_outputs_the_named_one_is_read() -> None:
    network = Written(lambda _, x: {"aux": torch.zeros(len(x), 3), "scores": torch.eye(3)[x[:, 0].long()]})
    actual = expecting(network, output_key="scores")
    assert [prediction.class_indices[0] for prediction in actual.forward.predictions] == [0, 1]
    assert "expectation" not in actual.unmeasured
    reason = expecting(network).unmeasured["expectation"]
    assert reason == "The network returned several rows of class scores per input: name one with --output-key."
    returned = {"['aux']": torch.zeros(2, 3), "['scores']": torch.zeros(2, 3)}
    assert class_scores(returned, 2, can_choose=False) == f"{reason.partition(':')[0]}, not one."
    with pytest.raises(UsageError, match="no floating-point output 'logits'"):
        expecting(network, output_key="logits")


def test_an_output_without_class_scores_cannot_be_judged() -> None:
    assert "no row of class scores" in expecting(Written(lambda _, x: x[:, 0])).unmeasured["expectation"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("returned", [Tensor.to_sparse, lambda x: torch.nested.nested_tensor([*x])])
def test_sparse_and_ragged_outputs_have_no_class_scores(returned: Callable[[Tensor], Tensor]) -> None:
    for network, key in (Written(lambda _, x: returned(x)), None), (Written(lambda _, x: {"a": returned(x)}), "a"):
        assert "no row of class scores" in expecting(network, output_key=key).unmeasured["expectation"]


def test_class_scores_in_float8_are_read() -> None:
    rows = torch.eye(3)[:2]
    network = Written(lambda _, x: rows[x[:, 0].long()].to(torch.float8_e4m3fn))
    assert [prediction.class_indices[0] for prediction in expecting(network).forward.predictions] == [0, 1]


# --- gradients ---


def test_gradients_are_those_of_the_inspection() -> None:
    network = small()
    measured = measure_network(network, pictures(2, 3, 8, 8), wanted={"zero-gradient"}, loss="ce", target="1")
    assert measured.forward is None
    assert (measured.gradients.loss.name, measured.gradients.mode) == ("ce", "eval")
    with torch.no_grad():
        expected = nn.functional.cross_entropy(network.eval()(pictures(2, 3, 8, 8)), torch.tensor([1, 1]))
    assert measured.gradients.loss.value == pytest.approx(float(expected), rel=1e-5)


def test_without_a_gradient_every_rule_about_them_says_why() -> None:
    wanted = {"zero-gradient", "non-finite-loss", "unused-parameter"}
    measured = measure_network(Written(lambda _, x: x.sign().long()), pictures(2, 4), wanted=wanted)
    assert set(measured.unmeasured) == wanted
    assert all("floating" in reason for reason in measured.unmeasured.values())


def test_an_int8_network_has_no_gradients_but_everything_else() -> None:
    network = NETWORKS["quantized resnet18"].build()
    measured = measure_network(network, pictures(1, 3, 64, 64), wanted=EVERYTHING)
    gradient_rules = {name for name, rule in RULES.items() if rule.needs == "gradients"}
    assert set(measured.unmeasured) & gradient_rules >= gradient_rules - {"non-finite-loss"}
    assert measured.outputs[0].repeat_difference == 0.0


@pytest.mark.parametrize(
    ("options", "says"), [({"loss": "crossentropy"}, "no loss 'crossentropy'"), ({"loss": "ce", "target": "77"}, "77")]
)
def test_an_unknown_loss_and_a_target_that_does_not_fit_are_the_users_to_correct(options: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        measure_network(small(), pictures(1, 3, 8, 8), wanted={"zero-gradient"}, **options)


def test_detectors_are_given_targets_in_train_mode() -> None:
    torch.manual_seed(0)
    network = NETWORKS["fasterrcnn_mobilenet_v3_large_320_fpn"].build()
    inputs = [torch.rand(3, 64, 96), torch.rand(3, 64, 96)]
    measured = measure(prepared(network, (inputs,)), CheckSettings(mode="train"), {"unused-parameter"})
    assert measured.unmeasured == {}
    assert measured.gradients.inputs[0].steps[-1].startswith("target for training")


# --- evidence ---


def seen_again(network: nn.Module, inputs: torch.Tensor, *labels: str) -> Activations:
    plan = prepared(network, (inputs,))
    rows = measure(plan, CheckSettings(), {"forward"}).forward.rows
    return measure_layers(plan, CheckSettings(), [row for row in rows if row.label in labels])


def test_layers_are_run_again_by_their_labels() -> None:
    network = Written(lambda net, x: net.act(net.body(net.act(x))), act=nn.ReLU(), body=nn.Conv2d(3, 4, 3))
    inputs = pictures(2, 3, 8, 8)
    inspection = seen_again(network, inputs, "act#1", "(model)")
    assert [row.label for row in inspection.rows] == ["act", "act#1", "(model)"]
    maps = {maps.label: maps for maps in inspection.feature_maps}
    assert {maps.input_index for maps in inspection.feature_maps} == {0}
    with torch.no_grad():
        np.testing.assert_allclose(maps["act#1"].values, network(inputs)[0].numpy(), rtol=1e-5, atol=1e-6)


def test_only_the_layer_meant_is_run_whatever_begins_alike_and_with_all_its_outputs() -> None:
    network = Written(lambda net, x: net.conv2(net.conv(x)), conv=nn.Conv2d(3, 3, 1), conv2=nn.Conv2d(3, 3, 1))
    assert [row.label for row in seen_again(network, pictures(1, 3, 4, 4), "conv").rows] == ["conv"]
    network = Written(lambda net, x: net.pair(x)["left"], pair=Written(lambda _, x: {"left": x, "right": x.neg()}))
    inspection = seen_again(network, pictures(1, 4), "pair['right']")
    assert [row.label for row in inspection.rows] == ["pair['left']", "pair['right']"]


def test_an_operation_is_run_again_by_its_name() -> None:
    network = Written(lambda net, x: torch.log(net.conv(x)), conv=nn.Conv2d(3, 3, 1))
    inspection = seen_again(network, pictures(1, 3, 4, 4), "(model):log")
    assert [row.label for row in inspection.rows] == ["(model):log"]


@pytest.mark.parametrize("name", ["type:x", "name:/x/", "!x", "*"])
def test_an_operation_of_a_layer_whose_name_is_a_pattern_is_run_with_that_layer(name: str) -> None:
    network = Written(lambda net, x: getattr(net, name)(x), **{name: Written(lambda _, x: x.relu())})
    assert [row.label for row in seen_again(network, pictures(1, 4), f"{name}:relu").rows] == [name]
