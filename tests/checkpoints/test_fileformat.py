import io
import json
import os
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from hookscope.checkpoints.fileformat import file_kind
from hookscope.errors import CheckpointError

STATE = {"w": torch.ones(2)}


def save_legacy(path: Path) -> None:
    torch.save(STATE, path, _use_new_zipfile_serialization=False)


def save_legacy_4(path: Path) -> None:
    torch.save(STATE, path, _use_new_zipfile_serialization=False, pickle_protocol=4)


def save_script(path: Path) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(path)


def save_program(path: Path) -> None:
    with path.open("wb") as file:
        torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), file)


def save_tar(path: Path, member: str = "sys_info") -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo(member), io.BytesIO())


def save_index(path: Path, shard: str = "model-1.safetensors") -> None:
    path.write_text(json.dumps({"weight_map": {"w": shard}}))


KINDS: list[tuple[str, Callable[[Path], Any]]] = [
    ("torch", lambda path: torch.save(STATE, path)),
    ("torch", lambda path: torch.save(nn.Linear(2, 2), path)),
    ("legacy torch", save_legacy),
    ("legacy torch", save_legacy_4),
    ("safetensors", lambda path: safetensors.torch.save_file(STATE, path)),
    ("safetensors", lambda path: safetensors.torch.save_file(STATE, path, {"format": "pt"})),
    ("safetensors index", save_index),
    ("torch index", lambda path: save_index(path, "pytorch_model-1.bin")),
    ("torchscript", save_script),
    ("exported program", save_program),
    ("torch tar", save_tar),
    *(
        ("pickle", lambda path, protocol=protocol: path.write_bytes(pickle.dumps({"w": Path}, protocol)))
        for protocol in range(6)
    ),
]


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        file_kind(path)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model"])
@pytest.mark.parametrize(("kind", "write"), KINDS)
def test_content_decides_the_kind(tmp_path: Path, kind: str, write: Callable[[Path], Any], name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        write(tmp_path / name)
    assert file_kind(tmp_path / name) == kind


@pytest.mark.parametrize("write", [KINDS[0][1], save_legacy, KINDS[4][1]])
def test_first_bytes_of_a_file_are_called_truncated_or_no_weights(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    path = tmp_path / "model.pt"
    write(path)
    whole = path.read_bytes()
    for length in range(1, 9):
        path.write_bytes(whole[:length])
        assert "truncated" in refusal(path), length


@pytest.mark.parametrize(
    ("start", "phrase"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"\n  <html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS pointer"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b'{"model": 1}', "JSON"),
        (b"\x89PNG\r\n\x1a\n", "PNG image"),
        (b"\xff\xd8\xff\xe0", "JPEG image"),
        (b"\x93NUMPY\x01\x00", "NumPy array"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"GGUF\x03", "GGUF"),
        (b"\x08\x07\x12\x07pytorch", "ONNX"),
        (b"\x1c\x00\x00\x00TFL3" + bytes(20), "TensorFlow Lite"),
        (b"\x00\x00\x00\x18ftypheic" + bytes(20), "HEIF"),
        (b"PK\x03\x04", "truncated"),
        (b"PK\x05\x06" + bytes(18), "empty zip"),
        (bytes(600), "zero bytes"),
        (b"import torch\n\nclass Net: ...\n", "is text, not weights; it starts with 'import torch"),
        ("Größe".encode() * 200, "is text"),
        (b"\x1b[31m\x00", "not a weights file"),
        (np.random.default_rng(0).bytes(600), "give one that torch.save or safetensors has written"),
    ],
)
def test_other_kinds_of_file_are_named(tmp_path: Path, start: bytes, phrase: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(start)
    assert phrase in refusal(path)


def test_missing_file_folder_loop_and_fifo_are_refused_without_waiting(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.pt")
    assert "folder" in refusal(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "symbolic links" in refusal(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe.pt")
    assert "not a regular file" in refusal(tmp_path / "pipe.pt")
    assert "a device, not a regular file" in refusal(Path("/dev/zero"))
    assert "cannot be read" in refusal(Path("a\0b"))


@pytest.mark.parametrize(
    ("document", "phrase"),
    [
        ({"architectures": ["ResNet"], "model_type": "resnet"}, "Hugging Face configuration"),
        ({"weight_map": {}}, "names no tensors"),
        ({"weight_map": ["a"]}, "JSON text"),
        ({"weights": 1}, "JSON text"),
    ],
)
def test_json_is_described(tmp_path: Path, document: object, phrase: str) -> None:
    (tmp_path / "model.index.json").write_text(json.dumps(document))
    assert phrase in refusal(tmp_path / "model.index.json")


@pytest.mark.parametrize(
    "text", ["{", '{"weight_map": ' + "[" * 100_000, '{"a": ' + "1" * 10_000 + "}", '{"a": "\xff"}', '{"a": 1} {}']
)
def test_json_that_cannot_be_read_is_still_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.index.json").write_bytes(text.encode("latin1"))
    assert "JSON text" in refusal(tmp_path / "model.index.json")


def test_huge_index_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "model.index.json").write_text('{"weight_map": {"w": "a.bin"}}' + " " * 2**24)
    assert "JSON text" in refusal(tmp_path / "model.index.json")


def test_a_link_to_a_file_is_that_file_and_a_dangling_one_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "model.pt").symlink_to(tmp_path / "real.pt")
    message = refusal(tmp_path / "model.pt")
    assert "dangling link" in message
    assert "real.pt" in message
    torch.save(STATE, tmp_path / "real.pt")
    assert file_kind(tmp_path / "model.pt") == "torch"


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"])
def test_folder_suggests_the_file_in_it(tmp_path: Path, name: str) -> None:
    for each in ("config.json", "zz-shard.safetensors" if name.endswith("json") else "zz.txt", name):
        (tmp_path / each).touch()  # an index is suggested before the shards beside it
    assert f"/{name}'" in refusal(tmp_path)


def test_fifo_that_appears_after_the_first_look_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    regular = (tmp_path / "model.pt").stat()
    os.mkfifo(tmp_path / "pipe.pt")
    monkeypatch.setattr(Path, "stat", lambda *_, **__: regular)
    assert "named pipe" in refusal(tmp_path / "pipe.pt")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_zip(path: Path, content: Iterator[tuple[str, bytes]] | dict[str, bytes], compression: int = 0) -> None:
    pairs = content.items() if isinstance(content, dict) else content
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", compression) as archive:
        warnings.simplefilter("ignore")  # names that repeat
        for name, body in pairs:
            archive.writestr(name, body)


@pytest.mark.parametrize(
    ("names", "phrase"),
    [
        (["a.npy", "b.npy"], "NumPy .npz archive"),
        (["config.json", "metadata.json", "model.weights.h5"], "Keras archive"),
        (["pkg/.data/extern_modules", "pkg/m.py"], r"torch.package archive"),
        (["word/document.xml", "b"], "a zip archive of word/document.xml, …"),
        (["data.pkl"], "a zip archive of data.pkl"),
    ],
)
def test_other_archives_are_named(tmp_path: Path, names: list[str], phrase: str) -> None:
    write_zip(tmp_path / "model.zip", dict.fromkeys(names, b"x"))
    assert phrase in refusal(tmp_path / "model.zip")


@pytest.mark.parametrize(
    "name", ["../evil", "/evil", "model/../../evil", "model/\x1b[31m", "model\\evil", "model/a\nb"]
)
def test_hostile_member_names_are_refused(saved: Path, name: str) -> None:
    write_zip(saved, members(saved) | {name: b""})
    assert "a member is called" in refusal(saved)


@pytest.mark.parametrize("name", ["model/data.pkl", "model/DATA.PKL", "model/data/0"])
def test_member_that_is_there_twice_is_refused_whatever_its_case(saved: Path, name: str) -> None:
    write_zip(saved, iter([*members(saved).items(), (name, b"other")]))
    assert "there twice" in refusal(saved)


def test_a_compressed_member_and_a_second_pickle_are_refused(saved: Path) -> None:
    whole = members(saved)
    write_zip(saved, whole, zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal(saved)
    write_zip(saved, whole | {"other/data.pkl": b""})
    assert "2 files data.pkl" in refusal(saved)


def test_directory_that_is_not_where_the_file_says_is_refused(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:4] + b"in front" + saved.read_bytes())
    assert zipfile.ZipFile(saved).namelist()  # Python corrects for it
    assert "directory is not where it says" in refusal(saved)
