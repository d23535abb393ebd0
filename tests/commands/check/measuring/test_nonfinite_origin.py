"""Where NaN and Inf begin: the module that makes them is named, those that hand them on are not.

A NaN in one weight of whole networks is planted in `checkpoints/test_torchvision.py`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.commands.check.measuring.nonfinite_origin import locate_origin
from hookscope.inputs.batches import Batch
from hookscope.inspection.network import inspected_network
from hookscope.results.check import NonFiniteOrigin
from hookscope.results.inputs import InputRecord
from tests.commands.check.measuring.networks import measure_network
from tests.networks import MECHANISMS, NETWORKS, Written

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]

WANTED = {"non-finite-activation"}


def origin_in(network: nn.Module, *batches: Tensor) -> NonFiniteOrigin | None:
    return measure_network(network, *batches, wanted=WANTED).origin


def module_in(network: nn.Module, *batches: Tensor) -> NonFiniteOrigin | None:
    """Return the origin without its operation and the inputs that lead to it."""
    origin = origin_in(network, *batches)
    return origin and replace(origin, operation="", source="", inputs=(), input_count=0, position=())


def hook_counts(network: nn.Module) -> list[tuple[int, int]]:
    return [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in network.modules()]


@pytest.mark.parametrize("name", [name for name in MECHANISMS if name != "dtypes and odd values"])
def test_in_a_finite_network_of_any_kind_the_search_finds_nothing_and_leaves_nothing(name: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name].build()
    args = NETWORKS[name].args()
    subject = inspected_network(network)
    state = {key: value.clone() for key, value in network.state_dict().items() if isinstance(value, Tensor)}
    hooks = hook_counts(network)
    batch = Batch(args, (0,), (InputRecord("x", None, None, (), ()),))
    assert locate_origin(subject, [batch], seed=0) == (None, "")
    after = network.state_dict()
    assert all(torch.equal(after[key], value) for key, value in state.items())
    assert hook_counts(network) == hooks


def with_bias(layer: nn.Linear, value: float) -> nn.Linear:
    with torch.no_grad():
        layer.bias[0] = value
    return layer


def chain(*parts: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*parts)


INPUTS = torch.linspace(-1, 1, 8).reshape(2, 4)


def two(function: Callable[..., Any]) -> nn.Module:
    """Return a network of two layers whose code is a function of itself and its input."""
    return Written(function, first=nn.Linear(4, 4), second=nn.Linear(4, 4))


def attention_with_nan() -> nn.Module:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    attention.out_proj.weight.data[1, 2] = math.nan
    return Written(lambda net, x: net.attention(x / 0, x, x)[0], attention=attention)


def embedding(function: Callable[..., Any]) -> nn.Module:
    return Written(function, words=nn.Embedding(4, 3), norm=nn.LayerNorm(3))


class Mask(nn.Module):
    """Puts -Inf above the diagonal, as attention does for what is yet to come."""

    def forward(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)


NAN_LAYER = partial(with_bias, value=math.nan)
INDICES = torch.tensor([[0, 1], [2, 3]])
SHIFT = nn.Parameter(torch.tensor([0.0, math.nan, 0.0, 0.0]))

ORIGINS: dict[str, tuple[Any, ...]] = {
    "modules that overwrite their input do not hide who made it": (
        lambda: chain(nn.Linear(4, 4), nn.ReLU(inplace=True), NAN_LAYER(nn.Linear(4, 4)), nn.ReLU(inplace=True)),
        NonFiniteOrigin("2", "Linear", 2, 0, 8, ("2.bias",)),
    ),
    "an in-place module that makes NaN": (
        lambda: chain(nn.Linear(4, 4), Written(lambda _, x: x.sqrt_()), nn.Identity()),
        NonFiniteOrigin("1", "Written", 4, 0, 8),
    ),
    "code between modules blames the innermost module around it": (
        lambda: chain(nn.Linear(4, 4), two(lambda net, x: net.second(net.first(x) * math.inf)), nn.ReLU()),
        NonFiniteOrigin("1", "Written", 0, 8, 8, between=True),
    ),
    "code of the whole network": (
        lambda: two(lambda net, x: net.second(net.first(x) / 0)),
        NonFiniteOrigin("(model)", "Written", 0, 8, 8, between=True),
    ),
    "a parameter of a container is named with it": (
        lambda: chain(
            nn.Linear(4, 4), Written(lambda net, x: net.first(x + net.shift), first=nn.Linear(4, 4), shift=SHIFT)
        ),
        NonFiniteOrigin("1", "Written", 2, 0, 8, ("1.shift",), between=True),
    ),
    "a container of indices": (
        lambda: chain(embedding(lambda net, x: net.norm(net.words(x) / 0)), nn.Linear(3, 2)),
        NonFiniteOrigin("0", "Written", 0, 12, 12, between=True),
        INDICES,
    ),
    "a container that has ended is not blamed for what its parts are given later": (
        lambda: Written(
            lambda net, x: net.embed.norm(net.embed(x) / 0), embed=embedding(lambda net, x: net.norm(net.words(x)))
        ),
        NonFiniteOrigin("(model)", "Written", 0, 12, 12, between=True),
        INDICES,
    ),
    "parameters that a module inside uses are not the container's": (
        attention_with_nan,
        NonFiniteOrigin("(model)", "Written", 0, 24, 24, between=True),
        torch.ones(2, 3, 4),
    ),
    "parameters of modules elsewhere that nobody calls are not named": (
        lambda: Written(
            lambda net, x: net.first(x), first=NAN_LAYER(nn.Linear(4, 4)), first_aux=NAN_LAYER(nn.Linear(4, 4))
        ),
        NonFiniteOrigin("first", "Linear", 2, 0, 8, ("first.bias",)),
    ),
    "the call of a container has its number": (
        lambda: Written(
            lambda net, x: net.block(net.block(x) * 0),
            block=Written(lambda net, x: net.last(x / x.abs().sum()), last=nn.Identity()),
        ),
        NonFiniteOrigin("block#1", "Written", 8, 0, 8, between=True),
    ),
    "the call of a shared module has its number": (
        lambda: Written(lambda net, x: net.norm(net.norm(x) * 0), norm=Written(lambda _, x: x / x.abs().sum())),
        NonFiniteOrigin("norm#1", "Written", 8, 0, 8),
    ),
    # log(1 + x) does not exist below -1.
    "the second batch": (
        lambda: chain(nn.Identity(), Written(lambda _, x: x.log1p()), nn.ReLU()),
        NonFiniteOrigin("1", "Written", 1, 0, 4),
        INPUTS / 2,
        torch.tensor([[0.0, 0.0, -3.0, 0.0]]),
    ),
    "a mask that a softmax takes up is no fault": (
        lambda: chain(nn.Linear(4, 4), Mask(), nn.Softmax(-1), nn.Linear(4, 4)),
        None,
    ),
    "a layer with parameters that hands on a mask is no origin": (
        lambda: chain(nn.Linear(4, 4), Mask(), nn.PReLU(), nn.Softmax(-1)),
        None,
    ),
    "a softmax over nothing but masked values": (
        lambda: chain(nn.Linear(4, 4), Written(lambda _, x: torch.full_like(x, -math.inf)), nn.Softmax(-1)),
        NonFiniteOrigin("2", "Softmax", 8, 0, 8),
    ),
    "a mask before the origin does not hide it": (
        lambda: chain(nn.Linear(4, 4), Mask(), nn.Softmax(-1), NAN_LAYER(nn.Linear(4, 4)), nn.Softmax(-1)),
        NonFiniteOrigin("3", "Linear", 2, 0, 8, ("3.bias",)),
    ),
    "-Inf of a layer with parameters is no mask": (
        lambda: chain(with_bias(nn.Linear(4, 4), -math.inf), nn.ReLU()),
        NonFiniteOrigin("0", "Linear", 0, 2, 8, ("0.bias",)),
    ),
    "-Inf that the network returns": (lambda: chain(nn.Linear(4, 4), Mask()), NonFiniteOrigin("1", "Mask", 0, 5, 8)),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_what_makes_nan_or_inf_is_named_and_what_passes_it_on_is_not(name: str) -> None:
    build, expected, *inputs = ORIGINS[name]
    assert module_in(build(), *(inputs or [INPUTS])) == expected


def test_an_input_that_is_not_finite_blames_no_module() -> None:
    measured = measure_network(chain(nn.Linear(4, 4)), torch.tensor([[0.0, 1.0, 2.0, math.nan]] * 2), wanted=WANTED)
    assert measured.origin is None
    sentence = "Input 0 ('input 0'), at [3], has NaN or Inf itself, so no module is to blame."
    assert measured.unmeasured == {"non-finite-activation": sentence}
    assert sentence in measured.warnings


def test_what_raises_over_nan_is_traced_to_where_it_begins() -> None:
    def strict(net: Any, x: Tensor) -> Any:
        out = net.second(net.first(x))
        if out.isnan().any():
            raise ValueError("NaN")
        return out

    network = Written(strict, first=with_bias(nn.Linear(4, 4), math.nan), second=nn.Linear(4, 4))
    measured = measure_network(network, INPUTS, wanted=WANTED)
    assert measured.forward.failure is not None
    assert measured.origin.layer == "first"


def test_a_finite_network_has_no_origin_and_no_search_is_made_unless_it_is_wanted() -> None:
    measured = measure_network(chain(nn.Linear(4, 4), nn.ReLU()), INPUTS, wanted=WANTED)
    assert (measured.origin, measured.unmeasured) == (None, {})
    network = chain(with_bias(nn.Linear(4, 4), math.nan))
    assert measure_network(network, INPUTS, wanted={"forward"}).origin is None


def masked(function: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Return a network of a function of scores, 0, and which to keep: those above 0 in the input."""
    return Written(lambda net, x: net.last(function(0 * x, x > 0)), last=nn.Linear(4, 4))


def in_place(scores: Tensor, keep: Tensor) -> Tensor:
    scores[~keep] = -math.inf
    return scores.log_softmax(-1).exp()


# Row 0 keeps all, row 1 keeps some, row 2 nothing: a softmax over -Inf alone is 0/0 by its formula.
ROWS = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, -1.0, 1.0, -1.0], [-1.0, -1.0, -1.0, -1.0]])

OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "where": (lambda scores, keep: torch.where(keep, scores, -math.inf).softmax(1), "softmax"),
    "in place": (in_place, "log_softmax"),
    "a logarithm as a mask": (lambda scores, keep: (scores + keep.float().log()).softmax(1), "softmax"),
    "logsumexp": (
        lambda scores, keep: (s := scores.masked_fill(~keep, -math.inf)) - s.logsumexp(1, keepdim=True),
        "sub",  # logsumexp gives -Inf, and -Inf - -Inf is NaN
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_infinities_of_a_mask_are_not_blamed_for_the_nan_of_what_takes_them_up(name: str) -> None:
    function, operation = OPERATIONS[name]
    origin = origin_in(masked(function), ROWS)
    assert origin is not None
    assert origin.operation == f"(model):{operation}"
    assert origin.source.startswith("test_nonfinite_origin.py:")
    assert (origin.inputs, origin.input_count, origin.position) == (((2, "input 2"),), 3, ())


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda x: x.clamp(min=0).log() * 0, "log"),
        (lambda x: (x.clamp(min=0).log() + 1) * 0, "log"),  # and what hands it on is not
        (lambda x: (x * 3e38 * 3e38).softmax(1), "mul#1"),  # +Inf is an overflow, whatever takes it up
        (lambda x: (x - math.inf) * x.relu(), "sub"),
        (lambda x: x.sqrt(), "sqrt"),
    ],
)
def test_what_makes_other_infinities_is_blamed(function: Callable[[Tensor], Tensor], operation: str) -> None:
    origin = origin_in(Written(lambda net, x: net.last(function(x)), last=nn.Linear(4, 4)), ROWS)
    assert origin is not None
    assert origin.operation == f"(model):{operation}"


def test_a_softmax_module_is_named_after_a_mask_in_code() -> None:
    network = Written(
        lambda net, x: net.last(net.softmax((0 * x).masked_fill(x < 0, -math.inf))),
        softmax=nn.Softmax(1),
        last=nn.Linear(4, 4),
    )
    origin = origin_in(network, ROWS)
    assert origin is not None
    assert (origin.layer, origin.inputs, origin.operation) == ("softmax", ((2, "input 2"),), "")


def test_the_place_inside_an_input_is_told() -> None:
    # Token 3 of input 1 attends to nothing: of its output (5, 4), row 3 is 0/0.
    x = torch.ones(2, 5, 4)
    x[1, 3] = -1
    network = Written(
        lambda net, x: net.last(x.mean(2, keepdim=True).expand(-1, -1, 4).masked_fill(x < 0, -math.inf).softmax(2)),
        last=nn.Linear(4, 4),
    )
    origin = origin_in(network, torch.ones(3, 5, 4), x)
    assert origin is not None
    assert (origin.inputs, origin.input_count, origin.position) == (((4, "input 4"),), 2, (3, None))


def test_every_input_that_leads_to_it_is_told() -> None:
    origin = origin_in(Written(lambda _, x: x.log1p()), torch.tensor([[0.0, -2.0], [0.0, 0.0], [-3.0, 0.0]]))
    assert origin is not None
    assert (origin.inputs, origin.input_count, origin.position) == (((0, "input 0"), (2, "input 2")), 3, (1,))


def test_a_network_that_overwrites_its_input_is_searched_with_the_input_as_it_was() -> None:
    origin = origin_in(Written(lambda _, x: x.log1p_()), torch.tensor([[0.0, -2.0], [0.0, 0.0]]))
    assert origin is not None
    assert origin.inputs == ((0, "input 0"),)


def root_of(x: Tensor) -> Tensor:
    return (x - 2).sqrt()


@pytest.mark.parametrize(
    ("build", "layer"),
    [
        # What is not finite in the input is replaced, and a module then makes some of its own.
        (lambda: Written(lambda net, x: net.root(x.nan_to_num()), root=Written(lambda _, x: root_of(x))), "root"),
        (lambda: chain(Written(lambda _, x: x.nan_to_num()), nn.Identity(), Written(lambda _, x: root_of(x))), "2"),
        (
            lambda: Written(
                lambda net, x: net.block(torch.where(x.isnan(), 0, x)),
                block=Written(lambda net, x: net.last(root_of(x)), last=nn.Linear(4, 4)),
            ),
            "block",
        ),
    ],
)
def test_a_module_with_finite_inputs_is_blamed_though_an_input_of_the_network_is_not_finite(
    build: Callable[[], nn.Module], layer: str
) -> None:
    x = torch.zeros(2, 4)
    x[1, 2] = math.nan
    measured = measure_network(build(), x, wanted=WANTED)
    assert measured.origin is not None
    assert (measured.origin.layer, measured.unmeasured) == (layer, {})
    assert measured.origin.inputs == ((0, "input 0"), (1, "input 1"))
    assert "Input 1 ('input 1'), at [2], has NaN or Inf itself." in measured.warnings


def test_modules_that_hand_on_an_input_that_is_not_finite_are_not_blamed() -> None:
    x = torch.zeros(2, 4)
    x[1, 2] = math.inf
    network = chain(nn.Linear(4, 4), two(lambda net, x: net.second(net.first(x) * 2)), nn.Softmax(-1))
    measured = measure_network(network, x, wanted=WANTED)
    assert measured.origin is None
    assert measured.unmeasured == {
        "non-finite-activation": "Input 1 ('input 1'), at [2], has NaN or Inf itself, so no module is to blame."
    }
