"""Which network is loaded, and what it is given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from hookscope.commands.check.measuring.network_passes import measure
from hookscope.commands.check.measuring.preparing import Prepared, prepare
from hookscope.errors import CheckpointError, ImageError, NothingMatchedError, UsageError
from hookscope.inspection.network import inspected_network
from hookscope.models.construction import LoadedModel
from hookscope.results.inputs import Preprocessing
from hookscope.rules.settings import CheckSettings, Expectation

FACTORY = """
from torch import nn


def small(width=4):
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(FACTORY)
    for number, name in enumerate(("a.png", "b.png", "c.png")):
        values = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(values).save(tmp_path / name)
    return tmp_path


def names(prepared: Prepared) -> list[str]:
    return [Path(record.name).name for batch in prepared.batches() for record in batch.records]


def shapes(prepared: Prepared) -> list[tuple[int, ...]]:
    return [tuple(batch.args[0].shape) for batch in prepared.batches()]


def test_a_network_without_pictures_gets_two_different_inputs_of_noise() -> None:
    prepared = prepare(nn.Linear(6, 2), CheckSettings(seed=3))
    (batch,) = prepared.batches()
    (values,) = batch.args
    assert (values.shape, prepared.input_count) == ((2, 6), 2)
    assert torch.equal(values, torch.randn(2, 6, generator=torch.Generator().manual_seed(3)))
    assert not torch.equal(values[0], values[1])


def test_a_network_on_the_meta_device_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"Linear holds shapes without values \(on the meta device\)"):
        prepare(nn.Linear(6, 2, device="meta"), CheckSettings())


def test_noise_has_the_shape_that_is_asked_for_in_batches_that_fit() -> None:
    prepared = prepare(nn.Linear(6, 2), CheckSettings(input_shape=(5, 3, 6), batch_size=2))
    assert shapes(prepared) == [(2, 3, 6), (2, 3, 6), (1, 3, 6)]
    assert [batch.indices for batch in prepared.batches()] == [(0, 1), (2, 3), (4,)]
    assert prepared.input_count == 5


def test_noise_for_a_detector_is_a_list() -> None:
    module = nn.Conv2d(3, 4, 1)
    loaded = LoadedModel(module, inspected_network(module).info, Preprocessing(kind="detection"))
    (batch,) = prepare(loaded, CheckSettings(input_shape=(2, 3, 8, 8))).batches()
    assert [tuple(argument.shape) for argument in batch.args[0]] == [(3, 8, 8), (3, 8, 8)]


def test_a_network_that_does_not_tell_its_input_needs_a_shape() -> None:
    with pytest.raises(UsageError, match=r"unknown input shape: give .* --input-shape, such as 1,16 for tokens\."):
        prepare(nn.Embedding(5, 2), CheckSettings())
    with pytest.raises(UsageError, match=r"unknown input shape: give .* to run on, or noise with --input-shape\."):
        prepare(nn.ReLU(), CheckSettings())


@pytest.mark.parametrize("settings", [CheckSettings(input_shape=()), CheckSettings(input_shape=(0, 6))])
def test_noise_that_cannot_be_is_refused(settings: CheckSettings) -> None:
    with pytest.raises(UsageError):
        list(prepare(nn.Linear(6, 2), settings).batches())


def test_inputs_come_in_the_dtype_of_the_network() -> None:
    (batch,) = prepare(nn.Linear(6, 2).double(), CheckSettings()).batches()
    assert batch.args[0].dtype == torch.float64


def test_pictures_of_expectations_follow_those_of_settings_each_once(folder: Path) -> None:
    a, b, c = (folder / name for name in ("a.png", "b.png", "c.png"))
    expectations = (Expectation(c, top1=0), Expectation(a, top1=1), Expectation(c, top1=2))
    settings = CheckSettings(images=(b, a, b), expectations=expectations)
    prepared = prepare(nn.Conv2d(3, 4, 1), settings)
    assert names(prepared) == ["b.png", "a.png", "c.png"]
    assert prepared.input_count == 3
    records = [record.name for batch in prepared.batches() for record in batch.records]
    assert [records.index(str(expectation.image)) for expectation in expectations] == [2, 1, 2]


def test_pictures_are_prepared_as_the_settings_say(folder: Path) -> None:
    settings = CheckSettings(images=(folder / "a.png",), resize="none", crop="16x24", mean="none", std="none")
    (batch,) = prepare(nn.Conv2d(3, 4, 1), settings).batches()
    assert batch.args[0].shape == (1, 3, 16, 24)
    assert 0 <= float(batch.args[0].min()) <= float(batch.args[0].max()) <= 1


def test_a_folder_that_holds_other_files_too_says_so(folder: Path) -> None:
    (folder / "labels.csv").touch()
    prepared = prepare(nn.Conv2d(3, 4, 1), CheckSettings(images=(folder,)))
    assert prepared.loaded.notes == (f"{folder}: 2 files skipped: 1 .csv, 1 .py.",)


def test_several_inputs_in_a_tensor_file_are_counted(folder: Path) -> None:
    np.save(folder / "batch.npy", np.zeros((5, 3, 8, 8), np.float32))
    prepared = prepare(nn.Conv2d(3, 4, 1), CheckSettings(images=(folder / "batch.npy",), batch_size=2))
    assert shapes(prepared) == [(2, 3, 8, 8), (2, 3, 8, 8), (1, 3, 8, 8)]
    assert prepared.input_count == 5
    prepared = prepare(nn.Conv2d(3, 4, 1), CheckSettings(images=(folder / "batch.npy",), batch_axis="none"))
    assert shapes(prepared) == [(1, 5, 3, 8, 8)]


def test_inputs_by_name_go_with_pictures_with_noise_or_alone(folder: Path) -> None:
    np.save(folder / "b.npy", np.arange(6, dtype=np.float32).reshape(3, 2))
    named = ("rate=2", f"b={folder / 'b.npy'}")
    files = tuple(folder / name for name in ("a.png", "b.png", "c.png"))
    prepared = prepare(nn.Conv2d(3, 4, 1), CheckSettings(images=files, input=named, batch_size=2))
    batches = list(prepared.batches())
    assert [batch.kwargs["b"].tolist() for batch in batches] == [[[0, 1], [2, 3]], [[4, 5]]]
    assert [batch.kwargs["rate"] for batch in batches] == [2, 2]
    prepared = prepare(nn.Linear(6, 2), CheckSettings(input_shape=(3, 6), input=named))
    (batch,) = prepared.batches()
    assert (batch.args[0].shape, batch.kwargs["b"].shape) == ((3, 6), (3, 2))
    prepared = prepare(nn.Linear(6, 2), CheckSettings(input=named, batch_size=2))
    assert [(batch.args, len(batch.kwargs["b"])) for batch in prepared.batches()] == [((), 2), ((), 1)]
    assert prepared.input_count == 3


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"images": (Path("a.png"),), "max_pixels": 1599}, ImageError, "over the limit of 1599 pixels"),
        ({"images": (Path("a.png"), Path("net.py"))}, ImageError, r"net\.py"),
        ({"expectations": (Expectation(Path("none.png"), top1=0),)}, ImageError, "no such file"),
        ({"images": (Path("empty"),)}, NothingMatchedError, "empty"),
    ],
)
def test_inputs_that_cannot_be_read_are_errors(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    monkeypatch.chdir(folder)
    Path("empty").mkdir()
    inputs = CheckSettings(**settings)
    with pytest.raises(error, match=says):
        measure(prepare(nn.Conv2d(3, 4, 1), inputs), inputs, {"forward"})


def test_a_weights_file_is_loaded_into_the_network_that_the_settings_name(folder: Path) -> None:
    layers = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 2))
    torch.save(layers.state_dict(), folder / "model.pt")
    settings = CheckSettings(arch=f"{folder / 'net.py'}:small", model_arg=("width=7",))
    prepared = prepare(str(folder / "model.pt"), settings)
    measured = measure(prepared, settings, {"output-shape", "zero-parameter"})
    assert [values.shape for values in measured.stored] == [(7, 6), (7,), (2, 7), (2,)]
    assert measured.outputs[0].shape == (2, 2)
    with torch.no_grad():
        (batch,) = prepared.batches()
        assert measured.outputs[0].max_abs == float(layers(batch.args[0]).abs().max())
    assert set(measured.seconds) == {"load", "stored", "forward", "again"}


def test_an_exported_program_gets_batches_of_the_size_it_was_exported_for(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(6, 2).eval(), (torch.randn(1, 6),)), tmp_path / "model.pt2")
    settings = CheckSettings()
    prepared = prepare(str(tmp_path / "model.pt2"), settings, trust=True)
    assert shapes(prepared) == [(1, 6), (1, 6)]
    measured = measure(prepared, settings, {"constant-output", "repeatability", "batch-consistency"})
    assert measured.forward.failure is None
    (output,) = measured.outputs
    assert output.repeat_difference == 0.0
    assert output.input_difference > 0.01
    assert "with a second one in its batch the network raised" in measured.unmeasured["batch-consistency"]


def test_a_network_is_moved_to_the_device_that_is_asked_for() -> None:
    network = nn.Linear(6, 2)
    prepared = prepare(network, CheckSettings(), device=torch.device("meta"))
    assert network.weight.is_meta
    (batch,) = prepared.batches()
    assert batch.args[0].is_meta
