"""What is listed without torch, against what is listed with it; whatever is odd is left to the latter."""

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torchvision
from torch import nn

from hookscope import api
from hookscope.errors import HookscopeError
from hookscope.models import plain_contents
from hookscope.models.contents import list_contents
from hookscope.models.plain_contents import list_published
from hookscope.models.torchvision_digests import Candidate
from tests.byteorder import save_big_endian
from tests.models import hostile
from tests.models.hostile import ASSEMBLED, GOOD, PAYLOADS

State = dict[str, Any]


def with_planted(state: State) -> State:
    """Plant what is not finite, what float32 cannot square, and what varies little about a large mean."""
    first, second, third, *_ = state
    state[first].view(-1)[[0, 5, 70]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    state[second].fill_(1e30)[0] = -3e25
    state[third].view(-1)[:].copy_(1000 + torch.rand(state[third].numel()))
    return state


CHANGES: dict[str, Callable[[State], State]] = {
    "as published": lambda state: state,
    "without counters": lambda s: {name: each for name, each in s.items() if not name.endswith("num_batches_tracked")},
    "half precision": lambda state: {name: each.half() for name, each in state.items()},
    "bfloat16": lambda state: {name: each.bfloat16() for name, each in state.items()},
    "float64": lambda state: {name: each.double() for name, each in state.items()},
    "int8": lambda state: {name: (100 * each).to(torch.int8) for name, each in state.items()},
    "values that are rare": with_planted,
    "large float64": lambda state: {name: each.double() * 1e200 for name, each in state.items()},
}


def small_state() -> State:
    torch.manual_seed(0)
    return {name: each.clone() for name, each in torchvision.models.shufflenet_v2_x0_5().state_dict().items()}


def save(state: State, path: Path) -> Path:
    safetensors.torch.save_file(state, path, {"format": "pt"}) if path.suffix == ".safetensors" else torch.save(
        state, path
    )
    return path


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["net.pt", "net.safetensors"])
def test_published_networks_are_listed_as_with_torch(tmp_path: Path, change: str, name: str) -> None:
    path = save(CHANGES[change](small_state()), tmp_path / name)
    found = list_published(path)
    assert found is not None
    assert found.parts[0].architectures[0].startswith("shufflenet_v2_x0_5: all ")
    assert found == list_contents(path)
    assert found.to_json() == list_contents(path).to_json()


def test_a_network_in_another_order_of_axes_is_listed_as_with_torch(tmp_path: Path) -> None:
    network = torchvision.models.squeezenet1_1().to(memory_format=torch.channels_last)
    torch.save(network.state_dict(), tmp_path / "net.pt")  # an OrderedDict with torch's _metadata
    found = list_published(tmp_path / "net.pt")
    assert found is not None
    assert found == list_contents(tmp_path / "net.pt")


def tied(state: State) -> State:
    names = [name for name in state if name.endswith("running_mean")]
    return state | {names[1]: state[names[0]][: state[names[1]].numel()]}


LEFT: dict[str, Callable[[State, Path], object]] = {
    "training checkpoint": lambda state, path: torch.save({"state_dict": state, "epoch": 3}, path),
    "parameters": lambda s, path: torch.save({n: nn.Parameter(v, v.is_floating_point()) for n, v in s.items()}, path),
    "tied tensors": lambda state, path: torch.save(tied(state), path),
    "views of larger storages": lambda state, path: torch.save(
        {name: torch.stack([each, each], -1)[..., 0] for name, each in state.items()}, path
    ),
    "legacy format": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "other byte order": save_big_endian,
    "later protocol": lambda state, path: torch.save(state, path, pickle_protocol=4),
    "class": lambda _state, path: torch.save(nn.Linear(2, 3), path),
    "complex numbers": lambda state, path: torch.save({n: v.to(torch.complex64) for n, v in state.items()}, path),
    "damage": lambda state, path: path.write_bytes(save(state, path).read_bytes()[:-500]),
}


@pytest.mark.parametrize("kind", LEFT)
def test_other_files_are_left_to_torch(tmp_path: Path, kind: str) -> None:
    LEFT[kind](small_state(), tmp_path / "net.pt")
    assert list_published(tmp_path / "net.pt") is None


def test_a_file_that_is_not_there_is_left_to_the_message_with_torch(tmp_path: Path) -> None:
    assert list_published(tmp_path / "net.pt") is None
    assert list_published(tmp_path) is None


def test_a_key_and_another_class_count_are_answered_with_torch(tmp_path: Path) -> None:
    torch.save({"model": small_state()}, tmp_path / "training.pt")
    assert api.checkpoint(tmp_path / "training.pt", key="model").parts[0].key == "model"
    torch.save(torchvision.models.squeezenet1_1(num_classes=3).state_dict(), tmp_path / "three.pt")
    assert "num_classes=3" in api.checkpoint(tmp_path / "three.pt").parts[0].architectures[0]


@pytest.fixture
def anything_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_contents, "published_networks", lambda _shapes: (Candidate("any", {}, None, ()),))


def listed_alike(path: Path) -> bool:
    """Say whether a file is listed without torch; then what is listed is what torch lists."""
    found = list_published(path)
    if found is None:
        return False
    with_torch = list_contents(path)
    assert found.parts[0].tensors == with_torch.parts[0].tensors
    assert (found.producer, found.metadata, found.byte_count) == (
        with_torch.producer,
        with_torch.metadata,
        with_torch.byte_count,
    )
    return True


@pytest.mark.usefixtures("anything_is_published")
def test_no_hostile_file_is_listed_without_torch_or_run(tmp_path: Path) -> None:
    canary, path = tmp_path / "canary", tmp_path / "net.pt"
    for name, payload in PAYLOADS.items():
        path.write_bytes(hostile.torch_bytes({**GOOD, "w": payload(canary)}))
        assert list_published(path) is None, name
    for name, assembled in ASSEMBLED.items():
        path.write_bytes(hostile.zip_bytes(hostile.torch_members(assembled(canary))))
        assert list_published(path) is None, name
    assert not canary.exists()


@pytest.mark.usefixtures("anything_is_published")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_file_with_one_byte_changed_is_listed_as_with_torch_or_left_to_it(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hookscope.models.architecture.find_spec", lambda _name: None)
    good = save(
        OrderedDict(a=torch.arange(6.0).view(2, 3), b=torch.ones(2, dtype=torch.int64)), tmp_path / f"g{suffix}"
    )
    assert listed_alike(good)
    content = good.read_bytes()
    changed = tmp_path / f"changed{suffix}"
    for at in range(0, len(content), max(1, len(content) // 60)):
        changed.write_bytes(hostile.flipped(content, at, at % 8))
        try:
            listed_alike(changed)
        except HookscopeError as error:
            raise AssertionError(f"listed without torch with byte {at} changed, and refused with it") from error


@pytest.mark.parametrize("name", ["net.pt", "net.safetensors"])
def test_listing_a_published_network_imports_no_torch(tmp_path: Path, name: str) -> None:
    save(small_state(), tmp_path / name)
    script = (
        "import sys; from hookscope.cli.app import app\n"
        "try: app(['checkpoint', sys.argv[1]])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'torchvision', 'timm'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / name)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "fits shufflenet_v2_x0_5: all 338 names and shapes fit" in " ".join(ended.stdout.split())
    assert ended.stdout.splitlines()[-1] == "set()"
