"""Layouts of checkpoints that libraries write: single shards, adapters, DeepSpeed's parts, averages, MMEngine's."""

import argparse
import copy
import enum
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch

from hookscope.checkpoints.checkpoint import FileOptions
from hookscope.checkpoints.find_checkpoints import find_checkpoints
from hookscope.errors import CheckpointError, HookscopeError, UntrustedFileError
from hookscope.models.adapters import is_adapter
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.contents import list_contents
from hookscope.models.spec import load_model
from hookscope.models.statedict import load_into
from tests.models import hostile


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_single_shard_says_which_of_how_many_it_is(tmp_path: Path, suffix: str) -> None:
    index = hostile.sharded(tmp_path, lambda *_: None, suffix)
    shard = tmp_path / f"model-00002-of-00002{suffix}"
    said = f"{shard.name} is file 2 of 2, with some of the tensors; the index is {index.name}"
    assert list_contents(shard).warnings == (f"{said}; give that.",)
    assert read_checkpoint(shard).warnings == (f"{said}; give that.",)
    assert list_contents(index).warnings == ()
    with pytest.raises(HookscopeError, match=f"{said}; give that") as raised:
        load_model(str(shard), arch="resnet18")
    assert "does not fit resnet18" in str(raised.value)
    index.unlink()
    assert list_contents(shard).warnings == (f"{said}, which is not next to it.",)


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
    assert list_contents(path).warnings == (f"{said}trained on; every lora_B is 0 (untrained).",)
    safetensors.torch.save_file(adapter(float("nan"), name=name), path)
    assert "untrained" not in list_contents(path).warnings[0]


@pytest.mark.timeout(60)
def test_a_name_of_many_parts_takes_no_longer_than_another(tmp_path: Path) -> None:
    # A copy of the name for each of its dots would be 2^39 bytes.
    path = tmp_path / "adapter_model.safetensors"
    safetensors.torch.save_file(adapter(0.5) | {"." * 2**20: torch.ones(1)}, path)
    assert is_adapter(read_checkpoint(path).state)


def test_adapters_inside_a_network_need_no_other(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    base = {"base_model.model.layers.0.self_attn.q_proj.base_layer.weight": torch.ones(8, 8)}
    safetensors.torch.save_file(adapter(0.5, 2, ".default") | base, path)
    assert list_contents(path).warnings == ("model.safetensors: 2 LoRA adapters of rank 2 for q_proj, v_proj.",)


# As DeepSpeed's engine writes them, `_save_checkpoint` and `_save_zero_checkpoint` of 0.14.
FLAT = torch.cat([tensor.flatten() for tensor in hostile.GOOD.values()])
SHAPES = [{name: tensor.shape for name, tensor in hostile.GOOD.items()}]


def model_states(module: Mapping[str, torch.Tensor], processes: int = 1) -> dict[str, Any]:
    return {
        "module": dict(module),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": SHAPES,
        "lr_scheduler": {"last_batch_iteration": 3},
        "sparse_tensor_module_names": set(),
        "global_steps": 3,
        "dp_world_size": 2,
        "mp_world_size": processes,
        "ds_config": {"zero_optimization": {"stage": 2}},
        "ds_version": "0.14.4",
    }


def optimiser_states(stage: Any) -> dict[str, Any]:
    state = {"state": {0: {"exp_avg": FLAT[:100]}}, "param_groups": [{}]}
    groups = {"fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups": [FLAT[:100]]}
    held = {"zero_stage": stage, "partition_count": 2 if stage == 3 else [2], **groups, "base_optimizer_state": state}
    return {"optimizer_state_dict": held, "ds_config": {}, "ds_version": "0.14.4"}


def test_deepspeed_keeps_whole_weights_below_stage_3(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save(model_states(hostile.GOOD), path)
    state = read_checkpoint(path).state
    assert list(state) == list(hostile.GOOD)
    assert all(torch.equal(state[name], tensor) for name, tensor in hostile.GOOD.items())
    assert list_contents(path).warnings == read_checkpoint(path).warnings == ()
    torch.save(model_states(hostile.GOOD, processes=4), path)
    said = "mp_rank_00_model_states.pt: it holds the weights of one of 4 model-parallel processes of DeepSpeed"
    for warnings in (list_contents(path).warnings, read_checkpoint(path).warnings):
        assert [warning.partition(",")[0] for warning in warnings] == [said]


def test_a_part_of_stage_3_says_what_puts_it_together(tmp_path: Path) -> None:
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save(model_states({name: torch.empty(0) for name in hostile.GOOD} | {"seen": torch.tensor(3)}), path)
    said = "is the part of one process of a DeepSpeed ZeRO-3 checkpoint: 4 of its 5 tensors are empty"
    assert said in list_contents(path).warnings[0]
    with pytest.raises(CheckpointError, match=r"`python zero_to_fp32\.py CHECKPOINT_FOLDER OUTPUT_FOLDER`") as raised:
        read_checkpoint(path)
    assert said in str(raised.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [2, 3])
def test_states_of_optimisers_say_where_the_weights_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    names = "deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", "deepspeed.runtime.zero.config"
    for name in names:
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
    module.ZeroStageEnum = enum.Enum("ZeroStageEnum", {"three": 3, "two": 2, "one": 1}, module=names[-1])  # type: ignore[attr-defined]
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    where = "`python zero_to_fp32.py" if stage == 3 else "mp_rank_00_model_states.pt beside it; give that file"
    for value in (stage, module.ZeroStageEnum(stage)):  # type: ignore[attr-defined]
        torch.save(optimiser_states(value), path)
        said = f"is the optimiser's state of one of 2 processes of a DeepSpeed ZeRO-{stage} checkpoint; "
        with pytest.raises(CheckpointError, match=said) as raised:
            read_checkpoint(path)
        assert where in str(raised.value)
        assert any(said in warning for warning in list_contents(path).warnings)


def test_a_stage_that_is_in_itself_is_no_stage(tmp_path: Path) -> None:
    stage: list[Any] = []
    stage.append(stage)
    torch.save(optimiser_states(stage), tmp_path / "states.pt")
    with pytest.raises(CheckpointError, match="of a DeepSpeed ZeRO checkpoint"):
        read_checkpoint(tmp_path / "states.pt")


def test_a_folder_of_deepspeed_stands_for_its_weights(tmp_path: Path) -> None:
    folder = tmp_path / "global_step3"
    folder.mkdir()
    for rank in (0, 1):
        torch.save(optimiser_states(2), folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        torch.save(optimiser_states(2), folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    assert len(find_checkpoints([str(tmp_path)])) == 4  # nothing passes unnoticed
    torch.save(model_states(hostile.GOOD), folder / "mp_rank_00_model_states.pt")
    for source in (str(tmp_path), str(folder / "*.pt")):
        assert find_checkpoints([source]) == [str(folder / "mp_rank_00_model_states.pt")]


class Averages(torch.nn.Module):
    """LitEma of latent-diffusion: a buffer for each parameter, called like it without dots."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.register_buffer("decay", torch.tensor(0.999))
        self.register_buffer("num_updates", torch.tensor(5))
        for name, parameter in network.named_parameters():
            self.register_buffer(name.replace(".", ""), parameter.detach() * 2)


class Diffusion(torch.nn.Module):
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.model_ema = network, Averages(network)


def averaged(tmp_path: Path) -> tuple[Path, torch.nn.Module]:
    network = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)))
    path = tmp_path / "model.ckpt"
    torch.save({"state_dict": Diffusion(network).state_dict(), "global_step": 3}, path)
    return path, network


def test_a_head_called_semantic_is_no_averaged_copy(tmp_path: Path) -> None:
    network = torch.nn.ModuleDict({name: torch.nn.Conv2d(3, 4, 3) for name in ("body", "semantic", "instance")})
    torch.save(network.state_dict(), tmp_path / "model.pt")
    assert read_checkpoint(tmp_path / "model.pt").state.keys() == network.state_dict().keys()


def test_averages_without_dots_are_told_from_the_weights(tmp_path: Path) -> None:
    path, network = averaged(tmp_path)
    read = read_checkpoint(path)
    assert load_into(network, read.state, "x") == ([], ["x: the prefix 'model.' was removed from its names."])
    assert "'state_dict.model_ema' is not used; give --key state_dict.model_ema for it" in read.notes[1]
    assert read.training is not None
    [copy] = read.training.copies
    assert copy.key == "state_dict.model_ema"
    assert copy.names == {
        f"model_ema.{name.replace('.', '')}": f"model.{name}" for name, _ in network.named_parameters()
    }
    [warning] = list_contents(path).warnings
    assert "4 tensors of 'state_dict.model_ema' are averages of those of 'model.'" in warning


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", ["model_ema", "state_dict.model_ema"])
def test_averages_without_dots_are_weights_by_their_key(tmp_path: Path, key: str) -> None:
    path, network = averaged(tmp_path)
    expected = {name: tensor * 2 for name, tensor in network.named_parameters()}
    buffers = dict(network.named_buffers())
    loaded = copy.deepcopy(network)
    load_into(loaded, read_checkpoint(path, FileOptions(key=key)).state, "x")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected.get(name, buffers.get(name)))


@pytest.mark.exhaustive
def test_mmengine_says_its_version_and_classes_and_keeps_its_average_apart(tmp_path: Path) -> None:
    path = tmp_path / "epoch_3.pth"
    average = {"steps": torch.tensor(3), **{f"module.{name}": tensor * 2 for name, tensor in hostile.GOOD.items()}}
    meta = {"epoch": 3, "mmengine_version": "0.10.4", "dataset_meta": {"CLASSES": list("abcdefgh")}}
    held = {"meta": meta, "state_dict": hostile.GOOD, "ema_state_dict": average, "message_hub": {"runtime_info": {}}}
    torch.save(held, path)
    read = read_checkpoint(path)
    assert all(torch.equal(read.state[name], tensor) for name, tensor in hostile.GOOD.items())
    assert read.categories == tuple("abcdefgh")
    assert list_contents(path).producer == "torch.save, zip format 3, MMEngine 0.10.4"
    loaded = hostile.network()
    load_into(loaded, read_checkpoint(path, FileOptions(key="ema_state_dict")).state, "x")
    assert torch.equal(loaded.state_dict()["0.bias"], hostile.GOOD["0.bias"] * 2)


# --- Hostile versions -------------------------------------------------------------------------------------------------


def with_average(**extra: Any) -> dict[str, Any]:
    average = {f"model_ema.{name.replace('.', '')}": tensor * 2 for name, tensor in hostile.GOOD.items()}
    return {"state_dict": {f"model.{name}": each for name, each in hostile.GOOD.items()} | average, **extra}


# The place in each layout where a library keeps something other than tensors.
HOSTILE: dict[str, Any] = {
    "DeepSpeed's optimiser": lambda bad: {**optimiser_states(2), "ds_config": bad},
    "LitEma": lambda bad: with_average(global_step=bad),
    "Lightning": lambda bad: {
        "state_dict": hostile.GOOD,
        "hyper_parameters": argparse.Namespace(lr=0.1, callback=bad),
        "pytorch-lightning_version": "2.6.6",
    },
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", HOSTILE)
def test_what_a_layout_hides_beside_its_tensors_is_refused_and_never_runs(layout: str, tmp_path: Path) -> None:
    payload = "os.system"
    canary, path = tmp_path / "canary", tmp_path / "mp_rank_00_model_states.pt"
    torch.save(HOSTILE[layout](hostile.PAYLOADS[payload](canary)), path)
    for rules in (FileOptions(), FileOptions(allowed_globals=("*",)), FileOptions(allowed_globals=(payload,))):
        with pytest.raises(UntrustedFileError, match=r"which can run code|can never be allowed"):
            read_checkpoint(path, rules)
    with suppress(HookscopeError):
        list_contents(path)
    assert not canary.exists()
