"""A network saved whole, in each way there is, computes what it did once it is loaded with trust."""

import hashlib
from pathlib import Path

import pytest
import torch

from hookscope.models import load_model
from hookscope.models.construction import FileOptions
from tests.models.saved import SAVERS, TWELVE, build, tensors_of
from tests.networks import conv_net

TRUST = FileOptions(trust=True)


@pytest.mark.parametrize("name", TWELVE)
@pytest.mark.parametrize("form", ["pickled", "scripted", "exported"])
def test_output_is_the_originals(tmp_path: Path, form: str, name: str) -> None:
    network, args = build(TWELVE[name])
    path = tmp_path / "model.pt"
    SAVERS[form](network, args, path)
    loaded = load_model(str(path), options=TRUST)
    assert loaded.info.name == loaded.info.weights == "model.pt"
    assert loaded.info.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert loaded.info.kind == type(network).__name__
    assert not loaded.info.random
    assert loaded.info.parameter_count == sum(parameter.numel() for parameter in network.parameters())
    outputs, expected = tensors_of(loaded.module(*args)), tensors_of(network(*args))
    assert len(outputs) == len(expected)
    for first, second in zip(outputs, expected, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("form", ["pickled", "scripted", "traced", "exported"])
def test_weights_of_a_whole_network_pour_into_the_one_that_arch_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    network = conv_net().eval()
    args = (torch.randn(2, 3, 8, 8),)
    SAVERS[form](network, args, tmp_path / "model.pt")
    (tmp_path / "net.py").write_text("from tests.networks import conv_net\n")
    monkeypatch.chdir(tmp_path)
    loaded = load_model("model.pt", arch="net.py:conv_net", options=TRUST)
    assert type(loaded.module[0]) is torch.nn.Conv2d
    assert torch.equal(loaded.module.eval()(*args), network(*args))
