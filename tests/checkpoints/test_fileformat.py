"""Which kind of file it is, and what a pickle in it would do, without doing any of it."""

import errno
import io
import json
import os
import pickle
import subprocess
import tarfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
        for protocol in (0, 2, 4)
    ),
]


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        file_kind(path)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize(("kind", "write"), KINDS)
def test_content_decides_the_kind(tmp_path: Path, kind: str, write: Callable[[Path], Any]) -> None:
    name = "model.safetensors"
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


@pytest.mark.parametrize("text", ['{"weight_map": ' + "[" * 100_000, '{"a": ' + "1" * 10_000 + "}", '{"a": "\xff"}'])
def test_json_that_cannot_be_read_is_still_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.index.json").write_bytes(text.encode("latin1"))
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
    for case in ("config.json", "zz-shard.safetensors" if name.endswith("json") else "zz.txt", name):
        (tmp_path / case).touch()  # an index is suggested before the shards beside it
    assert f"/{name}'" in refusal(tmp_path)


def test_folder_that_cannot_be_listed_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(folder: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", denied)
    assert refusal(tmp_path).endswith("is a folder; it cannot be read: Permission denied; make it readable.")


def test_fifo_that_appears_after_the_first_look_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    regular = (tmp_path / "model.pt").stat()
    os.mkfifo(tmp_path / "pipe.pt")
    monkeypatch.setattr(Path, "stat", lambda *_, **__: regular)
    assert "named pipe" in refusal(tmp_path / "pipe.pt")


def saved(content: object, protocol: int = 2) -> tuple[bytes, dict[str, int]]:
    """Return the pickle that torch.save writes, and the sizes of its storages."""
    buffer = io.BytesIO()
    torch.save(content, buffer, pickle_protocol=protocol)
    with zipfile.ZipFile(buffer) as archive:
        sizes = {i.filename.partition("/data/")[2]: i.file_size for i in archive.infolist() if "/data/" in i.filename}
        return archive.read("archive/data.pkl"), sizes


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
    assert survey.is_known_to_torch
    assert not survey.truncated
    assert not survey.malformed


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_names_are_todays_in_every_protocol(protocol: int) -> None:
    body = pickle.dumps([subprocess.Popen, eval], protocol)  # protocol 2 spells them commands.Popen, __builtin__.eval
    assert survey_pickle(io.BytesIO(body)).imports == ("subprocess.Popen", "builtins.eval")
    assert survey_pickle(io.BytesIO(body)).is_known_to_torch == (protocol == 2)


@pytest.mark.parametrize(
    "pid",
    [
        ("storage", torch.FloatStorage, "0", "cpu"),
        ("module", torch.FloatStorage, "0", "cpu", 1),
        ("storage", torch.Tensor, "0", "cpu", 1),
        ("storage", torch.FloatStorage, 0, "cpu", 1),
        ("storage", torch.FloatStorage, "é", "cpu", 1),
        ("storage", torch.FloatStorage, "0", "cpu", -1),
        ("storage", torch.FloatStorage, "0", "cpu", True),
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


def test_a_missing_file_has_its_nearest_neighbour_named(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").touch()
    for name, said in {"weihts.pt": "the path. Nearest: 'weights.pt'.", "other.safetensors": "the path."}.items():
        with pytest.raises(CheckpointError) as caught:
            file_kind(tmp_path / name)
        assert str(caught.value).endswith(f"{name} does not exist; check {said}")


def test_of_deepspeeds_folder_the_weights_are_named_and_not_the_optimisers_states(tmp_path: Path) -> None:
    states = tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    states.touch()
    with pytest.raises(CheckpointError, match="is a folder; no weights lie directly in it"):
        file_kind(tmp_path)
    (tmp_path / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match=r"such as '.*mp_rank_00_model_states\.pt'"):
        file_kind(tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_what_cannot_be_a_path_is_said_to_be_none(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read: not a path\.$"):
        file_kind(Path(name))
