import hashlib
import json
import pickle
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from hookscope.checkpoints.checkpoint import FileOptions
from hookscope.errors import CheckpointError
from hookscope.models.checkpoint import read_checkpoint
from tests.byteorder import save_big_endian

STATE = {"conv.weight": torch.arange(24.0).reshape(2, 3, 2, 2), "count": torch.tensor(7), "half": torch.ones(3).half()}


def save_legacy(state: Any, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


WRITERS: dict[str, Callable[[Any, Path], None]] = {
    "zip": torch.save,
    "legacy": save_legacy,
    "safetensors": safetensors.torch.save_file,
}


def refusal(path: Path, error: type[Exception] = CheckpointError) -> str:
    """Read a file that has to be refused, and return the message, which must be one line without torch's advice."""
    with pytest.raises(error) as caught:
        read_checkpoint(path)
    assert type(caught.value) is error
    message = str(caught.value)
    assert message.isprintable()
    assert "weights_only" not in message
    return message


def rezip(path: Path, change: Callable[[dict[str, bytes]], Any], compression: int = zipfile.ZIP_STORED) -> None:
    """Write a zip again with its members changed; their checksums are right afterwards."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, body in members.items():
            archive.writestr(name, body)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", ["model.pt", "m\udcff.pt"])  # the second cannot be mapped
def test_a_file_of_a_big_endian_machine_has_the_values_it_was_saved_with(tmp_path: Path, name: str) -> None:
    names = "float64 float32 float16 bfloat16 complex32 complex64 complex128 bool int64 int32 int16 int8 uint8"
    dtypes = [getattr(torch, dtype) for dtype in (names + " uint16 uint32 uint64 float8_e5m2").split()]
    state = {str(dtype): (torch.arange(12).reshape(3, 4) * 300).to(dtype) for dtype in dtypes}
    path = save_big_endian({"model": state, "epoch": 3}, tmp_path / name)
    read = read_checkpoint(path).state
    for dtype, saved in state.items():
        assert bytes(read[dtype].contiguous().untyped_storage()) == bytes(saved.untyped_storage()), dtype


@pytest.mark.parametrize(
    ("name", "writer"), [("model.pt", "zip"), ("model.safetensors", "legacy"), ("model", "safetensors")]
)
def test_content_decides_how_a_file_is_read(tmp_path: Path, writer: str, name: str) -> None:
    path = tmp_path / name
    WRITERS[writer](STATE, path)
    checkpoint = read_checkpoint(path)
    assert checkpoint.state.keys() == STATE.keys()
    for key, tensor in STATE.items():
        assert torch.equal(checkpoint.state[key], tensor)
        assert checkpoint.state[key].dtype == tensor.dtype
    assert checkpoint.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert checkpoint.warnings == ()
    assert read_checkpoint(path).state.keys() == STATE.keys()


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Sparse invariant")
def test_a_count_that_is_no_number_is_no_counter(tmp_path: Path) -> None:
    bits, sparse = torch.zeros(1, dtype=torch.uint8).view(torch.bits8), torch.ones(1, 1).to_sparse_csr()
    odd = {"epoch": bits, "iteration": sparse, "it": torch.tensor(1j)}
    torch.save({"state_dict": STATE, "step": torch.tensor([3]), **odd}, tmp_path / "model.pt")
    training = read_checkpoint(tmp_path / "model.pt").training
    assert training is not None
    assert training.counters == {"step": 3}


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_elements_that_share_a_byte_claim_no_more_than_their_storage(tmp_path: Path) -> None:
    scales, points = torch.ones(2), torch.zeros(2)
    packed = torch.quantize_per_channel(torch.ones(2, 4), scales, points, 0, torch.quint4x2)
    torch.save({"w": packed}, tmp_path / "model.pt")
    assert read_checkpoint(tmp_path / "model.pt").state["w"].dequantize().tolist() == [[1] * 4] * 2


def test_what_other_packages_allow_to_unpickle_does_not_count(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "extra": Counter}, tmp_path / "model.pt")
    before = set(torch.serialization.get_safe_globals())
    path = tmp_path / "path.pt"
    torch.save({"w": torch.ones(1), "extra": tmp_path}, path)
    with torch.serialization.safe_globals([type(tmp_path)]):
        torch.load(path, weights_only=True)
        [warning] = read_checkpoint(path).warnings
        assert "refuses this file, which names pathlib" in warning
        assert "skipped: 1 object of pathlib" in warning
    assert set(torch.serialization.get_safe_globals()) == before


def test_a_pickle_too_large_to_be_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(STATE, path)
    rezip(path, lambda members: members.update({"model/data.pkl": bytes(65 * 2**20)}))
    assert "64 MiB" in refusal(path)


def shard(folder: Path, parts: dict[str, dict[str, torch.Tensor]], **changed: str) -> Path:
    """Write an index and its shards; `changed` says of a tensor in which file the index claims it to be."""
    index = folder / "model.safetensors.index.json"
    for name, state in parts.items():
        write = safetensors.torch.save_file if name.endswith(".safetensors") else torch.save
        write(state, folder / name)
    weight_map = {tensor: name for name, state in parts.items() for tensor in state} | changed
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


A, B = {"a": torch.arange(3.0)}, {"b": torch.ones(2, 2), "c": torch.zeros(1)}


@pytest.mark.parametrize(
    "names", [("one.safetensors", "two.safetensors"), ("one.bin", "two.bin"), ("one.bin", "two.safetensors")]
)
def test_shards_are_read_by_their_index(tmp_path: Path, names: tuple[str, str]) -> None:
    index = shard(tmp_path, dict(zip(names, (A, B), strict=True)))
    checkpoint = read_checkpoint(index)
    assert list(checkpoint.state) == ["a", "b", "c"]
    assert all(torch.equal(checkpoint.state[key], value) for key, value in {**A, **B}.items())
    assert checkpoint.warnings == ()
    files = [index, *(tmp_path / name for name in names)]
    text = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    assert checkpoint.sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_links_into_one_folder_are_followed_as_a_download_cache_has_them(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    index = shard(blobs, {"one.safetensors": A})
    for file in (index, blobs / "one.safetensors"):
        (snapshot / file.name).symlink_to(file)
    assert read_checkpoint(snapshot / index.name).state.keys() == A.keys()


def test_shards_have_what_the_configuration_beside_them_tells(tmp_path: Path) -> None:
    index = shard(tmp_path, {"one.safetensors": A, "two.safetensors": B})
    (tmp_path / "config.json").write_text('{"architecture": "resnet18"}', "utf-8")
    assert read_checkpoint(index).architectures == ("resnet18",)


def test_an_index_with_too_many_shards_is_refused_before_any_is_looked_for(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"w{at}": f"{at}.safetensors" for at in range(10_001)}}))
    with pytest.raises(CheckpointError, match=r"names 10001 files, over the limit of 10000; refused\."):
        read_checkpoint(index)


def test_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    index = shard(tmp_path, {"one.safetensors": A | {"z": torch.ones(1)}, "two.safetensors": A | B})
    assert "'a' is in one.safetensors and in another file" in refusal(index)
    index.write_text('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}')
    assert "lists 'a' twice" in refusal(index)


@pytest.mark.parametrize("content", [nn.Linear(2, 2), {"epoch": 1, "model": nn.Linear(2, 2), "ema": None}])
@pytest.mark.parametrize("save", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_a_trusted_module_gives_its_weights_and_itself(tmp_path: Path, content: Any, save: Any) -> None:
    save(content, tmp_path / "model.pt")
    checkpoint = read_checkpoint(tmp_path / "model.pt", FileOptions(trust=True))
    assert isinstance(checkpoint.module, nn.Linear)
    assert list(checkpoint.state) == ["weight", "bias"]


def test_trusted_plain_file_is_still_read_without_running_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    monkeypatch.setattr("hookscope.models.trusted_files.read_trusted", pytest.fail)
    assert read_checkpoint(tmp_path / "model.pt", FileOptions(trust=True)).state.keys() == STATE.keys()


@pytest.mark.parametrize("writer", ["zip", "safetensors"])
def test_tensors_are_the_mapped_file_and_copies_of_it_when_written_to(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "model.bin"
    WRITERS[writer]({"w": torch.zeros(4096)}, path)
    before = path.read_bytes()
    tensor = read_checkpoint(path).state["w"]
    assert str(path) in Path("/proc/self/maps").read_text()
    tensor.fill_(1)
    assert path.read_bytes() == before
