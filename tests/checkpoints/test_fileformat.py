"""Which kind of file it is, and what a pickle in it would do, without doing any of it."""

import io
import json
import os
import pickle
import subprocess
import tarfile
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from hookscope.checkpoints.fileformat import file_kind
from hookscope.checkpoints.pickle_scan import survey_pickle
from hookscope.errors import CheckpointError

STATE = {"w": torch.ones(2)}


def save_legacy(path: Path, protocol: int = 2) -> None:
    torch.save(STATE, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)


def save_program(path: Path) -> None:
    with path.open("wb") as file:
        torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), file)


def save_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("sys_info"), io.BytesIO())


def save_index(path: Path, shard: str = "model-1.safetensors") -> None:
    path.write_text(json.dumps({"weight_map": {"w": shard}}))


KINDS: list[tuple[str, Callable[[Path], Any]]] = [
    ("torch", lambda path: torch.save(STATE, path)),
    ("torch", lambda path: torch.save(nn.Linear(2, 2), path)),
    ("legacy torch", save_legacy),
    ("legacy torch", lambda path: save_legacy(path, 4)),
    ("safetensors", lambda path: safetensors.torch.save_file(STATE, path)),
    ("safetensors", lambda path: safetensors.torch.save_file(STATE, path, {"format": "pt"})),
    ("safetensors index", save_index),
    ("torch index", lambda path: save_index(path, "pytorch_model-1.bin")),
    ("torchscript", lambda path: torch.jit.script(nn.Linear(2, 2)).save(path)),
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
        (b"import torch\n\nclass Net: ...\n", "is text, not weights: 'import torch"),
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
    assert "does not exist; check the path" in refusal(tmp_path / "absent.pt")
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
def written(tmp_path: Path) -> Path:
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
def test_hostile_member_names_are_refused(written: Path, name: str) -> None:
    write_zip(written, members(written) | {name: b""})
    assert "a member is called" in refusal(written)


@pytest.mark.parametrize("name", ["model/data.pkl", "model/DATA.PKL", "model/data/0"])
def test_member_that_is_there_twice_is_refused_whatever_its_case(written: Path, name: str) -> None:
    write_zip(written, iter([*members(written).items(), (name, b"other")]))
    assert "there twice" in refusal(written)


def test_a_compressed_member_and_a_second_pickle_are_refused(written: Path) -> None:
    whole = members(written)
    write_zip(written, whole, zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal(written)
    write_zip(written, whole | {"other/data.pkl": b""})
    assert "2 files data.pkl" in refusal(written)


def test_directory_that_is_not_where_the_file_says_is_refused(written: Path) -> None:
    written.write_bytes(written.read_bytes()[:4] + b"in front" + written.read_bytes())
    assert zipfile.ZipFile(written).namelist()  # Python corrects for it
    assert "directory is not at its stated offset" in refusal(written)


def saved(content: object, protocol: int = 2) -> tuple[bytes, dict[str, int]]:
    """Return the pickle that torch.save writes, and the sizes of its storages."""
    buffer = io.BytesIO()
    torch.save(content, buffer, pickle_protocol=protocol)
    with zipfile.ZipFile(buffer) as archive:
        sizes = {i.filename.partition("/data/")[2]: i.file_size for i in archive.infolist() if "/data/" in i.filename}
        return archive.read("archive/data.pkl"), sizes


class Call:
    """Pickles as a call of any function with any arguments."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


CONTENTS: dict[str, Callable[[], object]] = {
    "state dict": lambda: nn.BatchNorm2d(3).state_dict(),
    "dtypes": lambda: {
        str(d): torch.ones(3).to(d) for d in (torch.half, torch.bfloat16, torch.int8, torch.bool, torch.cdouble)
    },
    "new dtypes": lambda: {"a": torch.ones(2).to(torch.float8_e4m3fn), "b": torch.ones(2, dtype=torch.uint16)},
    "views of one storage": lambda: dict(zip("abc", torch.arange(12.0).split(4), strict=True)),
    "empty and scalar": lambda: {"a": torch.ones(0, 3), "b": torch.tensor(1.0)},
    "sparse": lambda: {"a": torch.eye(3).to_sparse(), "b": torch.eye(3).to_sparse_csr()},
    "quantised": lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
    "parameter": lambda: {"a": nn.Parameter(torch.ones(2))},
    "meta": lambda: {"a": torch.ones(2, device="meta")},
    "python's own": lambda: {
        "a": b"\xff",
        "b": bytearray(b"x"),
        "c": {1},
        "d": 1j,
        "e": (None, True, 1.5),
        "f": Counter("ab"),
    },
    "torch's own": lambda: {
        "a": torch.Size([1]),
        "b": torch.device("cpu"),
        "c": torch.float32,
        "d": torch.Generator().get_state(),
    },
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse CSR", "ignore:Sparse invariant")
def test_what_torch_saves_needs_no_import_and_claims_what_it_has(name: str) -> None:
    body, sizes = saved(CONTENTS[name]())
    survey = survey_pickle(io.BytesIO(body))
    assert survey.imports == ()
    assert survey.storages == sizes
    assert survey.protocol == 2
    assert not survey.truncated
    assert not survey.malformed


def test_imports_are_named_once_each_in_order() -> None:
    body, _ = saved({"a": Path, "b": partial, "c": Path, "d": OrderedDict()})
    assert survey_pickle(io.BytesIO(body)).imports == (f"{Path.__module__}.Path", "functools.partial")


@pytest.mark.parametrize("protocol", range(6))
def test_names_are_todays_in_every_protocol(protocol: int) -> None:
    body = pickle.dumps([subprocess.Popen, eval], protocol)  # protocol 2 spells them commands.Popen, __builtin__.eval
    assert survey_pickle(io.BytesIO(body)).imports == ("subprocess.Popen", "builtins.eval")
    assert survey_pickle(io.BytesIO(body)).protocol == (protocol if protocol > 1 else 0)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_called(tmp_path: Path, protocol: int) -> None:
    body = pickle.dumps(Call(Path.touch, tmp_path / "canary"), protocol)
    survey_pickle(io.BytesIO(body))
    assert not list(tmp_path.iterdir())
    pickle.loads(body)
    assert list(tmp_path.iterdir())  # it would have


@pytest.mark.parametrize(
    "call",
    [
        Call(bytearray, 10**12),
        Call(__import__("codecs").encode, "text", "punycode"),
        Call(torch.Tensor, 4),
        Call(torch.FloatTensor, 4),
        Call(torch._utils._rebuild_tensor_v2, 5, 0, (1,), (1,), False, OrderedDict()),
        Call(torch._tensor._rebuild_from_type_v2, torch.FloatTensor, torch.Tensor, (4,), {}),
    ],
)
def test_calls_that_torch_allows_but_never_writes_are_malformed(call: Call) -> None:
    body = pickle.dumps({"w": call}, 2)
    survey = survey_pickle(io.BytesIO(body))
    assert survey.imports == ()
    assert survey.malformed


@pytest.mark.parametrize(
    "pid",
    [
        "0",
        ("storage", torch.FloatStorage, "0", "cpu"),
        ("module", torch.FloatStorage, "0", "cpu", 1),
        ("storage", torch.Tensor, "0", "cpu", 1),
        ("storage", torch.FloatStorage, 0, "cpu", 1),
        ("storage", torch.FloatStorage, "é", "cpu", 1),
        ("storage", torch.FloatStorage, "0", "cpu", -1),
        ("storage", torch.FloatStorage, "0", "cpu", True),
        ("storage", torch.FloatStorage, "0", "cpu", 1.0),
    ],
)
def test_storages_named_as_torch_never_does_are_malformed(pid: object) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return pid if obj == "here" else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"w": "here"})
    assert survey_pickle(io.BytesIO(buffer.getvalue())).malformed


def test_every_cut_is_truncated() -> None:
    body, _ = saved(nn.Linear(2, 2).state_dict())
    for length in range(len(body)):
        survey = survey_pickle(io.BytesIO(body[:length]))
        assert survey.truncated, length
        assert survey.imports == ()


def test_nonsense_is_malformed_and_never_raises() -> None:
    for body in (b".junk", b"\x80\x02(.", b"\x80\x02h\x05.", b"ccollections\nOrderedDict\n)R}b(s.", b"\xff\xff"):
        assert survey_pickle(io.BytesIO(body)).malformed, body


def test_pickles_one_after_another_are_read_one_by_one() -> None:
    file = io.BytesIO(pickle.dumps([1, "a"], 2) + pickle.dumps({"b": Path}, 2) + b"rest")
    assert survey_pickle(file).content == [1, "a"]
    assert survey_pickle(file).imports == (f"{Path.__module__}.Path",)
    assert file.read() == b"rest"
