import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hookscope.checkpoints.checkpoint import FileOptions
from hookscope.checkpoints.wrapped_names import stripped_forms
from hookscope.errors import MisfitError
from hookscope.models.statedict import fits, foreign_names, load_into


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))


def test_misfits_are_listed_on_one_line_with_counts() -> None:
    state = network().state_dict()
    for key in ("0.weight", "1.weight", "1.bias", "1.running_mean"):
        del state[key]
    state["2.weight"] = torch.ones(10, 512)
    state["2.bias"] = torch.ones(10)
    state["head\n::error::"] = torch.ones(1)
    with pytest.raises(MisfitError) as caught:
        load_into(network(), state, "model.pt")
    message = str(caught.value)
    assert message.isprintable()
    assert "model.pt does not fit Sequential" in message
    assert "4 missing (0.weight, 1.weight, 1.bias, …)" in message
    assert (
        "2 of another shape or type (2.weight: file (10, 512), network (2, 4), 2.bias: file (10,), network (2,))"
        in message
    )
    assert r"1 unknown to the network (head\n::error::)" in message


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_a_network_that_raises_for_names_of_another_has_them_listed() -> None:
    dynamic = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 2)), {nn.Linear})
    with pytest.raises(MisfitError, match=r"4 missing \(0\.scale, .*, 2 unknown to the network \(0\.weight, 0\.bias\)"):
        load_into(dynamic, nn.Sequential(nn.Linear(3, 2)).state_dict(), "model.pt")


def test_missing_batch_counter_is_no_misfit() -> None:
    source, target = network(), network()
    state = {key: tensor for key, tensor in source.state_dict().items() if not key.endswith("num_batches_tracked")}
    load_into(target, state, "model.pt")
    assert torch.equal(target[1].weight, source[1].weight)


@given(st.lists(st.text("ab._", max_size=12), max_size=6, unique=True))
def test_every_reading_takes_different_names_to_different_names(names: list[str]) -> None:
    forms = stripped_forms(names)
    assert forms[0] == ("", {name: name for name in names})
    for _, mapping in forms:
        assert set(mapping) <= set(names)
        assert len(set(mapping.values())) == len(mapping)


def test_names_made_to_have_many_readings_have_few() -> None:
    names = ["module." * depth + "w" for depth in range(200)]
    assert len(stripped_forms(names)) < 50


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: nn.ModuleDict({"module": net}),
        lambda net: nn.ModuleDict({"model": nn.ModuleDict({"_orig_mod": net})}),
        torch.optim.swa_utils.AveragedModel,
        lambda net: torch.compile(net, backend="eager"),
    ],
)
def test_wrapped_network_is_loaded_and_the_prefix_reported(wrap: Any) -> None:
    source, target = network(), network()
    state = wrap(source).state_dict()
    _, notes = load_into(target, state, "model.pt")
    assert all(torch.equal(target.state_dict()[key], tensor) for key, tensor in source.state_dict().items())
    assert len(notes) == 1
    assert "was removed from its names" in notes[0]
    assert fits(target, {key: value for key, value in state.items() if key != "n_averaged"})


def test_wrappers_of_two_kinds_inside_names_are_removed_together() -> None:
    source, target = network(), network()
    wrapped = "_fsdp_wrapped_module.1._fsdp_wrapped_module._checkpoint_wrapped_module."
    state = {wrapped.replace("1", key[0]) + key[2:]: tensor for key, tensor in source.state_dict().items()}
    _, notes = load_into(target, state, "model.pt")
    assert all(torch.equal(target.state_dict()[key], tensor) for key, tensor in source.state_dict().items())
    removed = "_fsdp_wrapped_module._checkpoint_wrapped_module."
    assert notes == [f"model.pt: the prefix '{removed}' was removed from its names."]


def test_a_key_of_an_average_takes_the_average_next_to_what_it_is_of() -> None:
    copies = {"online_model.": network().state_dict(), "ema_model.": network().state_dict()}
    state = {f"{prefix}{key}": tensor for prefix, copy in copies.items() for key, tensor in copy.items()}
    for option, taken in ((None, "online_model."), ("ema", "ema_model.")):
        target = network()
        load_into(target, state, "model.pt", FileOptions(key=option))
        assert torch.equal(target[0].weight, copies[taken]["0.weight"])


def test_two_networks_in_one_file_are_a_question() -> None:
    state = {f"{who}.{key}": tensor for who in ("student", "teacher") for key, tensor in network().state_dict().items()}
    with pytest.raises(MisfitError, match=r"more than once, under 'student\.' and under 'teacher\.'.*--key student"):
        load_into(network(), state, "model.pt")


def test_misfit_of_a_wrapped_network_is_told_without_the_prefix() -> None:
    state = {f"module.{key}": tensor for key, tensor in network().state_dict().items()} | {
        "module.2.bias": torch.ones(9)
    }
    with pytest.raises(MisfitError, match=r"without the prefix 'module\.' does not fit .*2\.bias: file \(9,\)"):
        load_into(network(), state, "model.pt")


@pytest.mark.parametrize("outside", ["model", "net.backbone"])
@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_prefix_of_the_network_is_put_in_front_where_all_fits_so(outside: str, wrapper: str) -> None:
    source, target = network(), network()
    whole: nn.Module = target
    for name in reversed(outside.split(".")):
        whole = nn.ModuleDict({name: whole})
    _, notes = load_into(whole, {f"{wrapper}{key}": value for key, value in source.state_dict().items()}, "model.pt")
    assert f"model.pt: its names fit with the prefix '{outside}.' in front." in notes
    assert all(torch.equal(target.state_dict()[key], tensor) for key, tensor in source.state_dict().items())


def test_no_prefix_is_put_in_front_where_some_would_not_fit_or_two_would() -> None:
    state = network().state_dict()
    several = nn.ModuleDict({"a": network(), "b": network()})
    with pytest.raises(MisfitError):
        load_into(several, state, "model.pt")
    with pytest.raises(MisfitError):
        load_into(several, state, "model.pt", FileOptions(allow_missing=("*",)))
    with pytest.raises(MisfitError):
        load_into(nn.ModuleDict({"a": network()}), state | {"2.bias": torch.ones(99)}, "model.pt")


def test_versions_are_those_of_the_wrapped_module() -> None:
    source = nn.ModuleDict({"module": nn.BatchNorm1d(2)})
    state = source.state_dict()
    del state["module.num_batches_tracked"]
    state._metadata["module"] = {"version": 1}  # before there was num_batches_tracked
    load_into(nn.BatchNorm1d(2), state, "model.pt")


def test_allowed_missing_names_keep_their_values_and_are_reported() -> None:
    target = network()
    before = target[2].bias.clone()
    state = {key: tensor for key, tensor in network().state_dict().items() if key != "2.bias"}
    warned, _ = load_into(target, state, "model.pt", FileOptions(allow_missing=("2.*",)))
    assert torch.equal(target[2].bias, before)
    assert warned == ["model.pt: 1 of the network's tensors is not in it and keeps its initial values (2.bias)."]


def test_allowed_unexpected_names_are_reported() -> None:
    state = network().state_dict() | {"head.weight": torch.ones(1), "head.bias": torch.ones(1)}
    warned, _ = load_into(network(), state, "model.pt", FileOptions(allow_unexpected=("head.*",)))
    assert warned == ["model.pt: 2 of its tensors are not used (head.weight, head.bias)."]


def test_other_shape_needs_both_allowances() -> None:
    source, target = nn.Linear(4, 2), nn.Linear(4, 3)
    before = target.weight.clone()
    both = FileOptions(allow_missing=("*",), allow_unexpected=("*",))
    warned, _ = load_into(target, source.state_dict(), "model.pt", both)
    assert torch.equal(target.weight, before)
    assert "2 of its tensors are not used (weight, bias)" in warned[0]
    assert "2 of the network's tensors are not in it" in warned[1]
    for half in (FileOptions(allow_missing=("*",)), FileOptions(allow_unexpected=("*",))):
        with pytest.raises(MisfitError, match="2 of another shape"):
            load_into(target, source.state_dict(), "model.pt", half)


def test_allowance_covers_what_its_glob_matches_and_nothing_else() -> None:
    state = {"0.weight": network()[0].weight}
    with pytest.raises(MisfitError, match=r"\d missing \(0\.bias"):
        load_into(network(), state, "model.pt", FileOptions(allow_missing=("1.*", "2.*")))
    with pytest.raises(MisfitError, match="missing"):
        load_into(network(), state, "model.pt", FileOptions(allow_missing=("0", "bias", "1", "2")))


@pytest.mark.parametrize(
    ("inputs", "own", "copied"),
    [
        (torch.float64, torch.float32, True),
        (torch.int64, torch.float32, True),
        (torch.float32, torch.int64, False),
        (torch.complex64, torch.float32, False),
        (torch.float32, torch.complex64, True),
    ],
)
def test_values_lose_precision_at_most(inputs: torch.dtype, own: torch.dtype, copied: bool) -> None:
    module = nn.Module()
    module.register_buffer("values", torch.zeros(2, dtype=own))
    state = {"values": torch.tensor([1, 2]).to(inputs)}
    if copied:
        dtypes = f"from {inputs} to {own}".replace("torch.", "")
        assert load_into(module, state, "model.pt") == ([], [f"model.pt: loading converted 1 tensor {dtypes}."])
        assert module.values.tolist() == [1, 2]
    else:
        shown = f"{str(inputs).removeprefix('torch.')}, network {str(own).removeprefix('torch.')}"
        with pytest.raises(MisfitError, match=f"values: file {shown}"):
            load_into(module, state, "model.pt")


@pytest.mark.parametrize(
    ("value", "stored", "own", "overflows"),
    [
        (65519.0, torch.float32, torch.float16, False),  # the nearest number of float16 is 65504
        (65520.0, torch.float32, torch.float16, True),
        (-65520.0, torch.bfloat16, torch.float16, True),
        (1e39, torch.float64, torch.float32, True),
        (1e39, torch.float64, torch.bfloat16, True),
        (math.inf, torch.float64, torch.float32, False),
        (65520.0, torch.float16, torch.float32, False),
    ],
)
def test_values_beyond_the_networks_dtype_are_a_warning(
    value: float, stored: torch.dtype, own: torch.dtype, overflows: bool
) -> None:
    module = nn.Module()
    module.register_buffer("values", torch.zeros(2, dtype=own))
    warned, _ = load_into(module, {"module.values": torch.tensor([1, value], dtype=stored)}, "model.pt")
    sentence = "model.pt: 1 of its tensors overflowed in the network's dtype (module.values)."
    assert warned == ([sentence] if overflows else [])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_sparse_and_a_quantised_tensor_say_where_they_are() -> None:
    quantised = torch.quantize_per_tensor(torch.eye(2), 1.0, 0, torch.qint8)
    for value, forms in (
        (torch.eye(2).to_sparse(), "sparse_coo, network strided"),
        (quantised, "qint8, network float32"),
    ):
        with pytest.raises(MisfitError, match=rf"1 of another shape or type \(weight: file {forms}\)"):
            load_into(nn.Linear(2, 2, bias=False), {"weight": value}, "model.pt")


@pytest.mark.parametrize("name", ["conv1/kernel:0", "params.Conv_0.kernel"])
def test_names_of_other_frameworks_are_recognised(name: str) -> None:
    assert "Keras, TensorFlow or JAX" in foreign_names(["a", name])
    with pytest.raises(MisfitError, match="convert it to PyTorch"):
        load_into(network(), {name: torch.ones(1)}, "model.safetensors")


def test_buffers_that_the_network_keeps_out_of_its_state_dict_may_be_in_the_file() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.register_buffer("mask", torch.ones(2), persistent=False)

    network = Masked()
    stored = {"fc.weight": torch.eye(2), "fc.bias": torch.ones(2), "mask": torch.zeros(2)}
    assert load_into(network, stored, "file.pt") == ([], [])
    assert torch.equal(network.fc.weight, torch.eye(2))
    assert torch.equal(network.get_buffer("mask"), torch.ones(2))


class Tied(nn.Module):
    """A language model in small: the head's weight is the embedding's, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight


class TiedBuffers(nn.Module):
    """Two blocks that share a table of frequencies, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.ones(4)
        self.first, self.second = nn.Module(), nn.Module()
        self.first.register_buffer("table", table)
        self.second.register_buffer("table", table)


class Transposed(nn.Module):
    """A decoder whose weight is its encoder's, seen the other way round: another parameter of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 2, bias=False)
        self.decoder = nn.Linear(2, 3, bias=False)
        self.decoder.weight = nn.Parameter(self.encoder.weight.data.t())


class Packed(nn.Module):
    """Query, key and value, which are thirds of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.zeros(6, 2))
        self.parts = nn.ParameterList([nn.Parameter(part) for part in self.packed.data.split(2)])


def counting_state(network: nn.Module, *names: str) -> dict[str, Any]:
    own = network.state_dict()
    return {name: 1 + torch.arange(own[name].numel(), dtype=torch.float32).view(own[name].shape) for name in names}


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (Tied, ["words.weight"]),
        (Tied, ["head.weight"]),
        (TiedBuffers, ["first.table"]),
        (TiedBuffers, ["second.table"]),
        (Transposed, ["encoder.weight"]),
        (Transposed, ["decoder.weight"]),
        (Packed, ["packed"]),
        (Packed, ["parts.0", "parts.1", "parts.2"]),
    ],
)
def test_what_shares_memory_with_loaded_tensors_is_loaded(make: Any, arguments: list[str]) -> None:
    network = make()
    state = counting_state(network, *arguments)
    assert load_into(network, state, "model.pt") == ([], [])
    loaded = network.state_dict()
    assert all(torch.equal(loaded[name], state[name]) for name in arguments)
    assert all(value.all() for value in loaded.values())  # Packed begins with zeros


def test_tied_tensors_that_are_both_missing_are_missing_or_keep_their_values() -> None:
    with pytest.raises(MisfitError, match=r"2 missing \(words\.weight, head\.weight\)"):
        load_into(Tied(), {"head.bias": torch.ones(5)}, "model.pt", FileOptions(allow_unexpected=("head.bias",)))
    options = FileOptions(allow_missing=("*.weight",), allow_unexpected=("head.bias",))
    warnings, _ = load_into(Tied(), {"head.bias": torch.ones(5)}, "model.pt", options)
    assert any(
        "2 of the network's tensors are not in it and keep their initial values" in warning for warning in warnings
    )


@pytest.mark.parametrize(
    ("make", "lost", "kept"),
    [
        (Tied, "words.weight", "head.weight"),
        (TiedBuffers, "first.table", "second.table"),
        (Transposed, "encoder.weight", "decoder.weight"),
    ],
)
def test_where_the_file_has_two_values_for_one_tensor_it_is_told_which_are_loaded(
    make: Any, lost: str, kept: str
) -> None:
    network = make()
    state = counting_state(network, lost, kept)
    state[lost] = -state[lost]
    (warning,), _ = load_into(network, state, "model.pt")
    assert torch.equal(network.state_dict()[kept], state[kept])
    assert f"'{lost}' and '{kept}' share memory in the network, but differ in the file" in warning
    assert warning.endswith(f"has the values of '{kept}'.")
