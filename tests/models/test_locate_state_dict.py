import warnings
from typing import Any

import pytest
import torch
from torch import nn

from hookscope.checkpoints.locate_state_dict import weights_in
from hookscope.errors import CheckpointError, NothingMatchedError, UsageError

STATE = {"conv.weight": torch.ones(2, 3), "conv.bias": torch.zeros(2)}
EMA = {name: tensor + 1 for name, tensor in STATE.items()}
OPTIMISER = torch.optim.SGD([torch.ones(1, requires_grad=True)], momentum=0.9).state_dict()


def names(content: object, key: str | None = None) -> list[str]:
    return list(weights_in(content, "model.pt", key).state)


def refusal(content: object, error: type[Exception] = CheckpointError, key: str | None = None) -> str:
    with pytest.raises(error) as caught:
        weights_in(content, "model.pt", key)
    assert type(caught.value) is error
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        *("state_dict", "model", "ema", "module", "params_ema"),
    ],
)
def test_weights_inside_a_training_checkpoint_are_found_and_reported(key: str) -> None:
    content = {"epoch": 3, "loss": torch.tensor(0.5), key: STATE, "optimizer": OPTIMISER}
    weights = weights_in(content, "model.pt")
    assert list(weights.state) == list(STATE)
    assert weights.notes == (f"model.pt: weights taken from its key '{key}'; other entries: epoch, loss, optimizer.",)


def test_one_of_a_thing_and_a_vowel_have_their_words() -> None:
    assert "model.pt has at 'epoch' an int, not a state dict" in refusal({"epoch": 3, "model": STATE}, key="epoch")
    content = {"model": STATE, "net": {"conv.bias": torch.ones(2)}}
    assert "model (2 tensors), net (1 tensor); choose" in refusal(content, UsageError)


def test_several_weights_are_listed_with_what_to_give() -> None:
    message = refusal({"model": STATE, "net": EMA, "epoch": 3}, UsageError)
    assert "model (2 tensors), net (2 tensors)" in message
    assert "--key model" in message
    assert "ema (2 tensors), model_ema (2 tensors)" in refusal({"ema": EMA, "model_ema": STATE}, UsageError)


def test_weights_in_a_tuple_or_list_are_chosen_by_position() -> None:
    for content in ((STATE, EMA), [STATE, EMA]):
        assert "0 (2 tensors), 1 (2 tensors); choose with --key, such as --key 0." in refusal(content, UsageError)
        assert torch.equal(weights_in(content, "model.pt", "1").state["conv.bias"], EMA["conv.bias"])
    assert weights_in((3, {"model": STATE}, OPTIMISER), "model.pt").keys == (1, "model")
    assert weights_in({"pair": (EMA, STATE)}, "model.pt", "pair.1").keys == ("pair", 1)
    logs = {"net_g": STATE, "log": [{"loss": torch.tensor(0.5)}, {"loss": torch.tensor(0.4)}]}
    assert weights_in(logs, "model.pt").keys == ("net_g",)
    assert "'2' names nothing in model.pt, which holds a tuple." in refusal((STATE, EMA), NothingMatchedError, "2")
    assert "holds a tuple, not a state dict" in refusal((torch.ones(2), torch.ones(2)))


def test_two_state_dicts_of_one_network_are_one_set_of_weights() -> None:
    network = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))
    content = {"model": network.state_dict(), "net": network.state_dict()}
    assert list(weights_in(content, "model.pt").state) == list(network.state_dict())
    content["net"]["0.weight"] = network[0].weight.detach()[:, :, ::2]
    assert "several sets" in refusal(content, UsageError)
    sparse = {"model": {"w": torch.eye(2).to_sparse()}, "net": {"w": torch.eye(2).to_sparse()}}
    assert "several sets" in refusal(sparse, UsageError)


@pytest.mark.parametrize("name", ["ema", "params_ema"])
def test_of_weights_and_their_average_the_weights_are_taken_and_it_is_said(name: str) -> None:
    for content in ({"model": STATE, name: EMA}, {name: EMA, "model": STATE}):
        weights = weights_in(content, "model.pt")
        assert all(torch.equal(weights.state[tensor], STATE[tensor]) for tensor in STATE)
        assert weights.notes[1] == f"model.pt: the averaged copy at '{name}' is not used; give --key {name} for it."


def test_what_leads_to_the_only_weights_can_be_left_out_of_a_key() -> None:
    inside = {f"a.{n}": t for n, t in STATE.items()} | {f"b.{n}": t for n, t in EMA.items()}
    assert all(
        torch.equal(weights_in({"state_dict": inside, "epoch": 3}, "x", "a").state[n], t) for n, t in STATE.items()
    )
    assert "names nothing" in refusal({"model": inside, "net": inside | {"c": torch.ones(1)}}, NothingMatchedError, "a")


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"model": EMA, "ema": STATE}, "ema"),
        ({"a": {"b": {"c": STATE, "d": EMA}}}, "a.b.c"),
        ({"a.b": {"c.d": STATE, "d": EMA}}, "a.b.c.d"),
        ({"a": {"b": EMA}, "a.b": STATE}, "a.b"),
        ({f"teacher.{n}": t for n, t in EMA.items()} | {f"student.{n}": t for n, t in STATE.items()}, "student"),
        ({"m": {f"ema.{n}": t for n, t in STATE.items()} | {"step": 1}}, "m.ema"),
        ({0: EMA, 1: STATE}, "1"),
        ({"stages": {10: {"net": EMA}, 20: {"net": STATE}}}, "stages.20.net"),
    ],
)
def test_key_says_where_the_weights_are(content: dict[str, Any], key: str) -> None:
    weights = weights_in(content, "model.pt", key)
    assert list(weights.state) == list(STATE)
    assert all(torch.equal(weights.state[name], STATE[name]) for name in STATE)
    assert f"'{key}'" in weights.notes[0]


@pytest.mark.parametrize("key", ["absent", "", ".", "model.conv.weigh", "epoch.x"])
def test_key_that_leads_nowhere_says_what_there_is(key: str) -> None:
    assert "only model, epoch" in refusal({"model": STATE, "epoch": 3}, NothingMatchedError, key)


@pytest.mark.parametrize("content", [torch.ones(2, 3), [torch.ones(2, 3)], (torch.ones(2), torch.ones(3))])
def test_inputs_in_place_of_weights_are_told_where_they_belong(content: object) -> None:
    hint = "If it holds inputs, name the network first, then this file (in `check`: --images)."
    assert refusal(content).endswith(hint)
    assert hint not in refusal(3)
    assert hint not in refusal({"epoch": 3})


def test_versions_of_modules_are_kept_and_nothing_else_of_what_hangs_on_the_dict() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    state.items2 = 5  # type: ignore[attr-defined]
    state._metadata["evil"] = {"version": "x", "other": 1}
    kept = weights_in(state, "model.pt").state
    assert vars(kept) == {"_metadata": {"": {"version": 2}, "evil": {}}}


def test_tensors_without_data_or_with_more_elements_than_are_stored_are_refused() -> None:
    assert "without data" in refusal({"w": torch.ones(1, device="meta")})
    assert "claims 4000 bytes of a storage of 4" in refusal({"w": torch.ones(1).expand(1000)})
    with warnings.catch_warnings(action="ignore"):  # nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert "'w', a nested tensor, which has no shape" in refusal({"w": nested})
