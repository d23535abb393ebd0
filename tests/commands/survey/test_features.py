"""Features on the disk are what the layers put out, in the order of the inputs, however many chunks and processes."""

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import hookscope
from hookscope.commands.survey.plan import ChunkFolder
from hookscope.commands.survey.run_survey import merge_survey
from hookscope.errors import OutputError, UsageError
from tests.commands.survey.kept import kept_outputs
from tests.networks import TORCHVISION


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 5))


REDUCED = {
    "avg": lambda values: values.mean((2, 3)),
    "max": lambda values: values.max((2, 3)),
    "none": lambda values: values,
}


@pytest.mark.sample("float32")
@pytest.mark.parametrize("pool", REDUCED)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_they_are_the_outputs_of_the_layer(tmp_path: Path, pool: str, dtype: str) -> None:
    model, inputs = network(), torch.randn(21, 3, 8, 8)
    expected = REDUCED[pool](kept_outputs(model, inputs, 4)["1"])
    survey = hookscope.survey(
        model, inputs, layer="type:relu", features=tmp_path / "f.safetensors", pool=pool, features_dtype=dtype,  # type: ignore[arg-type]
        batch_size=4, chunk_size=10,
    )  # fmt: skip
    loaded_file = load_file(tmp_path / "f.safetensors")
    assert loaded_file["1"].dtype == dtype
    np.testing.assert_allclose(loaded_file["1"], expected, rtol=1e-6 if dtype == "float32" else 1e-3, atol=1e-6)
    sidecar = json.loads((tmp_path / "f.json").read_bytes())
    assert sidecar["shapes"] == {"1": list(expected.shape)}
    assert [each["input"] for each in sidecar["inputs"]] == [f"tensor[{number}]" for number in range(21)]
    assert survey is not None
    assert survey.features is not None
    assert survey.features.files == (str(tmp_path / "f.safetensors"), str(tmp_path / "f.json"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_parquet_holds_the_same_values(tmp_path: Path, dtype: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for number in range(7):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.random.default_rng(number).normal(size=(3, 8, 8)).astype(np.float32))
    for name in ("f.safetensors", "f.parquet"):
        hookscope.survey(
            network(), tmp_path / "data", layer=("name:1", "name:4"), pool="none", by_class=True, chunk_size=3,
            features=tmp_path / name, features_dtype=dtype,  # type: ignore[arg-type]
        )  # fmt: skip
    expected, table = load_file(tmp_path / "f.safetensors"), parquet.read_table(tmp_path / "f.parquet")
    assert parquet.ParquetFile(tmp_path / "f.parquet").num_row_groups == 3
    assert [Path(each).name for each in table["input"].to_pylist()] == [f"{case}.npy" for case in (0, 2, 4, 6, 1, 3, 5)]
    assert table["class"].to_pylist() == ["a"] * 4 + ["b"] * 3
    for name in ("f.json", "f.parquet.json"):  # each file has its own
        sidecar = json.loads((tmp_path / name).read_bytes())
        assert sidecar["files"] == [f"f.{'parquet' if 'parquet' in name else 'safetensors'}"]
    for label, values in expected.items():
        actual = table[label].combine_chunks().flatten().to_numpy().reshape(values.shape)
        np.testing.assert_array_equal(actual, values)
        assert actual.dtype == dtype


def test_without_pyarrow_parquet_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hookscope.commands.survey.feature_files.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"needs one more package: pip install 'hookscope\[parquet\]'"):
        hookscope.survey(network(), torch.randn(2, 3, 8, 8), layer="1", features=tmp_path / "f.parquet")


@pytest.mark.exhaustive
def test_the_first_token_is_taken(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = TORCHVISION["vit"].build(), torch.randn(3, 3, 112, 112)
    hookscope.survey(model, inputs, layer="encoder.ln", features=tmp_path / "f.safetensors", pool="cls", batch_size=2)
    expected = kept_outputs(model, inputs, 2)["encoder.ln"][:, 0]
    np.testing.assert_array_equal(load_file(tmp_path / "f.safetensors")["encoder.ln"], expected.astype(np.float32))


def test_shards_write_the_same_file_with_paths_and_classes(tmp_path: Path) -> None:
    for number in range(12):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.random.default_rng(number).normal(size=(3, 8, 8)).astype(np.float32))
    usual = {"layer": ("name:0", "name:2"), "by_class": True, "batch_size": 2, "chunk_size": 4}
    hookscope.survey(network(), tmp_path / "data", features=tmp_path / "one.safetensors", **usual)  # type: ignore[arg-type]
    for share in ("1/2", "2/2"):
        target = tmp_path / "two.safetensors"
        hookscope.survey(network(), tmp_path / "data", features=target, **usual, chunks=tmp_path / "c", shard=share)  # type: ignore[arg-type]
    merge_survey(ChunkFolder(tmp_path / "c"))
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
    first = json.loads((tmp_path / "one.json").read_bytes())["inputs"]
    assert [(Path(value["input"]).name, value["class"]) for value in first[:2]] == [("0.npy", "a"), ("2.npy", "a")]
    hookscope.survey(network(), tmp_path / "data", features=tmp_path / "folder", **usual)  # type: ignore[arg-type]
    sidecar = json.loads((tmp_path / "folder" / "features.json").read_bytes())
    parts = [load_file(tmp_path / "folder" / name)["2"] for name in sidecar["files"]]
    assert len(parts) == 3
    np.testing.assert_array_equal(np.concatenate(parts), load_file(tmp_path / "one.safetensors")["2"])
    assert [each["file"] for each in sidecar["inputs"]] == [0] * 4 + [1] * 4 + [2] * 4


def test_what_cannot_be_features_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "f.safetensors"
    with pytest.raises(UsageError, match="`features` needs `layer`"):
        hookscope.survey(network(), torch.randn(2, 3, 8, 8), features=target)
    with pytest.raises(UsageError, match="is no sequence of tokens but 2x6x6x6"):
        hookscope.survey(network(), torch.randn(2, 3, 8, 8), features=target, layer="0", pool="cls")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is not a folder"):
        hookscope.survey(network(), torch.randn(2, 3, 8, 8), features=tmp_path / "file" / "f.safetensors", layer="0")
    assert not target.exists()


class Observed(nn.Module):
    """A layer that gets the inputs in another form; they are returned as they are."""

    def __init__(self, form: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.form = nn.Identity(), form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(self.form(x))
        return x


@pytest.mark.parametrize("pool", ["avg", "max", "none"])
@pytest.mark.parametrize(
    "form",
    [
        torch.Tensor.to_sparse,
        lambda x: torch.nested.nested_tensor([*x]),
        lambda x: x[:, :, :0],
        lambda x: x.to("meta"),
    ],
    ids=["sparse", "ragged", "empty", "meta"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_outputs_without_a_value_for_each_place_are_refused(
    tmp_path: Path, form: Callable[[torch.Tensor], torch.Tensor], pool: Literal["avg", "max", "none"]
) -> None:
    with pytest.raises(UsageError, match=r"layer is sparse, ragged, empty or without memory\. Leave this layer out\."):
        hookscope.features(Observed(form), [torch.rand(4, 3, 6)], tmp_path / "f.safetensors", layer="layer", pool=pool)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bright, self.dark = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bright(x) if x.mean() > 0 else self.dark(x)


@pytest.mark.parametrize("chunk_size", [1, 9])
def test_layers_that_only_some_inputs_pass_are_refused(tmp_path: Path, chunk_size: int) -> None:
    target, ones = tmp_path / "f.safetensors", torch.ones(2, 3, 4, 4)
    with pytest.raises(UsageError, match="different inputs pass through different layers"):
        hookscope.survey(
            Branches(), torch.cat([ones, -ones]), layer=("name:bright", "name:dark"), features=target, batch_size=1,
            chunk_size=chunk_size,
        )  # fmt: skip
    with pytest.raises(UsageError, match="different inputs pass through different layers"):
        hookscope.features(Branches(), [ones, -ones, ones], target, layer="name:bright")
    assert not target.exists()


class Spectrum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft2(x)


def test_features_of_complex_outputs_are_their_magnitudes(tmp_path: Path) -> None:
    inputs = torch.randn(4, 3, 8, 8)
    hookscope.features(nn.Sequential(Spectrum()), [inputs], tmp_path / "f.safetensors", layer="name:0", pool="none")
    expected = np.abs(np.fft.fft2(inputs.numpy()))
    np.testing.assert_allclose(load_file(tmp_path / "f.safetensors")["0"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_of_great_values_is_no_infinity(tmp_path: Path, dtype: torch.dtype) -> None:
    hookscope.features(
        nn.Sequential(nn.Identity()),
        [torch.full((2, 3, 4, 4), 3e38, dtype=dtype)],
        tmp_path / "f.safetensors",
        layer="0",
    )
    np.testing.assert_allclose(load_file(tmp_path / "f.safetensors")["0"], np.full((2, 3), 3e38, np.float32), rtol=1e-6)


def test_batches_of_a_loader_with_labels(tmp_path: Path) -> None:
    model, inputs, labels = network(), torch.randn(10, 3, 8, 8), torch.arange(10) % 3
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=4)
    written = hookscope.features(model, loader, tmp_path / "f.safetensors", layer="name:2", pool="none")
    assert written.shapes == {"2": (10, 4, 4, 4)}
    expected = kept_outputs(model, inputs, 4)["2"].astype(np.float32)
    np.testing.assert_array_equal(load_file(tmp_path / "f.safetensors")["2"], expected)
    sidecar = json.loads((tmp_path / "f.json").read_bytes())
    assert [each["class"] for each in sidecar["inputs"]] == [str(number % 3) for number in range(10)]
    for item in ({}, ()):
        with pytest.raises(UsageError, match=f"A batch is {type(item).__name__}"):
            hookscope.features(model, [item], tmp_path / "g.safetensors", layer="2")
    assert not (tmp_path / "g.safetensors").exists()


def test_labels_may_be_any_sequence_and_hold_any_text(tmp_path: Path) -> None:
    batches = [
        (torch.randn(2, 3, 8, 8), labels)
        for labels in (np.array([1, 2]), ["a\ud800", "b"], range(3, 5), deque([5, 6]), "no")
    ]
    hookscope.features(network(), batches, tmp_path / "f.safetensors", layer="2")
    entries = json.loads((tmp_path / "f.json").read_bytes())["inputs"]
    classes = [entry.get("class") for entry in entries]
    assert classes == ["1", "2", r"a\ud800", "b", "3", "4", "5", "6", None, None]


def test_a_file_with_the_name_of_features_is_not_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "features-000000.safetensors"
    mine.write_text("mine")
    with pytest.raises(OutputError, match="it exists and is no file of features"):
        hookscope.survey(network(), torch.randn(2, 3, 8, 8), layer="2", features=tmp_path)
    assert mine.read_text() == "mine"


def test_a_tensor_is_one_batch_and_no_sequence_of_batches(tmp_path: Path) -> None:
    inputs, network = torch.randn(5, 7, 3), nn.Sequential(nn.Linear(3, 2))
    written = hookscope.features(network, inputs, tmp_path / "f.safetensors", layer="0", pool="none")
    assert written.shapes == {"0": (5, 7, 2)}


def test_a_layer_that_returns_its_input_has_features_of_its_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity())
    out = tmp_path / "f.safetensors"
    hookscope.survey(model, torch.randn(5, 3, 8, 8), layer=("0", "1"), features=out, chunk_size=2)
    features = load_file(out)
    assert {*features} == {"0", "1"}
    np.testing.assert_array_equal(features["0"], features["1"])


def test_batches_that_give_no_right_features_are_refused(tmp_path: Path) -> None:
    model, out = nn.Sequential(nn.Linear(1, 2, bias=False)), tmp_path / "f.safetensors"
    nn.init.constant_(model[0].weight, 65504.0)  # the greatest number of float16
    batches = [torch.ones(2, 1)]
    written = hookscope.features(model, batches, out, layer="0", features_dtype="float16")
    assert written.shapes == {"0": (2, 2)}
    with pytest.raises(UsageError, match=r"exceeds float16's greatest number, 65,504\. Give `features_dtype` float32"):
        hookscope.features(model, [1.001 * batches[0]], out, layer="0", features_dtype="float16")
    with pytest.raises(UsageError, match=r"exceeds float32's greatest number, 3\.4e38\. Leave this layer out"):
        hookscope.features(model.double(), [1e38 * batches[0].double()], out, layer="0")
    model.float()
    with pytest.raises(UsageError, match="There are no batches"):
        hookscope.features(model, [], out, layer="0")
    (tmp_path / "config.json").write_text("mine", encoding="utf-8")
    for name in ("config.safetensors", "config.json/f.safetensors"):
        with pytest.raises(OutputError, match="config"):
            hookscope.features(model, batches, tmp_path / name, layer="0")
    out.with_suffix(".json").unlink()
    with pytest.raises(OutputError, match="it exists and is no file of features"):  # weights, perhaps
        hookscope.features(model, batches, out, layer="0")
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == "mine"
    with pytest.raises(OutputError, match="Name another file with `out`"):
        hookscope.features(model, batches, "/proc/f.safetensors", layer="0")
