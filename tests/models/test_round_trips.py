"""A network saved in any kind of weights file, and loaded with nothing but that file, gives the same output."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from hookscope.models.spec import load_model

from .test_zoo import build

pytestmark = pytest.mark.exhaustive

State = Mapping[str, Tensor]


NETWORK = "squeezenet1_1"


def in_two(state: State) -> dict[str, dict[str, Tensor]]:
    """Deal the tensors out to two files."""
    half = len(state) // 2
    parts = list(state.items())
    return {"model-00001-of-00002": dict(parts[:half]), "model-00002-of-00002": dict(parts[half:])}


def write_shards(state: State, folder: Path, suffix: str, save: Callable[[dict[str, Tensor], Path], None]) -> Path:
    shards = in_two(state)
    for name, part in shards.items():
        save(part, folder / f"{name}{suffix}")
    weight_map = {key: f"{name}{suffix}" for name, part in shards.items() for key in part}
    index = folder / f"{'model' if suffix == '.safetensors' else 'pytorch_model'}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return index


def write(content: object, path: Path, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def write_safetensors(state: State, folder: Path) -> Path:
    safetensors.torch.save_file(dict(state), folder / "model.safetensors")
    return folder / "model.safetensors"


WRITERS: dict[str, Callable[[State, Path], Path]] = {
    "torch zip": lambda s, d: write(s, d / "model.pt"),
    "legacy torch": lambda s, d: write(s, d / "model.pth", _use_new_zipfile_serialization=False),
    "safetensors": write_safetensors,
    "sharded safetensors": lambda s, d: write_shards(s, d, ".safetensors", safetensors.torch.save_file),
    "sharded torch": lambda s, d: write_shards(s, d, ".bin", torch.save),
    "training checkpoint": lambda s, d: write({"state_dict": s, "epoch": 3, "optimizer": {"lr": 0.1}}, d / "last.ckpt"),
    "data parallel": lambda s, d: write({f"module.{name}": tensor for name, tensor in s.items()}, d / "ddp.pt"),
}


def output_of(network: nn.Module) -> Tensor:
    picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return network.eval()(picture)


@pytest.mark.parametrize("kind", WRITERS)
def test_network_of_a_file_gives_the_output_of_the_one_that_was_saved(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = build(NETWORK)
    expected = output_of(network)
    assert expected.std() > 0
    path = WRITERS[kind](network.state_dict(), tmp_path)
    loaded = load_model(str(path))
    assert loaded.info.name == f"{path.name} ({NETWORK})"
    assert not loaded.info.random
    assert torch.equal(output_of(loaded.module), expected)
