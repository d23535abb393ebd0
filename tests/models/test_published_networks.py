"""Networks that a library has and the table of another version of it has not."""

from types import SimpleNamespace

import pytest
import timm

from hookscope.errors import ModelNotFoundError
from hookscope.models import architecture, published_networks
from hookscope.models.architecture import adapt, recognise
from hookscope.models.network_table import Library, NetworkTable, network_table
from tests.models.test_architecture import models, shapes_of, timm_shapes


def without(library: Library, *names: str) -> NetworkTable:
    table = network_table(library)
    return NetworkTable("0.0.1", {name: each for name, each in table.networks.items() if name not in names})


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tables of earlier versions, which lack networks."""
    tables = {"torchvision": without("torchvision", "alexnet"), "timm": without("timm", "timm:test_vit")}
    monkeypatch.setattr(published_networks, "network_table", tables.__getitem__)


@pytest.mark.usefixtures("older")
def test_a_network_that_the_table_does_not_hold_is_built() -> None:
    assert models(recognise(shapes_of("alexnet", num_classes=3))) == ["alexnet"]
    assert models(recognise(shapes_of("resnet18"))) == ["resnet18"]
    adapted = adapt("alexnet", shapes_of("alexnet", 1))
    assert adapted is not None
    assert adapted.input_channels == 1


@pytest.mark.usefixtures("older")
def test_so_is_one_of_timm() -> None:
    (candidate,) = recognise(timm_shapes("test_vit", num_classes=3))
    assert (candidate.model, candidate.arguments) == ("timm:test_vit", {"num_classes": 3})
    assert models(recognise(timm_shapes("test_convnext"))) == ["timm:test_convnext"]


@pytest.mark.usefixtures("older")
def test_running_out_of_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (architecture, published_networks):
        monkeypatch.setattr(module, "TIMM_SECONDS", 0.0)
    with pytest.raises(ModelNotFoundError, match=r"1 of timm's networks were not compared, as 0 s had passed"):
        recognise(timm_shapes("test_vit"))
    named = timm_shapes("test_vit", num_classes=3)
    clock = iter([0.0, 0.0, 99.0])  # enough for one
    monkeypatch.setattr(published_networks, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for module in (architecture, published_networks):
        monkeypatch.setattr(module, "TIMM_SECONDS", 20.0)
    assert models(recognise(named)) == ["timm:test_vit"]


def test_a_network_that_the_installed_version_has_not_is_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_networks, "installed_version", lambda _name: "0.0.1")
    monkeypatch.setattr(published_networks, "torchvision_names", lambda: ["alexnet", "vgg11"])
    assert models(recognise(shapes_of("alexnet"))) == ["alexnet"]
    assert adapt("resnet18", shapes_of("resnet18")) is None


def test_the_tag_of_weights_may_change_the_classes() -> None:
    name = "vit_tiny_patch16_224.augreg_in21k"
    shapes = timm_shapes(name)
    adapted = adapt(f"timm:{name}", shapes)
    assert adapted is not None
    assert (adapted.model, adapted.arguments) == (f"timm:{name}", {})
    plain = adapt("timm:vit_tiny_patch16_224", shapes)
    assert plain is not None
    assert plain.arguments == {"num_classes": 21843}
    assert timm.get_pretrained_cfg(name).num_classes == 21843
