"""Networks that are recognised by the digest of their names and shapes, against networks that are built."""

import importlib.metadata
import json
from importlib.resources import files
from pathlib import Path

import pytest
import torchvision

from hookscope.models import torchvision_digests
from hookscope.models.architecture import recognise, state_shapes
from hookscope.models.torchvision_digests import TABLE, published_networks, table_of
from tests.models.test_architecture import FLOAT, Shapes, shapes_of

COUNTER = "num_batches_tracked"


def without_counters(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if not name.endswith(COUNTER)}


def test_the_table_holds_every_network_of_the_version_it_names(request: pytest.FixtureRequest) -> None:
    path = Path(str(files("hookscope.models").joinpath(TABLE)))
    installed = torchvision.__version__.partition("+")[0]
    table = table_of(installed, ((name, shapes_of(name)) for name in FLOAT))
    if request.config.getoption("--update-golden"):
        path.write_text(table, encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    if json.loads(text)["torchvision"] != installed:
        pytest.skip("the table is of another version of torchvision, and not used with this one")
    assert text == table, "run with --update-golden, and read the difference"


@pytest.mark.parametrize("name", ["alexnet", "resnet18", "fasterrcnn_mobilenet_v3_large_fpn", "mobilenet_v2"])
def test_a_network_by_its_digest_is_the_one_that_building_all_of_them_finds(name: str) -> None:
    whole = shapes_of(name)
    for shapes in (whole, without_counters(whole), dict(reversed(whole.items()))):
        found = published_networks(shapes)
        assert name in [candidate.model for candidate in found]
        assert found == recognise(shapes)


def test_anything_else_is_left_to_building() -> None:
    whole = shapes_of("resnet18")
    some_counters = {name: shape for name, shape in whole.items() if name != f"bn1.{COUNTER}"}
    for other in (shapes_of("resnet18", num_classes=10), some_counters, whole | {"more": ()}, {"x": (2,)}, {}):
        assert published_networks(other) == ()


def test_the_table_is_not_asked_about_another_version_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_digests, "version", lambda _name: "0.0.1")
    assert published_networks(shapes_of("resnet18")) == ()


def test_without_torchvision_the_table_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(torchvision_digests, "version", absent)
    assert published_networks(shapes_of("resnet18")) == ()


def test_the_demo_network_is_none_of_them() -> None:
    from efficientnet_lite_pytorch import EfficientNet

    assert published_networks(state_shapes(EfficientNet.from_name("efficientnet-lite0").state_dict())) == ()
