import hashlib
import io
import os
import pickle
import tarfile
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hookscope.errors import CheckpointError, UntrustedFileError
from hookscope.models import load_into, read_checkpoint, read_state_dict
from hookscope.models.checkpoint import looks_like_file

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


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


# ---------------------------------------------------------------------------------------------------------------- good


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model"])
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
    assert read_state_dict(path).keys() == STATE.keys()


@settings(max_examples=30, deadline=None)
@given(
    names=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5, unique=True),
    shape=st.lists(st.integers(0, 3), max_size=3),
    writer=st.sampled_from(sorted(WRITERS)),
)
def test_any_state_dict_comes_back(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], shape: list[int], writer: str
) -> None:
    path = tmp_path_factory.mktemp("state") / "model.bin"
    state = {name: torch.randn(shape) for name in names if name != "__metadata__"} or {"w": torch.ones(1)}
    WRITERS[writer](state, path)
    read = read_state_dict(path)
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())


def test_module_versions_travel_with_the_state_dict(tmp_path: Path) -> None:
    network = nn.BatchNorm2d(3)
    torch.save(network.state_dict(), tmp_path / "model.pt")
    assert read_state_dict(tmp_path / "model.pt")._metadata == network.state_dict()._metadata


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_weights_inside_a_training_checkpoint_are_found_and_reported(tmp_path: Path, key: str) -> None:
    torch.save({"epoch": 3, "loss": torch.tensor(0.5), key: STATE, "optimizer": {}}, tmp_path / "model.pt")
    checkpoint = read_checkpoint(tmp_path / "model.pt")
    assert checkpoint.state.keys() == STATE.keys()
    (note,) = checkpoint.warnings
    assert f"'{key}'" in note
    assert "epoch, loss, optimizer" in note


def test_tensors_saved_on_an_accelerator_come_to_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(2)}, path)
    rezip(
        path,
        lambda m: m.update({n: b.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0") for n, b in m.items()}),
    )
    assert b"cuda:0" in path.read_bytes()
    assert read_state_dict(path)["w"].device.type == "cpu"


def test_shadowed_methods_hide_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    state = OrderedDict(a=torch.tensor([float("nan")]), b=torch.ones(2))
    state.itemz = state.keyz = state.valuez = state["b"].detacz = Counter  # type: ignore[attr-defined]
    torch.save(state, path)  # calls items() itself, so the shadows get their names afterwards
    names = (b"itemz", b"items"), (b"keyz", b"keys"), (b"valuez", b"values"), (b"detacz", b"detach")

    def rename(members: dict[str, bytes]) -> None:
        for before, after in names:
            members["model/data.pkl"] = members["model/data.pkl"].replace(before, after)

    rezip(path, rename)
    trap = torch.load(path, weights_only=True)
    assert not trap.items()
    assert not trap["b"].detach()
    read = read_state_dict(path)
    assert list(read.items())[1][0] == "b"
    assert torch.equal(read["b"].detach(), torch.ones(2))


def test_what_other_packages_allow_to_unpickle_does_not_count(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "extra": Counter}, tmp_path / "model.pt")
    before = set(torch.serialization.get_safe_globals())
    path = tmp_path / "path.pt"
    torch.save({"w": torch.ones(1), "extra": tmp_path}, path)
    with torch.serialization.safe_globals([type(tmp_path)]):
        torch.load(path, weights_only=True)
        refusal(path, UntrustedFileError)
    assert set(torch.serialization.get_safe_globals()) == before


# ------------------------------------------------------------------------------------------------------------- refused


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
        (b"\x08\x07\x12\x07pytorch", "not a weights file"),
        (b"PK\x03\x04", "truncated"),
        (b"\x1b[31m\x00", "not a weights file"),
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
    assert "cannot be read" in refusal(Path("a\0b"))


def test_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    torch.save(STATE, path)

    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    assert "Permission denied" in refusal(path)


@pytest.mark.parametrize("writer", WRITERS)
def test_truncated_file_is_called_damaged_and_never_an_attack(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "model.pt"
    WRITERS[writer]({f"layer{i}.weight": torch.randn(50) for i in range(8)}, path)
    whole = path.read_bytes()
    for length in [*range(16, 700, 7), *range(700, len(whole), 101), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert "truncated" in refusal(path), length


@pytest.mark.parametrize("writer", ["zip", "safetensors"])
def test_flipped_bits_are_refused_or_change_nothing_else(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "model.pt"
    WRITERS[writer]({"layer.weight": torch.randn(64)}, path)
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    outcomes = Counter[str]()
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[generator.integers(len(whole))] ^= 1 << generator.integers(8)
        path.write_bytes(damaged)
        try:
            read_state_dict(path)
            outcomes["read"] += 1
        except (CheckpointError, UntrustedFileError) as error:
            outcomes[type(error).__name__] += 1
    assert outcomes["CheckpointError"] > 0


def test_flipped_bit_in_the_weights_of_a_zip_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.zeros(1000)}, path)
    body = bytearray(path.read_bytes())
    body[body.index(bytes(4000)) + 2000] ^= 1
    path.write_bytes(body)
    assert torch.load(path, weights_only=True)["w"].count_nonzero() == 1  # torch says nothing
    assert "damaged" in refusal(path)


def test_edited_pickles_with_right_checksums_never_escape(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"layer.weight": torch.randn(4), "layer.bias": torch.randn(4)}, path)
    whole = path.read_bytes()
    generator = np.random.default_rng(1)

    def edit(members: dict[str, bytes]) -> None:
        name = next(n for n in members if n.endswith("data.pkl"))
        body = bytearray(members[name])
        body[generator.integers(len(body))] = generator.integers(256)
        members[name] = bytes(body)

    messages = []
    for _ in range(600):
        path.write_bytes(whole)
        rezip(path, edit)
        try:
            read_state_dict(path)
        except (CheckpointError, UntrustedFileError) as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(message.isprintable() for message in messages)


@pytest.mark.parametrize("save", [torch.save, save_legacy])
def test_code_in_a_pickle_is_named_and_not_run(tmp_path: Path, save: Callable[[Any, Path], None]) -> None:
    canary = tmp_path / "canary"
    save({"w": torch.ones(1), "x": Touch(canary)}, tmp_path / "model.pt")
    assert "posix.system" in refusal(tmp_path / "model.pt", UntrustedFileError)
    assert not canary.exists()


def test_pickled_module_is_named_with_what_to_do(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    message = refusal(tmp_path / "model.pt", UntrustedFileError)
    assert "torch.nn.modules.linear.Linear" in message
    assert "state_dict()" in message


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_bare_pickle_is_refused_unread(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Touch(tmp_path / "canary"), protocol))
    assert "bare pickle" in refusal(tmp_path / "model.pt", UntrustedFileError)
    assert not (tmp_path / "canary").exists()


def test_newer_pickle_protocol_inside_a_zip_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "model.pt", pickle_protocol=4)
    refusal(tmp_path / "model.pt", UntrustedFileError)


def test_tar_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "model.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    assert "tar archive" in refusal(tmp_path / "model.tar", UntrustedFileError)


def test_torchscript_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "model.pt")
    assert "TorchScript" in refusal(tmp_path / "model.pt", UntrustedFileError)


def test_exported_program_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "model.pt2")
    assert "exported program" in refusal(tmp_path / "model.pt2", UntrustedFileError)


def test_other_zip_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", a=np.ones(2))
    assert "not one that torch.save wrote" in refusal(tmp_path / "arrays.npz")


def test_compressed_members_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(STATE, path)
    rezip(path, lambda _: None, zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal(path)


def test_second_member_of_the_same_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(STATE, path)
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr("model/data.pkl", b"")
    assert "repeat" in refusal(path)


def test_oversized_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(STATE, path)
    rezip(path, lambda members: members.update({"model/data.pkl": bytes(65 * 2**20)}))
    assert "64 MiB" in refusal(path)


def test_missing_storage_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(STATE, path)
    rezip(path, lambda members: members.pop("model/data/0"))
    assert "damaged" in refusal(path)


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        ({}, "holds no tensors by name: nothing"),
        ({"epoch": 3, "optimizer": {}}, "only epoch, optimizer"),
        ({"state_dict": {}, "a\nb": 1}, r"only state_dict, a\nb"),
        ([torch.ones(1)], "holds a list"),
        (torch.ones(1), "holds a Tensor"),
        (None, "holds a NoneType"),
        (5, "holds a int"),
        ({"w": torch.ones(1, device="meta")}, "without data"),
    ],
)
def test_content_without_weights_is_described(tmp_path: Path, content: object, phrase: str) -> None:
    torch.save(content, tmp_path / "model.pt")
    assert phrase in refusal(tmp_path / "model.pt")


def test_empty_safetensors_is_an_error(tmp_path: Path) -> None:
    safetensors.torch.save_file({}, tmp_path / "model.safetensors")
    assert "no tensors" in refusal(tmp_path / "model.safetensors")


# ------------------------------------------------------------------------------------------------------------- loading


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))


def test_fitting_state_dict_is_copied_whole() -> None:
    source, target = network(), network()
    load_into(target, source.state_dict(), "model.pt")
    for key, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], tensor)


def test_misfits_are_listed_on_one_line_with_counts() -> None:
    state = network().state_dict()
    for key in ("0.weight", "1.weight", "1.bias", "1.running_mean"):
        del state[key]
    state["2.weight"] = torch.ones(10, 512)
    state["2.bias"] = torch.ones(10)
    state["head\n::error::"] = torch.ones(1)
    with pytest.raises(CheckpointError) as caught:
        load_into(network(), state, "model.pt")
    message = str(caught.value)
    assert message.isprintable()
    assert "model.pt does not fit Sequential" in message
    assert "4 missing (0.weight, 1.weight, 1.bias, …)" in message
    assert "2 of another shape (2.weight: file (10, 512), network (2, 4), 2.bias: file (10,), network (2,))" in message
    assert r"1 unknown to the network (head\n::error::)" in message


def test_one_wrong_key_is_enough_to_refuse() -> None:
    with pytest.raises(CheckpointError, match="1 unknown to the network"):
        load_into(network(), network().state_dict() | {"extra": torch.ones(1)}, "model.pt")
    state = network().state_dict()
    del state["2.bias"]
    with pytest.raises(CheckpointError, match="1 missing"):
        load_into(network(), state, "model.pt")


def test_something_else_than_a_tensor_is_a_misfit() -> None:
    with pytest.raises(CheckpointError, match=r"2.bias: file int, network \(2,\)"):
        load_into(network(), network().state_dict() | {"2.bias": 3}, "model.pt")


def test_missing_batch_counter_is_no_misfit() -> None:
    source, target = network(), network()
    state = {key: tensor for key, tensor in source.state_dict().items() if not key.endswith("num_batches_tracked")}
    load_into(target, state, "model.pt")
    assert torch.equal(target[1].weight, source[1].weight)


def test_hostile_module_versions_are_a_misfit_not_a_crash() -> None:
    state = network().state_dict()
    state._metadata = {"1": {"version": "x"}}  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="does not fit Sequential: TypeError"):
        load_into(network(), state, "model.pt")


def test_module_with_a_version_of_its_own_loads_from_safetensors(tmp_path: Path) -> None:
    class Versioned(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            if metadata.get("version") != 2:
                raise ValueError(metadata)
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    source, target = Versioned(2, 2), Versioned(2, 2)
    safetensors.torch.save_file(source.state_dict(), tmp_path / "model.safetensors")
    load_into(target, read_state_dict(tmp_path / "model.safetensors"), "model.safetensors")
    assert torch.equal(target.weight, source.weight)


def test_lazy_parameters_take_the_shape_of_the_file() -> None:
    source, target = nn.Linear(5, 2), nn.LazyLinear(2)
    load_into(target, source.state_dict(), "model.pt")
    assert torch.equal(target.weight, source.weight)


def test_suffix_or_existence_make_a_file(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()
    assert looks_like_file("absent.SafeTensors")
    assert looks_like_file(str(tmp_path / "weights"))
    assert not looks_like_file(str(tmp_path / "absent"))
    assert not looks_like_file("x" * 5000)
    assert not looks_like_file("a\0b")
