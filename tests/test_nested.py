"""Nested values with other tensors in place of some: every container comes back as what it was."""

import dataclasses
from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from transformers.modeling_outputs import BaseModelOutput

from hookscope.nested import tensors_in, with_tensors

OLD, OTHER, NEW = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    logits: Tensor
    hidden: tuple[Tensor, ...]


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.name = "kept"


@pytest.mark.parametrize(
    "value",
    [
        OLD,
        (OLD,),
        [OTHER, [OLD, None]],
        {"out": OLD, "note": "text"},
        OrderedDict(aux=OTHER, out=OLD),
        UserDict({"out": OLD}),
        Pair(OLD, None),
        Frozen(OTHER, (OTHER, OLD)),
        BaseModelOutput(last_hidden_state=OLD, hidden_states=(OTHER, OLD)),
        ImageList(OLD, [(4, 4)]),
        Holder(OLD),
        nn.utils.rnn.PackedSequence(OLD, torch.tensor([1])),
        (OLD, "text", 3, nn.Linear(1, 1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_tensor_is_replaced_and_the_rest_is_as_it_was(value: Any) -> None:
    before = tensors_in(value)
    paths = [path for path, tensor in before if tensor is OLD]
    replaced: Any = with_tensors(value, dict.fromkeys(paths, NEW))
    assert type(replaced) is type(value)
    after = tensors_in(replaced)
    assert [path for path, _ in after] == [path for path, _ in before]
    for (_, old), (_, new) in zip(before, after, strict=True):
        assert new is (NEW if old is OLD else old)
    unchanged = tensors_in(value)
    assert [tensor for _, tensor in unchanged] == [tensor for _, tensor in before]
    if isinstance(value, BaseModelOutput):
        assert replaced.last_hidden_state is NEW
    if isinstance(value, Holder):
        assert replaced.name == "kept"


def test_containers_beside_the_way_stay_the_objects_they_are() -> None:
    aside, loop = [OTHER], {}
    loop["again"] = loop
    value = {"in": [OLD], "aside": aside, "loop": loop}
    replaced: Any = with_tensors(value, {"['in'][0]": NEW})
    assert replaced["aside"] is aside
    assert replaced["loop"] is loop
    assert with_tensors(value, {}) is value


def test_a_container_that_takes_nothing_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no tensor of a mappingproxy can be replaced"):
        with_tensors(MappingProxyType({"out": OLD}), {"['out']": NEW})
