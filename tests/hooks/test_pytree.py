"""Nested values with other tensors in place of some: every container comes back as what it was."""

import dataclasses
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutput

from hookscope.hooks import pytree
from hookscope.hooks.pytree import tensors_in, with_tensors
from tests.inspections import inspect, inspect_gradients
from tests.networks import CachingModel

OLD, OTHER, NEW = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])


class Pair(NamedTuple):  # keys() and items() would belong to a mapping
    keys: Tensor
    items: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    keys: tuple[Tensor, ...] | Tensor
    items: tuple[Tensor, ...]


class Grumpy:
    """Holds a tensor, and raises on any question it does not know."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.name = "kept"


class Slotted:
    __slots__ = ("__dict__", "given", "never_given")

    def __init__(self, tensor: Tensor, beside: object = None) -> None:
        self.given = tensor
        self.beside = beside


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (OLD, [""]),
        ([OTHER, [OLD, None]], ["[1][0]"]),
        ({"out": OLD, "note": "text"}, ["['out']"]),
        (OrderedDict(aux=OTHER, out=OLD), ["['out']"]),
        (Pair(OLD, None), [".keys"]),
        (Frozen(OTHER, (OTHER, OLD)), [".items[1]"]),
        (
            BaseModelOutput(last_hidden_state=OLD, hidden_states=(OTHER, OLD)),
            ["['last_hidden_state']", "['hidden_states'][1]"],
        ),
        (ImageList(OLD, [(4, 4)]), [".tensors"]),
        (Grumpy(OLD), [".tensor"]),
        (Slotted(OTHER, [Slotted(OLD)]), [".beside[0].given"]),
        (SimpleNamespace(boxes={"a": OLD}), [".boxes['a']"]),
        (UserList([OTHER, OLD]), [".data[1]"]),
        (deque([OTHER, (OLD,)], maxlen=3), ["[1][0]"]),
        ({OLD, "text"}, ["{0}"]),
        (nn.utils.rnn.PackedSequence(OLD, torch.tensor([1])), [".data"]),
        ((OLD, "text", 3, nn.Linear(1, 1)), ["[0]"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_tensor_is_found_under_its_path_and_replaced_and_the_rest_is_as_it_was(value: Any, paths: list[str]) -> None:
    before = tensors_in(value)
    assert [path for path, tensor in before if tensor is OLD] == paths
    replaced: Any = with_tensors(value, dict.fromkeys(paths, NEW))
    assert type(replaced) is type(value)
    after = tensors_in(replaced)
    assert [path for path, _ in after] == [path for path, _ in before]
    for (_, old), (_, new) in zip(before, after, strict=True):
        assert new is (NEW if old is OLD else old)
    unchanged = tensors_in(value)
    assert [tensor for _, tensor in unchanged] == [tensor for _, tensor in before]
    if isinstance(value, BaseModelOutput):  # whose attributes are its items
        assert replaced.last_hidden_state is replaced["last_hidden_state"]


def test_containers_beside_the_way_stay_the_objects_they_are() -> None:
    aside, loop = [OTHER], {}
    loop["again"] = loop
    value = {"in": [OLD], "aside": aside, "loop": loop}
    replaced: Any = with_tensors(value, {"['in'][0]": NEW})
    assert replaced["aside"] is aside
    assert replaced["loop"] is loop
    assert with_tensors(value, {}) is value


@pytest.mark.parametrize(
    ("value", "path"), [(MappingProxyType({"out": OLD}), "['out']"), ({"out": OLD}.values(), "[0]")]
)
def test_a_container_that_takes_nothing_is_a_type_error(value: object, path: str) -> None:
    assert tensors_in(value) == [(path, OLD)]
    with pytest.raises(TypeError, match=f"no tensor of a {type(value).__name__} can be replaced"):
        with_tensors(value, {path: NEW})


def test_an_object_at_two_places_stays_one() -> None:
    shared = Holder(OLD)
    value = (shared, {"again": shared})
    assert tensors_in(value) == [("[0].tensor", OLD)]
    replaced: Any = with_tensors(value, {"[0].tensor": NEW})
    assert replaced[0] is replaced[1]["again"]
    assert (replaced[0].tensor, shared.tensor) == (NEW, OLD)


@pytest.mark.parametrize("make", [set, frozenset])
def test_the_order_of_a_set_is_that_of_what_it_holds(make: Callable[..., Any]) -> None:
    def members() -> list[Any]:
        return [torch.zeros(2), torch.ones(2), torch.zeros(3), torch.zeros(2).long(), (torch.ones(2),), "text", None]

    def order(value: object) -> list[tuple[str, str, list[float]]]:
        return [(path, str(tensor.dtype), tensor.tolist()) for path, tensor in tensors_in(value)]

    first = order(make(members()))
    assert [path for path, *_ in first] == ["{0}", "{1}", "{2}", "{3}", "{4}[0]"]
    for _ in range(10):  # elsewhere in memory, so in another order in the set
        assert order(make(reversed(members()))) == first


class Guarded:
    """Whose own code must not run."""

    def __init__(self) -> None:
        object.__getattribute__(self, "__dict__").update(inner=Holder(OLD))

    @property
    def lazy(self) -> NoReturn:
        raise AssertionError("a property was called")

    @property  # as proxies do
    def __class__(self) -> NoReturn:
        raise AssertionError("__class__ was called")

    def __getattribute__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} was asked for")

    def __iter__(self) -> NoReturn:
        raise AssertionError("it was iterated over")

    __len__ = __bool__ = __hash__ = __eq__ = __iter__


class Broken(UserDict[str, Tensor]):
    def items(self) -> NoReturn:
        raise RuntimeError("not now")


def test_nothing_of_an_object_is_called() -> None:
    assert tensors_in((Guarded(), Broken(a=OLD))) == [("[0].inner.tensor", OLD)]
    replaced: Any = with_tensors([Guarded()], {"[0].inner.tensor": NEW})
    assert object.__getattribute__(replaced[0], "inner").tensor is NEW


def test_modules_classes_and_iterators_are_not_entered() -> None:
    def make() -> Iterator[Tensor]:
        yield OLD

    generator, iterator = make(), iter([OLD])
    layer = nn.Linear(1, 1)
    assert tensors_in([generator, iterator, map(str, iterator), layer, type(layer), pytree, Holder]) == []
    assert tensors_in(Slotted(OLD, layer)) == [(".given", OLD)]
    assert (next(generator), next(iterator)) == (OLD, OLD)


class Node:
    def __init__(self, tensor: Tensor, following: "Node | None" = None) -> None:
        self.tensor, self.following, self.nodes = tensor, following, list[Node]()


def test_what_objects_lead_to_is_followed_so_far_and_no_farther() -> None:
    nodes = [Node(OLD) for _ in range(60)]
    for node in nodes:  # each leads to all: as many ways as there are orders
        node.nodes = nodes
    assert len(tensors_in(nodes)) == 60
    chain = Node(OLD)
    for _ in range(5000):
        chain = Node(OLD, chain)
    assert len(tensors_in(chain)) == pytree._OBJECTS_LIMIT
    crowd = SimpleNamespace(words=["word"] * 10**6, out=OLD, more=[[OLD] * 9] * 10**4)
    assert len(tensors_in(crowd)) == 1 + pytree._MEMBERS_LIMIT - 10**4 - (pytree._MEMBERS_LIMIT - 10**4) % 9
    assert len(tensors_in([OLD] * 10**5)) == 10**5  # what the module itself returns is listed whole


@pytest.mark.parametrize("include_inputs", [False, True])
def test_what_a_cache_holds_has_its_activations_and_gradients(include_inputs: bool) -> None:
    torch.manual_seed(0)
    network, inputs = CachingModel().eval(), torch.randn(2, 4)
    output = network(inputs)
    truth = {"['out']": output["out"], "['seen'][0]": output["seen"][0], "['last']{0}": output["out"]}
    for at, entry in enumerate(output["cache"].layers):
        truth |= {f"['cache'].layers[{at}].keys": entry.keys, f"['cache'].layers[{at}].values": entry.values}
    rows = {row.slot: row.activation for row in inspect(network, inputs, ["name:/^$/"]).rows}
    assert rows.keys() == truth.keys()
    for slot, tensor in truth.items():
        assert rows[slot].mean == pytest.approx(tensor.mean().item(), rel=1e-5)

    def loss(output: Any, _target: object = None) -> Tensor:  # of the way out alone: the cache is used inside, too
        return (output["out"] ** 2).sum() + sum((layer.keys**3).sum() for layer in output["cache"].layers)

    actual = inspect_gradients(network, inputs, loss, ["*"], include_inputs=include_inputs)
    assert actual.loss.value == pytest.approx(loss(output).item(), rel=1e-6)
    gradients = torch.autograd.grad(loss(output), [*network.parameters()])
    for parameter, gradient in zip(actual.parameters, gradients, strict=True):
        assert parameter.gradient.l2 == pytest.approx(gradient.norm().item(), rel=1e-5)


def test_the_keys_and_values_of_a_transformer_have_rows() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    network = LlamaForCausalLM(LlamaConfig(vocab_size=20, pad_token_id=0, **sizes)).eval()
    inputs = torch.arange(6).reshape(2, 3)
    with torch.no_grad():
        output = network(inputs)
    name_of_cache = "cache" if "cache" in output else "past_key_values"  # from transformers 5.24 on, and before
    cache = output[name_of_cache]
    rows = {row.label: row.activation for row in inspect(network, inputs, ["name:/^$/"]).rows}
    for at, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            expected = getattr(layer, name)
            actual = rows[f"(model)['{name_of_cache}'].layers[{at}].{name}"]
            assert (actual.shape, actual.mean) == (
                tuple(expected.shape),
                pytest.approx(expected.mean().item(), rel=1e-5),
            )
