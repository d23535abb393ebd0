"""The networks that are measured, seeded, and the rows that hookscope finds in them."""

from collections.abc import Iterable, Sequence

import timm
import torch
from torch import Tensor, nn
from torchvision.models import get_model

from benchmarks.same_work import Rows
from hookscope.inspection.forward import inspect
from hookscope.results.activations import LayerRow
from hookscope.results.gradients import GradientRow
from hookscope.results.network import row_label

NETWORKS = ("resnet34", "vgg16", "densenet121", "vit_b_16", "efficientnet_b0", "swin_t")

# Small and deep, most with modules that return their input in eval mode, before an activation in place.
TIMM_NETWORKS = (
    "mobilenetv2_050",
    "mobilenetv3_small_100",
    "efficientnet_b0",
    "mobilevit_xxs",
    "resnet18",
    "regnety_002",
    "ghostnet_100",
    "convnext_atto",
    "densenet121",
    "vit_tiny_patch16_224",
)


def seeded(name: str, device: str = "cpu", count: int = 1, side: int = 224) -> tuple[nn.Module, Tensor]:
    """Return a torchvision or "timm NAME" network with seeded random weights, in eval mode, and noise (N, 3, H, W)."""
    torch.manual_seed(0)
    package, _, timm_name = name.partition(" ")
    model = (timm.create_model(timm_name) if timm_name else get_model(package)).eval().to(device)
    return model, torch.randn(count, 3, side, side).to(device)


def label(row: LayerRow | GradientRow) -> str:
    """Name a row by module and call; the networks measured here return at most one tensor from a module."""
    return row_label(row.layer, row.call, "")


def layer_rows(model: nn.Module, batch: Tensor) -> tuple[LayerRow, ...]:
    """Return hookscope's rows of every module call."""
    return inspect(model, batch, ["*"]).rows


def statistics_of(rows: Iterable[LayerRow]) -> Rows:
    """Return mean, std, min and max by label."""
    found = {}
    for row in rows:
        seen = row.activation
        found[label(row)] = (seen.mean or 0.0, seen.std or 0.0, seen.min or 0.0, seen.max or 0.0)
    return found


def shapes_of(rows: Iterable[LayerRow]) -> Rows:
    """Return shapes by label."""
    return {label(row): row.activation.shape for row in rows}


def layers_of(rows: Sequence[LayerRow]) -> list[str]:
    """Return the names of the modules that rows belong to, each once, without the whole model's."""
    return [layer for layer in dict.fromkeys(row.layer for row in rows) if layer]
