"""Layers find their partners."""

import copy
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import hookscope
from hookscope.commands.diff.alignment import Call, align, match_names, matching_names
from hookscope.commands.diff.describe import answer
from hookscope.errors import LayerNotFoundError, NothingMatchedError, UsageError
from hookscope.models.construction import seeded


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


@pytest.mark.parametrize(
    ("a", "b", "places"),
    [
        (["x", "y"], ["y", "x"], [1, 0]),
        (["x", "y"], ["z", "x"], [1, 0]),  # z is all that is left for y
        (["[0]", "[1]"], ["x", "y"], [0, 1]),
        (["x", "y", "z"], ["z"], [2]),
        (["x"], ["x", "y"], [0, None]),
    ],
)
def test_tensors_are_paired_by_name_and_the_rest_in_order(a: list[str], b: list[str], places: list[int | None]) -> None:
    assert matching_names(a, b) == places


def test_a_prefix_does_not_join_layers_of_other_shapes() -> None:
    assert match_names({"fc": ((2, 3),)}, {"head.fc": ((4, 3),)}) == {}


def test_a_map_goes_before_names_and_keeps_what_its_stars_stand_for() -> None:
    a, b = named("enc.0.conv", "enc.1.conv", "head"), named("back.0.c.conv", "back.1.c.conv", "head", "enc.0.conv")
    matched = match_names(a, b, ["enc.*.conv=back.*.c.conv"])
    assert matched["enc.0.conv"] == ("back.0.c.conv", "map")
    assert matched["enc.1.conv"] == ("back.1.c.conv", "map")
    assert matched["head"] == ("head", "name")


@pytest.mark.parametrize("text", ["enc.*", "=b", "a=b.*"])
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
    assert align(a, b, {}) == {("conv", 0): ("c", 0), ("relu", 0): ("act", 0), ("fc", 0): ("head", 0)}


def test_pairs_by_name_hold_the_alignment() -> None:
    a = [call("x", "ReLU", 1), call("mid", "Conv2d", 1), call("y", "ReLU", 1)]
    b = [call("mid", "Conv2d", 1), call("p", "ReLU", 1), call("q", "ReLU", 1)]
    assert align(a, b, {"mid": ("mid", "name")}) == {("y", 0): ("p", 0)}


def test_of_pairs_by_name_that_cross_the_longest_run_in_order_holds_the_alignment() -> None:
    """`x` runs before q and r in A, `y` behind them in B."""
    p, q, r = (call(name, "Conv2d", 1) for name in "pqr")
    others = [q, r, call("y", "ReLU", 1), p]
    assert align([call("x", "ReLU", 1), p, q, r], others, {name: (name, "name") for name in "pqr"}) == {}


def test_what_returns_its_input_is_no_partner_by_order() -> None:
    same = replace(call("same", "Identity", 1, 4), is_unchanged=True)
    assert align([same], [call("act", "ReLU", 1, 4)], {}) == {}


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


@pytest.mark.parametrize("wrap", [lambda each: Wrapped(Wrapped(each)), nn.DataParallel], ids=["twice", "DataParallel"])
def test_a_wrapped_network_is_its_own_partner(wrap: Any) -> None:
    result = hookscope.diff(small(), wrap(small()).eval(), torch.randn(2, 3, 8, 8))
    assert [row.origin for row in result.rows] == ["equal"] * 4
    assert result.unmatched == ()


NUMBERED = [
    lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
    lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)),
    lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)),
]


@pytest.mark.parametrize("build", NUMBERED)
@pytest.mark.parametrize("wrapped", ["A", "B"])
def test_a_wrapper_is_stripped_though_its_name_is_that_of_a_layer_too(build: Any, wrapped: str) -> None:
    torch.manual_seed(0)
    network = build()
    other = copy.deepcopy(network)
    faulty = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)][-1]
    with torch.no_grad():
        other.get_parameter(f"{faulty}.weight")[0] *= 1.5
    one, other = (nn.Sequential(network), other) if wrapped == "A" else (network, nn.Sequential(other))
    result = hookscope.diff(one, other, torch.randn(3, 4))
    names = [(row.label, row.label_b) if wrapped == "A" else (row.label_b, row.label) for row in result.rows]
    assert all(behind == f"0.{name}" for behind, name in names)
    assert (len(names), result.unmatched) == (3, ())
    assert [first.layer.removeprefix("0." * (wrapped == "A")) for first in result.first_differences] == [faulty]


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
    assert [difference.layer for difference in result.first_differences] == ["fc"]
    assert result["head"] is result["fc"]
    assert hookscope.diff(small(), renamed, pictures, map="conv=c1")["conv"].matched == "map"


def test_what_has_no_partner_is_listed_with_the_reason() -> None:
    longer = nn.Sequential(OrderedDict([*small().named_children(), ("soft", nn.Softmax(1))]))
    result = hookscope.diff(small(), longer, torch.randn(2, 3, 8, 8))
    assert [(row.side, row.label, row.reason) for row in result.unmatched] == [("B", "soft", "A has no such layer")]
    result = hookscope.diff(longer, small(), torch.randn(2, 3, 8, 8))
    assert [(row.side, row.label, row.reason) for row in result.unmatched] == [("A", "soft", "B has no such layer")]


class Repeating(nn.Module):
    """Calls `f` twice for large inputs, then a layer that is named anew in each network."""

    def __init__(self, last: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f, self.last = nn.Linear(4, 4), last
        self.add_module(last, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        for _ in range(2 if float(x.max()) > 5 else 1):
            x = self.f(x)
        return self.get_submodule(self.last)(x)


def test_a_call_that_only_later_batches_make_is_paired_by_name_beside_layers_paired_by_order() -> None:
    first, other = Repeating("u"), Repeating("v")
    with torch.no_grad():
        other.f.bias[0] += 1
    inputs = torch.tensor([[0.0] * 4, [9.0] * 4])
    result = hookscope.diff(first, other, inputs, batch_size=1)
    assert [(row.label, row.label_b) for row in result.rows] == [("f", "f"), ("u", "v"), ("f#1", "f#1")]
    assert result.unmatched == ()
    twice, twice_b = (f(f(inputs[1:])).detach() for f in (first.f, other.f))
    assert result["f#1"].relative_l2 == pytest.approx(float((twice - twice_b).norm() / twice.norm()), rel=1e-6)


def test_networks_that_have_nothing_in_common_are_an_error() -> None:
    first = nn.Sequential(OrderedDict(a=nn.Linear(6, 5), b=nn.Tanh()))
    other = nn.Sequential(OrderedDict(c=nn.Linear(6, 3), d=nn.Linear(3, 5, bias=False)))
    with pytest.raises(NothingMatchedError, match=r"no layer of A \(Sequential, 2 modules\) that .+ a partner .+`map`"):
        hookscope.diff(first, other, torch.randn(1, 6))
    with pytest.raises(NothingMatchedError, match="that changes its input"):
        hookscope.diff(nn.Sequential(nn.Identity()), "same", torch.randn(1, 6))


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
    assert {row.label for row in result.unmatched if row.side == "A"} == set()
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


class Adapted(nn.Module):
    """A linear layer and a term of low rank, as LoRA adds it, which is 0 at first."""

    def __init__(self, base: nn.Linear, changes: bool) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        nn.init.constant_(self.up.weight, 0.3 * changes)

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.base(x) + self.up(self.down(x))
        return values


class Int8(nn.Module):
    """A linear layer with weights of 8 bits, between two scalings that are modules too."""

    def __init__(self, base: nn.Linear, changes: bool) -> None:
        super().__init__()
        self.before, self.after, self.bias = nn.Identity(), nn.Identity(), base.bias
        self.step = float(base.weight.detach().abs().max()) / (7 if changes else 2**30)
        self.levels = (base.weight.detach().double() / self.step).round()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(
            nn.functional.linear(self.before(x * 1.0), (self.levels * self.step).float(), self.bias) * 1.0
        )


def layers_of_8() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 4)).eval()


@pytest.mark.parametrize(
    ("wrap", "around"),
    [(Adapted, nn.Sequential), (Int8, nn.Sequential), (Adapted, Wrapped)],  # a prefix counts if shapes are the same
    ids=["a low-rank term", "8 bits", "inside another module"],
)
@pytest.mark.parametrize("changes", [True, False], ids=["changed", "the same"])
def test_a_layer_is_compared_with_the_module_of_its_name_whatever_is_inside(
    wrap: Any, around: Any, changes: bool
) -> None:
    plain, wrapped = layers_of_8(), layers_of_8()
    wrapped[2] = wrap(wrapped[2], changes).eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        before = plain[:2](x)
        one, other = plain[2](before), wrapped[2](before)
    outer = Wrapped(wrapped) if around is Wrapped else wrapped
    for a, b, label in ((plain, outer, "2"), (outer, plain, "network.2" if around is Wrapped else "2")):
        result = hookscope.diff(a, b, x)
        row = result[label]
        assert len(result.rows) == 5
        assert {row.kind, row.kind_b} == {"Linear", wrap.__name__}
        assert [difference.row for difference in result.first_differences] == ([row.label] if changes else [])
        assert row.measures is not None
        reference = one if a is plain else other
        assert row.measures.relative_l2 == pytest.approx(float((one - other).norm() / reference.norm()), rel=1e-4)
        sentences = " ".join(answer(result))
        assert not any(word in sentences for word in ("calls", "own code", "there"))
        assert (", its inputs are equal." in sentences) == changes


def test_a_layer_that_runs_past_its_wrapper_keeps_its_partner_by_order() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = layers_of_8()
            self.parts[2] = Adapted(self.parts[2], changes=True)

        def forward(self, x: Tensor) -> Tensor:
            first, relu, second, _, last = self.parts
            return last(relu(second.base(relu(first(x)))))

    class Whole(Fused):
        def __init__(self) -> None:
            super().__init__()
            self.parts = layers_of_8()

        def forward(self, x: Tensor) -> Tensor:
            first, relu, second, _, last = self.parts
            return last(relu(second(relu(first(x)))))

    result = hookscope.diff(Whole(), Fused(), torch.randn(3, 8))
    assert [(row.label, row.label_b) for row in result.rows][2] == ("parts.2", "parts.2.base")
    assert result.first_differences == ()


def test_a_layer_that_returns_its_input_on_one_side_is_still_its_namesakes_partner() -> None:
    one, other = layers_of_8(), nn.Sequential(*layers_of_8(), nn.Softmax(1))
    one[1], other[1] = nn.Tanh(), nn.Identity()
    result = hookscope.diff(one, other, torch.randn(3, 8))
    assert (result["1"].label_b, result["1"].origin) == ("1", "begins")
    assert [(row.side, row.label, row.reason) for row in result.unmatched] == [("B", "5", "A has no such layer")]


def test_a_layer_that_returns_fewer_tensors_is_not_said_to_be_called_on_one_side_alone() -> None:
    class Two(nn.Module):
        def __init__(self, both: bool) -> None:
            super().__init__()
            self.both = both

        def forward(self, x: Tensor) -> Any:
            return (x * 2, x * 3) if self.both else (x * 2,)

    class Net(nn.Module):
        def __init__(self, both: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.two, self.fc = Two(both), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return self.fc(sum(self.two(x)))

    result = hookscope.diff(Net(both=True), Net(both=False), torch.randn(3, 4))
    assert [(row.label, row.reason) for row in result.unmatched] == [("two[1]", "B returns fewer tensors there")]
    assert not any("calls" in sentence.partition("layers that it calls")[2] for sentence in answer(result))


def test_stored_runs_say_that_a_wrapped_layer_was_not_compared(tmp_path: Path) -> None:
    plain, wrapped = layers_of_8(), layers_of_8()
    wrapped[0] = Adapted(wrapped[0], changes=True).eval()
    x = torch.randn(3, 8)
    folders = [
        str(hookscope.activations(case, x).save(tmp_path / name)) for name, case in (("a", plain), ("b", wrapped))
    ]
    result = hookscope.diff(*folders)
    assert [row.label for row in result.rows] == ["1", "2", "3", "4"]
    assert [row.label for row in result.unmatched] == ["0", "0.base", "0.down", "0.up"]
    assert answer(result)[0].endswith(" 0 is not compared: B's run only has rows of its parts.")


def test_a_network_that_is_given_compiled_is_said_to_run_as_written() -> None:
    result = hookscope.diff(small(), torch.compile(small(), backend="eager"), torch.randn(2, 3, 8, 8))
    assert result.notes == ("B is compiled, and runs uncompiled here: `compile_b` compares what is compiled.",)
