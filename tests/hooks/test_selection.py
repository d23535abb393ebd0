"""What `--layer` selects."""

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from hookscope.errors import LayerNotFoundError, UsageError
from hookscope.hooks.selection import module_index, owned_parameters, select_layers, unwrap
from tests.networks import Apply, Written


def network() -> nn.Module:
    """Return a small network; its leaves run in the order stem.conv, stem.norm, head.0, head.conv, head.act."""
    head = nn.Sequential(OrderedDict([("0", nn.Conv2d(4, 4, 1)), ("conv", nn.Linear(4, 4)), ("act", nn.ReLU())]))
    stem = nn.Sequential(OrderedDict([("conv", nn.Conv2d(3, 4, 1)), ("norm", nn.BatchNorm2d(4))]))
    return nn.Sequential(OrderedDict([("head", head), ("stem", stem)]))


LEAVES = ["head.0", "head.conv", "head.act", "stem.conv", "stem.norm"]
ORDER = ["stem.conv", "stem.norm", "stem", "head.0", "head.conv", "head.act", "head", ""]


def names(*patterns: str, model: nn.Module | None = None, order: list[str] | None = None) -> list[str]:
    expected = ORDER if order is None else order
    return list(select_layers(model or network(), patterns, lambda: expected))


@pytest.fixture(scope="module")
def resnet34() -> nn.Module:
    with torch.device("meta"):
        return torchvision.models.resnet34()


# --- without a pattern ---


def scaled(inner: nn.Module) -> nn.Module:
    """Return what owns a parameter, and calls a module."""
    return Written(lambda net, x: net.inner(x) * net.gain, gain=nn.Parameter(torch.ones(1)), inner=inner)


def weighted() -> nn.Module:
    """Return what owns its parameters in lists, and calls nothing."""
    weights = nn.ParameterList([nn.Parameter(torch.ones(2, 2))])
    named = nn.ParameterDict({"bias": nn.Parameter(torch.ones(2))})
    parts = {"weights": weights, "named": named, "spare": nn.ModuleList()}
    return Written(lambda net, x: x @ net.weights[0] + net.named["bias"], **parts)


def shared() -> nn.Module:
    linear = nn.Linear(2, 2)
    return nn.Sequential(OrderedDict([("encoder", linear), ("act", nn.ReLU()), ("decoder", linear)]))


def with_a_place_for_a_child() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0].register_module("later", None)
    return model


def containing_itself() -> nn.Module:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(1, 1)))
    model[1].shortcut = model[0]
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (network(), LEAVES),
        (nn.Sequential(scaled(nn.Sequential(nn.ReLU(), nn.Tanh()))), ["0", "0.inner.0", "0.inner.1"]),
        (with_a_place_for_a_child(), ["0", "1"]),
        (nn.Sequential(OrderedDict([("shortcut", nn.Sequential())])), ["shortcut"]),
        (shared(), ["encoder", "act"]),
        (containing_itself(), ["0", "1.0"]),
    ],
    ids=["leaves", "an owner of parameters", "a place for a child", "an empty container", "shared", "a loop"],
)
def test_without_a_pattern_leaves_and_owners_of_parameters_are_meant(model: nn.Module, expected: list[str]) -> None:
    assert names(model=model) == expected


def test_lists_of_modules_and_of_parameters_are_not_meant_but_what_they_are_for_is() -> None:
    lists = {"empty": nn.ModuleList(), "keyed": nn.ModuleDict({"a": nn.ReLU()})}
    model = nn.Sequential(OrderedDict([("blocks", nn.Sequential(weighted())), *lists.items()]))
    assert names(model=model) == ["blocks.0", "keyed.a"]
    assert sum(owned_parameter.numel() for owned_parameter in owned_parameters(model.get_submodule("blocks.0"))) == 6


def test_attention_is_meant_and_the_projection_that_it_does_not_call_is_not() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2))
    assert names(model=model) == ["0"]
    assert names("out_proj", model=model) == ["0.out_proj"]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    "norm",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.weight_norm,  # the two that work by hooks
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_parametrised_layer_is_one_layer_and_its_parametrisation_none(
    norm: Callable[..., nn.Module], bias: bool
) -> None:
    layer = norm(nn.Conv2d(2, 2, 1, bias=bias))
    assert names(model=nn.Sequential(layer, nn.ReLU())) == ["0", "1"]
    assert owned_parameters(layer) == list(layer.parameters())


def test_a_module_that_is_a_layer_and_a_parametrisation_is_a_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    register_parametrization(model[0], "weight", Apply(torch.exp))
    assert names(model=model) == ["0", "1"]
    model.append(model.get_submodule("0.parametrizations.weight.0"))
    assert names(model=model) == ["0", "0.parametrizations.weight.0", "1"]


def test_a_quantised_layer_is_meant_and_its_packed_weights_are_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still what quantised checkpoints hold
        quantised = torch.ao.nn.quantized.Linear(2, 2)
    assert names(model=nn.Sequential(quantised, nn.ReLU())) == ["0", "1"]


# --- plain words, globs, expressions ---


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        # A plain word: part of the name or of the class name, whatever the case.
        ("CONV", ["head.0", "head.conv", "stem.conv"]),
        ("stem", ["stem", "stem.conv", "stem.norm"]),
        ("relu", ["head.act"]),
        ("sequential", ["", "head", "stem"]),
        # A glob: the whole of the name or of the class name, whatever the case.
        ("conv*", ["head.0", "stem.conv"]),
        ("head.?", ["head.0"]),
        ("*", ["", "head", "head.0", "head.conv", "head.act", "stem", "stem.conv", "stem.norm"]),
        # A regular expression: found anywhere in either, in the case it is written in.
        ("/conv/", ["head.conv", "stem.conv"]),
        ("/Conv/", ["head.0", "stem.conv"]),
        (r"/^head\.\w+$/", ["head.0", "head.conv", "head.act"]),
        ("/^(ReLU|Linear)$/", ["head.conv", "head.act"]),
        ("/(?i)RELU/", ["head.act"]),
        # Narrowed to one of the two.
        ("type:conv", ["head.0", "stem.conv"]),
        ("name:relu*", None),
        ("type:/^Linear$/", ["head.conv"]),
    ],
)
def test_a_pattern_matches_names_and_types(pattern: str, expected: list[str] | None) -> None:
    if expected is None:
        with pytest.raises(LayerNotFoundError):
            names(pattern)
    else:
        assert names(pattern) == expected


class Padded(nn.Conv2d):
    """A convolution that pads by a module in it, as those with "same" padding do."""

    def __init__(self) -> None:
        super().__init__(3, 4, 3)
        self.border = nn.ZeroPad2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.border(x))


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["conv"], ["stage.conv"]),
        (["conv", "border"], ["stage.conv", "stage.conv.border"]),
        (["ZeroPad"], ["stage.conv.border"]),
        (["*conv*"], ["stage.conv", "stage.conv.border"]),
        (["stage"], ["stage", "stage.conv", "stage.conv.border", "stage.act"]),
        (["stage", "!conv"], ["stage", "stage.act"]),
    ],
)
def test_a_word_means_a_layer_without_the_padding_in_it(patterns: list[str], expected: list[str]) -> None:
    stage = nn.Sequential(OrderedDict([("conv", Padded()), ("act", nn.ReLU())]))
    assert names(*patterns, model=nn.Sequential(OrderedDict([("stage", stage)]))) == expected


# --- several patterns, exclusion ---


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["relu", "norm"], ["head.act", "stem.norm"]),
        (["conv", "conv"], ["head.0", "head.conv", "stem.conv"]),
        (["conv", "!stem"], ["head.0", "head.conv"]),
        (["!conv"], ["head.act", "stem.norm"]),
        (["head", "!head.?"], ["head", "head.conv", "head.act"]),
        (["conv", "!@0"], ["head.0", "head.conv"]),
        (["!conv@-1"], ["head.0", "head.act", "stem.conv", "stem.norm"]),
    ],
)
def test_patterns_add_up_and_exclusions_take_away(patterns: list[str], expected: list[str]) -> None:
    assert names(*patterns) == expected


def test_an_exclusion_that_leaves_nothing_is_an_error() -> None:
    with pytest.raises(LayerNotFoundError, match="leave no layer") as caught:
        names("conv", "!conv")
    assert "'conv', '!conv'" in str(caught.value)


# --- positions ---


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("conv@0", "stem.conv"),
        ("conv@-1", "head.conv"),
        ("type:conv@1", "head.0"),
        ("/Conv/@-1", "head.0"),
        ("@0", "stem.conv"),
        ("@-1", "head.act"),
        ("head@-1", "head"),
        ("head@0", "head.0"),
        ("*@-1", ""),
    ],
)
def test_a_position_counts_matches_in_execution_order(pattern: str, expected: str) -> None:
    assert names(pattern) == [expected]


def test_a_position_alone_counts_among_what_is_meant_without_a_pattern() -> None:
    model = nn.Sequential(nn.Sequential(scaled(nn.ReLU())))
    order = ["0.0.inner", "0.0", "0", ""]
    assert [names(f"@{at}", model=model, order=order) for at in (0, -1)] == [["0.0.inner"], ["0.0"]]


@pytest.mark.parametrize("pattern", ["conv@3", "conv@-4", "@5", "@-6"])
def test_a_position_out_of_range_says_which_there_are(pattern: str) -> None:
    with pytest.raises(LayerNotFoundError) as caught:
        names(pattern)
    count = 3 if pattern.startswith("conv") else 5
    assert f"{count} matching layers ran" in str(caught.value)
    assert f"from {-count} to {count - 1}" in str(caught.value)


def test_a_position_counts_only_what_runs() -> None:
    assert names("conv@0", order=["head.conv", "head", ""]) == ["head.conv"]
    with pytest.raises(LayerNotFoundError, match="no matching layer runs") as caught:
        names("relu@0", order=["stem.conv", ""])
    assert "-1" not in str(caught.value)
    with pytest.raises(UsageError, match="'conv@1' selects by execution order"):
        select_layers(network(), ["conv@1"])


def test_the_execution_order_is_only_asked_for_when_needed_and_once() -> None:
    asked: list[int] = []

    def order() -> list[str]:
        asked.append(1)
        return ORDER

    select_layers(network(), ["conv", "!relu"], order)
    assert not asked
    select_layers(network(), ["conv@0", "@-1", "!norm@0"], order)
    assert len(asked) == 1


def test_an_at_sign_inside_an_expression_is_no_position() -> None:
    model = nn.Sequential(OrderedDict([("relu@1", nn.ReLU()), ("relu", nn.ReLU())]))
    assert names("/relu@1/", model=model) == ["relu@1"]


# --- shared modules ---


@pytest.mark.parametrize("pattern", ["decoder", "name:dec*"])
def test_a_shared_module_is_found_under_any_name_and_listed_under_its_first(pattern: str) -> None:
    assert names(pattern, model=shared()) == ["encoder"]


def test_excluding_one_name_of_a_shared_module_excludes_it() -> None:
    assert names("!decoder", model=shared()) == ["act"]


def test_the_index_holds_each_module_once_with_its_further_names() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    model = nn.ModuleDict({"a": inner, "b": nn.ModuleList([inner, nn.ReLU()])})
    modules, aliases = module_index(model)
    assert modules == dict(model.named_modules())
    assert aliases == {"a": ("b.0",), "a.0": ("b.0.0",)}


# --- what is wrong is said ---


@pytest.mark.parametrize(
    ("pattern", "nearest"), [("layr4", "'layer4'"), ("Conv3d", "'Conv2d'"), ("name:layer4.0.con1", "'layer4.0.conv1'")]
)
def test_no_match_names_the_nearest_candidates(resnet34: nn.Module, pattern: str, nearest: str) -> None:
    with pytest.raises(LayerNotFoundError) as caught:
        select_layers(resnet34, ["conv", pattern])
    message = str(caught.value)
    assert message.startswith(f"No layer matches {pattern!r}. Nearest: ")
    assert nearest in message
    assert "hookscope layers MODEL" in message
    assert "\n" not in message
    assert caught.value.exit_code == 5


def test_a_pattern_that_names_a_torch_function_leads_to_the_operation() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3))
    with pytest.raises(
        LayerNotFoundError, match=r"No layer matches 'softmax'\. For the operation: --layer op:softmax\. "
    ):
        select_layers(network, ["softmax"])
    with pytest.raises(LayerNotFoundError) as caught:
        select_layers(network, ["device"])  # a name in torch, but no operation
    assert "op:" not in str(caught.value)


@pytest.mark.parametrize("pattern", ["", "!", "name:", "type:", "!name:"])
def test_an_empty_pattern_is_a_usage_error(pattern: str) -> None:
    with pytest.raises(UsageError, match=r"is empty: give a part of a layer's name or type") as caught:
        names(pattern)
    assert repr(pattern) in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("pattern", ["/(/", "/[/", "!/*a/", "type:/a{2,1}/", "/(?P<x/@1", "/a{99999999999}/"])
def test_a_malformed_expression_is_a_usage_error(pattern: str) -> None:
    with pytest.raises(UsageError, match="is not a regular expression") as caught:
        names(pattern)
    assert repr(pattern) in str(caught.value)
    assert isinstance(caught.value.__cause__, re.error | OverflowError)


@pytest.mark.filterwarnings("ignore:Possible")  # what `re` thinks of [[
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="!@/*?[]()|.\\^$+-{}0123 anmetyp:convhd", max_size=12))
def test_any_text_selects_or_says_what_is_wrong(text: str) -> None:
    model = network()
    try:
        selected = select_layers(model, [text], lambda: ORDER)
    except (LayerNotFoundError, UsageError):
        return
    assert selected
    assert set(selected) <= {name for name, _ in model.named_modules()}


# --- wrapped networks ---


def test_wrappers_are_taken_off() -> None:
    inner = nn.Tanh()
    wrapped: nn.Module = nn.DataParallel(inner)
    compiled = torch.compile(wrapped, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert unwrap(inner) is inner
    assert unwrap(wrapped) is inner
    assert unwrap(compiled) is inner
    assert unwrap(nn.DataParallel(compiled)) is inner


def test_only_the_wrappers_of_the_whole_network_are_taken_off() -> None:
    model = nn.Sequential(nn.DataParallel(nn.Tanh()))
    assert unwrap(model) is model
