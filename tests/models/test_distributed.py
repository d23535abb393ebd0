"""Distributed checkpoints: folders of slices, read as torch's own converter reads them, and refused where they lie."""

import argparse
import http
import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

import hookscope
from hookscope.checkpoints.reading import ReadingRules, read_verified
from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.errors import CheckpointError, HookscopeError, UntrustedFileError
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.contents import list_contents
from tests.commands.watch.conftest import ENVIRONMENT, TORCHRUN
from tests.fork_server import ForkServer
from tests.models import hostile
from tests.models.distributed import Folder, save, size, torch_reads
from tests.models.hostile import GOOD, Call


def content_of(folder: Path) -> Any:
    files = WeightsFiles.at(folder)
    return read_verified(files, lambda *_: None, ReadingRules("", allowed_globals=()))[folder].content


def assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert_equal(actual[key], value)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for each, value in zip(actual, expected, strict=True):
            assert_equal(each, value)
    else:
        assert actual == expected


def training() -> dict[str, Any]:
    network = hostile.network()
    network.load_state_dict(GOOD)
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.1)
    network(torch.rand(1, 3, 9, 9)).sum().backward()
    optimiser.step()
    return {
        "model": network.state_dict(),
        "optimiser": optimiser.state_dict(),
        "epoch": 3,
        "rates": [0.5, torch.tensor([1.0, float("nan")]), {"deep": torch.tensor(2)}],
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
    }


def test_a_configuration_in_the_folder_counts_and_none_around_it(tmp_path: Path) -> None:
    folder = save(training(), tmp_path / "step-3")
    (tmp_path / "config.json").write_text('{"architecture": "resnet18"}')
    assert read_checkpoint(folder).architectures == ()
    (folder / "config.json").write_text('{"architecture": "resnet50"}')
    assert read_checkpoint(folder).architectures == ("resnet50",)


def test_a_folder_reads_as_torch_converts_it(tmp_path: Path) -> None:
    folder = save(training(), tmp_path / "step-3")
    assert_equal(content_of(folder), torch_reads(folder))
    listing = list_contents(folder)
    assert (listing.name, listing.kind) == ("step-3", "distributed")
    assert listing.producer == "torch.distributed.checkpoint, 2 files"
    assert listing.byte_count == sum(file.stat().st_size for file in folder.iterdir())
    weights = listing.parts[0]
    assert (weights.key, [tensor.key for tensor in weights.tensors]) == ("model", list(GOOD))


CHUNKS = {
    "blocks": [((0, 0), (2, 4)), ((2, 0), (3, 2)), ((2, 2), (3, 2))],
    "an empty rank": [((0, 0), (5, 4)), ((5, 0), (0, 4))],
}


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.sample("blocks")
def test_chunks_are_put_together_as_torch_does(tmp_path: Path, name: str) -> None:
    folder = Folder()
    folder.tensor("model.w", torch.arange(20.0).reshape(5, 4), *CHUNKS[name], keys=("model", "w"))
    folder.tensor("model.b", torch.tensor(7, dtype=torch.int16), keys=("model", "b"))
    path = folder.write(tmp_path / "x")
    expected = {"model": {"w": torch.arange(20.0).reshape(5, 4), "b": torch.tensor(7, dtype=torch.int16)}}
    assert_equal(torch_reads(path), expected)
    assert_equal(content_of(path), expected)


@pytest.mark.parametrize("holder", [_MEM_FORMAT_ENCODING, nn.Module])
def test_the_member_of_an_enum_may_be_pickled_as_python_3_11_0_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Any
) -> None:
    name = "eval" if holder is nn.Module else "TORCH_CONTIGUOUS_FORMAT"
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda *_: (getattr, (holder, name)))
    content = {"weight": torch.randn(2, 3)}
    folder = save(content, tmp_path / "x")
    assert b"getattr" in (folder / ".metadata").read_bytes()
    if holder is nn.Module:
        with pytest.raises(UntrustedFileError, match=r"would import builtins\.getattr"):
            content_of(folder)
    else:
        assert_equal(content_of(folder), content)


@pytest.mark.exhaustive
def test_slices_of_a_later_pickle_protocol_and_of_quantised_tensors_are_read(tmp_path: Path) -> None:
    written = Folder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", partial(torch.save, pickle_protocol=4))
        written.tensor("weight", torch.arange(6.0).reshape(2, 3), ((0, 0), (1, 3)), ((1, 0), (1, 3)))
        written.object("epoch", 3)
    content = content_of(written.write(tmp_path / "later"))
    assert content["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert content["epoch"] == 3
    with warnings.catch_warnings(action="ignore"):  # of torch about quantised tensors
        packed = Folder()
        packed.tensor("weight", torch.quantize_per_tensor(torch.eye(2), 0.5, 0, torch.quint8))
        assert content_of(packed.write(tmp_path / "packed"))["weight"].dequantize().tolist() == [[1, 0], [0, 1]]


def test_what_is_empty_in_a_list_is_not_stored_and_read_as_none(tmp_path: Path) -> None:
    folder = save({"states": [{}, {"a": torch.ones(2)}]}, tmp_path / "gap")
    empty, state = content_of(folder)["states"]
    assert empty is None
    assert_equal(state, {"a": torch.ones(2)})


def test_objects_beside_the_tensors_are_read_past_and_a_gate_asks(tmp_path: Path) -> None:
    path = save({"model": GOOD, "args": argparse.Namespace(a=1)}, tmp_path / "plain")
    assert list_contents(path).warnings == ("plain: skipped: 1 object of argparse.Namespace.",)
    report = hookscope.check(path, arch="none")
    assert report.passed
    assert "names argparse.Namespace; nothing was imported" in " ".join(report.warnings)
    path = save({"model": GOOD, "status": http.HTTPStatus.OK}, tmp_path / "other")
    assert hookscope.check(path, arch="none").error_code == 4
    assert hookscope.check(path, arch="none", allow_global=["http.HTTPStatus"]).passed
    assert_equal(dict(read_checkpoint(path).state), GOOD)


def good() -> Folder:
    folder = Folder()
    for name, tensor in GOOD.items():
        folder.tensor(name, tensor, keys=("model", name))
    folder.object("epoch", 3)
    return folder


def _chunks(*chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Folder], None]:
    """Describe the first bias, of 4 elements, by other chunks, all of which have its slice."""

    def change(folder: Folder) -> None:
        tensor = folder.metadata.state_dict_metadata["0.bias"]
        assert isinstance(tensor, TensorStorageMetadata)
        tensor.chunks = [ChunkStorageMetadata(size(*offsets), size(*sizes)) for offsets, sizes in chunks]
        info = folder.metadata.storage_data.pop(MetadataIndex("0.bias", (0,)))
        for offsets, _ in chunks:
            folder.metadata.storage_data[MetadataIndex("0.bias", offsets)] = info

    return change


def _place(**fields: Any) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        index = MetadataIndex("0.bias", (0,))
        folder.metadata.storage_data[index] = replace(folder.metadata.storage_data[index], **fields)

    return change


def _value(value: object) -> Callable[[Folder], None]:
    """Put another value into the slice of the first bias."""

    def change(folder: Folder) -> None:
        folder.metadata.storage_data[MetadataIndex("0.bias", (0,))] = folder.place(value)

    return change


def _keys(**keys: tuple[Any, ...]) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        for name, way in keys.items():
            folder.object(name, 1, keys=way)

    return change


def _shape(*sizes: int) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        tensor = folder.metadata.state_dict_metadata["0.bias"]
        assert isinstance(tensor, TensorStorageMetadata)
        tensor.size = size(*sizes)
        tensor.chunks = [ChunkStorageMetadata(size(*(0 for _ in sizes)), size(*sizes))]
        info = folder.metadata.storage_data.pop(MetadataIndex("0.bias", (0,)))
        folder.metadata.storage_data[MetadataIndex("0.bias", [0 for _ in sizes])] = info

    return change


def _no_slices(folder: Folder) -> None:
    folder.metadata.storage_data = {}


def _repeated(folder: Folder) -> None:
    for at in range(100):
        folder.object(f"again{at}", 1)
        folder.metadata.storage_data[MetadataIndex(f"again{at}")] = folder.metadata.storage_data[
            MetadataIndex("0.bias", (0,))
        ]


LIES: dict[str, tuple[Callable[[Folder], None], str]] = {
    "a file outside": (_place(relative_path="../__0_0.distcp"), "not a file next to it; refused"),
    "a file that is not there": (_place(relative_path="__7_0.distcp"), "which is not there"),
    "bytes beyond the end": (_place(length=10**9), "names bytes that '__0_0.distcp' does not have"),
    "a negative offset": (_place(offset=-1), "is not what torch writes"),
    "other bytes": (_place(offset=3), "damaged|is not what"),
    "slices that were transformed": (
        _place(transform_descriptors=["stream.zstd"]),
        "transformed when they were written",
    ),
    "chunks that overlap": (_chunks(((0,), (2,)), ((1,), (2,))), "do not cover it, each element once"),
    "chunks that leave a gap": (_chunks(((0,), (1,)), ((2,), (2,))), "do not cover it"),
    "chunks beyond the tensor": (_chunks(((0,), (2,)), ((3,), (2,))), "do not cover it"),
    "chunks of other sizes": (_chunks(((0,), (2,)), ((2,), (2,))), "does not match its .metadata|more bytes"),
    "more chunks than any": (_chunks(*(((at,), (0,)) for at in range(10_001))), "more than 10000 chunks"),
    "no slices": (_no_slices, "is not what torch writes"),
    "one slice a hundred times": (_repeated, "names more bytes than its files have|does not hold"),
    "a shape that nothing could hold": (_shape(10**12, 10**12), "smaller than the values in it"),
    "a shape of the wrong length": (_shape(4, 10**6), "smaller than the values in it"),
    "a negative size": (_shape(-4), "is not what torch writes"),
    "a tensor of another dtype": (_value(GOOD["0.bias"].double()), "does not match its .metadata"),
    "a tensor that repeats one element": (_value(torch.ones(1).expand(4)), "claims 16 bytes of a storage of 4"),
    "no tensor": (_value({"a": 1}), "does not match its .metadata"),
    "bytes that torch did not write": (_value(b"PK\x03\x04" + bytes(400)), "damaged"),
    "a value inside another": (_keys(a=("epoch", "x")), "lies in another value"),
    "a value twice": (_keys(a=("epoch",)), "is there twice"),
    "a list with many gaps": (_keys(a=("list", 0), b=("list", 2000)), "a list with gaps"),
    "a list without end": (_keys(a=("list", 10**9)), "is not what torch writes"),
    "keys without end": (_keys(a=("x",) * 101), "is not what torch writes"),
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.sample("a file outside", "chunks that overlap")
def test_what_a_folder_claims_is_there_or_it_is_refused(tmp_path: Path, name: str) -> None:
    change, phrase = LIES[name]
    folder = good()
    change(folder)
    path = folder.write(tmp_path / "x")
    with pytest.raises(CheckpointError, match=phrase):
        read_checkpoint(path)


@pytest.mark.exhaustive
def test_slices_lie_in_the_folder_whatever_links_say(tmp_path: Path) -> None:
    path = good().write(tmp_path / "x")
    (path / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (path / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="a link out of its folder; refused"):
        read_checkpoint(path)
    (path / ".metadata").rename(tmp_path / "metadata")  # both in one place, as in the cache of Hugging Face
    (path / ".metadata").symlink_to(tmp_path / "metadata")
    assert_equal(dict(read_checkpoint(path).state), GOOD)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_one_file_alone_asks_for_its_folder(tmp_path: Path, name: str) -> None:
    path = good().write(tmp_path / "x")
    with pytest.raises(CheckpointError, match="one file of a distributed checkpoint; give its folder"):
        read_checkpoint(path / name)


@pytest.mark.exhaustive
def test_a_folder_without_its_metadata_says_what_is_missing(tmp_path: Path) -> None:
    path = good().write(tmp_path / "x")
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"whose \.metadata is missing"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        *(("os.system", place) for place in ("metadata", "planner", "slice of an object")),
        ("functools.partial", "slice of a tensor"),
    ],
)
@pytest.mark.sample("os.system-metadata", "os.system-slice of an object")
def test_nothing_that_a_folder_names_runs(tmp_path: Path, payload: str, place: str) -> None:
    canary = tmp_path / "canary"
    bad = hostile.PAYLOADS[payload](canary)
    folder = good()
    if place == "metadata":
        folder.metadata.storage_meta = bad
    elif place == "planner":
        folder.metadata.planner_data["epoch"] = bad
    elif place == "slice of a tensor":
        _value(argparse.Namespace(a=[bad]))(folder)
    else:
        folder.object("args", argparse.Namespace(a=[bad]))
    path = folder.write(tmp_path / "x")
    with pytest.raises(UntrustedFileError, match="import"):
        list_contents(path)
    report = hookscope.check(path, arch="none", allow_global=["*"], trust=True)
    assert report.error_code == 4, report
    assert not canary.exists()


@pytest.mark.exhaustive
def test_a_class_of_other_makers_in_the_metadata_is_refused_however_plain(tmp_path: Path) -> None:
    folder = good()
    folder.metadata.storage_meta = argparse.Namespace(a=1)  # type: ignore[assignment]
    with pytest.raises(UntrustedFileError, match=r"would import argparse\.Namespace"):
        list_contents(folder.write(tmp_path / "x"))


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_mutated_folder_reads_or_ends_in_one_sentence(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    folder = good()
    folder.object("args", argparse.Namespace(a=[1, 2]))
    path = folder.write(tmp_path / "x")
    contents = {file: file.read_bytes() for file in path.iterdir()}
    generator = np.random.default_rng(0)
    call = pickle.dumps(Call(os.system, f"touch {canary}"), 4)[11:-1]
    ways = set[str]()
    for _ in range(60):
        changed = path / str(generator.choice(["__0_0.distcp", ".metadata"], p=[0.2, 0.8]))
        content = bytearray(contents[changed])
        for _ in range(int(generator.integers(1, 4))):
            at = int(generator.integers(len(content)))
            match int(generator.integers(4)):
                case 0:
                    content[at] ^= 1 << int(generator.integers(8))
                case 1:
                    del content[at : at + int(generator.integers(1, 40))]
                case 2:
                    content[at:at] = content[: int(generator.integers(40))]
                case _:
                    content[at:at] = call
        changed.write_bytes(content)
        try:
            list_contents(path)
            ways.add("read")
        except HookscopeError as error:
            ways.add(type(error).__name__ if str(error).isprintable() else "unprintable")
        changed.write_bytes(contents[changed])
    assert not canary.exists()
    assert {"CheckpointError", "UntrustedFileError"} <= ways <= {"CheckpointError", "UntrustedFileError", "read"}


def save_sharded(folder: str) -> None:
    """Train a network that is spread over the processes of torchrun for a step, and save it."""
    from torch import distributed
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5 * 16, 7))
    fully_shard(network, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimiser = torch.optim.AdamW(network.parameters())
    network(torch.rand(2, 3, 6, 6)).sum().backward()
    optimiser.step()
    model, state = get_state_dict(network, optimiser)
    checkpoint.save({"model": model, "optimiser": state, "epoch": 1}, checkpoint_id=folder)
    distributed.destroy_process_group()


@pytest.mark.exhaustive
def test_what_processes_have_sharded_reads_as_torch_puts_it_together(tmp_path: Path, fork_server: ForkServer) -> None:
    count = 2  # of which neither 5 nor 7 rows are a multiple
    folder = tmp_path / "fsdp"
    program = f"from tests.models.test_distributed import save_sharded; save_sharded({str(folder)!r})"
    (tmp_path / "save.py").write_text(program, "utf-8")
    ended = fork_server.run(*TORCHRUN, count, "save.py", cwd=tmp_path, environment=ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr
    assert len([*folder.glob("*.distcp")]) == count
    expected = torch_reads(folder)
    assert_equal(content_of(folder), expected)
    assert expected["model"]["3.weight"].shape == (7, 80)
    assert_equal(dict(read_checkpoint(folder).state), expected["model"])
