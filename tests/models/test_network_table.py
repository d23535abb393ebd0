"""The tables of names and shapes, against what torch builds."""

import functools

import pytest
import timm
import torchvision

from hookscope.models.network_table import Free, Library, network_pattern, network_table, unpacked
from tests.models.known_networks import pattern_of, timm_network, torchvision_network
from tests.models.network_tables import packed
from tests.models.test_architecture import FLOAT, NAMES, shapes_of, timm_shapes

DEMO = "demo"

VERSIONS = {"torchvision": torchvision.__version__.partition("+")[0], "timm": timm.__version__}


def of_what_is_installed(library: Library) -> bool:
    return network_table(library).version == VERSIONS[library]


def test_the_tables_hold_every_network_of_the_version_they_name() -> None:
    if of_what_is_installed("torchvision"):
        assert [*network_table("torchvision").networks] == [*NAMES, DEMO]
    if of_what_is_installed("timm"):
        assert [*network_table("timm").networks] == [f"timm:{name}" for name in sorted(timm.list_models())]


@pytest.mark.parametrize("name", FLOAT)
@pytest.mark.sample("resnet18", "swin_t", "googlenet")
def test_a_torchvision_network_has_the_names_and_shapes_in_the_table(name: str) -> None:
    if name not in network_table("torchvision").networks:
        pytest.skip("the table is of another version")
    assert network_table("torchvision").networks[name].published_shapes() == shapes_of(name)


@pytest.mark.parametrize("name", timm.list_models("test_*"))  # one of each of timm's building blocks
def test_a_timm_network_has_the_names_and_shapes_in_the_table(name: str) -> None:
    if f"timm:{name}" not in network_table("timm").networks:
        pytest.skip("the table is of another version")
    assert network_table("timm").networks[f"timm:{name}"].published_shapes() == timm_shapes(name)


@functools.cache
def described(model: str) -> tuple[object, ...]:
    expected = timm_network(model.removeprefix("timm:")) if model.startswith("timm:") else torchvision_network(model)
    return comparable(pattern_of(expected))


def comparable(actual: object) -> tuple[object, ...]:
    names = ("model", "class_count", "grid", "heads", "auxiliary", "switches", "has_auxiliary", "optional_count")
    return tuple(getattr(actual, name) for name in (*names, "counts", "sizes"))


@pytest.mark.parametrize(
    "model",
    [
        *("googlenet", "fcn_resnet50", "vit_b_32", "ssd300_vgg16", "quantized_resnet18"),
        *("timm:test_vit", "timm:tresnet_m", "timm:deit_tiny_distilled_patch16_224"),
    ],
)
@pytest.mark.sample("googlenet")
def test_a_network_that_is_built_is_described_as_in_the_table(model: str) -> None:
    library: Library = "timm" if model.startswith("timm:") else "torchvision"
    if not of_what_is_installed(library):
        pytest.skip("the table is of another version")
    assert described(model) == comparable(network_table(library).networks[model])


def test_sizes_that_follow_an_argument_are_told_from_those_that_do_not() -> None:
    ssd = network_table("torchvision").networks["ssd300_vgg16"]  # 4 or 6 boxes at each place
    assert ssd.sizes["head.classification_head.module_list.0.bias"] == (Free("classes", 4),)
    assert ssd.sizes["head.classification_head.module_list.1.bias"] == (Free("classes", 6),)
    assert ssd.sizes["head.regression_head.module_list.0.bias"] == (16,)
    assert ssd.sizes["backbone.features.0.weight"] == (64, Free("channels", 1), 3, 3)
    distilled = network_table("timm").networks["timm:deit_tiny_distilled_patch16_224"]  # has two more tokens
    assert distilled.sizes["pos_embed"] == (1, Free("patches", 2), 192)
    assert distilled.heads == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}


def test_a_table_is_read_as_it_was_written() -> None:
    sizes = {
        "a.weight": (2, Free("channels", 3)),
        "a.num_batches_tracked": (),
        "b.a.weight": (2, Free("channels", 3)),
        "b.a.num_batches_tracked": (),
        "b.head": (Free("classes", 9), Free("patches", 0), 5),
    }
    facts = {"classes": 7, "heads": ["b.head"], "grid": [4, 8], "auxiliary": ["b.a.weight"], "switches": ["aux"]}
    expected = [network_pattern("one", facts, sizes), network_pattern("two", {}, {"a.weight": (2,)})]
    table = unpacked(packed("1.2", expected))
    assert table.version == "1.2"
    assert [*map(comparable, table.networks.values())] == [*map(comparable, expected)]
    one = table.networks["one"]
    assert one.counts == {"a": 2, "b": 3}
    assert one.optional_count == 2 + 1 + 1  # counters, the head, what is auxiliary
    assert one.published_shapes() == {
        "a.weight": (2, 9),
        "a.num_batches_tracked": (),
        "b.a.num_batches_tracked": (),
        "b.head": (63, 4, 5),
    }
