"""Pickles, and what else runs code when it is read: only where it is trusted."""

import hashlib
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hookscope.checkpoints.checkpoint import FileOptions
from hookscope.checkpoints.fileformat import file_kind
from hookscope.errors import CheckpointError, UntrustedFileError, UsageError
from hookscope.models.spec import load_model
from hookscope.models.trusted_files import read_trusted
from tests.models.hostile import Call
from tests.models.saved import NINE, SAVERS, SEVEN, build, tensors_of
from tests.models.test_checkpoint import save_legacy
from tests.networks import conv_net


def save_bare(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


@pytest.mark.parametrize("save", [torch.save, save_legacy, save_bare])
def test_a_module_comes_out_of_every_kind_of_pickle(tmp_path: Path, save: Callable[[object, Path], None]) -> None:
    network = conv_net().eval()
    path = tmp_path / "model.safetensors"  # the content decides
    save({"model": network, "epoch": 3}, path)
    content = read_trusted(path, file_kind(path))
    assert isinstance(content, dict)
    assert content["epoch"] == 3
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(content["model"](x), network(x))


def test_tensors_saved_on_an_accelerator_come_to_the_cpu(tmp_path: Path) -> None:
    save_legacy({"w": torch.ones(2)}, tmp_path / "model.pt")
    body = (tmp_path / "model.pt").read_bytes()
    assert body.count(b"X\x03\x00\x00\x00cpu") == 1
    (tmp_path / "model.pt").write_bytes(body.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"))
    content = read_trusted(tmp_path / "model.pt", file_kind(tmp_path / "model.pt"))
    assert isinstance(content, dict)
    assert torch.equal(content["w"], torch.ones(2))


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with a network whose class lies beside it and has not been imported."""
    (tmp_path / "its_net.py").write_text(NET)
    with monkeypatch.context() as context:
        context.syspath_prepend(str(tmp_path))
        torch.save(importlib.import_module("its_net").Net(), tmp_path / "model.pt")
    del sys.modules["its_net"]
    yield tmp_path / "model.pt"
    sys.modules.pop("its_net", None)


def test_classes_are_found_in_the_current_folder_and_only_while_reading(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(elsewhere.parent)
    before = list(sys.path)
    assert type(read_trusted(elsewhere, file_kind(elsewhere))).__name__ == "Net"
    assert sys.path == before


def test_a_missing_module_is_named_with_what_to_do(elsewhere: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_trusted(elsewhere, file_kind(elsewhere))
    assert str(caught.value) == (
        f"{elsewhere} needs the Python module 'its_net', which cannot be imported here: install it, or run hookscope "
        "in the folder it lies in."
    )


def raise_(kind: str) -> None:
    if kind == "attribute":
        raise AttributeError("no such\nthing")
    raise SystemExit(0) if kind == "exit" else ValueError(f"{kind}\nand more")


@pytest.mark.parametrize(
    ("kind", "phrase"),
    [("exit", "SystemExit: 0"), ("value \x1b[31m", "ValueError: value"), ("attribute", "AttributeError: no such")],
)
def test_whatever_unpickling_raises_becomes_one_line(tmp_path: Path, kind: str, phrase: str) -> None:
    torch.save(Call(raise_, kind), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=phrase) as caught:
        read_trusted(tmp_path / "model.pt", file_kind(tmp_path / "model.pt"))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("save", [torch.save, save_legacy, save_bare])
def test_a_pickle_runs_with_trust_and_not_without(tmp_path: Path, save: Callable[[object, Path], None]) -> None:
    canary = tmp_path / "canary"
    save({"model": conv_net(), "x": Call(os.mkdir, str(canary))}, tmp_path / "model.pt")
    with pytest.raises(UntrustedFileError):
        load_model(str(tmp_path / "model.pt"))
    assert not canary.exists()
    load_model(str(tmp_path / "model.pt"), options=FileOptions(trust=True))
    assert canary.exists()


# Layers and gradients of the other networks are compared in `test_saved_networks`.
WHOLE = [
    ("pickled", "resnet"),
    *zip(("scripted", "exported"), [name for name in NINE if name not in SEVEN], strict=True),
]


@pytest.mark.parametrize(("form", "name"), WHOLE)
@pytest.mark.sample("pickled-resnet", "scripted-video resnet")
def test_a_network_saved_whole_computes_what_it_did(tmp_path: Path, form: str, name: str) -> None:
    network, args = build(NINE[name])
    path = tmp_path / "model.pt"
    SAVERS[form](network, args, path)
    loaded = load_model(str(path), options=FileOptions(trust=True))
    assert loaded.info.name == loaded.info.weights == "model.pt"
    assert loaded.info.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert loaded.info.kind == type(network).__name__
    assert not loaded.info.random
    assert loaded.info.parameter_count == sum(parameter.numel() for parameter in network.parameters())
    outputs, expected = tensors_of(loaded.module(*args)), tensors_of(network(*args))
    assert len(outputs) == len(expected)
    for first, second in zip(outputs, expected, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("form", ["pickled", "traced", "exported"])
@pytest.mark.sample("pickled", "traced")
def test_weights_of_a_whole_network_pour_into_the_one_that_arch_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    network = conv_net().eval()
    args = (torch.randn(2, 3, 8, 8),)
    SAVERS[form](network, args, tmp_path / "model.pt")
    (tmp_path / "net.py").write_text("from tests.networks import conv_net\n")
    monkeypatch.chdir(tmp_path)
    loaded = load_model("model.pt", arch="net.py:conv_net", options=FileOptions(trust=True))
    assert type(loaded.module[0]) is torch.nn.Conv2d
    assert torch.equal(loaded.module.eval()(*args), network(*args))


def test_a_program_takes_no_key(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    SAVERS["scripted"](torch.nn.Linear(2, 2), (), path)
    with pytest.raises(UsageError, match=r"model\.pt is a program, so it takes no --key"):
        load_model(path, options=FileOptions(trust=True, key="ema"))
