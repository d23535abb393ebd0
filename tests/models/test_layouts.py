"""Layouts of checkpoints that libraries write: single shards, adapters."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.contents import list_contents
from tests.models import hostile


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_single_shard_says_which_of_how_many_it_is(tmp_path: Path, suffix: str) -> None:
    index = hostile.sharded(tmp_path, lambda *_: None, suffix)
    shard = tmp_path / f"model-00002-of-00002{suffix}"
    said = f"{shard.name} is file 2 of 2, with part of the tensors; the index of all is {index.name}"
    assert list_contents(shard).warnings == (f"{said}; give that.",)
    assert read_checkpoint(shard).warnings == (f"{said}; give that.",)
    assert list_contents(index).warnings == ()
    index.unlink()
    assert list_contents(shard).warnings == (f"{said}, which is not beside it.",)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors", "a-1-of-2.safetensors"])
def test_other_files_say_nothing_of_shards(tmp_path: Path, name: str) -> None:
    safetensors.torch.save_file(hostile.GOOD, tmp_path / name)
    assert list_contents(tmp_path / name).warnings == ()


def adapter(values: float, rank: int = 4, name: str = "") -> dict[str, torch.Tensor]:
    """What peft's `save_pretrained` writes for two layers; with a `name`, what `state_dict()` has."""
    state = {}
    for target in ("q_proj", "v_proj"):
        inside = f"base_model.model.layers.0.self_attn.{target}"
        state[f"{inside}.lora_A{name}.weight"] = torch.full((rank, 8), 0.1)
        state[f"{inside}.lora_B{name}.weight"] = torch.full((8, rank), values)
    return state


@pytest.mark.parametrize("name", ["", ".default"])
def test_an_adapter_says_its_rank_and_layers_and_whether_it_is_trained(tmp_path: Path, name: str) -> None:
    path = tmp_path / "adapter_model.safetensors"
    safetensors.torch.save_file(adapter(0.5, name=name), path)
    said = "adapter_model.safetensors: 2 LoRA adapters of rank 4 for q_proj, v_proj; it needs the network that it was "
    assert list_contents(path).warnings == (f"{said}trained on.",)
    safetensors.torch.save_file(adapter(0, name=name), path)
    assert list_contents(path).warnings == (f"{said}trained on; every lora_B is 0: untrained.",)
    safetensors.torch.save_file(adapter(float("nan"), name=name), path)
    assert "untrained" not in list_contents(path).warnings[0]


def test_adapters_inside_a_network_need_no_other(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    base = {"base_model.model.layers.0.self_attn.q_proj.base_layer.weight": torch.ones(8, 8)}
    safetensors.torch.save_file(adapter(0.5, 2, ".default") | base, path)
    assert list_contents(path).warnings == ("model.safetensors: 2 LoRA adapters of rank 2 for q_proj, v_proj.",)
