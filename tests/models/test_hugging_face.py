"""Any vision model of transformers works through a factory: its outputs are structures, its config is its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hookscope.models import load_model
from tests.inspections import inspect

FACTORIES = """
from transformers import (
    ConvNextV2Config, ConvNextV2ForImageClassification, Dinov2Config, Dinov2Model, ResNetConfig,
    ResNetForImageClassification, SegformerConfig, SegformerForSemanticSegmentation, ViTConfig,
    ViTForImageClassification,
)


def vit(labels=5):
    return ViTForImageClassification(ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, image_size=32, patch_size=8,
        num_labels=labels,
    ))


def resnet():
    return ResNetForImageClassification(ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic", num_labels=5,
    ))


def segformer():
    return SegformerForSemanticSegmentation(SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=5,
    ))


def convnext():
    return ConvNextV2ForImageClassification(ConvNextV2Config(hidden_sizes=[8, 12], depths=[1, 1], num_stages=2))


def dinov2():
    return Dinov2Model(Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=28, patch_size=14
    ))
"""

# What each returns, with the shapes that its configuration above gives for one picture of 32 x 32 pixels.
OUTPUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "vit": {"logits": (1, 5)},
    "resnet": {"logits": (1, 5)},
    "segformer": {"logits": (1, 5, 8, 8)},  # a quarter of each side
    "convnext": {"logits": (1, 2)},  # transformers' default number of labels
    "dinov2": {"last_hidden_state": (1, 5, 24), "pooler_output": (1, 24)},  # 2 x 2 patches and the class token
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "net.py"
    path.write_text(FACTORIES)
    return path


@pytest.mark.parametrize("factory", OUTPUTS)
def test_output_while_inspected_is_the_plain_output(source: Path, factory: str) -> None:
    loaded = load_model(f"{source}:{factory}", seed=2)
    assert loaded.preprocessing.channels == 3
    network = loaded.module.eval()
    picture = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        plain = network(picture)
    seen: list[Any] = []
    handle = network.register_forward_hook(lambda _module, _args, output: seen.append(output))
    inspection = inspect(network, picture, ["*"])
    handle.remove()
    assert {key: tuple(plain[key].shape) for key in plain} == OUTPUTS[factory]
    assert all(torch.equal(seen[-1][key], plain[key]) for key in plain)
    rows = {row.layer: row for row in inspection.rows if row.call == 0}
    # Every module that has weights and ran has a row, whatever structure it returned.
    uncalled = {layer.layer for layer in inspection.uncalled}
    assert {
        name for name, module in network.named_modules() if any(True for _ in module.parameters(recurse=False))
    } <= (rows.keys() | uncalled)
    root = {row.slot: row.activation for row in inspection.rows if row.layer == ""}
    for key, shape in OUTPUTS[factory].items():
        (statistics,) = [value for slot, value in root.items() if key in slot] or [root[""]]
        assert statistics.shape == shape
        assert statistics.mean == pytest.approx(plain[key].double().mean().item(), abs=1e-6)


def test_weights_saved_by_transformers_load_into_the_factory(source: Path, tmp_path: Path) -> None:
    saved = load_model(f"{source}:resnet", seed=7).module
    saved.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = load_model(str(tmp_path / "model.safetensors"), arch=f"{source}:resnet", seed=8)
    picture = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded.module.eval()(picture).logits, saved.eval()(picture).logits)
