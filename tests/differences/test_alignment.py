"""Layers find their partners."""

from collections import OrderedDict
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import hookscope
from hookscope.differences.alignment import Call, align, match_names
from hookscope.errors import LayerNotFoundError, NothingMatchedError, UsageError
from hookscope.models.construction import seeded
from hookscope.render.differences_text import answer


def call(name: str, kind: str, *shape: int, index: int = 0) -> Call:
    return Call((name, index), kind, (shape,), ())


def named(*names: str) -> dict[str, tuple[tuple[int, ...], ...]]:
    return dict.fromkeys(names, ())


def test_names_match_exactly_first_and_then_without_the_prefixes_of_wrappers() -> None:
    assert match_names(named("", "a", "b.c"), named("", "b.c", "a")) == {
        "": ("", "name"),
        "a": ("a", "name"),
        "b.c": ("b.c", "name"),
    }
    wrapped = match_names(named("conv", "block.fc"), named("module.conv", "module.block.fc"))
    assert wrapped == {"conv": ("module.conv", "prefix"), "block.fc": ("module.block.fc", "prefix")}
    assert match_names(named("model.conv", "model.fc"), named("conv", "fc"))["model.fc"] == ("fc", "prefix")
    inside = match_names(named("a.conv", "a.fc"), named("a._orig_mod.conv", "a._orig_mod.fc"))
    assert inside["a.conv"] == ("a._orig_mod.conv", "prefix")


def test_a_prefix_does_not_join_layers_of_other_shapes() -> None:
    assert match_names({"fc": ((2, 3),)}, {"head.fc": ((4, 3),)}) == {}


def test_a_map_goes_before_names_and_keeps_what_its_stars_stand_for() -> None:
    a, b = named("enc.0.conv", "enc.1.conv", "head"), named("back.0.c.conv", "back.1.c.conv", "head", "enc.0.conv")
    matched = match_names(a, b, ["enc.*.conv=back.*.c.conv"])
    assert matched["enc.0.conv"] == ("back.0.c.conv", "map")
    assert matched["enc.1.conv"] == ("back.1.c.conv", "map")
    assert matched["head"] == ("head", "name")


@pytest.mark.parametrize("text", ["enc.*", "=b", "a=", "a.*=b", "a=b.*"])
def test_a_malformed_map_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="as many stars on both sides"):
        match_names(named("a"), named("b"), [text])


def test_a_map_that_matches_nothing_names_the_side() -> None:
    with pytest.raises(LayerNotFoundError, match=r"no layer of A\. Nearest: 'encoder'"):
        match_names(named("encoder"), named("b"), ["encodr=b"])
    with pytest.raises(LayerNotFoundError, match=r"no layer of B\. Nearest: 'decoder'"):
        match_names(named("encoder"), named("decoder"), ["encoder=decodr"])


def test_what_names_do_not_match_is_aligned_in_order_by_type_and_shapes() -> None:
    a = [call("conv", "Conv2d", 1, 4), call("relu", "ReLU", 1, 4), call("extra", "Tanh", 1, 9), call("fc", "Linear", 2)]
    b = [call("c", "Conv2d", 1, 4), call("norm", "Tanh", 1, 4), call("act", "ReLU", 1, 4), call("head", "Linear", 2)]
    aligned, matched = align(a, b, {})
    assert aligned == {("conv", 0): ("c", 0), ("relu", 0): ("act", 0), ("fc", 0): ("head", 0)}
    assert matched == set()


def test_pairs_by_name_hold_the_alignment() -> None:
    a = [call("x", "ReLU", 1), call("mid", "Conv2d", 1), call("y", "ReLU", 1)]
    b = [call("mid", "Conv2d", 1), call("p", "ReLU", 1), call("q", "ReLU", 1)]
    aligned, matched = align(a, b, {"mid": ("mid", "name")})
    assert matched == {("mid", 0)}
    assert aligned == {("y", 0): ("p", 0)}


def small() -> nn.Module:
    torch.manual_seed(0)
    parts = OrderedDict(conv=nn.Conv2d(3, 4, 3), relu=nn.ReLU(), flat=nn.Flatten(), fc=nn.Linear(144, 5))
    return nn.Sequential(parts)


class Wrapped(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Any:
        return self.network(x)


@pytest.mark.parametrize(
    "wrap", [Wrapped, lambda each: Wrapped(Wrapped(each)), nn.DataParallel], ids=["once", "twice", "DataParallel"]
)
def test_a_wrapped_network_is_its_own_partner(wrap: Any) -> None:
    result = hookscope.diff(small(), wrap(small()).eval(), torch.randn(2, 3, 8, 8))
    assert [row.origin for row in result.rows] == ["equal"] * 4
    assert result.unmatched == ()


def test_a_compiled_part_is_its_own_partner() -> None:
    network = small()
    network.conv = torch.compile(network.conv, backend="eager")
    result = hookscope.diff(small(), network, torch.randn(2, 3, 8, 8))
    assert (result.rows[0].label, result.rows[0].origin) == ("conv", "equal")
    assert result.first_differences == ()


def test_renamed_layers_are_aligned_by_order_and_a_map_says_so_itself() -> None:
    renamed = nn.Sequential(OrderedDict(zip(["c1", "act", "flatten", "head"], small().children(), strict=True)))
    with torch.no_grad():
        renamed.head.weight *= 2
    pictures = torch.randn(2, 3, 8, 8)
    result = hookscope.diff(small(), renamed, pictures)
    assert [(row.label, row.label_b, row.matched) for row in result.rows] == [
        ("conv", "c1", "order"),
        ("relu", "act", "order"),
        ("flat", "flatten", "order"),
        ("fc", "head", "order"),
    ]
    assert [each.layer for each in result.first_differences] == ["fc"]
    assert result["head"] is result["fc"]
    assert hookscope.diff(small(), renamed, pictures, map="conv=c1")["conv"].matched == "map"


def test_what_has_no_partner_is_listed_with_the_reason() -> None:
    longer = nn.Sequential(OrderedDict([*small().named_children(), ("soft", nn.Softmax(1))]))
    result = hookscope.diff(small(), longer, torch.randn(2, 3, 8, 8))
    assert [(each.side, each.label, each.reason) for each in result.unmatched] == [("B", "soft", "A has no such layer")]
    result = hookscope.diff(longer, small(), torch.randn(2, 3, 8, 8))
    assert [(each.side, each.label, each.reason) for each in result.unmatched] == [("A", "soft", "B has no such layer")]


def test_networks_that_have_nothing_in_common_are_an_error() -> None:
    first = nn.Sequential(OrderedDict(a=nn.Linear(6, 5), b=nn.Tanh()))
    other = nn.Sequential(OrderedDict(c=nn.Linear(6, 3), d=nn.Linear(3, 5, bias=False)))
    with pytest.raises(NothingMatchedError, match=r"no layer of A \(Sequential, \d modules?\) has a partner .+`map`"):
        hookscope.diff(first, other, torch.randn(1, 6))


@pytest.mark.exhaustive
def test_torchvisions_and_timms_resnet50_are_aligned_layer_by_layer() -> None:
    with seeded(0):
        ours, theirs = torchvision.models.resnet50().eval(), timm.create_model("resnet50", pretrained=False).eval()
    theirs.load_state_dict(ours.state_dict())
    result = hookscope.diff(ours, theirs, torch.randn(1, 3, 64, 64))
    assert result.first_differences == ()
    for row in result.rows:
        block, _, part = row.layer.rpartition(".")
        if part.startswith("relu") and block:
            number = int(row.label.partition("#")[2] or 0) + 1
            assert (row.label_b, row.matched) == (f"{block}.act{number}", "order")
        elif part == "relu":
            assert row.label_b == "act1"
        elif part == "avgpool":
            assert row.label_b.startswith("global_pool")
        else:
            assert (row.label_b, row.matched) == (row.label, "name")
    assert {each.label for each in result.unmatched if each.side == "A"} == set()
    assert len(result.rows) == 53 + 53 + 49 + 3


class Stage(nn.Module):
    """A block with one activation for all, as torchvision has, or one for each, as timm has."""

    def __init__(self, shares: bool, inserted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.shares = shares
        for name in ["relu"] if shares else ["act1", "act2"]:
            self.add_module(name, nn.ReLU())
        if inserted:
            self.extra = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = ("relu", "relu") if self.shares else ("act1", "act2")
        x = self.get_submodule(first)(self.conv1(x))
        if hasattr(self, "extra"):
            x = self.extra(x)
        return self.get_submodule(second)(self.conv2(x))


def test_blocks_that_are_selected_have_partners_too_where_layers_are_named_otherwise() -> None:
    one, other = (nn.Sequential(OrderedDict(stage=Stage(shares))) for shares in (True, False))
    result = hookscope.diff(one, other, torch.randn(1, 3, 4, 4), layer=["stage", "!conv"])
    assert [(row.label, row.label_b) for row in result.rows] == [
        ("stage.relu", "stage.act1"),
        ("stage.relu#1", "stage.act2"),
        ("stage", "stage"),
    ]
    assert result.unmatched == ()


def test_a_layer_that_only_one_side_calls_is_named_where_the_difference_begins() -> None:
    networks = [nn.Sequential(OrderedDict(stage=Stage(True, inserted))) for inserted in (False, True)]
    result = hookscope.diff(*networks, torch.randn(1, 3, 4, 4))
    sentence = answer(result)[0]
    assert sentence.startswith("First difference in stage, in its own code between the layers that it calls:")
    assert sentence.endswith(" Only B calls stage.extra there.")


def test_a_network_that_is_given_compiled_is_said_to_run_as_written() -> None:
    result = hookscope.diff(small(), torch.compile(small(), backend="eager"), torch.randn(2, 3, 8, 8))
    assert result.notes == ("B is compiled, and runs uncompiled here: `compile_b` compares what is compiled.",)
