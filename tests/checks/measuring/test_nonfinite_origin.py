"""Where NaN and Inf begin: the module that makes them is named, those that hand them on are not."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.checks.measuring.nonfinite_origin import Located, locate_origin
from hookscope.inputs import Batch
from hookscope.inspection.network import inspected_network
from hookscope.results.check import NonFiniteOrigin
from hookscope.results.inputs import InputRecord
from tests.checks.measuring.networks import measure_network
from tests.networks import NETWORKS, Written

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]

WANTED = {"non-finite-activation"}

# Inputs are large enough for every weight of every kernel to meet a pixel of the picture, not only the padding.
# Other networks are in `checkpoints/test_planted_nan.py`.
PLANTED = {
    "efficientnet_b0": (1, 3, 96, 96),
    "swin": (1, 3, 64, 64),
    "vit": (1, 3, 112, 112),
}


def origin_in(network: nn.Module, *batches: Tensor) -> NonFiniteOrigin | None:
    return measure_network(network, *batches, wanted=WANTED).origin


def hook_counts(network: nn.Module) -> list[tuple[int, int]]:
    return [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in network.modules()]


def called_modules(network: nn.Module, args: Tensor) -> set[str]:
    """Return the names of the modules that run, as torch's own hooks tell."""
    called: set[str] = set()
    handles = [
        module.register_forward_hook(lambda *_, name=name: called.add(name)) for name, module in network.named_modules()
    ]
    with torch.no_grad():
        network(args)
    for handle in handles:
        handle.remove()
    return called


@pytest.mark.parametrize("name", PLANTED)
def test_a_nan_in_one_weight_is_attributed_to_its_layer(name: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name].build().eval()
    inputs = torch.randn(PLANTED[name], generator=torch.Generator().manual_seed(1))
    called = called_modules(network, inputs)
    # The small Vision Transformer has 13 in all, the others have more than 20.
    layers = [name for name, module in network.named_modules() if isinstance(getattr(module, "weight", None), Tensor)]
    chosen = random.Random(2)
    for layer in chosen.sample(layers, min(20, len(layers))):
        weight = network.get_parameter(f"{layer}.weight")
        at = chosen.randrange(weight.numel())
        before = weight.detach().flatten()[at].clone()
        with torch.no_grad():
            weight.view(-1)[at] = math.nan
        found = origin_in(network, inputs)
        with torch.no_grad():
            weight.view(-1)[at] = before
        # MultiheadAttention and Swin's attention use the weights of layers inside them without calling those.
        expected = layer
        while expected not in called:
            expected = expected.rpartition(".")[0]
        assert found is not None, layer
        assert (found.layer, found.parameters) == (expected, (f"{layer}.weight",))
        assert found.nan_count > 0
    assert origin_in(network, inputs) is None


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "dtypes and odd values"])
def test_in_a_finite_network_of_any_kind_the_search_finds_nothing_and_leaves_nothing(name: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name].build()
    args = NETWORKS[name].args()
    subject = inspected_network(network)
    state = {key: value.clone() for key, value in network.state_dict().items() if isinstance(value, Tensor)}
    hooks = hook_counts(network)
    batch = Batch(args, (0,), (InputRecord("x", None, None, (), ()),))
    assert locate_origin(subject, [batch], seed=0) == Located(None)
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


def test_modules_that_overwrite_their_input_do_not_hide_who_made_it() -> None:
    network = chain(nn.Linear(4, 4), nn.ReLU(inplace=True), with_bias(nn.Linear(4, 4), math.nan), nn.ReLU(inplace=True))
    found = origin_in(network, INPUTS)
    assert found == NonFiniteOrigin("2", "Linear", 2, 0, 8, ("2.bias",))


def test_an_in_place_module_that_makes_nan_is_named_itself() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sqrt_()

    found = origin_in(chain(nn.Linear(4, 4), Root(), nn.Identity()), INPUTS)
    assert found is not None
    assert (found.layer, found.kind, found.between) == ("1", "Root", False)


def test_inf_counts_are_those_of_the_layers_output() -> None:
    # 3e38 · 2 is beyond float32 for both inputs; the second feature stays finite.
    layer = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3e38], [1.0]]))
    found = origin_in(chain(nn.Identity(), layer), torch.tensor([[2.0], [-2.0]]))
    assert found == NonFiniteOrigin("1", "Linear", 0, 2, 4)


def test_a_variance_that_is_negative_blames_the_batchnorm() -> None:
    norm = nn.BatchNorm1d(4)
    assert norm.running_var is not None
    norm.running_var[2] = -1.0
    found = origin_in(chain(nn.Linear(4, 4), norm, nn.ReLU()), INPUTS)
    assert found == NonFiniteOrigin("1", "BatchNorm1d", 2, 0, 8)


def test_code_between_modules_blames_the_innermost_module_around_it() -> None:
    block = Written(lambda net, x: net.second(net.first(x) * math.inf), first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    found = origin_in(chain(nn.Linear(4, 4), block, nn.ReLU()), INPUTS)
    assert found is not None
    assert (found.layer, found.kind, found.between, found.inf_count) == ("1", "Written", True, 8)


def test_code_after_the_last_module_blames_the_module_around_it() -> None:
    block = Written(lambda net, x: net.first(x) * math.inf, first=nn.Linear(4, 4))
    found = origin_in(chain(block, nn.ReLU()), INPUTS)
    assert found == NonFiniteOrigin("0", "Written", 0, 8, 8, between=True)


def test_code_of_the_whole_network_is_called_model() -> None:
    network = Written(lambda net, x: net.second(net.first(x) / 0), first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    found = origin_in(network, INPUTS)
    assert found is not None
    assert (found.layer, found.between) == ("(model)", True)


def test_a_parameter_of_a_container_is_named_with_the_container() -> None:
    block = Written(lambda net, x: net.first(x + net.shift), first=nn.Linear(4, 4))
    block.shift = nn.Parameter(torch.tensor([0.0, math.nan, 0.0, 0.0]))
    found = origin_in(chain(nn.Linear(4, 4), block), INPUTS)
    assert found == NonFiniteOrigin("1", "Written", 2, 0, 8, ("1.shift",), between=True)


def test_a_container_of_indices_is_named_for_its_own_code() -> None:
    embed = Written(lambda net, x: net.norm(net.words(x) / 0), words=nn.Embedding(4, 3), norm=nn.LayerNorm(3))
    found = origin_in(chain(embed, nn.Linear(3, 2)), torch.tensor([[0, 1], [2, 3]]))
    assert found is not None
    assert (found.layer, found.between) == ("0", True)


def test_a_container_that_has_ended_is_not_blamed_for_what_its_parts_are_given_later() -> None:
    embed = Written(lambda net, x: net.norm(net.words(x)), words=nn.Embedding(4, 3), norm=nn.LayerNorm(3))
    network = Written(lambda net, x: net.embed.norm(net.embed(x) / 0), embed=embed)
    found = origin_in(network, torch.tensor([[0, 1], [2, 3]]))
    assert found is not None
    assert (found.layer, found.between) == ("(model)", True)


def test_parameters_that_a_module_inside_uses_are_not_the_containers() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    with torch.no_grad():
        attention.out_proj.weight[1, 2] = math.nan
    network = Written(lambda net, x: net.attention(x / 0, x, x)[0], attention=attention)
    found = origin_in(network, torch.ones(2, 3, 4))
    assert found == NonFiniteOrigin("(model)", "Written", 0, 24, 24, between=True)


def test_parameters_of_modules_elsewhere_that_nobody_calls_are_not_named() -> None:
    network = Written(
        lambda net, x: net.first(x),
        first=with_bias(nn.Linear(4, 4), math.nan),
        first_aux=with_bias(nn.Linear(4, 4), math.nan),
    )
    found = origin_in(network, INPUTS)
    assert found is not None
    assert found.parameters == ("first.bias",)


def test_the_call_of_a_container_is_told_by_its_number() -> None:
    block = Written(lambda net, x: net.last(x / x.abs().sum()), last=nn.Identity())
    found = origin_in(Written(lambda net, x: net.block(net.block(x) * 0), block=block), INPUTS)
    assert found == NonFiniteOrigin("block#1", "Written", 8, 0, 8, between=True)


def test_the_call_of_a_shared_module_is_told_by_its_number() -> None:
    network = Written(lambda net, x: net.norm(net.norm(x) * 0), norm=Written(lambda _, x: x / x.abs().sum()))
    found = origin_in(network, INPUTS)
    assert found is not None
    assert (found.layer, found.nan_count, found.between) == ("norm#1", 8, False)


def test_an_origin_in_the_second_batch_is_found() -> None:
    network = chain(nn.Identity(), Written(lambda _, x: x.log1p()), nn.ReLU())
    # log(1 + x) does not exist below -1.
    found = origin_in(network, INPUTS / 2, torch.tensor([[0.0, 0.0, -3.0, 0.0]]))
    assert found == NonFiniteOrigin("1", "Written", 1, 0, 4)


def test_an_input_that_is_not_finite_blames_no_module() -> None:
    measured = measure_network(chain(nn.Linear(4, 4)), torch.tensor([[0.0, 1.0, 2.0, math.nan]] * 2), wanted=WANTED)
    assert measured.origin is None
    sentence = "The input input 0 holds NaN or Inf itself, so no module is to blame."
    assert measured.unmeasured == {"non-finite-activation": sentence}
    assert sentence in measured.warnings


def test_a_finite_network_has_no_origin() -> None:
    measured = measure_network(chain(nn.Linear(4, 4), nn.ReLU()), INPUTS, wanted=WANTED)
    assert measured.origin is None
    assert not measured.unmeasured


class Mask(nn.Module):
    """Puts -Inf above the diagonal, as attention does for what is yet to come."""

    def forward(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)


def test_a_mask_that_a_softmax_takes_up_is_no_fault() -> None:
    assert origin_in(chain(nn.Linear(4, 4), Mask(), nn.Softmax(-1), nn.Linear(4, 4)), INPUTS) is None


def test_a_layer_with_parameters_that_hands_on_a_mask_is_no_origin() -> None:
    assert origin_in(chain(nn.Linear(4, 4), Mask(), nn.PReLU(), nn.Softmax(-1)), INPUTS) is None


def test_a_softmax_over_nothing_but_masked_values_is_the_origin() -> None:
    everything = Written(lambda _, x: torch.full_like(x, -math.inf))
    found = origin_in(chain(nn.Linear(4, 4), everything, nn.Softmax(-1), nn.Linear(4, 4)), INPUTS)
    assert found == NonFiniteOrigin("2", "Softmax", 8, 0, 8)


def test_a_mask_before_the_origin_does_not_hide_it() -> None:
    network = chain(nn.Linear(4, 4), Mask(), nn.Softmax(-1), with_bias(nn.Linear(4, 4), math.nan), nn.Softmax(-1))
    found = origin_in(network, INPUTS)
    assert found is not None
    assert (found.layer, found.parameters) == ("3", ("3.bias",))


def test_minus_inf_of_a_layer_with_parameters_is_no_mask() -> None:
    found = origin_in(chain(with_bias(nn.Linear(4, 4), -math.inf), nn.ReLU()), INPUTS)
    assert found == NonFiniteOrigin("0", "Linear", 0, 2, 8, ("0.bias",))


def test_minus_inf_that_the_network_returns_is_attributed_to_who_makes_it() -> None:
    found = origin_in(chain(nn.Linear(4, 4), Mask()), INPUTS)
    assert found == NonFiniteOrigin("1", "Mask", 0, 5, 8)


def test_what_raises_over_nan_is_traced_to_where_it_begins() -> None:
    def strict(net: Any, x: Tensor) -> Any:
        out = net.second(net.first(x))
        if out.isnan().any():
            raise ValueError("NaN")
        return out

    network = Written(strict, first=with_bias(nn.Linear(4, 4), math.nan), second=nn.Linear(4, 4))
    measured = measure_network(network, INPUTS, wanted=WANTED)
    assert measured.forward is not None
    assert measured.forward.failure is not None
    assert measured.origin is not None
    assert measured.origin.layer == "first"


def test_no_search_is_made_unless_it_is_wanted() -> None:
    network = chain(with_bias(nn.Linear(4, 4), math.nan))
    assert measure_network(network, INPUTS, wanted={"forward"}).origin is None
