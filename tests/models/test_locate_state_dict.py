from typing import Any

import pytest
import torch
from torch import nn

from hookscope.errors import CheckpointError, NothingMatchedError, UsageError
from hookscope.models.locate_state_dict import weights_in

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


def test_bare_state_dict_is_taken_whole() -> None:
    weights = weights_in(STATE, "model.pt")
    assert list(weights.state) == list(STATE)
    assert all(torch.equal(weights.state[name], STATE[name]) for name in STATE)
    assert weights.notes == ()
    assert weights.module is None


@pytest.mark.parametrize(
    "key",
    [
        *("state_dict", "model", "model_state_dict", "ema", "ema_state_dict"),
        *("module", "net", "network", "params", "params_ema"),
    ],
)
def test_weights_inside_a_training_checkpoint_are_found_and_reported(key: str) -> None:
    content = {"epoch": 3, "loss": torch.tensor(0.5), key: STATE, "optimizer": OPTIMISER}
    weights = weights_in(content, "model.pt")
    assert list(weights.state) == list(STATE)
    assert weights.notes == (f"model.pt: weights taken from its key '{key}'; ignored: epoch, loss, optimizer.",)


def test_nested_weights_are_found() -> None:
    weights = weights_in({"checkpoint": {"model": STATE, "optimizer": OPTIMISER}, "args": {"lr": 1}}, "model.pt")
    assert "'checkpoint.model'" in weights.notes[0]


def test_the_only_dict_of_tensors_is_taken_whatever_its_key() -> None:
    assert names({"student": STATE, "epoch": 3}) == list(STATE)


def test_tensors_of_the_optimiser_are_no_weights() -> None:
    assert names({"optimizer": {"state": {0: {"momentum": torch.ones(1)}}, "param_groups": []}, "m": STATE}) == list(
        STATE
    )


def test_several_weights_are_listed_with_what_to_give() -> None:
    message = refusal({"model": STATE, "net": EMA, "epoch": 3}, UsageError)
    assert "model (2 tensors), net (2 tensors)" in message
    assert "--key model" in message
    assert "ema (2 tensors), model_ema (2 tensors)" in refusal({"ema": EMA, "model_ema": STATE}, UsageError)


@pytest.mark.parametrize("name", ["ema", "model_ema", "state_dict_ema", "params_ema"])
def test_of_weights_and_their_average_the_weights_are_taken_and_it_is_said(name: str) -> None:
    for content in ({"model": STATE, name: EMA}, {name: EMA, "model": STATE}):
        weights = weights_in(content, "model.pt")
        assert all(torch.equal(weights.state[each], STATE[each]) for each in STATE)
        assert weights.notes[1] == f"model.pt: the averaged copy at '{name}' is not used; give --key {name} for it."


def test_what_leads_to_the_only_weights_can_be_left_out_of_a_key() -> None:
    inside = {f"a.{n}": t for n, t in STATE.items()} | {f"b.{n}": t for n, t in EMA.items()}
    assert all(
        torch.equal(weights_in({"state_dict": inside, "epoch": 3}, "x", "a").state[n], t) for n, t in STATE.items()
    )
    assert "names nothing" in refusal({"model": inside, "net": inside | {"c": torch.ones(1)}}, NothingMatchedError, "a")


def test_the_same_weights_under_two_keys_are_no_question() -> None:
    assert names({"model": STATE, "state_dict": dict(STATE)}) == list(STATE)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"model": EMA, "ema": STATE}, "ema"),
        ({"a": {"b": {"c": STATE, "d": EMA}}}, "a.b.c"),
        ({"a.b": {"c.d": STATE, "d": EMA}}, "a.b.c.d"),
        ({"a": {"b": EMA}, "a.b": STATE}, "a.b"),
        ({f"teacher.{n}": t for n, t in EMA.items()} | {f"student.{n}": t for n, t in STATE.items()}, "student"),
        ({"m": {f"ema.{n}": t for n, t in STATE.items()} | {"step": 1}}, "m.ema"),
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


def test_key_of_something_else_is_described() -> None:
    assert "model.pt has at 'epoch' a int, not a state dict" in refusal({"model": STATE, "epoch": 3}, key="epoch")


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        ({}, "holds no tensors by name: nothing"),
        ({"epoch": 3, "optimizer": {}}, "only epoch, optimizer"),
        ({"state_dict": {}, "a\nb": 1}, r"only state_dict, a\\nb"),
        ([torch.ones(1)], "holds a list"),
        (torch.ones(1), "holds a Tensor"),
        (None, "holds a NoneType"),
        (5, "holds a int"),
        (OPTIMISER, "is an optimiser's state"),
        ({"epoch": 3, "optimizer": OPTIMISER}, "an optimiser's state, but no weights"),
        ({"w": torch.ones(1, device="meta")}, "without data"),
        ({0: torch.ones(1)}, "keys that are no names, such as 0"),
        ({"w": torch.ones(1).expand(1000)}, "claims 4000 bytes of a storage of 4"),
    ],
)
def test_content_without_weights_is_described(content: object, phrase: str) -> None:
    assert phrase.replace("\\\\", "\\") in refusal(content)


def test_versions_of_modules_are_kept_and_nothing_else_of_what_hangs_on_the_dict() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    state.items2 = 5  # type: ignore[attr-defined]
    state._metadata["evil"] = {"version": "x", "other": 1}
    kept = weights_in(state, "model.pt").state
    assert vars(kept) == {"_metadata": {"": {"version": 2}, "evil": {}}}


def test_parameters_come_out_as_plain_tensors_without_attributes() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.is_floating_point = set  # type: ignore[assignment]
    tensor = weights_in({"w": parameter}, "model.pt").state["w"]
    assert type(tensor) is torch.Tensor
    assert not vars(tensor)
